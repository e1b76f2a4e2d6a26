/* Steps of optimizers: arrays of all lengths and types, whole, in parts and with threads. */
#include "scenarios.h"

enum { ARRAYS = 7, ROWS = 6, MOST = 5000 };

/* Each array in memory of its own: a read or write beyond it is seen. */
typedef struct {
    void *at[ROWS][ARRAYS];
    uint64_t addresses[ROWS * ARRAYS], counts[ARRAYS];
    uint32_t kinds[ARRAYS];
} arrays;

static const uint32_t dtypes[] = {PLC_F32, PLC_F64, PLC_F16, PLC_BF16};

static void write_number(void *at, uint64_t index, uint32_t dtype, double value) {
    if (dtype == PLC_F32) ((float *)at)[index] = (float)value;
    else if (dtype == PLC_F64) ((double *)at)[index] = value;
    else if (dtype == PLC_F16) ((uint16_t *)at)[index] = (uint16_t)(0x3000 + (int)(value * 100));
    else ((uint16_t *)at)[index] = (uint16_t)(0x3e00 + (int)(value * 100));
}

static arrays *new_arrays(uint64_t seed) {
    arrays *a = calloc(1, sizeof *a);
    CHECK(a != NULL, "no memory");
    uint64_t state = seed;
    for (uint32_t i = 0; i < ARRAYS; i++) {
        uint32_t dtype = dtypes[below(&state, 4)];
        bool wide = below(&state, 2);
        a->counts[i] = below(&state, 2) ? below(&state, 40) : below(&state, MOST);
        a->kinds[i] = dtype | (below(&state, 2) ? PLC_FIRST_UPDATE : 0) |
                      (wide ? PLC_WIDE_STEP : 0);
        for (uint32_t row = 0; row < ROWS; row++) {
            bool is_step = row == ROWS - 1;
            uint64_t count = is_step ? 1 : a->counts[i];
            uint32_t type = is_step ? (wide ? PLC_F64 : PLC_F32) : dtype;
            void *at = a->at[row][i] = malloc(count * plc_element_bytes(type) + (count == 0));
            CHECK(at != NULL, "no memory");
            for (uint64_t j = 0; j < count; j++)
                write_number(at, j, type, is_step ? i : (double)below(&state, 100) / 100);
            a->addresses[row * ARRAYS + i] = (uint64_t)(uintptr_t)at;
        }
    }
    return a;
}

static void free_arrays(arrays *a) {
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t i = 0; i < ARRAYS; i++) free(a->at[row][i]);
    free(a);
}

static plc_update update_of(const arrays *a, uint32_t rule, uint32_t options) {
    return (plc_update){.rule = rule, .options = options, .lr = 0.1, .weight_decay = 0.01,
                        .eps = 1e-8, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.99,
                        .grad_scale = options & PLC_MAXIMIZE ? 4 : 1, .parts = 1, .threads = 1,
                        .arrays = ARRAYS, .addresses = a->addresses, .counts = a->counts,
                        .kinds = a->kinds};
}

static void compare(const arrays *one, const arrays *other) {
    for (uint32_t row = 0; row < ROWS - 1; row++)
        for (uint32_t i = 0; i < ARRAYS; i++) {
            uint64_t bytes =
                one->counts[i] * plc_element_bytes(one->kinds[i] & PLC_DTYPE_MASK);
            CHECK(bytes == 0 || memcmp(one->at[row][i], other->at[row][i], bytes) == 0,
                  "row %u of array %u differs", row, i);
        }
}

void updates(uint64_t seed) {
    for (uint32_t rule = 0; rule < PLC_RULES; rule++)
        for (uint32_t options = 0; options < 16; options++) {
            uint64_t numbers = seed * 100 + rule * 16 + options;
            arrays *whole = new_arrays(numbers), *cut = new_arrays(numbers);
            plc_update u = update_of(whole, rule, options);
            CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
            u = update_of(cut, rule, options);
            u.parts = 1 + (uint32_t)(numbers % 5);
            u.threads = 1 + (uint32_t)(numbers % 4);
            for (u.part = 0; u.part < u.parts; u.part++) {
                /* Who makes a part counts the step for itself: here one counter is for all. */
                for (uint32_t i = 0; u.part > 0 && i < ARRAYS; i++) {
                    void *step = cut->at[ROWS - 1][i];
                    if (cut->kinds[i] & PLC_WIDE_STEP) *(double *)step -= 1;
                    else *(float *)step -= 1;
                }
                CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
            }
            compare(whole, cut);
            free_arrays(whole);
            free_arrays(cut);
        }
}

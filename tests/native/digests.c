/* What the kernels compute, as one line of text per kind: programs built for different machines
 * print the same, or the bits of training would depend on the machine. */
#include "scenarios.h"

enum { LENGTH = 1031, MOST_RANKS = 3 };

/* A finite number of moderate size, every bit of its fraction in use. NaN is left out: machines
 * differ in its sign. */
static void write_float(void *at, uint32_t dtype, uint64_t *state) {
    uint64_t random = next_random(state);
    double value = ((double)(random >> 11) / 4503599627370496.0 - 1) * (double)(1 << random % 5);
    if (dtype == PLC_F64 || dtype == PLC_C128) memcpy(at, &value, 8);
    else if (dtype == PLC_F32 || dtype == PLC_C64) memcpy(at, &(float){(float)value}, 4);
    else {
        /* Sign and fraction at random; the exponent is one of eight in the middle. */
        uint16_t fraction_bits = dtype == PLC_BF16 ? 7 : 10, middle = dtype == PLC_BF16 ? 123 : 11;
        uint16_t half = (uint16_t)((random & 0x8000) | (random & ((1u << fraction_bits) - 1)) |
                                   ((middle + (random >> 20) % 8) << fraction_bits));
        memcpy(at, &half, 2);
    }
}

static void *numbers(uint32_t dtype, uint64_t count, uint64_t *state) {
    uint64_t element = plc_element_bytes(dtype);
    unsigned char *data = malloc(count * element);
    CHECK(data != NULL, "no memory");
    bool is_complex = dtype == PLC_C32 || dtype == PLC_C64 || dtype == PLC_C128;
    bool is_float = is_complex || dtype == PLC_F16 || dtype == PLC_BF16 || dtype == PLC_F32 ||
                    dtype == PLC_F64;
    uint64_t step = is_complex ? element / 2 : element;
    for (uint64_t at = 0; at < count * element; at += step) {
        uint64_t random = next_random(state);
        if (is_float) write_float(data + at, dtype, state);
        else if (dtype == PLC_BOOL) data[at] = random & 1;
        else memcpy(data + at, &random, step);
    }
    return data;
}

static void print_reductions(uint64_t seed) {
    for (uint32_t dtype = 0; dtype < PLC_DTYPES; dtype++)
        for (uint32_t op = 0; op < PLC_OPS; op++) {
            uint64_t state = seed, digest = 0, bytes = LENGTH * plc_element_bytes(dtype);
            void *inputs[MOST_RANKS], *out = malloc(bytes);
            for (uint32_t r = 0; r < MOST_RANKS; r++) inputs[r] = numbers(dtype, LENGTH, &state);
            bool known = true;
            for (uint32_t ranks = 1; ranks <= MOST_RANKS && known; ranks++) {
                known = plc_reduce_local(out, (const void *const *)inputs, ranks, LENGTH, dtype, op,
                                         0.7) == PLC_OK;
                digest = plc_digest(out, bytes, digest);
            }
            if (known)
                printf("reduce type %u operation %u: %016llx\n", dtype, op,
                       (unsigned long long)digest);
            for (uint32_t r = 0; r < MOST_RANKS; r++) free(inputs[r]);
            free(out);
        }
}

static void print_update(uint32_t dtype, uint32_t rule, uint32_t options, uint32_t ranks,
                         uint64_t seed) {
    uint64_t state = seed, addresses[6], count = LENGTH, digest = 0;
    uint64_t bytes = LENGTH * plc_element_bytes(dtype);
    uint32_t kind = dtype;
    int64_t distances[MOST_RANKS];
    double weights[MOST_RANKS] = {0.2, 0.3, 0.5}, squares[8] = {0};
    float steps = 3;
    void *arrays[5], *gradients[MOST_RANKS];
    for (uint32_t i = 0; i < 5; i++) {
        arrays[i] = numbers(dtype, LENGTH, &state);
        addresses[i] = (uint64_t)(uintptr_t)arrays[i];
        /* Averages of squares are not negative. */
        for (uint64_t at = 0; i > 2 && at < LENGTH; at++)
            ((unsigned char *)arrays[i])[(at + 1) * plc_element_bytes(dtype) - 1] &= 0x7f;
    }
    /* Adagrad's sum of squares is its first array of state. */
    for (uint64_t at = 0; rule == PLC_ADAGRAD && at < LENGTH; at++)
        ((unsigned char *)arrays[2])[(at + 1) * plc_element_bytes(dtype) - 1] &= 0x7f;
    addresses[5] = (uint64_t)(uintptr_t)&steps;
    gradients[0] = arrays[1];
    for (uint32_t r = 0; r < ranks; r++) {
        if (r > 0) gradients[r] = numbers(dtype, LENGTH, &state);
        distances[r] = (int64_t)((intptr_t)gradients[r] - (intptr_t)gradients[0]);
    }
    plc_update u = {.rule = rule, .options = options, .lr = 0.1, .weight_decay = 0.01, .eps = 1e-8,
                    .momentum = 0.9, .dampening = 0.1, .beta1 = 0.9, .beta2 = 0.99,
                    .lr_decay = 0.01, .grad_scale = 3, .clip = 0.7, .parts = 1, .threads = 1,
                    .arrays = 1, .addresses = addresses, .counts = &count, .kinds = &kind,
                    .ranks = ranks, .distances = distances, .weights = weights};
    CHECK(plc_norm_blocks(&u) <= 8, "more blocks than room");
    CHECK_STATUS(PLC_OK, plc_square_sums(&u, squares));
    CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
    digest = plc_digest(squares, sizeof squares, digest);
    for (uint32_t i = 0; i < 5; i++) digest = plc_digest(arrays[i], bytes, digest);
    printf("update type %u rule %u options %u ranks %u: %016llx\n", dtype, rule, options, ranks,
           (unsigned long long)digest);
    for (uint32_t i = 0; i < 5; i++) free(arrays[i]);
    for (uint32_t r = 1; r < ranks; r++) free(gradients[r]);
}

void digests(uint64_t seed) {
    static const uint32_t dtypes[] = {PLC_F32, PLC_F64, PLC_F16, PLC_BF16};
    print_reductions(seed);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t rule = 0; rule < PLC_RULES; rule++)
            for (uint32_t options = 0; options < 16; options++)
                for (uint32_t ranks = 0; ranks <= MOST_RANKS; ranks += MOST_RANKS)
                    print_update(dtypes[i], rule, options, ranks, seed);
}

#ifdef DIGESTS_ALONE /* a program of its own, to link with a core that is built already */
int main(void) { return digests(5), 0; }
#endif

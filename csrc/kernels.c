/* Reductions: out[i] = op over ranks of inputs[r][i], always in ascending order of rank.
 *
 * float16 and bfloat16 accumulate in float32 and round once. No multiply-add is fused (see the
 * build flags), and every instruction set does the same operations in the same order, so all
 * machines of one kind give the same bits. The loops are plain C; `kernels_for_isa.h` compiles them
 * once per instruction set and the best is chosen at run time.
 */
#include "internal.h"
#include "numbers.h"

/* `copy`: NULL, or a second place for the result. */
typedef void (*kernel)(void *out, void *copy, const void *const *inputs, uint32_t ranks,
                       uint64_t count, double factor, uint64_t divisor);
typedef struct {
    float re, im;
} complex64;
typedef struct {
    double re, im;
} complex128;
typedef struct {
    uint16_t re, im;
} complex32;

#define AS_BOOL(x) ((uint8_t)((x) != 0))

#define OP_SUM(a, b) ((a) + (b))
#define OP_PRODUCT(a, b) ((a) * (b))
/* A NaN on any rank is a NaN in the result, whatever its rank. */
#define OP_MIN(a, b) (((a) != (a) || (a) < (b)) ? (a) : (b))
#define OP_MAX(a, b) (((a) != (a) || (a) > (b)) ? (a) : (b))
#define OP_IMIN(a, b) ((a) < (b) ? (a) : (b))
#define OP_IMAX(a, b) ((a) > (b) ? (a) : (b))
#define OP_BAND(a, b) ((a) & (b))
#define OP_BOR(a, b) ((a) | (b))
#define OP_BXOR(a, b) ((a) ^ (b))

#define KERNELS "kernels_for_isa.h"
#include "for_each_isa.h"

typedef const kernel (*kernel_table)[PLC_OPS];

static const kernel_table tables[] = BY_INSTRUCTION_SET(table);

uint64_t plc_element_bytes(uint32_t dtype) {
    static const uint8_t bytes[PLC_DTYPES] = {
        [PLC_U8] = 1, [PLC_I8] = 1, [PLC_U16] = 2, [PLC_I16] = 2, [PLC_U32] = 4, [PLC_I32] = 4,
        [PLC_U64] = 8, [PLC_I64] = 8, [PLC_F16] = 2, [PLC_BF16] = 2, [PLC_F32] = 4, [PLC_F64] = 8,
        [PLC_C32] = 4, [PLC_C64] = 8,
        [PLC_C128] = 16, [PLC_BOOL] = 1, [PLC_BYTES] = 1};
    return dtype < PLC_DTYPES ? bytes[dtype] : 0;
}

static kernel kernel_for(uint32_t dtype, uint32_t op) {
    /* Asked for in every call; the same answer for the life of the process. */
    static _Atomic(kernel_table) best;
    if (dtype >= PLC_DTYPES || op >= PLC_OPS) return NULL;
    kernel_table table = atomic_load_explicit(&best, memory_order_relaxed);
    if (table == NULL)
        atomic_store_explicit(&best, table = tables[choose_instruction_set(NULL)],
                              memory_order_relaxed);
    return table[dtype][op];
}

bool can_reduce(uint32_t dtype, uint32_t op) { return kernel_for(dtype, op) != NULL; }

void reduce_block_for(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                      uint32_t dtype, uint32_t op, double factor, uint64_t divisor) {
    kernel_for(dtype, op)(out, NULL, inputs, ranks, count, factor, divisor);
}

void reduce_block(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                  uint32_t dtype, uint32_t op, double factor) {
    reduce_block_for(out, inputs, ranks, count, dtype, op, factor, ranks);
}

void reduce_block_twice(void *out, void *copy, const void *const *inputs, uint32_t ranks,
                        uint64_t count, uint32_t dtype, uint32_t op, double factor) {
    kernel_for(dtype, op)(out, copy, inputs, ranks, count, factor, ranks);
}

int plc_reduce_local(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                     uint32_t dtype, uint32_t op, double factor) {
    if (!can_reduce(dtype, op) || ranks == 0) return PLC_INVALID;
    reduce_block(out, inputs, ranks, count, dtype, op, factor);
    return PLC_OK;
}

int plc_reduce_with(const char *name, void *out, const void *const *inputs, uint32_t ranks,
                    uint64_t count, uint32_t dtype, uint32_t op, double factor) {
    int set = choose_instruction_set(name);
    if (set < 0 || !can_reduce(dtype, op) || ranks == 0) return PLC_INVALID;
    tables[set][dtype][op](out, NULL, inputs, ranks, count, factor, ranks);
    return PLC_OK;
}

int plc_scale_local(void *data, uint64_t count, uint32_t dtype, uint64_t divisor) {
    if (!can_reduce(dtype, PLC_AVG) || divisor == 0) return PLC_INVALID;
    const void *inputs[1] = {data};
    reduce_block_for(data, inputs, 1, count, dtype, PLC_AVG, 1.0, divisor);
    return PLC_OK;
}

/* Four independent multiply-rotate lanes over 8-byte words: as fast as memory, and any changed bit
 * shows. */
uint64_t plc_digest(const void *data, uint64_t bytes, uint64_t seed) {
    const uint64_t p = 0x9e3779b97f4a7c15ull;
    const unsigned char *at = data;
    uint64_t lane[4] = {seed ^ p, seed + p, seed ^ (p << 1), seed - p}, rest = bytes;
    for (; rest >= 32; rest -= 32, at += 32) {
        for (int i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, at + 8 * i, 8);
            lane[i] = (lane[i] ^ word) * p;
            lane[i] ^= lane[i] >> 29;
        }
    }
    uint64_t hash = bytes * p;
    for (int i = 0; i < 4; i++) hash = ((hash ^ lane[i]) * p) ^ (hash >> 31);
    for (; rest > 0; rest--, at++) hash = (hash ^ *at) * 0x100000001b3ull;
    hash ^= hash >> 33;
    hash *= p;
    return hash ^ (hash >> 29);
}

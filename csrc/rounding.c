/* float32 that travels as bfloat16: rounded once, to nearest even, and added in float32, in the
 * order of the inputs. Plain loops that every x86-64 and ARM compiler makes vectors of; they are as
 * fast as the memory they read.
 */
#include "internal.h"
#include "numbers.h"

void plc_round_to_bf16(uint16_t *out, const float *values, uint64_t count) {
    INDEPENDENT for (uint64_t i = 0; i < count; i++) out[i] = store_bf16(values[i]);
}

int plc_sum_of_bf16(float *out, const uint16_t *const *inputs, uint32_t ranks, uint64_t count) {
    if (ranks < 2) return PLC_INVALID;
    /* The sum of a block stays in the first-level cache while more inputs are added to it. */
    const uint64_t block = 2048;
    for (uint64_t base = 0; base < count; base += block) {
        uint64_t n = MIN(block, count - base);
        const uint16_t *x = inputs[0] + base, *y = inputs[1] + base;
        float *sum = out + base;
        INDEPENDENT for (uint64_t i = 0; i < n; i++) sum[i] = load_bf16(x[i]) + load_bf16(y[i]);
        for (uint32_t r = 2; r < ranks; r++) {
            const uint16_t *next = inputs[r] + base;
            INDEPENDENT for (uint64_t i = 0; i < n; i++) sum[i] += load_bf16(next[i]);
        }
    }
    return PLC_OK;
}

/* float32 that travels as bfloat16: rounded once, to nearest even, and added in float32, in the
 * order of the inputs. Plain loops, compiled once per instruction set.
 */
#include "internal.h"
#include "numbers.h"

typedef struct {
    void (*round)(uint16_t *out, const float *values, uint64_t count);
    void (*expand)(float *out, const uint16_t *values, uint64_t count);
    void (*sum)(float *out, const uint16_t *const *inputs, uint32_t ranks, uint64_t count);
} rounding_kernels;

#define KERNELS "rounding_for_isa.h"
#include "for_each_isa.h"

static const rounding_kernels *kernels_of(int set) {
    static const rounding_kernels *const tables[] = BY_INSTRUCTION_SET(&rounding);
    return tables[set];
}

void plc_round_to_bf16(uint16_t *out, const float *values, uint64_t count) {
    kernels_of(choose_instruction_set(NULL))->round(out, values, count);
}

int plc_sum_of_bf16(float *out, const uint16_t *const *inputs, uint32_t ranks, uint64_t count) {
    if (ranks < 2) return PLC_INVALID;
    kernels_of(choose_instruction_set(NULL))->sum(out, inputs, ranks, count);
    return PLC_OK;
}

void expand_bf16(float *out, const uint16_t *values, uint64_t count) {
    kernels_of(choose_instruction_set(NULL))->expand(out, values, count);
}

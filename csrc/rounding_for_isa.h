/* Included once per instruction set (for_each_isa.h): the loops of rounding.c. */

ISA_TARGET static void ISA_NAME(round_all)(uint16_t *out, const float *values, uint64_t count) {
    INDEPENDENT for (uint64_t i = 0; i < count; i++) out[i] = store_bf16(values[i]);
}

ISA_TARGET static void ISA_NAME(expand_all)(float *out, const uint16_t *values, uint64_t count) {
    INDEPENDENT for (uint64_t i = 0; i < count; i++) out[i] = load_bf16(values[i]);
}

ISA_TARGET static void ISA_NAME(sum_all)(float *out, const uint16_t *const *inputs, uint32_t ranks,
                                         uint64_t count) {
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
}

static const rounding_kernels ISA_NAME(rounding) = {ISA_NAME(round_all), ISA_NAME(expand_all),
                                                    ISA_NAME(sum_all)};

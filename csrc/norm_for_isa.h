/* Included once per instruction set (for_each_isa.h): the loops of norm.c. */

#define LANES 8
#define SQUARES(name, T, LOAD)                                                                     \
    ISA_TARGET static double ISA_NAME(squares_##name)(const void *numbers, uint64_t count) {       \
        const T *x = numbers;                                                                      \
        double lane[LANES] = {0};                                                                  \
        uint64_t whole = count / LANES * LANES;                                                    \
        for (uint64_t i = 0; i < whole; i += LANES)                                                \
            for (uint64_t j = 0; j < LANES; j++) {                                                 \
                double value = (double)LOAD(x[i + j]);                                             \
                lane[j] += value * value;                                                          \
            }                                                                                      \
        for (uint64_t i = whole; i < count; i++) {                                                 \
            double value = (double)LOAD(x[i]);                                                     \
            lane[i - whole] += value * value;                                                      \
        }                                                                                          \
        return ((lane[0] + lane[1]) + (lane[2] + lane[3])) +                                       \
               ((lane[4] + lane[5]) + (lane[6] + lane[7]));                                        \
    }

SQUARES(f32, float, KEEP)
SQUARES(f64, double, KEEP)
SQUARES(f16, uint16_t, load_f16)
SQUARES(bf16, uint16_t, load_bf16)

static const squares_kernel ISA_NAME(squares)[PLC_DTYPES] = {
    [PLC_F32] = ISA_NAME(squares_f32),
    [PLC_F64] = ISA_NAME(squares_f64),
    [PLC_F16] = ISA_NAME(squares_f16),
    [PLC_BF16] = ISA_NAME(squares_bf16),
};

#undef SQUARES
#undef LANES

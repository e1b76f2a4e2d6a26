/* Included once per instruction set (for_each_isa.h): the loops of tree_sum.c. */

/* Of two NaN the right one's bits remain, as in torch's own sums: the compiler may exchange the
 * operands of a plain addition. */
#define SUM_OF(left, right) ((right) != (right) ? (right) + (right) : (left) + (right))

#define TREE_KERNELS(name, T)                                                                      \
    ISA_TARGET static void ISA_NAME(add_##name)(void *out_, const void *left_, const void *right_, \
                                                uint64_t count) {                                  \
        T *out = out_;                                                                             \
        const T *left = left_, *right = right_;                                                    \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) out[i] = SUM_OF(left[i], right[i]);       \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(average_##name)(void *out_, const void *left_,                 \
                                                    const void *right_, uint64_t count,            \
                                                    uint64_t divisor_) {                           \
        T *out = out_, divisor = (T)divisor_;                                                      \
        const T *left = left_, *right = right_;                                                    \
        INDEPENDENT for (uint64_t i = 0; i < count; i++)                                           \
            out[i] = SUM_OF(left[i], right[i]) / divisor;                                          \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(divide_##name)(void *out_, const void *from_, uint64_t count,  \
                                                   uint64_t divisor_) {                            \
        T *out = out_, divisor = (T)divisor_;                                                      \
        const T *from = from_;                                                                     \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) out[i] = from[i] / divisor;               \
    }

TREE_KERNELS(f32, float)
TREE_KERNELS(f64, double)

static const tree_kernels ISA_NAME(kernels)[2] = {
    {ISA_NAME(add_f32), ISA_NAME(average_f32), ISA_NAME(divide_f32)},
    {ISA_NAME(add_f64), ISA_NAME(average_f64), ISA_NAME(divide_f64)},
};

#undef SUM_OF
#undef TREE_KERNELS

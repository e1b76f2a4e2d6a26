/* Included once per instruction set (for_each_isa.h): the loops of kernels.c. */

#define BLOCK 1024 /* elements kept in the first-level cache while the ranks are added to them */

/* One kernel: element type T, accumulator A, how to load, combine, finish and store. */
#define KERNEL(name, T, A, LOAD, OP, FINISH, STORE)                                                \
    ISA_TARGET static void ISA_NAME(name)(void *out_, void *copy_, const void *const *inputs,      \
                                          uint32_t ranks, uint64_t count, double factor,           \
                                          uint64_t divisor) {                                      \
        T *out = out_, *copy = copy_;                                                              \
        const A scale = (A)factor, parts = (A)divisor;                                             \
        (void)scale, (void)parts;                                                                  \
        if (ranks == 2) {                                                                          \
            const T *x = inputs[0], *y = inputs[1];                                                \
            if (copy != NULL) {                                                                    \
                INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                 \
                    A a = (A)LOAD(x[i]), b = (A)LOAD(y[i]);                                        \
                    a = (A)(OP(a, b));                                                             \
                    out[i] = copy[i] = (T)STORE(FINISH(a));                                        \
                }                                                                                  \
                return;                                                                            \
            }                                                                                      \
            INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                     \
                A a = (A)LOAD(x[i]), b = (A)LOAD(y[i]);                                            \
                a = (A)(OP(a, b));                                                                 \
                out[i] = (T)STORE(FINISH(a));                                                      \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        A sum[BLOCK];                                                                              \
        for (uint64_t base = 0; base < count; base += BLOCK) {                                     \
            uint64_t n = count - base < BLOCK ? count - base : BLOCK;                              \
            const T *x = (const T *)inputs[0] + base;                                              \
            INDEPENDENT for (uint64_t i = 0; i < n; i++) sum[i] = (A)LOAD(x[i]);                   \
            for (uint32_t r = 1; r < ranks; r++) {                                                 \
                const T *y = (const T *)inputs[r] + base;                                          \
                INDEPENDENT for (uint64_t i = 0; i < n; i++) {                                     \
                    A b = (A)LOAD(y[i]);                                                           \
                    sum[i] = (A)(OP(sum[i], b));                                                   \
                }                                                                                  \
            }                                                                                      \
            INDEPENDENT for (uint64_t i = 0; i < n; i++) out[base + i] = (T)STORE(FINISH(sum[i])); \
            if (copy != NULL) memcpy(copy + base, out + base, n * sizeof(T));                      \
        }                                                                                          \
    }

#define DIVIDE(a) ((a) / parts)
/* In the widest type of the same sign: the number of ranks may not fit the element type. */
#define DIVIDE_SIGNED(a) ((int64_t)(a) / (int64_t)divisor)
#define DIVIDE_UNSIGNED(a) ((uint64_t)(a) / divisor)
#define SCALED(x) ((x) * scale)
#define SCALED_F16(x) (load_f16(x) * scale)
#define SCALED_BF16(x) (load_bf16(x) * scale)

#define INTEGER_KERNELS(name, T, DIVIDE_BY_RANKS)                                                  \
    KERNEL(name##_sum, T, T, KEEP, OP_SUM, KEEP, KEEP)                                             \
    KERNEL(name##_avg, T, T, KEEP, OP_SUM, DIVIDE_BY_RANKS, KEEP)                                  \
    KERNEL(name##_product, T, T, KEEP, OP_PRODUCT, KEEP, KEEP)                                     \
    KERNEL(name##_min, T, T, KEEP, OP_IMIN, KEEP, KEEP)                                            \
    KERNEL(name##_max, T, T, KEEP, OP_IMAX, KEEP, KEEP)                                            \
    KERNEL(name##_band, T, T, KEEP, OP_BAND, KEEP, KEEP)                                           \
    KERNEL(name##_bor, T, T, KEEP, OP_BOR, KEEP, KEEP)                                             \
    KERNEL(name##_bxor, T, T, KEEP, OP_BXOR, KEEP, KEEP)

#define REAL_KERNELS(name, T, A, LOAD, SCALED_LOAD, STORE)                                         \
    KERNEL(name##_sum, T, A, LOAD, OP_SUM, KEEP, STORE)                                            \
    KERNEL(name##_avg, T, A, LOAD, OP_SUM, DIVIDE, STORE)                                          \
    KERNEL(name##_product, T, A, LOAD, OP_PRODUCT, KEEP, STORE)                                    \
    KERNEL(name##_min, T, A, LOAD, OP_MIN, KEEP, STORE)                                            \
    KERNEL(name##_max, T, A, LOAD, OP_MAX, KEEP, STORE)                                            \
    KERNEL(name##_premul, T, A, SCALED_LOAD, OP_SUM, KEEP, STORE)

INTEGER_KERNELS(u8, uint8_t, DIVIDE_UNSIGNED)
INTEGER_KERNELS(i8, int8_t, DIVIDE_SIGNED)
INTEGER_KERNELS(u16, uint16_t, DIVIDE_UNSIGNED)
INTEGER_KERNELS(i16, int16_t, DIVIDE_SIGNED)
INTEGER_KERNELS(u32, uint32_t, DIVIDE_UNSIGNED)
INTEGER_KERNELS(i32, int32_t, DIVIDE_SIGNED)
INTEGER_KERNELS(u64, uint64_t, DIVIDE_UNSIGNED)
INTEGER_KERNELS(i64, int64_t, DIVIDE_SIGNED)
REAL_KERNELS(f32, float, float, KEEP, SCALED, KEEP)
REAL_KERNELS(f64, double, double, KEEP, SCALED, KEEP)
REAL_KERNELS(f16, uint16_t, float, load_f16, SCALED_F16, store_f16)
REAL_KERNELS(bf16, uint16_t, float, load_bf16, SCALED_BF16, store_bf16)
/* Booleans add as torch adds them: or. */
KERNEL(bool_or, uint8_t, uint8_t, AS_BOOL, OP_BOR, KEEP, KEEP)
KERNEL(bool_and, uint8_t, uint8_t, AS_BOOL, OP_BAND, KEEP, KEEP)
KERNEL(bool_xor, uint8_t, uint8_t, AS_BOOL, OP_BXOR, KEEP, KEEP)

/* A complex number is added part by part: the real kernel on twice the elements. */
#define PART_BY_PART(name, real)                                                                   \
    ISA_TARGET static void ISA_NAME(name)(void *out, void *copy, const void *const *inputs,        \
                                          uint32_t ranks, uint64_t count, double factor,           \
                                          uint64_t divisor) {                                      \
        ISA_NAME(real)(out, copy, inputs, ranks, 2 * count, factor, divisor);                      \
    }

#define COMPLEX_PRODUCT(name, T, A, LOAD, STORE)                                                   \
    ISA_TARGET static void ISA_NAME(name)(void *out_, void *copy_, const void *const *inputs,      \
                                          uint32_t ranks, uint64_t count, double factor,           \
                                          uint64_t divisor) {                                      \
        T *out = out_, *copy = copy_;                                                              \
        (void)factor, (void)divisor;                                                               \
        for (uint64_t i = 0; i < count; i++) {                                                     \
            A re = LOAD(((const T *)inputs[0])[i].re), im = LOAD(((const T *)inputs[0])[i].im);    \
            for (uint32_t r = 1; r < ranks; r++) {                                                 \
                A x = LOAD(((const T *)inputs[r])[i].re), y = LOAD(((const T *)inputs[r])[i].im);  \
                A next = re * x - im * y;                                                          \
                im = re * y + im * x;                                                              \
                re = next;                                                                         \
            }                                                                                      \
            out[i].re = STORE(re);                                                                 \
            out[i].im = STORE(im);                                                                 \
            if (copy != NULL) copy[i] = out[i];                                                    \
        }                                                                                          \
    }

#define COMPLEX_KERNELS(name, real, T, A, LOAD, STORE)                                             \
    PART_BY_PART(name##_sum, real##_sum)                                                           \
    PART_BY_PART(name##_avg, real##_avg)                                                           \
    PART_BY_PART(name##_premul, real##_premul)                                                     \
    COMPLEX_PRODUCT(name##_product, T, A, LOAD, STORE)

COMPLEX_KERNELS(c32, f16, complex32, float, load_f16, store_f16)
COMPLEX_KERNELS(c64, f32, complex64, float, KEEP, KEEP)
COMPLEX_KERNELS(c128, f64, complex128, double, KEEP, KEEP)

#define INTEGER_ROW(name)                                                                          \
    {                                                                                              \
        [PLC_SUM] = ISA_NAME(name##_sum), [PLC_AVG] = ISA_NAME(name##_avg),                        \
        [PLC_PRODUCT] = ISA_NAME(name##_product), [PLC_MIN] = ISA_NAME(name##_min),                \
        [PLC_MAX] = ISA_NAME(name##_max), [PLC_BAND] = ISA_NAME(name##_band),                      \
        [PLC_BOR] = ISA_NAME(name##_bor), [PLC_BXOR] = ISA_NAME(name##_bxor)                       \
    }
#define REAL_ROW(name)                                                                             \
    {                                                                                              \
        [PLC_SUM] = ISA_NAME(name##_sum), [PLC_AVG] = ISA_NAME(name##_avg),                        \
        [PLC_PRODUCT] = ISA_NAME(name##_product), [PLC_MIN] = ISA_NAME(name##_min),                \
        [PLC_MAX] = ISA_NAME(name##_max), [PLC_PREMUL_SUM] = ISA_NAME(name##_premul)               \
    }
#define COMPLEX_ROW(name)                                                                          \
    {                                                                                              \
        [PLC_SUM] = ISA_NAME(name##_sum), [PLC_AVG] = ISA_NAME(name##_avg),                        \
        [PLC_PRODUCT] = ISA_NAME(name##_product), [PLC_PREMUL_SUM] = ISA_NAME(name##_premul)       \
    }

static const kernel ISA_NAME(table)[PLC_DTYPES][PLC_OPS] = {
    [PLC_U8] = INTEGER_ROW(u8),
    [PLC_I8] = INTEGER_ROW(i8),
    [PLC_U16] = INTEGER_ROW(u16),
    [PLC_I16] = INTEGER_ROW(i16),
    [PLC_U32] = INTEGER_ROW(u32),
    [PLC_I32] = INTEGER_ROW(i32),
    [PLC_U64] = INTEGER_ROW(u64),
    [PLC_I64] = INTEGER_ROW(i64),
    [PLC_F16] = REAL_ROW(f16),
    [PLC_BF16] = REAL_ROW(bf16),
    [PLC_F32] = REAL_ROW(f32),
    [PLC_F64] = REAL_ROW(f64),
    [PLC_C32] = COMPLEX_ROW(c32),
    [PLC_C64] = COMPLEX_ROW(c64),
    [PLC_C128] = COMPLEX_ROW(c128),
    [PLC_BOOL] = {[PLC_SUM] = ISA_NAME(bool_or), [PLC_PRODUCT] = ISA_NAME(bool_and),
                  [PLC_MIN] = ISA_NAME(bool_and), [PLC_MAX] = ISA_NAME(bool_or),
                  [PLC_BAND] = ISA_NAME(bool_and), [PLC_BOR] = ISA_NAME(bool_or),
                  [PLC_BXOR] = ISA_NAME(bool_xor)},
};

#undef BLOCK
#undef KERNEL
#undef DIVIDE
#undef DIVIDE_SIGNED
#undef DIVIDE_UNSIGNED
#undef SCALED
#undef SCALED_F16
#undef SCALED_BF16
#undef INTEGER_KERNELS
#undef REAL_KERNELS
#undef PART_BY_PART
#undef COMPLEX_PRODUCT
#undef COMPLEX_KERNELS
#undef INTEGER_ROW
#undef REAL_ROW
#undef COMPLEX_ROW

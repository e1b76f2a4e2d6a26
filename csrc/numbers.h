/* What loops over numbers share: the promise that no iteration depends on another, and float16 and
 * bfloat16, which are computed with as float32. */
#ifndef PACELINE_NUMBERS_H
#define PACELINE_NUMBERS_H

#include <stdint.h>
#include <string.h>

/* The output may be one of the inputs, at the same index: no loop here carries a dependence. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif
#define INLINE static inline __attribute__((always_inline))
#define KEEP(x) (x)

INLINE float bits_to_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE uint32_t float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* Branch-free selections below, so that the compiler can vectorise them. */
INLINE float load_f16(uint16_t h) {
    uint32_t shifted = (uint32_t)(h & 0x7fff) << 13;
    uint32_t exponent = shifted & (0x7c00u << 13);
    uint32_t normal = shifted + ((127u - 15u) << 23);
    uint32_t special = normal + ((128u - 16u) << 23);
    uint32_t tiny = float_to_bits(bits_to_float(normal + (1u << 23)) - bits_to_float(113u << 23));
    uint32_t magnitude = exponent == (0x7c00u << 13) ? special : exponent == 0 ? tiny : normal;
    return bits_to_float(magnitude | ((uint32_t)(h & 0x8000) << 16));
}

INLINE uint16_t store_f16(float f) {
    /* Adding it rounds a subnormal in place. */
    const uint32_t half_of_tiny = (127u - 15u + 23u - 10u + 1u) << 23;
    uint32_t u = float_to_bits(f), sign = u & 0x80000000u;
    u ^= sign;
    uint32_t large = u > (255u << 23) ? 0x7e00u : 0x7c00u;
    uint32_t tiny = float_to_bits(bits_to_float(u) + bits_to_float(half_of_tiny)) - half_of_tiny;
    uint32_t normal = (u - ((127u - 15u) << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
    uint32_t magnitude = u >= ((127u + 16u) << 23) ? large : u < (113u << 23) ? tiny : normal;
    return (uint16_t)(magnitude | (sign >> 16));
}

INLINE float load_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

INLINE uint16_t store_bf16(float f) {
    uint32_t u = float_to_bits(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > (255u << 23) ? 0x7fc0u : rounded);
}

#endif

/* Which instructions this machine has. Loops are compiled once per set and chosen at run time. */
#include "internal.h"

#if defined(__x86_64__)
#define BASE "sse2" /* part of every x86-64 */
#elif defined(__aarch64__)
#define BASE "neon" /* part of every ARMv8 */
#else
#define BASE "portable"
#endif

/* Best first; the last one is always there. Tables of kernels have the same order. */
#if defined(__x86_64__)
static const char *const known[] = {"avx512", "avx2", BASE};
#else
static const char *const known[] = {BASE};
#endif
#define KNOWN (sizeof known / sizeof *known)

static bool is_available(uint32_t index) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (index == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (index == 1) return __builtin_cpu_supports("avx2");
#endif
    return index == KNOWN - 1;
}

int choose_instruction_set(const char *name) {
    for (uint32_t i = 0; i < KNOWN; i++)
        if (is_available(i) && (name == NULL || strcmp(name, known[i]) == 0)) return (int)i;
    return -1;
}

const char *plc_instruction_set(void) { return known[choose_instruction_set(NULL)]; }

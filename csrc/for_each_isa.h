/* Compiles a file of kernels once per instruction set: define KERNELS as its name and include this.
 * There ISA_NAME(name) is a name of this set's own, and ISA_TARGET goes before each function.
 * BY_INSTRUCTION_SET(name) is then what was made, as `choose_instruction_set` numbers the sets. */

#define ISA_NAME(name) name##_portable
#define ISA_TARGET
#include KERNELS
#undef ISA_NAME
#undef ISA_TARGET

#if defined(__x86_64__)
#define ISA_NAME(name) name##_avx2
#define ISA_TARGET __attribute__((target("avx2")))
#include KERNELS
#undef ISA_NAME
#undef ISA_TARGET

#define ISA_NAME(name) name##_avx512
#define ISA_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include KERNELS
#undef ISA_NAME
#undef ISA_TARGET

#define BY_INSTRUCTION_SET(name) {name##_avx512, name##_avx2, name##_portable}
#else
#define BY_INSTRUCTION_SET(name) {name##_portable}
#endif

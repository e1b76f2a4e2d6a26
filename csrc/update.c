/* One step of an optimizer over many arrays: a model's parameters, each at its own address.
 *
 * Every element is read once and written once. All arrays together are a row of lines of 64 bytes,
 * each array beginning a new one; a part of an update, and a thread's part of that, is a range of
 * lines. An element's result depends on nothing but its own numbers, and no multiply-add is fused
 * (see the build flags), so neither the cut nor the instruction set shows in the bits.
 *
 * Threads live for one call: a step of an optimizer is long where they pay, nothing has to be kept
 * between calls, and a fork finds nothing of them.
 */
#include <math.h>
#include <signal.h>

#include "internal.h"
#include "numbers.h"

#define LINE_BYTES 64
/* Elements updated before the next ones are unscaled: what is written twice stays in cache. */
#define UNSCALED_AT_ONCE 4096
#define MAX_THREADS 256u

enum { PARAMETER, GRADIENT, STATE, STEP = STATE + 3, ADDRESSES };

/* What a kernel computes with; each array has its own, because its step has. */
typedef struct {
    uint32_t rule;
    bool amsgrad, nesterov, first;
    double sign, decay, keep, minus_lr, eps, grad_scale;
    double momentum, share;                  /* PLC_SGD */
    double weight, beta2, rest2, correction; /* PLC_ADAM */
} numbers;

typedef void (*update_kernel)(const numbers *k, void *const *at, uint64_t count);

#define ISA_NAME(name) name##_portable
#define ISA_TARGET
#include "update_for_isa.h"
#undef ISA_NAME
#undef ISA_TARGET

#if defined(__x86_64__)
#define ISA_NAME(name) name##_avx2
#define ISA_TARGET __attribute__((target("avx2")))
#include "update_for_isa.h"
#undef ISA_NAME
#undef ISA_TARGET

#define ISA_NAME(name) name##_avx512
#define ISA_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "update_for_isa.h"
#undef ISA_NAME
#undef ISA_TARGET
#endif

/* By instruction set, as `choose_instruction_set` numbers them. */
#if defined(__x86_64__)
static const update_kernel *const tables[] = {table_avx512, table_avx2, table_portable};
#else
static const update_kernel *const tables[] = {table_portable};
#endif

/* base ** exponent for whole exponents, by squaring: the C library's `pow` may have other last bits
 * on another machine. */
static double power(double base, double exponent) {
    if (!(exponent >= 0 && exponent < 0x1p53) || exponent != floor(exponent))
        return pow(base, exponent);
    double result = 1;
    for (uint64_t left = (uint64_t)exponent; left > 0; left >>= 1, base *= base)
        if (left & 1) result *= base;
    return result;
}

static void *address(const plc_update *u, uint32_t row, uint32_t array) {
    return (void *)(uintptr_t)u->addresses[(uint64_t)row * u->arrays + array];
}

static uint32_t dtype_of(const plc_update *u, uint32_t array) {
    return u->kinds[array] & PLC_DTYPE_MASK;
}

/* The number of the step that is being made; the first is 1. */
static double step_of(const plc_update *u, uint32_t array) {
    const void *at = address(u, STEP, array);
    if (at == NULL) return 1;
    return 1 + (u->kinds[array] & PLC_WIDE_STEP ? *(const double *)at : *(const float *)at);
}

static void count_step(const plc_update *u, uint32_t array) {
    void *at = address(u, STEP, array);
    if (at == NULL) return;
    if (u->kinds[array] & PLC_WIDE_STEP) *(double *)at += 1;
    else *(float *)at += 1;
}

static numbers numbers_for(const plc_update *u, double step, bool first) {
    const bool decoupled = u->options & PLC_DECOUPLED_DECAY;
    numbers k = {.rule = u->rule, .amsgrad = u->options & PLC_AMSGRAD,
                 .nesterov = u->options & PLC_NESTEROV, .first = first,
                 .sign = u->options & PLC_MAXIMIZE ? -1 : 1,
                 .decay = decoupled ? 0 : u->weight_decay,
                 .keep = decoupled ? 1 - u->lr * u->weight_decay : 1,
                 .minus_lr = -u->lr, .eps = u->eps, .grad_scale = u->grad_scale};
    if (u->rule == PLC_SGD) {
        k.momentum = u->momentum;
        k.share = 1 - u->dampening;
    } else if (u->rule == PLC_ADAM) {
        k.weight = 1 - u->beta1;
        k.beta2 = u->beta2;
        k.rest2 = 1 - u->beta2;
        k.minus_lr = -(u->lr / (1 - power(u->beta1, step)));
        k.correction = 1 / sqrt(1 - power(u->beta2, step));
    } else {
        k.minus_lr = -(u->lr / (1 + (step - 1) * u->lr_decay));
    }
    return k;
}

typedef struct {
    const plc_update *update;
    const update_kernel *table;
    uint64_t first, end; /* lines */
    pthread_t thread;
} range;

/* Elements from..to of one array. */
static void update_elements(const range *r, uint32_t array, const numbers *k, uint64_t from,
                            uint64_t to) {
    const plc_update *u = r->update;
    const uint32_t dtype = dtype_of(u, array);
    const uint64_t bytes = plc_element_bytes(dtype);
    const uint64_t at_once = k->grad_scale == 1 ? to - from : UNSCALED_AT_ONCE;
    void *base[STEP], *at[STEP];
    for (uint32_t row = 0; row < STEP; row++) base[row] = address(u, row, array);
    for (uint64_t i = from; i < to; i += at_once) {
        for (uint32_t row = 0; row < STEP; row++)
            at[row] = base[row] == NULL ? NULL : (char *)base[row] + i * bytes;
        r->table[dtype](k, at, MIN(at_once, to - i));
    }
}

static uint64_t lines_of(const plc_update *u, uint32_t array) {
    uint64_t bytes = u->counts[array] * plc_element_bytes(dtype_of(u, array));
    return (bytes + LINE_BYTES - 1) / LINE_BYTES;
}

static void update_range(const range *r) {
    const plc_update *u = r->update;
    numbers k = {0};
    double step = -1; /* that `k` is for; most arrays have made as many steps */
    bool first = false;
    uint64_t begins = 0;
    for (uint32_t i = 0; i < u->arrays && begins < r->end; i++) {
        uint64_t lines = lines_of(u, i), ends = begins + lines;
        if (ends > r->first && lines > 0) {
            uint64_t per_line = LINE_BYTES / plc_element_bytes(dtype_of(u, i));
            uint64_t from = (MAX(begins, r->first) - begins) * per_line;
            uint64_t to = MIN((MIN(ends, r->end) - begins) * per_line, u->counts[i]);
            bool is_first = u->kinds[i] & PLC_FIRST_UPDATE;
            if (step != step_of(u, i) || first != is_first) {
                step = step_of(u, i);
                first = is_first;
                k = numbers_for(u, step, first);
            }
            update_elements(r, i, &k, from, to);
        }
        begins = ends;
    }
}

static void *update_thread(void *argument) {
    update_range(argument);
    return NULL;
}

static void update_in_threads(const plc_update *u, const update_kernel *table, uint64_t first,
                              uint64_t end, uint32_t threads) {
    range ranges[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    sigset_t all, before;
    sigfillset(&all); /* signals are for the caller's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t t = threads; t-- > 0;) {
        ranges[t] = (range){.update = u, .table = table,
                            .first = first + (end - first) * t / threads,
                            .end = first + (end - first) * (t + 1) / threads};
        if (t > 0)
            started[t] = pthread_create(&ranges[t].thread, NULL, update_thread, &ranges[t]) == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (uint32_t t = 0; t < threads; t++)
        if (!started[t]) update_range(&ranges[t]);
    for (uint32_t t = 0; t < threads; t++)
        if (started[t]) pthread_join(ranges[t].thread, NULL);
}

static bool is_valid(const plc_update *u, const update_kernel *table) {
    if (u->rule >= PLC_RULES || u->parts == 0 || u->part >= u->parts) return false;
    for (uint32_t i = 0; i < u->arrays; i++)
        if (dtype_of(u, i) >= PLC_DTYPES || table[dtype_of(u, i)] == NULL) return false;
    return true;
}

int plc_update_with(const char *name, const plc_update *u) {
    int set = choose_instruction_set(name);
    if (set < 0 || !is_valid(u, tables[set])) return PLC_INVALID;
    uint64_t lines = 0;
    for (uint32_t i = 0; i < u->arrays; i++) lines += lines_of(u, i);
    uint64_t first = lines * u->part / u->parts, end = lines * (u->part + 1) / u->parts;
    update_in_threads(u, tables[set], first, end, MAX(1u, MIN(u->threads, MAX_THREADS)));
    for (uint32_t i = 0; i < u->arrays; i++) count_step(u, i);
    return PLC_OK;
}

int plc_update_arrays(const plc_update *u) { return plc_update_with(NULL, u); }

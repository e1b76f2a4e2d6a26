/* One step of an optimizer over many arrays: a model's parameters, each at its own address.
 *
 * Every element is read once and written once. All arrays together are a row of lines of 64 bytes,
 * each array beginning a new one; a part of an update, and a thread's part of that, is a range of
 * lines. An element's result depends on nothing but its own numbers, and no multiply-add is fused
 * (see the build flags), so neither the cut nor the instruction set shows in the bits.
 *
 * Where several processes make one update, what is written goes through a journal (journal.h).
 */
#include "journal.h" /* first: it asks for the GNU declarations */

#include <math.h>

#include "numbers.h"

/* Elements updated before the next ones are unscaled: what is written twice stays in cache. */
#define UNSCALED_AT_ONCE 4096

/* What a kernel computes with; each array has its own, because its step has. */
typedef struct {
    uint32_t rule;
    bool amsgrad, nesterov, first;
    double sign, decay, keep, minus_lr, eps, grad_scale;
    double momentum, share;                  /* PLC_SGD */
    double weight, beta2, rest2, correction; /* PLC_ADAM */
} numbers;

/* `at`: each row of the elements. What is written goes through the slot, unless that is NULL. */
typedef void (*update_kernel)(const numbers *k, void *const *at, journal_slot *slot,
                              uint64_t count);

#define KERNELS "update_for_isa.h"
#include "for_each_isa.h"

static const update_kernel *const tables[] = BY_INSTRUCTION_SET(table);

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
                 .sign = u->options & PLC_MAXIMIZE ? -u->clip : u->clip,
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

/* How many elements are updated at once: all, unless their gradients pass through the cache. */
static uint64_t at_once(const plc_update *u, uint64_t element_bytes, uint64_t count) {
    if (is_summed(u)) return BLOCK_BYTES / element_bytes;
    return u->grad_scale == 1 ? count : UNSCALED_AT_ONCE;
}

/* Elements from..to of one array. */
static void update_elements(const update_part *part, uint32_t array, const numbers *k,
                            uint64_t from, uint64_t to) {
    const plc_update *u = part->update;
    const update_kernel *kernels = part->kernels;
    const uint32_t dtype = dtype_of(u, array);
    const uint64_t bytes = plc_element_bytes(dtype), most = at_once(u, bytes, to - from);
    void *base[STEP], *at[STEP];
    for (uint32_t row = 0; row < STEP; row++) base[row] = address(u, row, array);
    for (uint64_t i = from; i < to; i += most) {
        uint64_t count = MIN(most, to - i);
        for (uint32_t row = 0; row < STEP; row++)
            at[row] = base[row] == NULL ? NULL : (char *)base[row] + i * bytes;
        at[GRADIENT] = (void *)summed_gradients(part, array, i, count, to);
        if (at[GRADIENT] == NULL) return; /* the step ends here */
        kernels[dtype](k, at, part->slot, count);
    }
}

static void update_lines(const update_part *part) {
    const plc_update *u = part->update;
    numbers k = {0};
    double step = -1; /* that `k` is for; most arrays have made as many steps */
    bool first = false;
    uint64_t begins = 0;
    for (uint32_t i = 0; i < u->arrays && begins < part->end; i++) {
        uint64_t lines = lines_of(u, i), ends = begins + lines;
        if (ends > part->first && lines > 0) {
            uint64_t per_line = LINE_BYTES / plc_element_bytes(dtype_of(u, i));
            uint64_t from = (MAX(begins, part->first) - begins) * per_line;
            uint64_t to = MIN((MIN(ends, part->end) - begins) * per_line, u->counts[i]);
            bool is_first = u->kinds[i] & PLC_FIRST_UPDATE;
            if (step != step_of(u, i) || first != is_first) {
                step = step_of(u, i);
                first = is_first;
                k = numbers_for(u, step, first);
            }
            update_elements(part, i, &k, from, to);
        }
        begins = ends;
    }
}

static bool can_be_updated(const plc_update *u, uint32_t array) {
    const uint32_t dtype = dtype_of(u, array);
    if (u->tree != NULL && dtype != PLC_F32 && dtype != PLC_F64) return false;
    return dtype < PLC_DTYPES && tables[0][dtype] != NULL;
}

bool is_valid_update(const plc_update *u) {
    if (u->rule >= PLC_RULES || u->parts == 0 || u->part >= u->parts) return false;
    if (u->ranks > PLC_MAX_RANKS || (u->tree != NULL && !is_valid_tree(u))) return false;
    for (uint32_t i = 0; i < u->arrays; i++)
        if (!can_be_updated(u, i)) return false;
    return true;
}

int plc_update_with(const char *name, const plc_update *u) {
    int set = choose_instruction_set(name);
    if (set < 0 || !is_valid_update(u)) return PLC_INVALID;
    uint64_t lines = 0;
    for (uint32_t i = 0; i < u->arrays; i++) lines += lines_of(u, i);
    update_part pass = {
        .update = u, .run = update_lines, .kernels = tables[set], .journal = u->journal};
    int status = run_part(&pass, lines);
    for (uint32_t i = 0; status == PLC_OK && i < u->arrays; i++) count_step(u, i);
    return status;
}

int plc_update_arrays(const plc_update *u) { return plc_update_with(NULL, u); }

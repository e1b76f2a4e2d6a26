/* Included once per instruction set (for_each_isa.h): the loops of update.c. */

/* One kernel: element type T, computed with as A. The operations and their order are those of
 * torch's own loop, one rounding each. What is constant in a loop but differs between calls is a
 * variant, so that no loop has a branch. */
#define RUN(name, ...) ISA_NAME(blocks_##name)(k, at, slot, count, __VA_ARGS__)
#define UPDATE_KERNELS(name, T, A, LOAD, STORE, SQRT)                                              \
    INLINE ISA_TARGET void ISA_NAME(adam_##name)(const numbers *k, void *const *from,              \
                                                 void *const *to, uint64_t count, bool l2_decay,   \
                                                 bool amsgrad) {                                   \
        const T *p = from[PARAMETER], *g = from[GRADIENT], *m = from[STATE];                       \
        const T *v = from[STATE + 1], *largest = from[STATE + 2];                                  \
        T *new_p = to[PARAMETER], *new_m = to[STATE], *new_v = to[STATE + 1];                      \
        T *new_largest = to[STATE + 2];                                                            \
        const A sign = (A)k->sign, decay = (A)k->decay, keep = (A)k->keep;                         \
        const A weight = (A)k->weight, beta2 = (A)k->beta2, rest2 = (A)k->rest2;                   \
        const A correction = (A)k->correction, eps = (A)k->eps, minus_lr = (A)k->minus_lr;         \
        /* As torch interpolates: from the nearer end, so that weight 1 gives the gradient. */     \
        const bool near = k->weight < 0.5;                                                         \
        const A distance = near ? weight : (A)-(1 - (A)k->weight);                                 \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                         \
            A pi = (A)LOAD(p[i]) * keep, gi = (A)LOAD(g[i]) * sign, mi = (A)LOAD(m[i]);            \
            if (l2_decay) gi = gi + decay * pi;                                                    \
            mi = (near ? mi : gi) + distance * (gi - mi);                                          \
            A vi = (A)LOAD(v[i]) * beta2 + rest2 * gi * gi, most = vi;                             \
            if (amsgrad) {                                                                         \
                A li = (A)LOAD(largest[i]);                                                        \
                most = (li != li || li > vi) ? li : vi;                                            \
                new_largest[i] = (T)STORE(most);                                                   \
            }                                                                                      \
            new_m[i] = (T)STORE(mi);                                                               \
            new_v[i] = (T)STORE(vi);                                                               \
            new_p[i] = (T)STORE(pi + minus_lr * mi / (SQRT(most) * correction + eps));             \
        }                                                                                          \
    }                                                                                              \
    INLINE ISA_TARGET void ISA_NAME(sgd_##name)(const numbers *k, void *const *from,               \
                                                void *const *to, uint64_t count, bool l2_decay,    \
                                                bool momentum, bool first, bool nesterov) {        \
        const T *p = from[PARAMETER], *g = from[GRADIENT], *b = from[STATE];                       \
        T *new_p = to[PARAMETER], *new_b = to[STATE];                                              \
        const A sign = (A)k->sign, decay = (A)k->decay, minus_lr = (A)k->minus_lr;                 \
        const A factor = (A)k->momentum, share = (A)k->share;                                      \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                         \
            A pi = (A)LOAD(p[i]), gi = (A)LOAD(g[i]) * sign;                                       \
            if (l2_decay) gi = gi + decay * pi;                                                    \
            if (momentum) {                                                                        \
                A bi = first ? gi : (A)LOAD(b[i]) * factor + share * gi;                           \
                new_b[i] = (T)STORE(bi);                                                           \
                gi = nesterov ? gi + factor * bi : bi;                                             \
            }                                                                                      \
            new_p[i] = (T)STORE(pi + minus_lr * gi);                                               \
        }                                                                                          \
    }                                                                                              \
    INLINE ISA_TARGET void ISA_NAME(adagrad_##name)(const numbers *k, void *const *from,           \
                                                    void *const *to, uint64_t count,               \
                                                    bool l2_decay) {                               \
        const T *p = from[PARAMETER], *g = from[GRADIENT], *s = from[STATE];                       \
        T *new_p = to[PARAMETER], *new_s = to[STATE];                                              \
        const A sign = (A)k->sign, decay = (A)k->decay, eps = (A)k->eps;                           \
        const A minus_lr = (A)k->minus_lr;                                                         \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                         \
            A pi = (A)LOAD(p[i]), gi = (A)LOAD(g[i]) * sign;                                       \
            if (l2_decay) gi = gi + decay * pi;                                                    \
            A si = (A)LOAD(s[i]) + gi * gi;                                                        \
            new_s[i] = (T)STORE(si);                                                               \
            new_p[i] = (T)STORE(pi + minus_lr * gi / (SQRT(si) + eps));                            \
        }                                                                                          \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(unscale_##name)(T *g, uint64_t count, double scale) {          \
        const A divisor = (A)scale;                                                                \
        INDEPENDENT for (uint64_t i = 0; i < count; i++)                                           \
            g[i] = (T)STORE((A)LOAD(g[i]) / divisor);                                              \
    }                                                                                              \
    /* One variant over `count` elements, straight or through a journal. */                        \
    INLINE ISA_TARGET void ISA_NAME(blocks_##name)(const numbers *given, void *const *at,          \
                                                   journal_slot *slot, uint64_t count,             \
                                                   uint32_t rule, bool l2_decay, bool momentum,    \
                                                   bool first, bool nesterov, bool amsgrad) {      \
        const numbers k = *given; /* so that no store may change it */                             \
        const uint64_t most = slot == NULL ? count : JOURNAL_BLOCK_BYTES / sizeof(T);              \
        const uint32_t rows = rule == PLC_ADAM ? 2 + amsgrad : rule == PLC_ADAGRAD || momentum;    \
        for (uint64_t i = 0; i < count; i += most) {                                               \
            const uint64_t now = MIN(most, count - i);                                             \
            void *from[STEP] = {NULL}, *to[STEP] = {NULL};                                         \
            for (uint32_t row = 0; row < STATE + rows; row++) {                                    \
                from[row] = (T *)at[row] + i;                                                      \
                to[row] = slot == NULL ? from[row] : journal_row(slot, row);                       \
            }                                                                                      \
            if (rule == PLC_ADAM)                                                                  \
                ISA_NAME(adam_##name)(&k, from, to, now, l2_decay, amsgrad);                       \
            else if (rule == PLC_ADAGRAD)                                                          \
                ISA_NAME(adagrad_##name)(&k, from, to, now, l2_decay);                             \
            else                                                                                   \
                ISA_NAME(sgd_##name)(&k, from, to, now, l2_decay, momentum, first, nesterov);      \
            if (slot == NULL) continue;                                                            \
            uint64_t line = mark_whole(slot, now * sizeof(T));                                     \
            copy_block(from[PARAMETER], to[PARAMETER], now * sizeof(T));                           \
            for (uint32_t row = STATE; row < STATE + rows; row++)                                  \
                copy_block(from[row], to[row], now * sizeof(T));                                   \
            mark_written(slot, line);                                                              \
        }                                                                                          \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(update_##name)(const numbers *k, void *const *at,              \
                                                   journal_slot *slot, uint64_t count) {           \
        const bool l2 = k->decay != 0;                                                             \
        if (k->grad_scale != 1)                                                                    \
            ISA_NAME(unscale_##name)(at[GRADIENT], count, k->grad_scale);                          \
        if (k->rule == PLC_ADAM) {                                                                 \
            if (k->amsgrad && l2) RUN(name, PLC_ADAM, true, false, false, false, true);            \
            else if (k->amsgrad) RUN(name, PLC_ADAM, false, false, false, false, true);            \
            else if (l2) RUN(name, PLC_ADAM, true, false, false, false, false);                    \
            else RUN(name, PLC_ADAM, false, false, false, false, false);                           \
        } else if (k->rule == PLC_ADAGRAD) {                                                       \
            if (l2) RUN(name, PLC_ADAGRAD, true, false, false, false, false);                      \
            else RUN(name, PLC_ADAGRAD, false, false, false, false, false);                        \
        } else if (k->momentum == 0) {                                                             \
            if (l2) RUN(name, PLC_SGD, true, false, false, false, false);                          \
            else RUN(name, PLC_SGD, false, false, false, false, false);                            \
        } else if (k->first && k->nesterov) {                                                      \
            if (l2) RUN(name, PLC_SGD, true, true, true, true, false);                             \
            else RUN(name, PLC_SGD, false, true, true, true, false);                               \
        } else if (k->first) {                                                                     \
            if (l2) RUN(name, PLC_SGD, true, true, true, false, false);                            \
            else RUN(name, PLC_SGD, false, true, true, false, false);                              \
        } else if (k->nesterov) {                                                                  \
            if (l2) RUN(name, PLC_SGD, true, true, false, true, false);                            \
            else RUN(name, PLC_SGD, false, true, false, true, false);                              \
        } else {                                                                                   \
            if (l2) RUN(name, PLC_SGD, true, true, false, false, false);                           \
            else RUN(name, PLC_SGD, false, true, false, false, false);                             \
        }                                                                                          \
    }

UPDATE_KERNELS(f32, float, float, KEEP, KEEP, sqrtf)
UPDATE_KERNELS(f64, double, double, KEEP, KEEP, sqrt)
UPDATE_KERNELS(f16, uint16_t, float, load_f16, store_f16, sqrtf)
UPDATE_KERNELS(bf16, uint16_t, float, load_bf16, store_bf16, sqrtf)

static const update_kernel ISA_NAME(table)[PLC_DTYPES] = {
    [PLC_F32] = ISA_NAME(update_f32),
    [PLC_F64] = ISA_NAME(update_f64),
    [PLC_F16] = ISA_NAME(update_f16),
    [PLC_BF16] = ISA_NAME(update_bf16),
};

#undef UPDATE_KERNELS
#undef RUN

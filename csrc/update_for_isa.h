/* Included by update.c once per instruction set, with ISA_NAME(name) and ISA_TARGET defined. */

/* One kernel: element type T, computed with as A. The operations and their order are those of
 * torch's own loop, one rounding each. What is constant in a loop but differs between calls is a
 * variant, so that no loop has a branch. */
#define UPDATE_KERNELS(name, T, A, LOAD, STORE, SQRT)                                              \
    INLINE ISA_TARGET void ISA_NAME(adam_##name)(const numbers *k, T *p, const T *g, T *m, T *v,   \
                                                 T *largest, uint64_t count, bool l2_decay,        \
                                                 bool amsgrad) {                                   \
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
                largest[i] = (T)STORE(most);                                                       \
            }                                                                                      \
            m[i] = (T)STORE(mi);                                                                   \
            v[i] = (T)STORE(vi);                                                                   \
            p[i] = (T)STORE(pi + minus_lr * mi / (SQRT(most) * correction + eps));                 \
        }                                                                                          \
    }                                                                                              \
    INLINE ISA_TARGET void ISA_NAME(sgd_##name)(const numbers *k, T *p, const T *g, T *b,          \
                                                uint64_t count, bool l2_decay, bool momentum,      \
                                                bool first, bool nesterov) {                       \
        const A sign = (A)k->sign, decay = (A)k->decay, minus_lr = (A)k->minus_lr;                 \
        const A factor = (A)k->momentum, share = (A)k->share;                                      \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                         \
            A pi = (A)LOAD(p[i]), gi = (A)LOAD(g[i]) * sign;                                       \
            if (l2_decay) gi = gi + decay * pi;                                                    \
            if (momentum) {                                                                        \
                A bi = first ? gi : (A)LOAD(b[i]) * factor + share * gi;                           \
                b[i] = (T)STORE(bi);                                                               \
                gi = nesterov ? gi + factor * bi : bi;                                             \
            }                                                                                      \
            p[i] = (T)STORE(pi + minus_lr * gi);                                                   \
        }                                                                                          \
    }                                                                                              \
    INLINE ISA_TARGET void ISA_NAME(adagrad_##name)(const numbers *k, T *p, const T *g, T *s,      \
                                                    uint64_t count, bool l2_decay) {               \
        const A sign = (A)k->sign, decay = (A)k->decay, eps = (A)k->eps;                           \
        const A minus_lr = (A)k->minus_lr;                                                         \
        INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                         \
            A pi = (A)LOAD(p[i]), gi = (A)LOAD(g[i]) * sign;                                       \
            if (l2_decay) gi = gi + decay * pi;                                                    \
            A si = (A)LOAD(s[i]) + gi * gi;                                                        \
            s[i] = (T)STORE(si);                                                                   \
            p[i] = (T)STORE(pi + minus_lr * gi / (SQRT(si) + eps));                                \
        }                                                                                          \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(unscale_##name)(T *g, uint64_t count, double scale) {          \
        const A divisor = (A)scale;                                                                \
        INDEPENDENT for (uint64_t i = 0; i < count; i++)                                           \
            g[i] = (T)STORE((A)LOAD(g[i]) / divisor);                                              \
    }                                                                                              \
    ISA_TARGET static void ISA_NAME(update_##name)(const numbers *k, void *const *at,              \
                                                   uint64_t count) {                               \
        T *p = at[PARAMETER], *g = at[GRADIENT], *a = at[STATE], *b = at[STATE + 1],               \
          *c = at[STATE + 2];                                                                      \
        const bool l2 = k->decay != 0;                                                             \
        if (k->grad_scale != 1) ISA_NAME(unscale_##name)(g, count, k->grad_scale);                 \
        if (k->rule == PLC_ADAM) {                                                                 \
            if (k->amsgrad && l2) ISA_NAME(adam_##name)(k, p, g, a, b, c, count, true, true);      \
            else if (k->amsgrad) ISA_NAME(adam_##name)(k, p, g, a, b, c, count, false, true);      \
            else if (l2) ISA_NAME(adam_##name)(k, p, g, a, b, c, count, true, false);              \
            else ISA_NAME(adam_##name)(k, p, g, a, b, c, count, false, false);                     \
        } else if (k->rule == PLC_ADAGRAD) {                                                       \
            if (l2) ISA_NAME(adagrad_##name)(k, p, g, a, count, true);                             \
            else ISA_NAME(adagrad_##name)(k, p, g, a, count, false);                               \
        } else if (k->momentum == 0) {                                                             \
            if (l2) ISA_NAME(sgd_##name)(k, p, g, a, count, true, false, false, false);            \
            else ISA_NAME(sgd_##name)(k, p, g, a, count, false, false, false, false);              \
        } else if (k->first && k->nesterov) {                                                      \
            if (l2) ISA_NAME(sgd_##name)(k, p, g, a, count, true, true, true, true);               \
            else ISA_NAME(sgd_##name)(k, p, g, a, count, false, true, true, true);                 \
        } else if (k->first) {                                                                     \
            if (l2) ISA_NAME(sgd_##name)(k, p, g, a, count, true, true, true, false);              \
            else ISA_NAME(sgd_##name)(k, p, g, a, count, false, true, true, false);                \
        } else if (k->nesterov) {                                                                  \
            if (l2) ISA_NAME(sgd_##name)(k, p, g, a, count, true, true, false, true);              \
            else ISA_NAME(sgd_##name)(k, p, g, a, count, false, true, false, true);                \
        } else {                                                                                   \
            if (l2) ISA_NAME(sgd_##name)(k, p, g, a, count, true, true, false, false);             \
            else ISA_NAME(sgd_##name)(k, p, g, a, count, false, true, false, false);               \
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

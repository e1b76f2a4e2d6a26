/* What the passes over the arrays of an update share: parts of it in threads, and gradients that
 * are still to be summed over ranks. */
#ifndef PACELINE_UPDATE_H
#define PACELINE_UPDATE_H

#include "internal.h"

/* Gradients are summed, and looked at for their norm, by blocks of this size: the sums stay in the
 * first-level cache until they are used. */
#define BLOCK_BYTES PLC_NORM_BLOCK_BYTES

enum { PARAMETER, GRADIENT, STATE, STEP = STATE + 3, ADDRESSES };

typedef struct update_part update_part;
struct update_part {
    const plc_update *update;
    uint64_t first, end;  /* in units of the pass */
    void (*run)(const update_part *part);
    const void *kernels;  /* of the pass */
    double *out;          /* of the pass */
    unsigned char *block; /* room for what is summed; NULL: the gradients are there */
    pthread_t thread;
};

static inline void *address(const plc_update *u, uint32_t row, uint32_t array) {
    return (void *)(uintptr_t)u->addresses[(uint64_t)row * u->arrays + array];
}

static inline uint32_t dtype_of(const plc_update *u, uint32_t array) {
    return u->kinds[array] & PLC_DTYPE_MASK;
}

static inline uint64_t bytes_of(const plc_update *u, uint32_t array) {
    return u->counts[array] * plc_element_bytes(dtype_of(u, array));
}

/* Make this process's part of a pass over `units`, divided once more among its threads.
 * PLC_SYSTEM, and nothing is done, without memory for sums. */
int run_part(const update_part *pass, uint64_t units);

/* At most a block of gradients at this address, summed over ranks if they are to be. */
const void *summed_gradients(const update_part *part, const void *gradients, uint32_t dtype,
                             uint64_t count);

bool is_valid_update(const plc_update *u);

#endif

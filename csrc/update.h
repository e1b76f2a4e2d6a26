/* What the passes over the arrays of an update share: parts of it in threads, and gradients that
 * are still to be summed over ranks. */
#ifndef PACELINE_UPDATE_H
#define PACELINE_UPDATE_H

#include "internal.h"

/* Gradients are summed, and looked at for their norm, by blocks of this size: the sums stay in the
 * first-level cache until they are used. */
#define BLOCK_BYTES PLC_NORM_BLOCK_BYTES

/* All arrays together are a row of lines; each array begins a new one. */
#define LINE_BYTES 64

enum { PARAMETER, GRADIENT, STATE, STEP = STATE + 3, ADDRESSES };

typedef struct journal_slot journal_slot;
/* What was last read of gradients in other ranks' own memory: bytes begin..end of one array, in
 * `room` bytes for each summand: each rank, or each node of a tree. */
typedef struct {
    uint32_t array;
    uint64_t begin, end, room;
    unsigned char *bytes;
    int status; /* PLC_OK until a rank cannot be read */
} gradient_reads;

typedef struct update_part update_part;
struct update_part {
    const plc_update *update;
    uint64_t first, end;  /* in units of the pass */
    void (*run)(const update_part *part);
    const void *kernels;  /* of the pass */
    double *out;          /* of the pass */
    unsigned char *block; /* room for what is summed; NULL: the gradients are there */
    void *journal;        /* of the pass; NULL: it keeps none */
    journal_slot *slot;   /* of this thread */
    gradient_reads *reads;
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

static inline uint64_t lines_of(const plc_update *u, uint32_t array) {
    return (bytes_of(u, array) + LINE_BYTES - 1) / LINE_BYTES;
}

/* Whether an update writes this row of arrays. */
static inline bool writes_row(const plc_update *u, uint32_t row) {
    if (row == PARAMETER) return true;
    if (row == STATE) return u->rule != PLC_SGD || u->momentum != 0;
    if (row == STATE + 1) return u->rule == PLC_ADAM;
    return row == STATE + 2 && u->rule == PLC_ADAM && (u->options & PLC_AMSGRAD);
}

/* Whether the gradients have still to be summed, block by block. */
static inline bool is_summed(const plc_update *u) { return u->ranks > 0 || u->tree != NULL; }

/* Make this process's part of a pass over `units`, divided once more among its threads.
 * PLC_SYSTEM, and nothing is done, without memory for sums; another status if a rank's gradients
 * could not be read. */
int run_part(const update_part *pass, uint64_t units);

/* At most a block of an array's gradients, `count` from element `first` on, summed over ranks if
 * they are to be. Others up to `end` will be asked for next. NULL if they cannot be read, now or
 * before. */
const void *summed_gradients(const update_part *part, uint32_t array, uint64_t first,
                             uint64_t count, uint64_t end);

bool is_valid_update(const plc_update *u);
bool is_valid_tree(const plc_update *u);

#endif

/* Sums through rings: all ranks add up what lies in their own memory, by blocks that stay in cache, each rank at its
 * own pace. It stages the others' parts of a block, sums its own part of the block before, and fetches the others'
 * sums of the one before that: 2 * bytes of cache traffic.
 */
#ifndef PACELINE_RINGS_H
#define PACELINE_RINGS_H

#include "internal.h"

typedef struct {
    plc_comm *comm;
    int64_t deadline;
    /* What is summed. */
    const unsigned char *input;
    unsigned char *output;
    uint64_t count;
    uint32_t dtype, op;
    double factor;
    double weight; /* the input, which is the output then, is multiplied by it before it is staged */
    bool reads;    /* this rank wants the result */
    /* The shared memory it goes through: for every rank a ring of parts for others, and one of its sums. */
    unsigned char *stages, *sums;
    uint64_t stride, ring_bytes;
    /* Blocks staged, summed and fetched, by rank; how many there were before this call. */
    signal_word *progress;
    uint64_t progress_stride;
    uint32_t first;
    /* Filled in by rings_plan. */
    uint64_t bytes, part, blocks, stage_bytes;
} rings;

void rings_plan(rings *p);
/* The first block may be staged before the ranks meet; all others only by rings_run, which stages it if not `staged`. */
void rings_stage(const rings *p, uint64_t block);
/* All ranks are there. When it ends, what this rank staged was read; its sums may still be read. */
int rings_run(const rings *p, bool staged);

#endif

/* Pipelined reduction: all ranks sum what is in their own memory, by blocks that stay in cache,
 * each rank at its own pace. A rank stages the others' parts of a block, sums its own part of the
 * block before, and fetches the others' sums of the one before that: 2 * bytes of cache traffic.
 *
 * Parts and sums pass through ring buffers of a few blocks. A rank that would overwrite a block
 * first waits until its peers' progress shows that they have read it; there is no phase between
 * blocks.
 */
#ifndef PACELINE_PIPELINE_H
#define PACELINE_PIPELINE_H

#include "internal.h"

/* More slack than two blocks, and all of it still fits a second-level cache. */
#define RING_DEPTH 4

typedef struct pipeline pipeline;

/* What is done with a block, each at a time when the memory it reads and writes is free for it. */
typedef struct {
    void (*stage)(const pipeline *p, uint64_t block);
    void (*sum)(const pipeline *p, uint64_t block);
    void (*fetch)(const pipeline *p, uint64_t block);
} pipeline_steps;

struct pipeline {
    plc_comm *comm;
    int64_t deadline;
    const pipeline_steps *steps;
    /* What is summed. */
    const unsigned char *input;
    unsigned char *output;
    uint64_t count;
    uint32_t dtype, op;
    double factor;
    /* The input, which is the output then, is multiplied by it before it is staged */
    double weight;
    bool reads;    /* this rank wants the result */
    /* The shared memory it goes through: for every rank a ring of parts for others, and one of its
     * sums. */
    unsigned char *stages, *sums;
    uint64_t stride, ring_bytes;
    /* Blocks staged, summed and fetched, by rank; how many there were before this call. */
    event_count *progress;
    uint64_t progress_stride;
    uint32_t first;
    /* Filled in by pipeline_plan. */
    uint64_t bytes, part, blocks, stage_bytes;
};

/* Sums of one array of every rank, in the order of ranks. */
void pipeline_plan(pipeline *p);
/* The first block may be staged before the first phase; all others only by pipeline_run, which
 * stages it if not `staged`. */
void pipeline_stage(const pipeline *p, uint64_t block);
/* All ranks are there. When it ends, what this rank staged was read; its sums may still be read. */
int pipeline_run(const pipeline *p, bool staged);
/* Until every peer has done this step with `blocks` blocks of this call; 0: of those before. */
int pipeline_wait(const pipeline *p, int step, uint64_t blocks);
void pipeline_count(const pipeline *p, int step); /* this rank has done it with one more block */

/* --- buckets.c -------------------------------------------------------------------------------- */
plc_comm *arena_comm(const plc_arena *arena);
/* The room of an external bucket, and how far its arena is; PLC_INVALID for other buckets. */
int arena_rings(plc_arena *arena, uint32_t index, pipeline *p);
void arena_count_blocks(plc_arena *arena, const pipeline *p);

#endif

/* All-reduce and reduce.
 *
 * Four algorithms, all of which sum in order of rank and therefore give the same bits:
 *   redundantly   each rank stages its slot; after a phase, each rank sums all slots into its own
 *                 output. One phase a slot, ranks * bytes read per rank: best for short messages.
 *   in parts      each rank sums one part of all slots, in place in its own slot; after a second
 *                 phase, all copy the finished parts out. Two phases a slot, 2 * bytes read per
 *                 rank: best for very many ranks.
 *   pipelined     the same by blocks that stay in cache, each rank at its own pace, see pipeline.h.
 *                 No phase but the first. Best from 32 KB on.
 *   direct reads  in parts, but the kernel copies straight from the peers' own memory: no staging,
 *                 three phases in all. Best for long messages, where the system allows it.
 */
#include "pipeline.h"

#define REDUNDANT_UP_TO_BYTES (32 * 1024)
#define DIRECT_FROM_BYTES (1024 * 1024)
#define PIPELINE_UP_TO_RANKS 16 /* beyond, a rank's part of a block becomes short */
#define DIRECT_2_RANKS_FROM_BYTES (2 * 1024 * 1024)
#define DIRECT_2_RANKS_BELOW_BYTES (8 * 1024 * 1024)

static int reduce_redundantly(op_context *ctx, uint64_t chunk,
                              bool (*gets_result)(const op_context *ctx)) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t element = plc_element_bytes(q->dtype), bytes = q->count * element;
    for (uint64_t done = 0; done == 0 || done < bytes; done += chunk) {
        uint64_t n = MIN(bytes - done, chunk);
        if (done > 0) ctx->slot = next_slot(comm);
        if (n > 0) memcpy(slot_of(comm, comm->rank, ctx->slot), (const char *)q->input + done, n);
        int status = done == 0 ? enter_and_compare(ctx, q->count) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        if (!gets_result(ctx)) continue;
        const void *inputs[PLC_MAX_RANKS];
        for (uint32_t r = 0; r < comm->ranks; r++) inputs[r] = slot_of(comm, r, ctx->slot);
        reduce_block((char *)q->output + done, inputs, comm->ranks, n / element, q->dtype, q->op,
                     q->factor);
    }
    return PLC_OK;
}

/* Part r of `bytes`, in whole cache lines so that no two ranks write to one. */
static void part_range(uint64_t bytes, uint32_t ranks, uint32_t r, uint64_t *from, uint64_t *to) {
    uint64_t part = ALIGN_UP((bytes + ranks - 1) / ranks, CACHE_LINE);
    *from = MIN(r * part, bytes);
    *to = MIN(*from + part, bytes);
}

static int reduce_in_parts(op_context *ctx, uint64_t chunk,
                           bool (*gets_result)(const op_context *ctx)) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t element = plc_element_bytes(q->dtype), bytes = q->count * element, from, to;
    for (uint64_t done = 0; done < bytes; done += chunk) {
        uint64_t n = MIN(bytes - done, chunk);
        if (done > 0) ctx->slot = next_slot(comm);
        unsigned char *mine = slot_of(comm, comm->rank, ctx->slot);
        memcpy(mine, (const char *)q->input + done, n);
        int status = done == 0 ? enter_and_compare(ctx, q->count) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        part_range(n, comm->ranks, comm->rank, &from, &to);
        const void *inputs[PLC_MAX_RANKS];
        for (uint32_t r = 0; r < comm->ranks; r++) inputs[r] = slot_of(comm, r, ctx->slot) + from;
        reduce_block(mine + from, inputs, comm->ranks, (to - from) / element, q->dtype, q->op,
                     q->factor);
        status = next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        for (uint32_t r = 0; gets_result(ctx) && r < comm->ranks; r++) {
            part_range(n, comm->ranks, r, &from, &to);
            memcpy((char *)q->output + done + from, slot_of(comm, r, ctx->slot) + from, to - from);
        }
    }
    return PLC_OK;
}

/* --- pipelined -------------------------------------------------------------------------------- */
/* The parts staged for others are in the slot of this use, where they may be written before the
 * first phase; sums are in the other slot, which is free from then on. They may still be read when
 * the call ends, so the next use takes the slot of this one again. */
static int reduce_pipelined(op_context *ctx, bool (*gets_result)(const op_context *ctx)) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    pipeline p = {.comm = comm,
                  .deadline = ctx->deadline,
                  .input = q->input,
                  .output = q->output,
                  .count = q->count,
                  .dtype = q->dtype,
                  .op = q->op,
                  .factor = q->factor,
                  .weight = 1.0,
                  .reads = gets_result(ctx),
                  .stages = slot_of(comm, 0, ctx->slot),
                  .sums = slot_of(comm, 0, ctx->slot ^ 1u),
                  .stride = (uint64_t)(slot_of(comm, 1, 0) - slot_of(comm, 0, 0)),
                  .ring_bytes = comm->config.slot_bytes,
                  .progress = comm->shared->records[0].progress,
                  .progress_stride = sizeof(rank_record),
                  .first = comm->blocks};
    pipeline_plan(&p);
    pipeline_stage(&p, 0);
    int status = enter_and_compare(ctx, q->count);
    if (status == PLC_OK) status = pipeline_run(&p, true);
    if (status != PLC_OK) return status;
    comm->blocks += (uint32_t)p.blocks;
    comm->slot = ctx->slot;
    return PLC_OK;
}

/* --- direct reads ----------------------------------------------------------------------------- */
/* Small enough to stay in the second-level cache, long enough to make the system call cheap. */
#define PIECE_BYTES (64 * 1024u)

/* Sum this rank's part, piece by piece, in order of rank. */
static int sum_part(op_context *ctx, unsigned char *scratch, uint64_t from, uint64_t to) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t piece =
        MIN(comm->config.slot_bytes / comm->ranks, PIECE_BYTES) / CACHE_LINE * CACHE_LINE;
    uint64_t element = plc_element_bytes(q->dtype);
    const void *inputs[PLC_MAX_RANKS];
    for (; from < to; from += piece) {
        uint64_t n = MIN(to - from, piece);
        for (uint32_t r = 0; r < comm->ranks; r++) {
            if (r == comm->rank) {
                inputs[r] = (const unsigned char *)q->input + from;
                continue;
            }
            inputs[r] = scratch + r * piece;
            uint64_t theirs = comm->shared->records[r].input_at[ctx->slot] + from;
            int status = direct_read(comm, r, scratch + r * piece, theirs, n);
            if (status != PLC_OK) return status;
        }
        reduce_block((char *)q->output + from, inputs, comm->ranks, n / element, q->dtype, q->op,
                     q->factor);
    }
    return PLC_OK;
}

/* Fetch the parts that the others have summed. */
static int fetch_parts(op_context *ctx, uint64_t bytes) {
    plc_comm *comm = ctx->comm;
    uint64_t from, to;
    for (uint32_t step = 1; step < comm->ranks; step++) {
        /* Each rank starts elsewhere, so that not all read from one. */
        uint32_t r = (comm->rank + step) % comm->ranks;
        part_range(bytes, comm->ranks, r, &from, &to);
        uint64_t theirs = comm->shared->records[r].output_at[ctx->slot] + from;
        int status = direct_read(comm, r, (char *)ctx->request->output + from, theirs, to - from);
        if (status != PLC_OK) return status;
    }
    return PLC_OK;
}

static int reduce_by_direct_reads(op_context *ctx, bool (*gets_result)(const op_context *ctx)) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t bytes = q->count * plc_element_bytes(q->dtype), from, to;
    int status = enter_and_compare(ctx, q->count);
    if (status != PLC_OK) return status;
    part_range(bytes, comm->ranks, comm->rank, &from, &to);
    /* Nothing is staged: the slot is free. */
    status = sum_part(ctx, slot_of(comm, comm->rank, ctx->slot), from, to);
    if (status == PLC_OK) status = next_phase(comm, ctx->deadline);
    if (status == PLC_OK && gets_result(ctx)) status = fetch_parts(ctx, bytes);
    /* No rank may touch its tensor before all have read it. One that gave up waiting here may have
     * done so. */
    if (status == PLC_OK) status = next_phase(comm, ctx->deadline);
    return status == PLC_OK ? known_failure(comm) : status;
}

static bool every_rank_gets_it(const op_context *ctx) {
    (void)ctx;
    return true;
}

static bool root_gets_it(const op_context *ctx) {
    return ctx->comm->rank == (uint32_t)ctx->request->root;
}

/* Direct reads win where both tensors fit the last-level cache: they move the data in fewer
 * passes. */
static bool prefers_direct_reads(const plc_comm *comm, uint64_t bytes) {
    if (!comm->direct) return false;
    if (comm->ranks == 2)
        return bytes >= DIRECT_2_RANKS_FROM_BYTES && bytes < DIRECT_2_RANKS_BELOW_BYTES;
    return comm->ranks > PIPELINE_UP_TO_RANKS && bytes >= DIRECT_FROM_BYTES;
}

static int reduce(op_context *ctx, bool (*gets_result)(const op_context *ctx)) {
    const plc_comm *comm = ctx->comm;
    uint64_t bytes = ctx->request->count * plc_element_bytes(ctx->request->dtype);
    uint64_t chunk = comm->config.slot_bytes;
    if (comm->ranks == 1 || bytes <= REDUNDANT_UP_TO_BYTES)
        return reduce_redundantly(ctx, chunk, gets_result);
    if (prefers_direct_reads(comm, bytes)) return reduce_by_direct_reads(ctx, gets_result);
    if (comm->ranks <= PIPELINE_UP_TO_RANKS) return reduce_pipelined(ctx, gets_result);
    return reduce_in_parts(ctx, chunk, gets_result);
}

int run_allreduce(op_context *ctx) { return reduce(ctx, every_rank_gets_it); }

int run_reduce(op_context *ctx) { return reduce(ctx, root_gets_it); }

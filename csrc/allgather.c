/* All-gather and gather: every rank stages its next piece; after a phase, those that get the result
 * copy every rank's piece out. One phase a slot. Contributions may differ in size; each must be as
 * long as the buffer meant for it.
 */
#include "internal.h"

static bool gets_result(const op_context *ctx) {
    return ctx->request->kind == PLC_ALLGATHER || (uint32_t)ctx->request->root == ctx->comm->rank;
}

static uint64_t table_bytes(const plc_comm *comm) {
    return ALIGN_UP(comm->ranks * sizeof(uint64_t), CACHE_LINE);
}

/* Every rank checks what every reader expects, so that all reach the same conclusion. */
static bool counts_match(const op_context *ctx) {
    const plc_comm *comm = ctx->comm;
    for (uint32_t reader = 0; reader < comm->ranks; reader++) {
        if (ctx->request->kind == PLC_GATHER && reader != (uint32_t)ctx->request->root) continue;
        const uint64_t *expected = (const uint64_t *)slot_of(comm, reader, ctx->slot);
        for (uint32_t r = 0; r < comm->ranks; r++)
            if (expected[r] != comm->last_calls[r].count) return false;
    }
    return true;
}

int run_allgather(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t element = plc_element_bytes(q->dtype), mine = q->count * element, longest = mine;
    uint64_t table = table_bytes(comm);
    for (uint64_t done = 0;;) {
        /* The first slot starts with the sizes this rank expects; the rest already carries data. */
        uint64_t head = done == 0 ? table : 0, room = comm->config.slot_bytes - head;
        if (done > 0) ctx->slot = next_slot(comm);
        unsigned char *slot = slot_of(comm, comm->rank, ctx->slot);
        if (done == 0 && gets_result(ctx))
            memcpy(slot, q->out_counts, comm->ranks * sizeof(uint64_t));
        if (done < mine) memcpy(slot + head, (const char *)q->input + done, MIN(mine - done, room));
        int status = done == 0 ? enter_and_compare(ctx, q->count) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        if (done == 0) {
            if (!counts_match(ctx)) return PLC_MISMATCH;
            for (uint32_t r = 0; r < comm->ranks; r++)
                longest = MAX(longest, comm->last_calls[r].count * element);
        }
        for (uint32_t r = 0; gets_result(ctx) && r < comm->ranks; r++) {
            uint64_t theirs = comm->last_calls[r].count * element;
            bool is_there = r == comm->rank && q->outputs[r] == q->input;
            if (done < theirs && !is_there)
                memcpy((char *)q->outputs[r] + done, slot_of(comm, r, ctx->slot) + head,
                       MIN(theirs - done, room));
        }
        done += room;
        if (done >= longest) return PLC_OK;
    }
}

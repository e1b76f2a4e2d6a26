/* Reduce-scatter: a slot is cut into one part per rank; after a phase, each rank reduces its own
 * part, in order of rank. One phase a round of parts; every byte that another rank needs is copied
 * once, and every byte is read once. The output may be this rank's own input.
 */
#include "internal.h"

int run_reduce_scatter(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t element = plc_element_bytes(q->dtype);
    uint64_t part = comm->config.slot_bytes / comm->ranks / 16 * 16;
    uint64_t longest = 0, total = 0, blocks = q->label;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        longest = MAX(longest, q->in_counts[r]);
        total += q->in_counts[r];
        blocks = blocks * 1000003u + q->in_counts[r];
    }
    /* Uneven blocks must be the same on every rank, as must the caller's own label. */
    ctx->label = blocks;
    for (uint64_t done = 0; done == 0 || done < longest * element; done += part) {
        if (done > 0) ctx->slot = next_slot(comm);
        unsigned char *parts = slot_of(comm, comm->rank, ctx->slot);
        for (uint32_t r = 0; r < comm->ranks; r++) {
            uint64_t bytes = q->in_counts[r] * element;
            if (r != comm->rank && done < bytes)
                memcpy(parts + r * part, (const char *)q->inputs[r] + done,
                       MIN(bytes - done, part));
        }
        int status = done == 0 ? enter_and_compare(ctx, total) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        uint64_t mine = q->in_counts[comm->rank] * element;
        if (done >= mine) continue;
        const void *inputs[PLC_MAX_RANKS];
        for (uint32_t r = 0; r < comm->ranks; r++)
            inputs[r] = slot_of(comm, r, ctx->slot) + comm->rank * part;
        inputs[comm->rank] = (const char *)q->inputs[comm->rank] + done;
        reduce_block((char *)q->output + done, inputs, comm->ranks,
                     MIN(mine - done, part) / element, q->dtype, q->op, q->factor);
    }
    return PLC_OK;
}

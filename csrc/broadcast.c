/* Broadcast: the root stages a slot; after a phase, the others copy it out. One phase a slot; two
 * copies of every byte.
 */
#include "internal.h"

int run_broadcast(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint32_t root = (uint32_t)q->root;
    uint64_t bytes = q->count * plc_element_bytes(q->dtype), slot_bytes = comm->config.slot_bytes;
    for (uint64_t done = 0; done == 0 || done < bytes; done += slot_bytes) {
        uint64_t n = MIN(bytes - done, slot_bytes);
        if (done > 0) ctx->slot = next_slot(comm);
        if (comm->rank == root && n > 0)
            memcpy(slot_of(comm, root, ctx->slot), (const char *)q->input + done, n);
        int status = done == 0 ? enter_and_compare(ctx, q->count) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        if (comm->rank != root && n > 0)
            memcpy((char *)q->output + done, slot_of(comm, root, ctx->slot), n);
    }
    return PLC_OK;
}

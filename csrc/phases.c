/* The steps every collective is made of: take a slot, publish the call, wait for all, compare.
 *
 * Each rank compares all headers, its own included, and all see the same ones. So they reach the
 * same conclusion without another exchange, and a mismatch leaves the group usable.
 */
#include "internal.h"

uint32_t next_slot(plc_comm *comm) {
    uint32_t slot = comm->slot;
    comm->slot = slot ^ 1u;
    return slot;
}

/* A rank that has not reached the phase this one waits for is needed; the others have done their
 * part. */
static bool has_not_arrived(const plc_comm *comm, uint32_t rank, const void *context) {
    (void)context;
    return (int32_t)(atomic_load(&comm->shared->records[rank].phase) - comm->phase) < 0;
}

/* One phase: a counter that all ranks add to. The one that completes it wakes the sleepers. In the
 * first one of a call it is not yet known that all ranks make it. */
int first_phase(plc_comm *comm, int64_t deadline, const plc_call *call) {
    event_count *arrivals = &comm->shared->arrivals;
    uint32_t phase = ++comm->phase;
    uint32_t target = phase * comm->ranks;
    bool last = atomic_fetch_add(&arrivals->value, 1) + 1 == target;
    /* After the count: a rank that dies between the two is one that did not arrive, and not one
     * that nobody misses. */
    atomic_store_explicit(&comm->shared->records[comm->rank].phase, phase, memory_order_release);
    if (last) {
        wake(arrivals);
        return PLC_OK;
    }
    return wait_for(comm, arrivals, target, deadline, has_not_arrived, NULL, call);
}

int next_phase(plc_comm *comm, int64_t deadline) { return first_phase(comm, deadline, NULL); }

static bool kind_has_root(uint32_t kind) {
    return kind == PLC_REDUCE || kind == PLC_BROADCAST || kind == PLC_GATHER || kind == PLC_SCATTER;
}

static bool kind_reduces(uint32_t kind) {
    return kind == PLC_ALLREDUCE || kind == PLC_REDUCE || kind == PLC_REDUCE_SCATTER;
}

bool calls_match(const plc_comm *comm, const plc_call *calls, bool same_count) {
    const plc_call *first = &calls[0];
    for (uint32_t r = 1; r < comm->ranks; r++) {
        const plc_call *c = &calls[r];
        if (c->kind != first->kind || c->dtype != first->dtype || c->sequence != first->sequence ||
            c->label != first->label)
            return false;
        if (kind_reduces(c->kind) && c->op != first->op) return false;
        if (kind_has_root(c->kind) && c->root != first->root) return false;
        if (same_count && c->count != first->count) return false;
    }
    return true;
}

int enter_and_compare(op_context *ctx, uint64_t count) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    segment *shared = comm->shared;
    plc_call *call = &shared->records[comm->rank].calls[ctx->slot];
    *call = (plc_call){
        .sequence = comm->sequence, .kind = q->kind, .dtype = q->dtype, .op = q->op,
        .root = q->root, .count = count, .label = ctx->label};
    shared->records[comm->rank].input_at[ctx->slot] = (uint64_t)(uintptr_t)q->input;
    shared->records[comm->rank].output_at[ctx->slot] = (uint64_t)(uintptr_t)q->output;
    int status = first_phase(comm, ctx->deadline, call);
    if (status != PLC_OK) return status;
    for (uint32_t r = 0; r < comm->ranks; r++)
        comm->last_calls[r] = shared->records[r].calls[ctx->slot];
    bool same_count = q->kind != PLC_ALLGATHER && q->kind != PLC_GATHER && q->kind != PLC_ALLTOALL;
    return calls_match(comm, comm->last_calls, same_count) ? PLC_OK : PLC_MISMATCH;
}

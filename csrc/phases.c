/* The steps every collective is made of: take a slot, say the call, arrive, compare. */
#include "internal.h"

uint32_t next_slot(plc_comm *comm) {
    uint32_t slot = comm->slot;
    comm->slot = slot ^ 1u;
    return slot;
}

/* A rank that has not arrived at the phase this one waits for is needed; the others have done their part. */
static bool has_not_arrived(const plc_comm *comm, uint32_t rank, const void *context) {
    (void)context;
    return (int32_t)(atomic_load(&comm->shared->records[rank].phase) - comm->phase) < 0;
}

/* One phase: a counter that all ranks add to. Whoever completes it wakes those who fell asleep. */
int arrive(plc_comm *comm, int64_t deadline) {
    signal_word *arrivals = &comm->shared->arrivals;
    uint32_t phase = ++comm->phase;
    uint32_t target = phase * comm->ranks;
    bool last = atomic_fetch_add(&arrivals->value, 1) + 1 == target;
    /* After the count: a rank that dies between the two is one that did not arrive, and not one that nobody misses. */
    atomic_store_explicit(&comm->shared->records[comm->rank].phase, phase, memory_order_release);
    if (last) {
        wake(arrivals);
        return PLC_OK;
    }
    return wait_for(comm, arrivals, target, deadline, has_not_arrived, NULL);
}

static bool kind_has_root(uint32_t kind) {
    return kind == PLC_REDUCE || kind == PLC_BROADCAST || kind == PLC_GATHER || kind == PLC_SCATTER;
}

static bool kind_reduces(uint32_t kind) {
    return kind == PLC_ALLREDUCE || kind == PLC_REDUCE || kind == PLC_REDUCE_SCATTER;
}

bool calls_agree(const plc_comm *comm, const plc_call *calls, bool same_count) {
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

int meet(passage *at, uint64_t count) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    segment *shared = comm->shared;
    shared->records[comm->rank].calls[at->slot] = (plc_call){
        .sequence = comm->sequence, .kind = q->kind, .dtype = q->dtype, .op = q->op, .root = q->root,
        .count = count, .label = at->label};
    shared->records[comm->rank].input_at[at->slot] = (uint64_t)(uintptr_t)q->input;
    shared->records[comm->rank].output_at[at->slot] = (uint64_t)(uintptr_t)q->output;
    int status = arrive(comm, at->deadline);
    if (status != PLC_OK) return status;
    for (uint32_t r = 0; r < comm->ranks; r++) comm->last_calls[r] = shared->records[r].calls[at->slot];
    bool same_count = q->kind != PLC_ALLGATHER && q->kind != PLC_GATHER && q->kind != PLC_ALLTOALL;
    return calls_agree(comm, comm->last_calls, same_count) ? PLC_OK : PLC_MISMATCH;
}

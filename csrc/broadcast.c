/* Broadcast: the root stages a slot, all meet, the others copy it out. One phase a slot; 2 copies of every byte. */
#include "internal.h"

int run_broadcast(passage *at) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint32_t root = (uint32_t)q->root;
    uint64_t bytes = q->count * plc_element_bytes(q->dtype), slot_bytes = comm->config.slot_bytes;
    for (uint64_t done = 0; done == 0 || done < bytes; done += slot_bytes) {
        uint64_t n = MIN(bytes - done, slot_bytes);
        if (done > 0) at->slot = next_slot(comm);
        if (comm->rank == root && n > 0) memcpy(slot_of(comm, root, at->slot), (const char *)q->input + done, n);
        int status = done == 0 ? meet(at, q->count) : arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        if (comm->rank != root && n > 0) memcpy((char *)q->output + done, slot_of(comm, root, at->slot), n);
    }
    return PLC_OK;
}

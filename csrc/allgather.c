/* All-gather and gather: every rank stages its next piece, all meet, the readers copy everyone's piece out.
 * One phase a slot. Shares may differ in size; a reader checks that each is as long as the buffer meant for it.
 */
#include "internal.h"

static bool is_reader(const passage *at) {
    return at->request->kind == PLC_ALLGATHER || (uint32_t)at->request->root == at->comm->rank;
}


static uint64_t table_bytes(const plc_comm *comm) { return ALIGN_UP(comm->ranks * sizeof(uint64_t), CACHE_LINE); }

/* Every rank looks at what every reader expects, so that all come to the same verdict. */
static bool shares_agree(const passage *at) {
    const plc_comm *comm = at->comm;
    for (uint32_t reader = 0; reader < comm->ranks; reader++) {
        if (at->request->kind == PLC_GATHER && reader != (uint32_t)at->request->root) continue;
        const uint64_t *expected = (const uint64_t *)slot_of(comm, reader, at->slot);
        for (uint32_t r = 0; r < comm->ranks; r++)
            if (expected[r] != comm->last_calls[r].count) return false;
    }
    return true;
}

int run_allgather(passage *at) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t element = plc_element_bytes(q->dtype), mine = q->count * element, longest = mine;
    uint64_t table = table_bytes(comm);
    for (uint64_t done = 0;;) {
        /* The first slot starts with this rank's expectations; the rest of it carries data already. */
        uint64_t head = done == 0 ? table : 0, room = comm->config.slot_bytes - head;
        if (done > 0) at->slot = next_slot(comm);
        unsigned char *slot = slot_of(comm, comm->rank, at->slot);
        if (done == 0 && is_reader(at)) memcpy(slot, q->out_counts, comm->ranks * sizeof(uint64_t));
        if (done < mine) memcpy(slot + head, (const char *)q->input + done, MIN(mine - done, room));
        int status = done == 0 ? meet(at, q->count) : arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        if (done == 0) {
            if (!shares_agree(at)) return PLC_MISMATCH;
            for (uint32_t r = 0; r < comm->ranks; r++) longest = MAX(longest, comm->last_calls[r].count * element);
        }
        for (uint32_t r = 0; is_reader(at) && r < comm->ranks; r++) {
            uint64_t theirs = comm->last_calls[r].count * element;
            if (done < theirs)
                memcpy((char *)q->outputs[r] + done, slot_of(comm, r, at->slot) + head, MIN(theirs - done, room));
        }
        done += room;
        if (done >= longest) return PLC_OK;
    }
}

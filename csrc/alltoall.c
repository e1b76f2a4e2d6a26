/* All-to-all and scatter: a slot is cut into one part per receiver; all meet; each rank collects its parts.
 * One phase a round of parts. The first round also carries both size tables of every rank, so that all ranks can
 * check the whole matrix of sizes and come to the same verdict.
 */
#include "internal.h"

typedef struct {
    uint64_t tables, part; /* bytes of the size tables, bytes of a part */
} cut;

static cut cut_slot(const plc_comm *comm, bool first) {
    uint64_t tables = first ? ALIGN_UP(2 * comm->ranks * sizeof(uint64_t), CACHE_LINE) : 0;
    uint64_t part = (comm->config.slot_bytes - tables) / comm->ranks;
    return (cut){tables, part / 16 * 16}; /* 16: no element is split */
}

/* sent[r], then wanted[r], in elements. A rank that takes no part in a direction says 0. */
static uint64_t *tables_of(const passage *at, uint32_t rank) { return (uint64_t *)slot_of(at->comm, rank, at->slot); }

static void write_tables(const passage *at) {
    const plc_request *q = at->request;
    uint32_t ranks = at->comm->ranks;
    uint64_t *sent = tables_of(at, at->comm->rank), *wanted = sent + ranks;
    for (uint32_t r = 0; r < ranks; r++) {
        sent[r] = q->inputs == NULL ? 0 : q->in_counts[r];
        wanted[r] = q->outputs == NULL ? 0 : q->out_counts[r];
    }
}

static bool sizes_agree(const passage *at, uint64_t *longest) {
    uint32_t ranks = at->comm->ranks;
    *longest = 0;
    for (uint32_t from = 0; from < ranks; from++) {
        const uint64_t *sent = tables_of(at, from);
        for (uint32_t to = 0; to < ranks; to++) {
            if (sent[to] != tables_of(at, to)[ranks + from]) return false;
            *longest = MAX(*longest, sent[to]);
        }
    }
    return true;
}

int run_alltoall(passage *at) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t element = plc_element_bytes(q->dtype), longest = 0;
    for (uint64_t done = 0;;) {
        bool first = done == 0;
        cut c = cut_slot(comm, first);
        if (!first) at->slot = next_slot(comm);
        if (first) write_tables(at);
        unsigned char *parts = slot_of(comm, comm->rank, at->slot) + c.tables;
        for (uint32_t r = 0; q->inputs != NULL && r < comm->ranks; r++) {
            uint64_t bytes = q->in_counts[r] * element;
            if (done < bytes) memcpy(parts + r * c.part, (const char *)q->inputs[r] + done, MIN(bytes - done, c.part));
        }
        int status = first ? meet(at, q->count) : arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        if (first && !sizes_agree(at, &longest)) return PLC_MISMATCH;
        for (uint32_t r = 0; q->outputs != NULL && r < comm->ranks; r++) {
            uint64_t bytes = q->out_counts[r] * element;
            const unsigned char *theirs = slot_of(comm, r, at->slot) + c.tables + comm->rank * c.part;
            if (done < bytes) memcpy((char *)q->outputs[r] + done, theirs, MIN(bytes - done, c.part));
        }
        done += c.part;
        if (done >= longest * element) return PLC_OK;
    }
}

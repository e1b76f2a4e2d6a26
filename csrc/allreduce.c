/* All-reduce and reduce.
 *
 * Three ways, all with the sum in order of rank and therefore the same bits:
 *   everyone sums   each rank stages its slot, all meet, each rank sums all slots into its own output.
 *                   One phase a slot, ranks * bytes read per rank: best for two ranks, and for short messages.
 *   share the sums  each rank sums one part of all slots, in place in its own slot; a second phase; all copy the
 *                   finished parts out. Two phases a slot, 2 * bytes read per rank: best for many ranks.
 *   read directly   the same, but the kernel copies straight from the peers' own memory: no staging, three phases
 *                   in all. Best for long messages, where the system allows it.
 */
#include "internal.h"

#define EVERYONE_SUMS_BELOW_BYTES (32 * 1024)
#define READ_DIRECTLY_FROM_BYTES (1024 * 1024)

static int everyone_sums(passage *at, uint64_t chunk, bool (*reads)(const passage *at)) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t element = plc_element_bytes(q->dtype), bytes = q->count * element;
    for (uint64_t done = 0; done == 0 || done < bytes; done += chunk) {
        uint64_t n = MIN(bytes - done, chunk);
        if (done > 0) at->slot = next_slot(comm);
        if (n > 0) memcpy(slot_of(comm, comm->rank, at->slot), (const char *)q->input + done, n);
        int status = done == 0 ? meet(at, q->count) : arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        if (!reads(at)) continue;
        const void *inputs[PLC_MAX_RANKS];
        for (uint32_t r = 0; r < comm->ranks; r++) inputs[r] = slot_of(comm, r, at->slot);
        reduce_block((char *)q->output + done, inputs, comm->ranks, n / element, q->dtype, q->op, q->factor);
    }
    return PLC_OK;
}

/* Part r of `bytes`, in whole cache lines so that no two ranks write to one. */
static void part_of(uint64_t bytes, uint32_t ranks, uint32_t r, uint64_t *from, uint64_t *to) {
    uint64_t part = ALIGN_UP((bytes + ranks - 1) / ranks, CACHE_LINE);
    *from = MIN(r * part, bytes);
    *to = MIN(*from + part, bytes);
}

static int share_the_sums(passage *at, uint64_t chunk, bool (*reads)(const passage *at)) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t element = plc_element_bytes(q->dtype), bytes = q->count * element, from, to;
    for (uint64_t done = 0; done < bytes; done += chunk) {
        uint64_t n = MIN(bytes - done, chunk);
        if (done > 0) at->slot = next_slot(comm);
        unsigned char *mine = slot_of(comm, comm->rank, at->slot);
        memcpy(mine, (const char *)q->input + done, n);
        int status = done == 0 ? meet(at, q->count) : arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        part_of(n, comm->ranks, comm->rank, &from, &to);
        const void *inputs[PLC_MAX_RANKS];
        for (uint32_t r = 0; r < comm->ranks; r++) inputs[r] = slot_of(comm, r, at->slot) + from;
        reduce_block(mine + from, inputs, comm->ranks, (to - from) / element, q->dtype, q->op, q->factor);
        status = arrive(comm, at->deadline);
        if (status != PLC_OK) return status;
        for (uint32_t r = 0; reads(at) && r < comm->ranks; r++) {
            part_of(n, comm->ranks, r, &from, &to);
            memcpy((char *)q->output + done + from, slot_of(comm, r, at->slot) + from, to - from);
        }
    }
    return PLC_OK;
}

/* Small enough to stay in the second-level cache, long enough to make the system call cheap. */
#define PIECE_BYTES (64 * 1024u)

/* Sum this rank's part, piece by piece, in order of rank. */
static int sum_part(passage *at, unsigned char *scratch, uint64_t from, uint64_t to) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t piece = MIN(comm->config.slot_bytes / comm->ranks, PIECE_BYTES) / CACHE_LINE * CACHE_LINE;
    uint64_t element = plc_element_bytes(q->dtype);
    const void *inputs[PLC_MAX_RANKS];
    for (; from < to; from += piece) {
        uint64_t n = MIN(to - from, piece);
        for (uint32_t r = 0; r < comm->ranks; r++) {
            inputs[r] = r == comm->rank ? (const unsigned char *)q->input + from : scratch + r * piece;
            if (r == comm->rank) continue;
            int status = read_from(comm, r, scratch + r * piece, comm->shared->records[r].input_at[at->slot] + from, n);
            if (status != PLC_OK) return status;
        }
        reduce_block((char *)q->output + from, inputs, comm->ranks, n / element, q->dtype, q->op, q->factor);
    }
    return PLC_OK;
}

/* Fetch the parts that the others have summed. */
static int fetch_parts(passage *at, uint64_t bytes) {
    plc_comm *comm = at->comm;
    uint64_t from, to;
    for (uint32_t step = 1; step < comm->ranks; step++) {
        uint32_t r = (comm->rank + step) % comm->ranks; /* each starts elsewhere, so that not all read from one */
        part_of(bytes, comm->ranks, r, &from, &to);
        int status = read_from(comm, r, (char *)at->request->output + from,
                               comm->shared->records[r].output_at[at->slot] + from, to - from);
        if (status != PLC_OK) return status;
    }
    return PLC_OK;
}

static int read_directly(passage *at, bool (*reads)(const passage *at)) {
    plc_comm *comm = at->comm;
    const plc_request *q = at->request;
    uint64_t bytes = q->count * plc_element_bytes(q->dtype), from, to;
    int status = meet(at, q->count);
    if (status != PLC_OK) return status;
    part_of(bytes, comm->ranks, comm->rank, &from, &to);
    status = sum_part(at, slot_of(comm, comm->rank, at->slot), from, to); /* nothing is staged: the slot is free */
    if (status == PLC_OK) status = arrive(comm, at->deadline);
    if (status == PLC_OK && reads(at)) status = fetch_parts(at, bytes);
    /* Nobody may touch its tensor before all have read it. One that gave up waiting here may have. */
    if (status == PLC_OK) status = arrive(comm, at->deadline);
    return status == PLC_OK ? known_failure(comm) : status;
}

static bool all_read(const passage *at) {
    (void)at;
    return true;
}

static bool root_reads(const passage *at) { return at->comm->rank == (uint32_t)at->request->root; }

static int reduce(passage *at, bool (*reads)(const passage *at)) {
    const plc_request *q = at->request;
    uint64_t bytes = q->count * plc_element_bytes(q->dtype), chunk = at->comm->config.slot_bytes;
    if (at->comm->direct && bytes >= READ_DIRECTLY_FROM_BYTES) return read_directly(at, reads);
    if (at->comm->ranks <= 2 || bytes <= EVERYONE_SUMS_BELOW_BYTES) return everyone_sums(at, chunk, reads);
    return share_the_sums(at, chunk, reads);
}

int run_allreduce(passage *at) { return reduce(at, all_read); }

int run_reduce(passage *at) { return reduce(at, root_reads); }

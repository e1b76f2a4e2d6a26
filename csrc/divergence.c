/* Ranks that wait for each other in different places: one in a bucket, another in a collective or
 * in a bucket of another arena. Headers cannot show it, because they are compared by ranks that
 * have come to the same place.
 *
 * Whoever sleeps leaves a note in its record that says where. A rank that sleeps in a bucket reads
 * the notes of those it waits for: if such a rank sleeps where this one has not been, both would
 * sleep until their deadline. Notes are read while ranks may be leaving, so this has to be seen
 * unchanged for a while. The group cannot go on afterwards: the counters of both places have moved.
 */
#include "internal.h"

#define CERTAIN_AFTER_NS (1000 * 1000 * 1000)

static wait_note *note_of(const plc_comm *comm, uint32_t rank, uint32_t place) {
    return &comm->shared->records[rank].waits[place];
}

static uint32_t place_of(const plc_call *call) {
    return call->kind == PLC_BUCKET ? IN_BUCKET : IN_COLLECTIVE;
}

/* The thread that runs asynchronous requests keeps nobody from going on who does not wait for
 * one. */
static void note_whether_it_blocks(plc_comm *comm, const plc_call *call) {
    bool blocks = call->kind == PLC_BUCKET || gil_in_collective(comm) ||
                  atomic_load(&comm->request_waits) != 0;
    atomic_store(&note_of(comm, comm->rank, place_of(call))->blocks, blocks);
}

/* False: another thread of this process waits in such a place already, and its note stands. */
bool note_wait(plc_comm *comm, const plc_call *call) {
    wait_note *note = note_of(comm, comm->rank, place_of(call));
    uint32_t number = atomic_load(&note->number);
    if (number % 2 == 1) return false;
    uint64_t words[CALL_WORDS];
    memcpy(words, call, sizeof *call);
    for (uint32_t i = 0; i < CALL_WORDS; i++)
        atomic_store_explicit(&note->call[i], words[i], memory_order_relaxed);
    note_whether_it_blocks(comm, call);
    return atomic_compare_exchange_strong(&note->number, &number, number + 1);
}

void end_wait(plc_comm *comm, const plc_call *call) {
    atomic_fetch_add(&note_of(comm, comm->rank, place_of(call))->number, 1);
}

/* Read a note that stands; false if there is none, or it changes meanwhile. */
static bool read_note(const plc_comm *comm, uint32_t rank, uint32_t place, plc_call *out,
                      uint32_t *number) {
    const wait_note *note = note_of(comm, rank, place);
    uint64_t words[CALL_WORDS];
    *number = atomic_load(&note->number);
    if (*number % 2 == 0) return false;
    for (uint32_t i = 0; i < CALL_WORDS; i++) words[i] = atomic_load(&note->call[i]);
    memcpy(out, words, sizeof *out);
    return atomic_load(&note->number) == *number;
}

static bool runs_collectives(plc_comm *comm) {
    pthread_mutex_lock(&comm->queue_lock);
    bool busy = comm->queue_head != NULL || comm->running;
    pthread_mutex_unlock(&comm->queue_lock);
    return busy;
}

/* Whether a rank sleeps, and its program with it, where this one has not been. */
static bool sleeps_elsewhere(plc_comm *comm, uint32_t rank, plc_call *where, uint32_t *number) {
    if (read_note(comm, rank, IN_BUCKET, where, number)) return !has_been_in_bucket(comm, where);
    if (!read_note(comm, rank, IN_COLLECTIVE, where, number)) return false;
    return atomic_load(&note_of(comm, rank, IN_COLLECTIVE)->blocks) != 0 &&
           where->sequence > atomic_load(&comm->sequence) && !runs_collectives(comm);
}

/* The first to claim it writes down where everybody is, for all to report the same. */
static int record_divergence(plc_comm *comm, uint32_t peer) {
    uint32_t unclaimed = 0;
    if (!atomic_compare_exchange_strong(&comm->shared->divergence_claimed, &unclaimed, 1))
        return PLC_PENDING; /* known_failure has it in a moment */
    for (uint32_t r = 0; r < comm->ranks; r++) {
        plc_call *out = &comm->shared->records[r].diverged;
        uint32_t number;
        if (!read_note(comm, r, IN_BUCKET, out, &number) &&
            !read_note(comm, r, IN_COLLECTIVE, out, &number))
            *out = (plc_call){.kind = PLC_ELSEWHERE, .root = -1};
    }
    return record_failure(comm, PLC_DIVERGED, (int32_t)peer);
}

int check_divergence(plc_comm *comm, const plc_call *mine, needed_fn needed, const void *context,
                     divergence *seen) {
    if (mine->kind != PLC_BUCKET) {
        note_whether_it_blocks(comm, mine);
        return PLC_PENDING;
    }
    for (uint32_t r = 0; r < comm->ranks; r++) {
        plc_call where;
        uint32_t number;
        if (r == comm->rank || !needed(comm, r, context) ||
            !sleeps_elsewhere(comm, r, &where, &number))
            continue;
        int64_t now = now_ns();
        if (seen->since_ns == 0 || seen->rank != r || seen->number != number)
            *seen = (divergence){.rank = r, .number = number, .since_ns = now};
        return now - seen->since_ns < CERTAIN_AFTER_NS ? PLC_PENDING : record_divergence(comm, r);
    }
    seen->since_ns = 0;
    return PLC_PENDING;
}

/* Meetings: some ranks of a communicator wait for each other, and see a few numbers of each.
 *
 * Unlike a collective, a meeting needs only the ranks that are named, and they agree on its number
 * beforehand: a rank that missed some meetings takes part in a later one all the same. Numbers grow
 * (modulo 2^32). One flag per rank: whoever is there waits for each of the others in turn.
 *
 * What a rank brings is kept by the parity of the meeting. It writes the same place again two
 * meetings later, when all who read it have come to the meeting between: so two meetings that share
 * a rank follow each other with an even and an odd number.
 */
#include "internal.h"

typedef struct {
    event_count arrived; /* the number of the last meeting this rank came to */
    uint64_t brought[2][PLC_MEETING_NUMBERS];
} attendance;

uint64_t plc_meeting_bytes(uint32_t ranks) { return ranks * sizeof(attendance); }

static bool is_awaited(const plc_comm *comm, uint32_t rank, const void *context) {
    (void)comm;
    return rank == *(const uint32_t *)context;
}

static void come(attendance *mine, uint32_t number, const uint64_t *numbers) {
    memcpy(mine->brought[number & 1], numbers, sizeof mine->brought[0]);
    atomic_store(&mine->arrived.value, number);
    wake(&mine->arrived);
}

static int wait_for_others(plc_comm *comm, attendance *all, uint32_t number, const uint8_t *present,
                           uint64_t *out, int64_t deadline) {
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (!present[r]) continue;
        int status = PLC_OK;
        if (r != comm->rank)
            status = wait_for(comm, &all[r].arrived, number, deadline, is_awaited, &r, NULL);
        if (status != PLC_OK) return status;
        memcpy(out + (uint64_t)r * PLC_MEETING_NUMBERS, all[r].brought[number & 1],
               sizeof all[r].brought[0]);
    }
    return PLC_OK;
}

int plc_meet(plc_comm *comm, void *meeting, uint32_t number, const uint8_t *present,
             const uint64_t *numbers, uint64_t *out, int64_t timeout_ns) {
    if (!comm_enter(comm)) return PLC_ABORTED;
    gil_scope scope;
    gil_scope_enter(&scope, comm);
    attendance *all = meeting;
    come(&all[comm->rank], number, numbers);
    int64_t deadline = deadline_after(comm, timeout_ns);
    int status = wait_for_others(comm, all, number, present, out, deadline);
    gil_scope_exit(&scope);
    comm_exit(comm);
    return status;
}

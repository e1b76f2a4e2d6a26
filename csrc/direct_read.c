/* Direct reads: process_vm_readv copies from a peer's own memory, without staging.
 *
 * The system allows it between processes of one user, unless it was hardened (Yama's ptrace_scope)
 * or a process made itself unreadable. So the ranks try it once, share the outcome, and use it
 * only if all of them may.
 */
#include "internal.h" /* first: it asks for the GNU declarations */

#include <errno.h>
#include <sys/uio.h>

static bool copy_from_process(int pid, void *to, uint64_t from, uint64_t bytes) {
    while (bytes > 0) {
        struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)from, bytes};
        ssize_t n = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (n <= 0) return false;
        to = (char *)to + n;
        from += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return true;
}

int direct_read(plc_comm *comm, uint32_t rank, void *to, uint64_t from, uint64_t bytes) {
    bool left;
    if (copy_from_process(comm->shared->records[rank].pid, to, from, bytes)) return PLC_OK;
    int error = errno, failure = known_failure(comm);
    if (failure != PLC_OK) return failure; /* it gave up, and its memory is its own again */
    if (rank_is_gone(comm, rank, &left))
        return record_failure(comm, left ? PLC_PEER_LEFT : PLC_PEER_LOST, (int32_t)rank);
    /* Alive but unreadable: it is about to end, or it changed its rights in mid-flight. Either way
     * the call is lost. */
    errno = error;
    return record_failure(comm, error == ESRCH ? PLC_PEER_LOST : PLC_SYSTEM, (int32_t)rank);
}

static uint64_t probe_word(const segment *s, uint32_t rank) {
    return s->nonce[0] ^ (rank * 0x9e3779b97f4a7c15ull);
}

static bool can_read_all(const plc_comm *comm) {
    const segment *s = comm->shared;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        uint64_t word = 0;
        if (!copy_from_process(s->records[r].pid, &word, s->records[r].probe_at, sizeof word))
            return false;
        if (word != probe_word(s, r)) return false; /* not the process we think it is */
    }
    return true;
}

int plc_comm_reads_directly(const plc_comm *comm) { return comm->direct; }

int plc_comm_probe_direct_reads(plc_comm *comm, int allow_direct) {
    rank_record *mine = &comm->shared->records[comm->rank];
    volatile uint64_t word = probe_word(comm->shared, comm->rank);
    int64_t deadline = deadline_after(comm, -1);
    mine->probe_at = (uint64_t)(uintptr_t)&word;
    int status = next_phase(comm, deadline);
    if (status != PLC_OK) return status;
    mine->reads_all = allow_direct && can_read_all(comm);
    status = next_phase(comm, deadline);
    if (status != PLC_OK) return status;
    bool direct = comm->ranks > 1;
    for (uint32_t r = 0; r < comm->ranks; r++)
        direct = direct && comm->shared->records[r].reads_all;
    comm->direct = direct;
    return next_phase(comm, deadline); /* the probed words live until here */
}

/* How collectives and buckets wait: spin briefly, then sleep on a futex in slices. Between slices
 * check_group looks for an abort, a peer that died or left, and the deadline.
 *
 * A failure is recorded twice: in the segment, where the first one wins and peers find it, and in
 * the communicator, with the ranks this one was missing. After that every call returns it.
 */
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

/* A dead peer is noticed within one slice; a slice costs two system calls. */
#define SLICE_NS (50 * 1000 * 1000)
#define SPINS_BETWEEN_CLOCK_READS 64

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t deadline_after(const plc_comm *comm, int64_t timeout_ns) {
    int64_t relative = timeout_ns < 0 ? comm->config.timeout_ns : timeout_ns;
    int64_t now = now_ns();
    return relative > INT64_MAX - now ? INT64_MAX : now + relative;
}

void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns) {
    struct timespec t = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void wake(event_count *event) {
    if (atomic_load(&event->sleepers) != 0) futex_wake_all(&event->value);
}

/* Sequentially consistent on both sides: either the sleeper sees the new value, or we see the
 * sleeper. */
void advance(event_count *event, uint32_t by) {
    atomic_fetch_add(&event->value, by);
    wake(event);
}

static inline bool reached(event_count *event, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&event->value, memory_order_acquire) - target) >= 0;
}

static bool spin_until(const plc_comm *comm, event_count *event, uint32_t target) {
    if (reached(event, target)) return true;
    int64_t end = now_ns() + comm->config.spin_ns;
    do {
        for (int i = 0; i < SPINS_BETWEEN_CLOCK_READS; i++) {
            if (reached(event, target)) return true;
            relax();
        }
    } while (now_ns() < end);
    return false;
}

static void sleep_until(event_count *event, uint32_t target, int64_t ns) {
    atomic_fetch_add(&event->sleepers, 1);
    uint32_t seen = atomic_load(&event->value);
    if ((int32_t)(seen - target) < 0) futex_wait(&event->value, seen, ns);
    atomic_fetch_sub(&event->sleepers, 1);
}

/* Whether a peer can no longer answer: its process ended, or it left the communicator. */
bool rank_is_gone(const plc_comm *comm, uint32_t rank, bool *left) {
    *left = atomic_load(&comm->shared->records[rank].state) == STATE_LEFT;
    if (*left) return true;
    if (rank == comm->rank || comm->pidfds[rank] < 0) return false;
    struct pollfd p = {.fd = comm->pidfds[rank], .events = POLLIN};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

int plc_comm_is_gone(const plc_comm *comm, uint32_t rank) {
    bool left;
    return rank < comm->ranks && rank_is_gone(comm, rank, &left);
}

static uint64_t pack(uint32_t status, int32_t rank) {
    return ((uint64_t)status << 32) | (uint32_t)rank;
}
static uint32_t status_in(uint64_t packed) { return (uint32_t)(packed >> 32); }
static int32_t rank_in(uint64_t packed) { return (int32_t)(uint32_t)packed; }

static bool is_needed(const plc_comm *comm, uint32_t rank, needed_fn needed, const void *context) {
    return needed == NULL ? rank != comm->rank : needed(comm, rank, context);
}

/* Record a failure for this rank, and for peers that come later. The first one wins. */
static int publish_failure(plc_comm *comm, const plc_failure *failure) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&comm->shared->failure, &none,
                                   pack(failure->status, failure->rank));
    pthread_mutex_lock(&comm->failure_lock);
    if (comm->failure.status == PLC_OK) {
        comm->failure = *failure;
        if (failure->status == PLC_DIVERGED)
            for (uint32_t r = 0; r < comm->ranks; r++)
                comm->mismatched[r] = comm->shared->records[r].diverged;
    }
    uint32_t status = comm->failure.status;
    atomic_store(&comm->failed, status);
    pthread_mutex_unlock(&comm->failure_lock);
    futex_wake_all(&comm->shared->arrivals.value); /* sleepers look again and find the failure */
    return (int)status;
}

int record_failure(plc_comm *comm, uint32_t status, int32_t rank) {
    plc_failure failure = {
        .status = status, .rank = rank, .sequence = atomic_load(&comm->sequence)};
    return publish_failure(comm, &failure);
}

int record_timeout(plc_comm *comm, uint32_t timed_out_rank, needed_fn needed,
                   const void *context) {
    plc_failure failure = {.status = PLC_TIMEOUT,
                           .rank = (int32_t)timed_out_rank,
                           .sequence = atomic_load(&comm->sequence)};
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (is_needed(comm, r, needed, context)) failure.missing[failure.missing_count++] = r;
    return publish_failure(comm, &failure);
}

int known_failure(plc_comm *comm) {
    if (atomic_load(&comm->failed) != PLC_OK) return (int)atomic_load(&comm->failed);
    if (atomic_load(&comm->leaving)) return PLC_ABORTED;
    uint64_t packed = atomic_load_explicit(&comm->shared->failure, memory_order_acquire);
    if (packed == 0) return PLC_OK;
    /* A peer gave up waiting. That is no timeout of ours: it may be this rank that was late. */
    return record_failure(comm, status_in(packed) == PLC_TIMEOUT ? PLC_ABORTED : status_in(packed),
                          rank_in(packed));
}

/* A peer gave up waiting for ranks that this one waits for as well: the same timeout, reported
 * with who is missing. */
static bool shares_timeout(plc_comm *comm, needed_fn needed, const void *context,
                           uint32_t *timed_out_rank) {
    uint64_t packed = atomic_load_explicit(&comm->shared->failure, memory_order_acquire);
    *timed_out_rank = (uint32_t)rank_in(packed);
    return status_in(packed) == PLC_TIMEOUT && atomic_load(&comm->failed) == PLC_OK &&
           !atomic_load(&comm->leaving) && !is_needed(comm, *timed_out_rank, needed, context);
}

static int check_group(plc_comm *comm, event_count *event, uint32_t target, int64_t deadline,
                       needed_fn needed, const void *context) {
    uint32_t timed_out_rank;
    if (reached(event, target)) return PLC_OK;
    if (shares_timeout(comm, needed, context, &timed_out_rank))
        return reached(event, target) ? PLC_OK
                                      : record_timeout(comm, timed_out_rank, needed, context);
    int failure = known_failure(comm);
    if (failure != PLC_OK) return reached(event, target) ? PLC_OK : failure;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        bool left;
        if (!is_needed(comm, r, needed, context) || !rank_is_gone(comm, r, &left)) continue;
        /* It may have done its part before it went. */
        if (reached(event, target)) return PLC_OK;
        if (!is_needed(comm, r, needed, context)) continue;
        return record_failure(comm, left ? PLC_PEER_LEFT : PLC_PEER_LOST, (int32_t)r);
    }
    if (now_ns() >= deadline)
        return reached(event, target) ? PLC_OK : record_timeout(comm, comm->rank, needed, context);
    return PLC_PENDING;
}

static int sleep_for(plc_comm *comm, event_count *event, uint32_t target, int64_t deadline,
                     needed_fn needed, const void *context, const plc_call *noted) {
    divergence seen = {0};
    for (;;) {
        int status = check_group(comm, event, target, deadline, needed, context);
        if (status == PLC_PENDING && noted != NULL)
            status = check_divergence(comm, noted, needed, context, &seen);
        if (status != PLC_PENDING) return status;
        /* Half a collective cannot be resumed. */
        if (gil_interrupted()) plc_comm_abort(comm);
        int64_t left = deadline - now_ns();
        sleep_until(event, target, MAX(MIN(left, SLICE_NS), 1));
        if (reached(event, target)) return PLC_OK;
    }
}

int wait_for(plc_comm *comm, event_count *event, uint32_t target, int64_t deadline,
             needed_fn needed, const void *context, const plc_call *call) {
    if (spin_until(comm, event, target)) return PLC_OK;
    gil_release();
    const plc_call *noted = call != NULL && note_wait(comm, call) ? call : NULL;
    int status = sleep_for(comm, event, target, deadline, needed, context, noted);
    if (noted != NULL) end_wait(comm, noted);
    return status;
}

int wait_change(const plc_comm *comm, event_count *event, uint32_t seen, int64_t deadline) {
    if (spin_until(comm, event, seen + 1)) return PLC_OK;
    int64_t left = deadline - now_ns();
    if (left > 0) sleep_until(event, seen + 1, left);
    return reached(event, seen + 1) ? PLC_OK : PLC_TIMEOUT;
}

/* Waiting: spin briefly, then sleep on a futex in slices, and between slices look whether the peers still live. */
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

void futex_wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void wake(signal_word *word) {
    if (atomic_load(&word->sleepers) != 0) futex_wake_all(&word->value);
}

/* Sequentially consistent on both sides: either the sleeper sees the new value, or we see the sleeper. */
void advance(signal_word *word, uint32_t by) {
    atomic_fetch_add(&word->value, by);
    wake(word);
}

static inline bool reached(signal_word *word, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&word->value, memory_order_acquire) - target) >= 0;
}

static bool spin_until(const plc_comm *comm, signal_word *word, uint32_t target) {
    if (reached(word, target)) return true;
    int64_t end = now_ns() + comm->config.spin_ns;
    do {
        for (int i = 0; i < SPINS_BETWEEN_CLOCK_READS; i++) {
            if (reached(word, target)) return true;
            relax();
        }
    } while (now_ns() < end);
    return false;
}

static void sleep_until(signal_word *word, uint32_t target, int64_t ns) {
    atomic_fetch_add(&word->sleepers, 1);
    uint32_t seen = atomic_load(&word->value);
    if ((int32_t)(seen - target) < 0) futex_wait(&word->value, seen, ns);
    atomic_fetch_sub(&word->sleepers, 1);
}

/* Whether a peer can no longer answer: its process ended, or it left the communicator. */
bool rank_is_gone(const plc_comm *comm, uint32_t rank, bool *left) {
    *left = atomic_load(&comm->shared->records[rank].state) == STATE_LEFT;
    if (*left) return true;
    if (rank == comm->rank || comm->pidfds[rank] < 0) return false;
    struct pollfd p = {.fd = comm->pidfds[rank], .events = POLLIN};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

static uint64_t pack(uint32_t status, int32_t rank) { return ((uint64_t)status << 32) | (uint32_t)rank; }
static uint32_t status_in(uint64_t word) { return (uint32_t)(word >> 32); }
static int32_t rank_in(uint64_t word) { return (int32_t)(uint32_t)word; }

static bool is_needed(const plc_comm *comm, uint32_t rank, needed_fn needed, const void *context) {
    return needed == NULL ? rank != comm->rank : needed(comm, rank, context);
}

/* Record a failure for this rank, and for peers that come later. The first one wins. */
static int record(plc_comm *comm, const plc_failure *failure) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&comm->shared->failure, &none, pack(failure->status, failure->rank));
    pthread_mutex_lock(&comm->failure_lock);
    if (comm->failure.status == PLC_OK) comm->failure = *failure;
    uint32_t status = comm->failure.status;
    atomic_store(&comm->failed, status);
    pthread_mutex_unlock(&comm->failure_lock);
    futex_wake_all(&comm->shared->arrivals.value); /* sleepers look again and find the failure */
    return (int)status;
}

int raise_failure(plc_comm *comm, uint32_t status, int32_t rank) {
    plc_failure failure = {.status = status, .rank = rank, .sequence = atomic_load(&comm->sequence)};
    return record(comm, &failure);
}

int raise_timeout(plc_comm *comm, uint32_t whose, needed_fn needed, const void *context) {
    plc_failure failure = {.status = PLC_TIMEOUT, .rank = (int32_t)whose, .sequence = atomic_load(&comm->sequence)};
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (is_needed(comm, r, needed, context)) failure.missing[failure.missing_count++] = r;
    return record(comm, &failure);
}

int known_failure(plc_comm *comm) {
    if (atomic_load(&comm->failed) != PLC_OK) return (int)atomic_load(&comm->failed);
    if (atomic_load(&comm->leaving)) return PLC_ABORTED;
    uint64_t word = atomic_load_explicit(&comm->shared->failure, memory_order_acquire);
    if (word == 0) return PLC_OK;
    /* A peer gave up waiting. That is no time-out of ours: it may be this rank that was late. */
    return raise_failure(comm, status_in(word) == PLC_TIMEOUT ? PLC_ABORTED : status_in(word), rank_in(word));
}

/* A peer gave up waiting for ranks that this one waits for as well: the same time-out, told with who is missing. */
static bool shares_timeout(plc_comm *comm, needed_fn needed, const void *context, uint32_t *whose) {
    uint64_t word = atomic_load_explicit(&comm->shared->failure, memory_order_acquire);
    *whose = (uint32_t)rank_in(word);
    return status_in(word) == PLC_TIMEOUT && atomic_load(&comm->failed) == PLC_OK && !atomic_load(&comm->leaving) &&
           !is_needed(comm, *whose, needed, context);
}

static int look_around(plc_comm *comm, signal_word *word, uint32_t target, int64_t deadline, needed_fn needed,
                       const void *context) {
    uint32_t whose;
    if (reached(word, target)) return PLC_OK;
    if (shares_timeout(comm, needed, context, &whose))
        return reached(word, target) ? PLC_OK : raise_timeout(comm, whose, needed, context);
    int failure = known_failure(comm);
    if (failure != PLC_OK) return reached(word, target) ? PLC_OK : failure;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        bool left;
        if (!is_needed(comm, r, needed, context) || !rank_is_gone(comm, r, &left)) continue;
        /* It may have done its part before it went. */
        if (reached(word, target)) return PLC_OK;
        if (!is_needed(comm, r, needed, context)) continue;
        return raise_failure(comm, left ? PLC_PEER_LEFT : PLC_PEER_LOST, (int32_t)r);
    }
    if (now_ns() >= deadline)
        return reached(word, target) ? PLC_OK : raise_timeout(comm, comm->rank, needed, context);
    return PLC_PENDING;
}

int wait_for(plc_comm *comm, signal_word *word, uint32_t target, int64_t deadline, needed_fn needed,
             const void *context) {
    if (spin_until(comm, word, target)) return PLC_OK;
    caller_waits();
    for (;;) {
        int status = look_around(comm, word, target, deadline, needed, context);
        if (status != PLC_PENDING) return status;
        if (caller_stops()) plc_comm_abort(comm); /* half a collective cannot be taken up again */
        int64_t left = deadline - now_ns();
        sleep_until(word, target, MAX(MIN(left, SLICE_NS), 1));
        if (reached(word, target)) return PLC_OK;
    }
}

int wait_change(const plc_comm *comm, signal_word *word, uint32_t seen, int64_t deadline) {
    if (spin_until(comm, word, seen + 1)) return PLC_OK;
    int64_t left = deadline - now_ns();
    if (left > 0) sleep_until(word, seen + 1, left);
    return reached(word, seen + 1) ? PLC_OK : PLC_TIMEOUT;
}

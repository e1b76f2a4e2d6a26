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

/* Record a failure for this rank, and for peers that come later. The first one wins. */
int raise_failure(plc_comm *comm, uint32_t status, int32_t rank) {
    uint64_t none = 0;
    /* What peers are told: who died, or that this rank gave up. */
    uint64_t word = status == PLC_TIMEOUT ? pack(PLC_ABORTED, (int32_t)comm->rank) : pack(status, rank);
    atomic_compare_exchange_strong(&comm->shared->failure, &none, word);
    pthread_mutex_lock(&comm->failure_lock);
    if (comm->failure.status == PLC_OK) {
        comm->failure.status = status;
        comm->failure.rank = rank;
        comm->failure.sequence = comm->sequence;
        comm->failure.missing_count = 0;
        for (uint32_t r = 0; r < comm->ranks; r++) {
            uint32_t at = atomic_load(&comm->shared->records[r].phase);
            if ((int32_t)(at - comm->phase) < 0) comm->failure.missing[comm->failure.missing_count++] = r;
        }
    }
    status = comm->failure.status;
    atomic_store(&comm->failed, status);
    pthread_mutex_unlock(&comm->failure_lock);
    futex_wake_all(&comm->shared->arrivals.value); /* sleepers look again and find the failure */
    return (int)status;
}

int known_failure(plc_comm *comm) {
    if (atomic_load(&comm->failed) != PLC_OK) return (int)atomic_load(&comm->failed);
    if (atomic_load(&comm->leaving)) return PLC_ABORTED;
    uint64_t word = atomic_load_explicit(&comm->shared->failure, memory_order_acquire);
    if (word == 0) return PLC_OK;
    return raise_failure(comm, (uint32_t)(word >> 32), (int32_t)(uint32_t)word);
}

static int look_around(plc_comm *comm, signal_word *word, uint32_t target, int64_t deadline, needed_fn needed,
                       const void *context) {
    if (reached(word, target)) return PLC_OK;
    int failure = known_failure(comm);
    if (failure != PLC_OK) return reached(word, target) ? PLC_OK : failure;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        bool left;
        if (needed != NULL && !needed(comm, r, context)) continue;
        if (!rank_is_gone(comm, r, &left)) continue;
        /* It may have done its part before it went. */
        if (reached(word, target)) return PLC_OK;
        if (needed != NULL && !needed(comm, r, context)) continue;
        return raise_failure(comm, left ? PLC_PEER_LEFT : PLC_PEER_LOST, (int32_t)r);
    }
    if (now_ns() >= deadline) return reached(word, target) ? PLC_OK : raise_failure(comm, PLC_TIMEOUT, -1);
    return PLC_PENDING;
}

int wait_for(plc_comm *comm, signal_word *word, uint32_t target, int64_t deadline, needed_fn needed,
             const void *context) {
    if (spin_until(comm, word, target)) return PLC_OK;
    for (;;) {
        int status = look_around(comm, word, target, deadline, needed, context);
        if (status != PLC_PENDING) return status;
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

/* Flags: one process raises, another waits. For a pair that is no group: a parent and the workers
 * it forked.
 *
 * A flag is a word in memory both have mapped. It only grows, so that a raise is never missed. The
 * waiter spins, then sleeps in slices between which it looks whether the other process still lives.
 * Unlike the waits of a communicator this one may end early without harm, so that a caller can
 * attend to signals and wait again.
 */
#include <poll.h>

#include "internal.h"

#define SLICE_NS (50 * 1000 * 1000)
#define SPINS_BETWEEN_CLOCK_READS 64

uint64_t plc_flag_bytes(void) { return sizeof(event_count); }

void plc_flag_raise(void *flag) { advance((event_count *)flag, 1); }

/* Raising the flag publishes what was written before: whoever sees it raised sees the arrays and
 * the notice. */
void plc_hand_over(void *flag, uint64_t *notice, uint64_t first, uint64_t second, uint32_t pieces,
                   const uint64_t *to, const uint64_t *from, const uint64_t *bytes) {
    plc_copy_pieces(pieces, to, from, bytes);
    notice[0] = first;
    notice[1] = second;
    advance((event_count *)flag, 1);
}

static bool raised(event_count *flag, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&flag->value, memory_order_acquire) - target) >= 0;
}

static bool has_ended(int pidfd) {
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return pidfd >= 0 && poll(&p, 1, 0) == 1;
}

static bool spin(event_count *flag, uint32_t target, int64_t end) {
    do {
        for (int i = 0; i < SPINS_BETWEEN_CLOCK_READS; i++) {
            if (raised(flag, target)) return true;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        }
    } while (now_ns() < end);
    return false;
}

int plc_flag_wait(void *word, uint32_t target, int pidfd, int64_t spin_ns, int64_t timeout_ns) {
    event_count *flag = word;
    int64_t start = now_ns();
    int64_t deadline = timeout_ns > INT64_MAX - start ? INT64_MAX : start + timeout_ns;
    if (spin(flag, target, start + spin_ns)) return PLC_OK;
    for (;;) {
        /* It may have raised the flag before it ended: look at the process first, then at the
         * flag. */
        bool ended = has_ended(pidfd);
        if (raised(flag, target)) return PLC_OK;
        if (ended) return PLC_PEER_LOST;
        int64_t left = deadline - now_ns();
        if (left <= 0) return PLC_PENDING;
        atomic_fetch_add(&flag->sleepers, 1);
        uint32_t seen = atomic_load(&flag->value);
        if ((int32_t)(seen - target) < 0)
            futex_wait(&flag->value, seen, left < SLICE_NS ? left : SLICE_NS);
        atomic_fetch_sub(&flag->sleepers, 1);
    }
}

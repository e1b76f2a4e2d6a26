/* Ranks as threads over one mapping: what the sanitizers can see, they see on all ranks at once.
 *
 * A world is a formatted segment, mapped once, and one thread per rank which joins it, runs a
 * function and leaves.
 */
#ifndef PACELINE_TEST_WORLD_H
#define PACELINE_TEST_WORLD_H

#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MS 1000000ll
#define SLOT_BYTES 4096u
#define RING_BYTES 4096u

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s: ", __FILE__, __LINE__, #condition);                \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#define CHECK_STATUS(expected, call)                                                               \
    do {                                                                                           \
        int found_ = (call);                                                                       \
        CHECK(found_ == (expected), "status %d instead of %d", found_, (int)(expected));           \
    } while (0)

typedef struct world world;
typedef struct {
    world *in;
    plc_comm *comm;
    uint32_t rank, ranks;
    uint64_t seed;  /* the same on all ranks */
    uint64_t mine;  /* differs from rank to rank */
    pthread_t thread;
} rank_thread;
typedef void (*rank_fn)(rank_thread *self);

struct world {
    uint32_t ranks;
    int fd;
    void *mapping;
    plc_config config;
    uint64_t nonce[2];
    int pidfds[PLC_MAX_RANKS];
    rank_fn run;
    void *shared;           /* for the scenario's own use */
    pthread_barrier_t all;  /* outside of what is tested */
};

static inline uint64_t next_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15ull;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline uint64_t below(uint64_t *state, uint64_t limit) { return next_random(state) % limit; }

static inline void nap_ns(int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    nanosleep(&t, NULL);
}

static inline plc_comm *join_world(world *w, uint32_t rank) {
    plc_comm *comm = NULL;
    CHECK_STATUS(PLC_OK,
                 plc_comm_join(-1, w->mapping, rank, w->ranks, w->nonce, &w->config, w->pidfds,
                               &comm));
    return comm;
}

static inline void *rank_main(void *argument) {
    rank_thread *self = argument;
    self->comm = join_world(self->in, self->rank);
    self->in->run(self);
    if (self->comm != NULL) { /* a scenario that left by itself says so */
        plc_comm_leave(self->comm);
        plc_comm_free(self->comm);
    }
    return NULL;
}

static inline world new_world(uint32_t ranks, int64_t timeout_ms) {
    world w = {.ranks = ranks, .nonce = {ranks, 42}};
    w.config = (plc_config){SLOT_BYTES, RING_BYTES, timeout_ms * MS, 20000};
    for (uint32_t r = 0; r < ranks; r++) w.pidfds[r] = -1;
    uint64_t bytes = plc_segment_bytes(ranks, &w.config);
    w.fd = memfd_create("paceline-stress", MFD_CLOEXEC);
    CHECK(w.fd >= 0, "memfd_create: errno %d", errno);
    CHECK_STATUS(PLC_OK, plc_segment_format(w.fd, ranks, &w.config, w.nonce));
    w.mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w.fd, 0);
    CHECK(w.mapping != MAP_FAILED, "mmap: errno %d", errno);
    return w;
}

static inline void end_world(world *w) {
    munmap(w->mapping, plc_segment_bytes(w->ranks, &w->config));
    close(w->fd);
}

/* Run `fn` on every rank and wait for all. */
static inline void run_world(world *w, rank_fn fn, uint64_t seed) {
    rank_thread threads[PLC_MAX_RANKS];
    w->run = fn;
    pthread_barrier_init(&w->all, NULL, w->ranks);
    for (uint32_t r = 0; r < w->ranks; r++) {
        threads[r] =
            (rank_thread){.in = w, .rank = r, .ranks = w->ranks, .seed = seed,
                          .mine = seed * 1000 + r};
        CHECK(pthread_create(&threads[r].thread, NULL, rank_main, &threads[r]) == 0, "no thread");
    }
    for (uint32_t r = 0; r < w->ranks; r++) pthread_join(threads[r].thread, NULL);
    pthread_barrier_destroy(&w->all);
}

static inline void in_new_world(uint32_t ranks, int64_t timeout_ms, rank_fn fn, uint64_t seed) {
    world w = new_world(ranks, timeout_ms);
    run_world(&w, fn, seed);
    end_world(&w);
}

static inline int call(rank_thread *self, plc_request q) {
    q.timeout_ns = q.timeout_ns != 0 ? q.timeout_ns : -1;
    return plc_run(self->comm, &q);
}

static inline int barrier(rank_thread *self) {
    return call(self, (plc_request){.kind = PLC_BARRIER, .dtype = PLC_BYTES});
}

#endif

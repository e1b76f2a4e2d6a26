/* Buckets: buffers that live in shared memory and are reduced where they lie. Whoever has time does the sums.
 *
 * An arena holds one region per rank and a control block per bucket. A rank that has filled its share counts itself
 * in; once all are in, the bucket is cut into chunks which any waiting rank claims with an atomic counter and
 * reduces, writing the result to every rank's region. No thread, no blocking while a rank still computes, no copies.
 * All counters only grow: use number u of a bucket is complete at u * ranks arrivals and u * chunks finished chunks.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "internal.h"

#define CHUNK_BYTES (64 * 1024)

typedef struct {
    signal_word arrived;
    _Alignas(CACHE_LINE) _Atomic uint64_t claimed;
    signal_word done;
} bucket_control;

typedef struct {
    uint64_t offset, count;
    uint32_t dtype, op, chunks;
    uint32_t uses; /* how often this rank has counted itself in */
} bucket;

struct plc_arena {
    plc_comm *comm;
    void *mapping;
    uint64_t mapped_bytes, bytes_per_rank;
    uint32_t buckets;
    bucket *table;
};

static uint64_t controls_bytes(uint32_t buckets) { return ALIGN_UP(buckets * sizeof(bucket_control), 4096); }

uint64_t plc_arena_bytes(uint32_t ranks, uint64_t bytes_per_rank, uint32_t buckets) {
    return controls_bytes(buckets) + ranks * ALIGN_UP(bytes_per_rank, 4096);
}

int plc_arena_open(plc_comm *comm, int fd, uint64_t bytes_per_rank, uint32_t buckets, plc_arena **out) {
    plc_arena *arena = calloc(1, sizeof *arena);
    bucket *table = calloc(buckets, sizeof *table);
    uint64_t bytes = plc_arena_bytes(comm->ranks, bytes_per_rank, buckets);
    void *mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (arena == NULL || table == NULL || mapping == MAP_FAILED) {
        int error = mapping == MAP_FAILED ? errno : ENOMEM;
        if (mapping != MAP_FAILED) munmap(mapping, bytes);
        free(arena), free(table);
        errno = error;
        return PLC_SYSTEM;
    }
    *arena = (plc_arena){comm, mapping, bytes, ALIGN_UP(bytes_per_rank, 4096), buckets, table};
    *out = arena;
    return PLC_OK;
}

void plc_arena_close(plc_arena *arena) {
    munmap(arena->mapping, arena->mapped_bytes);
    free(arena->table);
    free(arena);
}

void *plc_arena_region(plc_arena *arena, uint32_t rank) {
    return (char *)arena->mapping + controls_bytes(arena->buckets) + rank * arena->bytes_per_rank;
}

static bucket_control *control_of(const plc_arena *arena, uint32_t index) {
    return (bucket_control *)arena->mapping + index;
}

int plc_bucket_define(plc_arena *arena, uint32_t index, uint64_t offset, uint64_t count, uint32_t dtype, uint32_t op) {
    uint64_t bytes = count * plc_element_bytes(dtype);
    if (index >= arena->buckets || offset + bytes > arena->bytes_per_rank || !can_reduce(dtype, op)) return PLC_INVALID;
    bucket *b = &arena->table[index];
    if (b->uses != 0) return PLC_INVALID; /* its counters are in units of its chunks */
    uint64_t chunks = (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    *b = (bucket){.offset = offset, .count = count, .dtype = dtype, .op = op, .chunks = (uint32_t)MAX(chunks, 1)};
    return PLC_OK;
}

/* The sum of one chunk, written to the first region and copied to the others while it is in cache. */
static void reduce_chunk(plc_arena *arena, const bucket *b, uint64_t chunk) {
    uint64_t element = plc_element_bytes(b->dtype), per_chunk = CHUNK_BYTES / element;
    uint64_t from = chunk * per_chunk, count = MIN(b->count - from, per_chunk);
    const void *inputs[PLC_MAX_RANKS];
    char *first = (char *)plc_arena_region(arena, 0) + b->offset + from * element;
    for (uint32_t r = 0; r < arena->comm->ranks; r++)
        inputs[r] = (const char *)plc_arena_region(arena, r) + b->offset + from * element;
    reduce_block(first, inputs, arena->comm->ranks, count, b->dtype, b->op, 1.0);
    for (uint32_t r = 1; r < arena->comm->ranks; r++) memcpy((void *)inputs[r], first, count * element);
}

static void help(plc_arena *arena, uint32_t index) {
    bucket *b = &arena->table[index];
    bucket_control *c = control_of(arena, index);
    uint64_t first = (uint64_t)(b->uses - 1) * b->chunks, end = first + b->chunks;
    for (;;) {
        uint64_t claim = atomic_load(&c->claimed);
        if (claim >= end) return;
        if (!atomic_compare_exchange_weak(&c->claimed, &claim, claim + 1)) continue;
        reduce_chunk(arena, b, claim - first);
        if (atomic_fetch_add(&c->done.value, 1) + 1 == (uint32_t)end) wake(&c->done);
    }
}

int plc_bucket_ready(plc_arena *arena, uint32_t index) {
    if (index >= arena->buckets || arena->table[index].chunks == 0) return PLC_INVALID;
    bucket_control *c = control_of(arena, index);
    uint32_t target = ++arena->table[index].uses * arena->comm->ranks;
    if (atomic_fetch_add(&c->arrived.value, 1) + 1 == target) wake(&c->arrived);
    return PLC_OK;
}

int plc_bucket_finish(plc_arena *arena, uint32_t index, int64_t timeout_ns) {
    if (index >= arena->buckets || arena->table[index].uses == 0) return PLC_INVALID;
    bucket *b = &arena->table[index];
    bucket_control *c = control_of(arena, index);
    int64_t deadline = deadline_after(arena->comm, timeout_ns);
    int status = wait_for(arena->comm, &c->arrived, b->uses * arena->comm->ranks, deadline, NULL, NULL);
    if (status != PLC_OK) return status;
    help(arena, index);
    return wait_for(arena->comm, &c->done, b->uses * b->chunks, deadline, NULL, NULL);
}

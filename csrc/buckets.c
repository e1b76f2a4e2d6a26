/* Buckets: buffers that live in shared memory and are reduced where they lie. Whoever has time does
 * the sums.
 *
 * An arena holds one region per rank and a control block per bucket. A rank that has filled its
 * share marks its arrival; once all have, the bucket is cut into chunks which any waiting rank
 * claims with an atomic counter and reduces, writing the result to every rank's region. No thread,
 * no blocking while a rank still computes, no copies. All counters only grow: use number u of a
 * bucket is complete at u * ranks arrivals and u * chunks finished chunks.
 *
 * An external bucket is one that is not worth copying here: its ranks wait for each other and sum
 * it through rings, see pipeline.h, for which a part of the regions is set aside.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "pipeline.h"

#define CHUNK_BYTES (64 * 1024)
#define COPY_LONG_FROM_BYTES                                                                       \
    (2 * 1024 * 1024) /* does not fit the second-level cache with what comes next */
#define BLOCK_BYTES (8 * 1024) /* of every rank, in the first-level cache when it is written back */
/* Header n is overwritten by header n + 4. A rank writes at most two headers after a bucket that it
 * finished, so before it writes n + 4 it has finished one at which every rank arrived with header
 * n + 2 written. Ranks read only the last two headers they wrote: nobody reads header n again. */
#define HEADERS 4

typedef struct {
    _Alignas(CACHE_LINE) double numbers[PLC_HEADER_NUMBERS];
} header;

/* Every rank's factor in an average. Where all ranks that bring anything have the same one, the
 * average is a plain one with that factor, and has the bits of a plain one; a rank of weight 0
 * brings zeros, for which any factor will do. */
typedef struct {
    bool given, uniform;
    double factor; /* if uniform */
    double ranks[PLC_MAX_RANKS];
} weighting;

typedef struct {
    event_count arrived;
    _Alignas(CACHE_LINE) _Atomic uint64_t claimed;
    event_count done;
} bucket_control;

typedef struct {
    uint64_t offset, count;
    uint32_t dtype, op, chunks;
    uint64_t ring_bytes; /* 0: the numbers lie in the region */
    uint32_t uses;       /* how often this rank has marked its arrival */
    bool compared; /* the ranks were found to mean the same by it */
} bucket;

struct plc_arena {
    plc_comm *comm;
    void *mapping;
    bool owns_mapping;
    uint64_t mapped_bytes, bytes_per_rank;
    uint32_t rank, ranks, buckets; /* ranks: also known when the communicator is gone */
    uint32_t number;               /* among the arenas of its communicator */
    uint64_t nonce;                /* of the communicator, whose address may be used again */
    plc_arena *next;               /* in the list of this process's arenas */
    bucket *table;
    uint32_t headers; /* that this rank has written so far */
    uint32_t blocks;  /* that went through the rings so far */
    weighting weights;
};

typedef struct {
    event_count progress[PIPELINE_STEPS];
} ring_control;

/* How often each rank has marked its arrival, by rank and bucket: to say who is missing. Nobody
 * shares a line. */
static uint64_t uses_stride(uint32_t buckets) {
    return ALIGN_UP(buckets * sizeof(uint32_t), CACHE_LINE);
}

/* The mapping: a control per bucket, every rank's table of uses, every rank's headers, every rank's
 * definitions, every rank's progress through rings, every rank's region. */
static uint64_t headers_at(uint32_t ranks, uint32_t buckets) {
    return ALIGN_UP(buckets * sizeof(bucket_control) + ranks * uses_stride(buckets), CACHE_LINE);
}

static uint64_t definitions_at(uint32_t ranks, uint32_t buckets) {
    return headers_at(ranks, buckets) + ranks * HEADERS * sizeof(header);
}

static uint64_t progress_at(uint32_t ranks, uint32_t buckets) {
    return ALIGN_UP(definitions_at(ranks, buckets) + (uint64_t)ranks * buckets * sizeof(plc_call),
                    CACHE_LINE);
}

static uint64_t regions_at(uint32_t ranks, uint32_t buckets) {
    return ALIGN_UP(progress_at(ranks, buckets) + ranks * sizeof(ring_control), 4096);
}

/* Arenas of this process, by which a peer's note about one is understood. */
static plc_arena *open_arenas;
static pthread_mutex_t open_arenas_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t plc_arena_bytes(uint32_t ranks, uint64_t bytes_per_rank, uint32_t buckets) {
    return regions_at(ranks, buckets) + ranks * ALIGN_UP(bytes_per_rank, 4096);
}

int plc_arena_open(plc_comm *comm, int fd, void *mapping, uint64_t bytes_per_rank, uint32_t buckets,
                   plc_arena **out) {
    plc_arena *arena = calloc(1, sizeof *arena);
    bucket *table = calloc(buckets, sizeof *table);
    uint64_t bytes = plc_arena_bytes(comm->ranks, bytes_per_rank, buckets);
    bool maps = mapping == NULL;
    if (maps) mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (arena == NULL || table == NULL || mapping == MAP_FAILED) {
        int error = mapping == MAP_FAILED ? errno : ENOMEM;
        if (maps && mapping != MAP_FAILED) munmap(mapping, bytes);
        free(arena), free(table);
        errno = error;
        return PLC_SYSTEM;
    }
    *arena = (plc_arena){.comm = comm,
                         .mapping = mapping,
                         .owns_mapping = maps,
                         .mapped_bytes = bytes,
                         .bytes_per_rank = ALIGN_UP(bytes_per_rank, 4096),
                         .rank = comm->rank,
                         .ranks = comm->ranks,
                         .buckets = buckets,
                         .number = comm->arenas++,
                         .nonce = comm->shared->nonce[0],
                         .table = table};
    pthread_mutex_lock(&open_arenas_lock);
    arena->next = open_arenas;
    open_arenas = arena;
    pthread_mutex_unlock(&open_arenas_lock);
    *out = arena;
    return PLC_OK;
}

void plc_arena_close(plc_arena *arena) {
    pthread_mutex_lock(&open_arenas_lock);
    plc_arena **link = &open_arenas;
    while (*link != arena) link = &(*link)->next;
    *link = arena->next;
    pthread_mutex_unlock(&open_arenas_lock);
    if (arena->owns_mapping) munmap(arena->mapping, arena->mapped_bytes);
    free(arena->table);
    free(arena);
}

void *plc_arena_region(plc_arena *arena, uint32_t rank) {
    return (char *)arena->mapping + regions_at(arena->ranks, arena->buckets) +
           rank * arena->bytes_per_rank;
}

static header *header_of(const plc_arena *arena, uint32_t rank, uint32_t number) {
    char *table = (char *)arena->mapping + headers_at(arena->ranks, arena->buckets);
    return (header *)table + rank * HEADERS + number % HEADERS;
}

uint32_t plc_arena_write_header(plc_arena *arena, const double *numbers) {
    uint32_t number = arena->headers++;
    memcpy(header_of(arena, arena->rank, number)->numbers, numbers, sizeof(header));
    return number;
}

void plc_arena_read_headers(plc_arena *arena, uint32_t number, double *out) {
    for (uint32_t r = 0; r < arena->ranks; r++)
        memcpy(out + r * PLC_HEADER_NUMBERS, header_of(arena, r, number)->numbers, sizeof(header));
}

static void set_factor(plc_arena *arena, double factor) {
    arena->weights.given = arena->weights.uniform = true;
    arena->weights.factor = factor;
}

void plc_arena_set_weights(plc_arena *arena, const double *weights) {
    double factor = 0;
    for (uint32_t r = 0; r < arena->ranks && factor == 0; r++) factor = weights[r];
    set_factor(arena, factor);
    for (uint32_t r = 0; r < arena->ranks; r++) {
        arena->weights.ranks[r] = weights[r];
        if (weights[r] != 0 && weights[r] != factor) arena->weights.uniform = false;
    }
}

static bucket_control *control_of(const plc_arena *arena, uint32_t index) {
    return (bucket_control *)arena->mapping + index;
}

static _Atomic uint32_t *uses_of(const plc_arena *arena, uint32_t rank, uint32_t index) {
    char *table = (char *)control_of(arena, arena->buckets);
    return (_Atomic uint32_t *)(table + rank * uses_stride(arena->buckets)) + index;
}

/* What a rank means by a bucket, in the form of a call: its number, offset (label), count, type and
 * operation. */
static plc_call *definition_of(const plc_arena *arena, uint32_t rank, uint32_t index) {
    plc_call *table =
        (plc_call *)((char *)arena->mapping + definitions_at(arena->ranks, arena->buckets));
    return table + (uint64_t)rank * arena->buckets + index;
}

static int define(plc_arena *arena, uint32_t index, uint64_t offset, uint64_t room,
                  const bucket *what) {
    if (index >= arena->buckets || !can_reduce(what->dtype, what->op)) return PLC_INVALID;
    if (offset > arena->bytes_per_rank || room > arena->bytes_per_rank - offset) return PLC_INVALID;
    bucket *b = &arena->table[index];
    if (b->uses != 0) return PLC_INVALID; /* its counters are in units of its chunks */
    *b = *what;
    *definition_of(arena, arena->rank, index) = (plc_call){.sequence = index,
                                                           .kind = PLC_BUCKET,
                                                           .dtype = b->dtype,
                                                           .op = b->op,
                                                           .root = -1,
                                                           .count = b->count,
                                                           .label = offset};
    return PLC_OK;
}

int plc_bucket_define(plc_arena *arena, uint32_t index, uint64_t offset, uint64_t count,
                      uint32_t dtype, uint32_t op) {
    uint64_t element = plc_element_bytes(dtype), bytes = count * element;
    if (element == 0 || offset % element != 0 || count > arena->bytes_per_rank / element)
        return PLC_INVALID;
    uint64_t chunks = (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    bucket b = {.offset = offset,
                .count = count,
                .dtype = dtype,
                .op = op,
                .chunks = chunks == 0 ? 1 : (uint32_t)chunks};
    return define(arena, index, offset, bytes, &b);
}

int plc_bucket_define_external(plc_arena *arena, uint32_t index, uint64_t offset,
                               uint64_t ring_bytes, uint64_t count, uint32_t dtype, uint32_t op) {
    if (arena->ranks < 2) return PLC_INVALID; /* nothing to sum */
    /* Room for a cache line of every part in every block of both rings. */
    if (offset % CACHE_LINE != 0 || ring_bytes % 4096 != 0 || ring_bytes < 1024ull * arena->ranks)
        return PLC_INVALID;
    bucket b = {.offset = offset,
                .count = count,
                .dtype = dtype,
                .op = op,
                .chunks = 1,
                .ring_bytes = ring_bytes};
    return define(arena, index, offset, ring_bytes, &b);
}

/* The result of one block, written to the first region and copied to the others while it is in
 * cache. */
static void reduce_part(plc_arena *arena, const bucket *b, uint64_t from, uint64_t count,
                        const weighting *w) {
    uint64_t element = plc_element_bytes(b->dtype);
    uint32_t ranks = arena->ranks;
    const void *inputs[PLC_MAX_RANKS];
    char *first = (char *)plc_arena_region(arena, 0) + b->offset + from * element;
    for (uint32_t r = 0; r < ranks; r++)
        inputs[r] = (const char *)plc_arena_region(arena, r) + b->offset + from * element;
    if (w == NULL) {
        reduce_block(first, inputs, ranks, count, b->dtype, b->op, 1.0);
    } else if (w->uniform) {
        /* Scaled before it is added, as torch does it: the same bits as torch's class on a group of
         * this kind. */
        reduce_block(first, inputs, ranks, count, b->dtype, PLC_PREMUL_SUM, w->factor);
    } else {
        for (uint32_t r = 0; r < ranks; r++)
            reduce_block((void *)inputs[r], &inputs[r], 1, count, b->dtype, PLC_PREMUL_SUM,
                         w->ranks[r]);
        reduce_block(first, inputs, ranks, count, b->dtype, PLC_SUM, 1.0);
    }
    for (uint32_t r = 1; r < ranks; r++) memcpy((void *)inputs[r], first, count * element);
}

static void reduce_chunk(plc_arena *arena, const bucket *b, uint64_t chunk, const weighting *w) {
    uint64_t element = plc_element_bytes(b->dtype), per_chunk = CHUNK_BYTES / element,
             per_block = BLOCK_BYTES / element;
    uint64_t from = chunk * per_chunk, end = MIN(b->count, from + per_chunk);
    for (; from < end; from += per_block)
        reduce_part(arena, b, from, MIN(end - from, per_block), w);
}

static void help(plc_arena *arena, uint32_t index) {
    bucket *b = &arena->table[index];
    bucket_control *c = control_of(arena, index);
    uint64_t first = (uint64_t)(b->uses - 1) * b->chunks, end = first + b->chunks;
    const weighting *weights = b->op == PLC_AVG && arena->weights.given ? &arena->weights : NULL;
    for (;;) {
        uint64_t claim = atomic_load(&c->claimed);
        if (claim >= end) return;
        if (!atomic_compare_exchange_weak(&c->claimed, &claim, claim + 1)) continue;
        reduce_chunk(arena, b, claim - first, weights);
        if (atomic_fetch_add(&c->done.value, 1) + 1 == (uint32_t)end) wake(&c->done);
    }
}

int plc_bucket_ready(plc_arena *arena, uint32_t index) {
    if (index >= arena->buckets || arena->table[index].chunks == 0) return PLC_INVALID;
    bucket_control *c = control_of(arena, index);
    uint32_t uses = ++arena->table[index].uses;
    bool last = atomic_fetch_add(&c->arrived.value, 1) + 1 == uses * arena->ranks;
    atomic_store(uses_of(arena, arena->rank, index),
                 uses); /* after the count, as in `next_phase` */
    if (last) wake(&c->arrived);
    return PLC_OK;
}

typedef struct {
    const plc_arena *arena;
    uint32_t index;
} bucket_wait;

static bool has_not_arrived(const plc_comm *comm, uint32_t rank, const void *context) {
    const bucket_wait *w = context;
    (void)comm;
    return (int32_t)(atomic_load(uses_of(w->arena, rank, w->index)) -
                     w->arena->table[w->index].uses) < 0;
}

bool has_been_in_bucket(const plc_comm *comm, const plc_call *note) {
    bool been = false;
    pthread_mutex_lock(&open_arenas_lock);
    for (const plc_arena *arena = open_arenas; arena != NULL; arena = arena->next)
        if (arena->comm == comm && arena->nonce == comm->shared->nonce[0] &&
            arena->number == note->label && note->sequence < arena->buckets)
            been = (int32_t)(atomic_load(uses_of(arena, arena->rank, (uint32_t)note->sequence)) -
                             (uint32_t)note->root) >= 0;
    pthread_mutex_unlock(&open_arenas_lock);
    return been;
}

/* Once, when all ranks have arrived: all of them look at the same definitions and come to the same
 * conclusion. */
static int compare_definitions(plc_arena *arena, uint32_t index) {
    plc_comm *comm = arena->comm;
    const plc_call *mine = definition_of(arena, arena->rank, index);
    bool same = true;
    for (uint32_t r = 0; r < arena->ranks; r++) {
        const plc_call *c = definition_of(arena, r, index);
        same = same && c->label == mine->label && c->count == mine->count &&
               c->dtype == mine->dtype && c->op == mine->op;
    }
    arena->table[index].compared = same;
    if (same) return PLC_OK;
    pthread_mutex_lock(&comm->failure_lock);
    for (uint32_t r = 0; r < arena->ranks; r++)
        comm->mismatched[r] = *definition_of(arena, r, index);
    pthread_mutex_unlock(&comm->failure_lock);
    return PLC_MISMATCH;
}

static int wait_for_arrivals(plc_arena *arena, uint32_t index, int64_t deadline) {
    const bucket *b = &arena->table[index];
    bucket_wait context = {arena, index};
    event_count *arrived = &control_of(arena, index)->arrived;
    plc_call call = {.sequence = index,
                     .kind = PLC_BUCKET,
                     .dtype = b->dtype,
                     .op = b->op,
                     .root = (int32_t)b->uses,
                     .count = b->count,
                     .label = arena->number};
    int status = wait_for(arena->comm, arrived, b->uses * arena->ranks, deadline, has_not_arrived,
                          &context, &call);
    return status == PLC_OK && !b->compared ? compare_definitions(arena, index) : status;
}

static int finish(plc_arena *arena, uint32_t index, int64_t timeout_ns) {
    bucket *b = &arena->table[index];
    bucket_control *c = control_of(arena, index);
    int64_t deadline = deadline_after(arena->comm, timeout_ns);
    int status = wait_for_arrivals(arena, index, deadline);
    if (status != PLC_OK) return status;
    if (b->count * plc_element_bytes(b->dtype) > CHUNK_BYTES) gil_release();
    help(arena, index);
    return wait_for(arena->comm, &c->done, b->uses * b->chunks, deadline, NULL, NULL, NULL);
}

int plc_bucket_finish(plc_arena *arena, uint32_t index, int64_t timeout_ns) {
    if (index >= arena->buckets || arena->table[index].uses == 0 ||
        arena->table[index].ring_bytes != 0)
        return PLC_INVALID;
    gil_scope scope;
    if (!comm_enter(arena->comm)) return PLC_ABORTED;
    gil_scope_enter(&scope, arena->comm);
    int status = finish(arena, index, timeout_ns);
    gil_scope_exit(&scope);
    comm_exit(arena->comm);
    return status;
}

plc_comm *arena_comm(const plc_arena *arena) { return arena->comm; }

int arena_rings(plc_arena *arena, uint32_t index, pipeline *p) {
    if (index >= arena->buckets || arena->table[index].ring_bytes == 0) return PLC_INVALID;
    const bucket *b = &arena->table[index];
    p->comm = arena->comm;
    p->stages = (unsigned char *)plc_arena_region(arena, 0) + b->offset;
    p->stride = arena->bytes_per_rank;
    p->ring_bytes = b->ring_bytes;
    p->progress =
        ((ring_control *)((char *)arena->mapping + progress_at(arena->ranks, arena->buckets)))
            ->progress;
    p->progress_stride = sizeof(ring_control);
    p->first = arena->blocks;
    return PLC_OK;
}

void arena_count_blocks(plc_arena *arena, const pipeline *p) {
    arena->blocks += (uint32_t)p->blocks;
}

/* Both rings in the room the bucket was given. Every rank ends a call with what it staged read, and
 * begins to sum only when all have staged, hence have fetched the sums of the call before: so each
 * call may use the same room again. */
static int reduce_external(plc_arena *arena, uint32_t index, void *data, int64_t deadline) {
    const bucket *b = &arena->table[index];
    pipeline p = {.deadline = deadline,
                  .input = data,
                  .output = data,
                  .count = b->count,
                  .dtype = b->dtype,
                  .op = b->op,
                  .factor = 1.0,
                  .weight = 1.0,
                  .reads = true};
    int status = arena_rings(arena, index, &p);
    if (status != PLC_OK) return status;
    p.ring_bytes = b->ring_bytes / 2 / CACHE_LINE * CACHE_LINE;
    p.sums = p.stages + p.ring_bytes;
    if (b->op == PLC_AVG && arena->weights.given) {
        p.op = arena->weights.uniform ? PLC_PREMUL_SUM : PLC_SUM;
        if (arena->weights.uniform) p.factor = arena->weights.factor;
        else p.weight = arena->weights.ranks[arena->rank];
    }
    pipeline_plan(&p);
    status = pipeline_run(&p, false);
    if (status == PLC_OK) arena_count_blocks(arena, &p);
    return status;
}

int plc_bucket_reduce_external(plc_arena *arena, uint32_t index, void *data, int64_t timeout_ns) {
    if (index >= arena->buckets || arena->table[index].ring_bytes == 0) return PLC_INVALID;
    gil_scope scope;
    if (!comm_enter(arena->comm)) return PLC_ABORTED;
    gil_scope_enter(&scope, arena->comm);
    int64_t deadline = deadline_after(arena->comm, timeout_ns);
    int status = plc_bucket_ready(arena, index);
    if (status == PLC_OK) status = wait_for_arrivals(arena, index, deadline);
    gil_release();
    if (status == PLC_OK) status = reduce_external(arena, index, data, deadline);
    gil_scope_exit(&scope);
    comm_exit(arena->comm);
    return status;
}

#if defined(__SSE2__)
#include <emmintrin.h>
/* Past the cache: the target is read next by another core, and fetching its old content first would
 * cost a third. */
static void copy_long(char *to, const char *from, uint64_t bytes) {
    uint64_t head = MIN(ALIGN_UP((uintptr_t)to, CACHE_LINE) - (uintptr_t)to, bytes);
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= CACHE_LINE; to += CACHE_LINE, from += CACHE_LINE, bytes -= CACHE_LINE) {
        const __m128i *x = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(x), b = _mm_loadu_si128(x + 1), c = _mm_loadu_si128(x + 2),
                d = _mm_loadu_si128(x + 3);
        __m128i *y = (__m128i *)to;
        _mm_stream_si128(y, a), _mm_stream_si128(y + 1, b), _mm_stream_si128(y + 2, c),
            _mm_stream_si128(y + 3, d);
    }
    memcpy(to, from, bytes);
    _mm_sfence(); /* before the arrival is counted */
}
#else
static void copy_long(char *to, const char *from, uint64_t bytes) { memcpy(to, from, bytes); }
#endif

static void copy(char *to, const char *from, uint64_t bytes) {
    if (bytes >= COPY_LONG_FROM_BYTES)
        copy_long(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

int plc_arena_fill(plc_arena *arena, uint64_t offset, uint32_t pieces, const uint64_t *addresses,
                   const uint64_t *bytes) {
    char *to = (char *)plc_arena_region(arena, arena->rank) + offset;
    uint64_t left = offset > arena->bytes_per_rank ? 0 : arena->bytes_per_rank - offset;
    for (uint32_t i = 0; i < pieces; i++) {
        if (bytes[i] > left) return PLC_INVALID;
        const void *from = (const void *)(uintptr_t)addresses[i];
        if (from != to) copy(to, from, bytes[i]);
        to += bytes[i], left -= bytes[i];
    }
    return PLC_OK;
}

int plc_arena_step(plc_arena *arena, const double *numbers, uint32_t signals, uint32_t index,
                   int64_t timeout_ns, uint32_t *number) {
    *number = plc_arena_write_header(arena, numbers);
    int status = plc_bucket_ready(arena, index);
    /* Ready after the bucket: who has waited for the headers finds the bucket complete too. */
    if (status == PLC_OK) status = plc_bucket_ready(arena, signals);
    if (status == PLC_OK) status = plc_bucket_finish(arena, signals, timeout_ns);
    if (status != PLC_OK) return status;
    for (uint32_t r = 0; r < arena->ranks; r++)
        if (memcmp(header_of(arena, r, *number)->numbers, numbers, sizeof(header)) != 0)
            return PLC_PENDING;
    set_factor(arena, 1.0 / (double)arena->ranks);
    return plc_bucket_finish(arena, index, timeout_ns);
}

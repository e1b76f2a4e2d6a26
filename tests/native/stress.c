/* Calls that must succeed: random collectives, asynchronous calls, messages and buckets, every
 * result checked. */
#include "scenarios.h"

/* --- values: small integers, exact in every type, so that any order of summing is the same ---- */
static const uint32_t dtypes[] = {PLC_U8, PLC_I16, PLC_I32, PLC_I64, PLC_BF16, PLC_F32, PLC_F64};
static const uint32_t ops[] = {PLC_SUM, PLC_PRODUCT, PLC_MIN, PLC_MAX, PLC_PREMUL_SUM};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static int64_t value(uint64_t seed, uint32_t rank, uint64_t i) {
    uint64_t state = seed ^ ((uint64_t)rank << 40) ^ i;
    return 1 + (int64_t)below(&state, 2);
}

static void put(void *data, uint32_t dtype, uint64_t i, int64_t v) {
    switch (dtype) {
    case PLC_U8: ((uint8_t *)data)[i] = (uint8_t)v; break;
    case PLC_I16: ((int16_t *)data)[i] = (int16_t)v; break;
    case PLC_I32: ((int32_t *)data)[i] = (int32_t)v; break;
    case PLC_I64: ((int64_t *)data)[i] = v; break;
    case PLC_F32: ((float *)data)[i] = (float)v; break;
    case PLC_F64: ((double *)data)[i] = (double)v; break;
    default: { /* PLC_BF16: the upper half of a float */
        float f = (float)v;
        memcpy((uint16_t *)data + i, (char *)&f + 2, 2);
    }
    }
}

static int64_t get(const void *data, uint32_t dtype, uint64_t i) {
    switch (dtype) {
    case PLC_U8: return ((const uint8_t *)data)[i];
    case PLC_I16: return ((const int16_t *)data)[i];
    case PLC_I32: return ((const int32_t *)data)[i];
    case PLC_I64: return ((const int64_t *)data)[i];
    case PLC_F32: return (int64_t)((const float *)data)[i];
    case PLC_F64: return (int64_t)((const double *)data)[i];
    default: {
        float f = 0;
        memcpy((char *)&f + 2, (const uint16_t *)data + i, 2);
        return (int64_t)f;
    }
    }
}

static int64_t reduced(uint64_t seed, uint32_t ranks, uint64_t i, uint32_t op, int64_t factor) {
    int64_t result = value(seed, 0, i) * (op == PLC_PREMUL_SUM ? factor : 1);
    for (uint32_t r = 1; r < ranks; r++) {
        int64_t v = value(seed, r, i);
        if (op == PLC_SUM) result += v;
        if (op == PLC_PREMUL_SUM) result += factor * v;
        if (op == PLC_PRODUCT) result *= v;
        if (op == PLC_MIN) result = MIN(result, v);
        if (op == PLC_MAX) result = MAX(result, v);
    }
    return result;
}

static void *filled(uint64_t seed, uint32_t rank, uint32_t dtype, uint64_t from, uint64_t count) {
    if (count == 0) return NULL; /* as an empty tensor has it */
    void *data = malloc(count * plc_element_bytes(dtype));
    for (uint64_t i = 0; i < count; i++) put(data, dtype, i, value(seed, rank, from + i));
    return data;
}

static void check_values(rank_thread *self, const char *what, const void *data, uint64_t seed,
                         uint32_t from_rank, uint32_t dtype,
                         uint64_t from, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        CHECK(get(data, dtype, i) == value(seed, from_rank, from + i),
              "%s: rank %u, element %lu of %lu from rank %u",
              what, self->rank, (unsigned long)i, (unsigned long)count, from_rank);
}

static void check_reduced(rank_thread *self, const char *what, const void *data, uint64_t seed,
                          uint32_t dtype, uint32_t op,
                          int64_t factor, uint64_t from, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        int64_t expected = reduced(seed, self->ranks, from + i, op, factor),
            found = get(data, dtype, i);
        CHECK(found == expected, "%s: rank %u, element %lu of %lu: %ld instead of %ld", what,
              self->rank,
              (unsigned long)i, (unsigned long)count, (long)found, (long)expected);
    }
}

/* --- one random collective: its data, its request, its check ---------------------------------- */
typedef struct {
    plc_request request;
    uint64_t seed, count;
    int64_t factor;
    void *input, *output;
    void *inputs[PLC_MAX_RANKS], *outputs[PLC_MAX_RANKS];
    uint64_t in_counts[PLC_MAX_RANKS], out_counts[PLC_MAX_RANKS];
} exercise;

/* 0, 1, odd, about a slot, several slots. */
static uint64_t random_count(uint64_t *state) {
    const uint64_t choices[] =
        {0, 1, 7, 100 + below(state, 400), SLOT_BYTES / 4 + below(state, 3), 3 * SLOT_BYTES + 13};
    return choices[below(state, COUNT(choices))];
}

static uint64_t share_of(uint64_t seed, uint32_t from, uint32_t to) {
    uint64_t state = seed + from * 31 + to * 977;
    return below(&state, 4) == 0 ? 0 : below(&state, 900);
}

static uint64_t block_start(const exercise *e, uint32_t rank) {
    uint64_t start = 0;
    for (uint32_t r = 0; r < rank; r++) start += e->in_counts[r];
    return start;
}

static void prepare(rank_thread *self, exercise *e) {
    uint64_t *state = &self->seed;
    *e = (exercise){.seed = next_random(state)};
    plc_request *q = &e->request;
    q->kind = (uint32_t)below(state, PLC_HOSTS_BEGIN); /* those of several hosts: hosts.c */
    q->dtype = dtypes[below(state, COUNT(dtypes))];
    q->op = ops[below(state, COUNT(ops))];
    bool real = q->dtype == PLC_F32 || q->dtype == PLC_F64 || q->dtype == PLC_BF16;
    if (q->op == PLC_PREMUL_SUM && !real) q->op = PLC_SUM;
    q->root = (int32_t)below(state, self->ranks);
    q->timeout_ns = -1;
    e->factor = 1 + (int64_t)below(state, 3);
    q->factor = (double)e->factor;
    e->count = random_count(state);
    uint32_t me = self->rank;
    bool root = me == (uint32_t)q->root;
    for (uint32_t r = 0; r < self->ranks; r++) e->in_counts[r] = e->out_counts[r] = 0;
    switch (q->kind) {
    case PLC_BARRIER: break;
    case PLC_ALLREDUCE:
    case PLC_REDUCE:
    case PLC_BROADCAST:
        q->count = e->count;
        e->input = filled(e->seed, me, q->dtype, 0, e->count);
        q->input = q->output = e->input;
        break;
    case PLC_ALLGATHER:
    case PLC_GATHER:
        q->count = share_of(e->seed, me, 0);
        e->input = filled(e->seed, me, q->dtype, 0, q->count);
        q->input = e->input;
        for (uint32_t r = 0; r < self->ranks && (root || q->kind == PLC_ALLGATHER); r++) {
            e->out_counts[r] = share_of(e->seed, r, 0);
            e->outputs[r] = malloc(e->out_counts[r] * 8 + 1);
        }
        break;
    case PLC_REDUCE_SCATTER:
        for (uint32_t r = 0; r < self->ranks; r++) e->in_counts[r] = share_of(e->seed, r, r);
        for (uint32_t r = 0; r < self->ranks; r++)
            e->inputs[r] = filled(e->seed, me, q->dtype, block_start(e, r), e->in_counts[r]);
        e->output = malloc(e->in_counts[me] * 8 + 1);
        q->output = e->output;
        break;
    default: /* PLC_ALLTOALL, PLC_SCATTER */
        for (uint32_t r = 0; r < self->ranks; r++) {
            bool sends = q->kind == PLC_ALLTOALL || root, wants = q->kind == PLC_ALLTOALL ||
                r == (uint32_t)q->root;
            e->in_counts[r] = sends ? share_of(e->seed, me, r) : 0;
            e->inputs[r] = filled(e->seed, me * 64 + r, q->dtype, 0, e->in_counts[r]);
            e->out_counts[r] = wants ? share_of(e->seed, r, me) : 0;
            e->outputs[r] = malloc(e->out_counts[r] * 8 + 1);
        }
    }
    q->inputs = (const void *const *)e->inputs, q->outputs = e->outputs;
    q->in_counts = e->in_counts, q->out_counts = e->out_counts;
    if (q->kind == PLC_GATHER && !root) q->outputs = NULL, q->out_counts = NULL;
    if (q->kind == PLC_SCATTER && !root) q->inputs = NULL, q->in_counts = NULL;
}

static void verify(rank_thread *self, exercise *e) {
    const plc_request *q = &e->request;
    uint32_t me = self->rank;
    bool root = me == (uint32_t)q->root;
    if (q->kind == PLC_ALLREDUCE || (q->kind == PLC_REDUCE && root))
        check_reduced(self, "reduce", e->input, e->seed, q->dtype, q->op, e->factor, 0, e->count);
    if (q->kind == PLC_REDUCE && !root)
        check_values(self, "reduce", e->input, e->seed, me, q->dtype, 0, e->count);
    if (q->kind == PLC_BROADCAST)
        check_values(self, "broadcast", e->input, e->seed, (uint32_t)q->root, q->dtype, 0,
                     e->count);
    if (q->kind == PLC_REDUCE_SCATTER)
        check_reduced(self, "reduce_scatter", e->output, e->seed, q->dtype, q->op, e->factor,
                      block_start(e, me),
                      e->in_counts[me]);
    for (uint32_t r = 0; r < self->ranks; r++) {
        bool gathers = q->kind == PLC_ALLGATHER || q->kind == PLC_GATHER;
        uint32_t from = gathers ? r : r * 64 + me;
        check_values(self, "all_to_all or gather", e->outputs[r], e->seed, from, q->dtype, 0,
                     e->out_counts[r]);
        free(e->inputs[r]), free(e->outputs[r]);
    }
    free(e->input), free(e->output);
}

static void maybe_nap(rank_thread *self) {
    if (below(&self->mine, 8) == 0) nap_ns((int64_t)below(&self->mine, 200000));
}

static void random_collectives(rank_thread *self) {
    exercise *e = malloc(sizeof *e);
    for (int i = 0; i < 250; i++) {
        prepare(self, e);
        maybe_nap(self);
        CHECK_STATUS(PLC_OK, plc_run(self->comm, &e->request));
        verify(self, e);
    }
    free(e);
}

void collectives(uint64_t seed) {
    for (uint32_t ranks = 1; ranks <= 5; ranks++)
        in_new_world(ranks, 30000, random_collectives, seed + ranks);
}

/* --- long reductions, read straight from the peers' memory where the system allows it --------- */
static void long_reductions(rank_thread *self) {
    CHECK_STATUS(PLC_OK, plc_comm_probe_direct_reads(self->comm, 1));
    CHECK(self->comm->direct || self->ranks == 1, "a process may not read its own memory");
    for (int i = 0; i < 6; i++) {
        uint64_t count = 140000 + below(&self->seed, 5), seed = next_random(&self->seed);
        uint32_t dtype = i % 2 ? PLC_F64 : PLC_I32,
            root = (uint32_t)below(&self->seed, self->ranks);
        void *data = filled(seed, self->rank, dtype, 0, count);
        plc_request q =
            {.kind = i % 3 ? PLC_ALLREDUCE : PLC_REDUCE, .dtype = dtype, .op = PLC_SUM,
             .count = count,
                         .root = (int32_t)root, .input = data, .output = data, .timeout_ns = -1};
        maybe_nap(self);
        CHECK_STATUS(PLC_OK, plc_run(self->comm, &q));
        if (q.kind == PLC_ALLREDUCE || self->rank == root)
            check_reduced(self, "long", data, seed, dtype, PLC_SUM, 1, 0, count);
        free(data);
    }
}

void direct(uint64_t seed) {
    for (uint32_t ranks = 1; ranks <= 4; ranks++)
        in_new_world(ranks, 30000, long_reductions, seed + ranks);
}

/* --- asynchronous: several under way, mixed with calls that wait ------------------------------ */
#define UNDER_WAY 6

static void random_submissions(rank_thread *self) {
    exercise *all = malloc(UNDER_WAY * sizeof *all);
    for (int round = 0; round < 40; round++) {
        uint64_t n = 1 + below(&self->seed, UNDER_WAY);
        bool last_waits = below(&self->seed, 2);
        for (uint64_t i = 0; i < n; i++) {
            prepare(self, &all[i]);
            bool waits = last_waits && i == n - 1;
            CHECK_STATUS(PLC_OK, (waits ? plc_run : plc_submit)(self->comm, &all[i].request));
        }
        maybe_nap(self);
        for (uint64_t i = 0; i < n; i++) {
            int status = last_waits && i == n - 1 ? PLC_OK : PLC_PENDING;
            while (status == PLC_PENDING)
                status =
                    plc_request_wait(self->comm, &all[i].request, below(&self->mine, 2) ? -1 : MS);
            CHECK_STATUS(PLC_OK, status);
            verify(self, &all[i]);
        }
    }
    free(all);
}

void submissions(uint64_t seed) {
    for (uint32_t ranks = 2; ranks <= 4; ranks++)
        in_new_world(ranks, 30000, random_submissions, seed + ranks);
}

/* --- messages: everyone sends to everyone under three tags; order holds per peer and tag ------ */
#define TAGS 3
#define ROUNDS 12

static uint64_t message_bytes(uint64_t seed, uint32_t from, uint32_t to, int32_t tag, int round) {
    uint64_t state = seed + from * 7919 + to * 104729 + (uint64_t)tag * 1299709 + (uint64_t)round;
    const uint64_t choices[] =
        {0, 1, 63, below(&state, 2000), RING_BYTES - 64, 2 * RING_BYTES + below(&state, 999)};
    return choices[below(&state, COUNT(choices))];
}

static unsigned char message_byte(uint32_t from, int32_t tag, int round, uint64_t i) {
    return (unsigned char)(from * 50 + (uint32_t)tag * 17 + (uint32_t)round * 3 + i);
}

static plc_message *new_message(uint32_t peer, int32_t tag, uint64_t bytes) {
    plc_message *m = calloc(1, sizeof *m);
    *m =
        (plc_message){.peer = (int32_t)peer, .tag = tag, .buffer = malloc(bytes + 1),
                      .bytes = bytes, .timeout_ns = -1};
    return m;
}

static void free_message(plc_message *m) {
    free(m->buffer);
    free(m);
}

static void all_to_all_messages(rank_thread *self) {
    uint32_t n = self->ranks;
    plc_message *sends[8][TAGS], *receives[8][TAGS];
    for (int round = 0; round < ROUNDS; round++) {
        bool sends_first = below(&self->mine, 2);
        for (int step = 0; step < 2; step++) {
            bool sending = (step == 0) == sends_first;
            for (uint32_t k = 1; k < n; k++) {
                uint32_t peer = (self->rank + k) % n;
                for (int32_t t = 0; t < TAGS; t++) {
                    /* Each in an order of its own */
                    int32_t tag = (t + (int32_t)self->rank) % TAGS;
                    uint64_t bytes = sending ?
                        message_bytes(self->seed, self->rank, peer, tag, round)
                                             :
                                                 message_bytes(self->seed, peer, self->rank, tag,
                                                               round);
                    plc_message *m = new_message(peer, tag, bytes);
                    for (uint64_t i = 0; i < bytes && sending; i++)
                        ((unsigned char *)m->buffer)[i] = message_byte(self->rank, tag, round, i);
                    (sending ? sends : receives)[peer][tag] = m;
                    CHECK_STATUS(PLC_OK, (sending ? plc_send : plc_receive)(self->comm, m));
                }
            }
        }
        for (uint32_t k = 1; k < n; k++) {
            uint32_t peer = (self->rank + k) % n;
            for (int32_t tag = 0; tag < TAGS; tag++) {
                plc_message *m = receives[peer][tag];
                CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, m, -1));
                CHECK(m->source == (int32_t)peer, "from %d instead of %u", m->source, peer);
                for (uint64_t i = 0; i < m->bytes; i++)
                    CHECK(((unsigned char *)m->buffer)[i] == message_byte(peer, tag, round, i),
                          "rank %u: message of %lu bytes from %u, tag %d, round %d: wrong at %lu",
                              self->rank,
                          (unsigned long)m->bytes, peer, tag, round, (unsigned long)i);
                CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, sends[peer][tag], -1));
                free_message(m), free_message(sends[peer][tag]);
            }
        }
    }
    CHECK_STATUS(PLC_OK, barrier(self));
}

/* Rank 0 takes what comes; the others send numbered messages, which must come in order from
 * each. */
static void any_source(rank_thread *self) {
    enum { EACH = 60 };
    uint64_t word;
    if (self->rank != 0) {
        for (word = 0; word < EACH; word++) {
            plc_message m =
                {.peer = 0, .tag = 5, .buffer = &word, .bytes = sizeof word, .timeout_ns = -1};
            CHECK_STATUS(PLC_OK, plc_send(self->comm, &m));
            CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
            maybe_nap(self);
        }
    } else {
        uint64_t next[8] = {0};
        for (uint32_t i = 0; i < EACH * (self->ranks - 1); i++) {
            plc_message m =
                {.peer = PLC_ANY_SOURCE, .tag = 5, .buffer = &word, .bytes = sizeof word,
                 .timeout_ns = -1};
            CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
            CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
            CHECK(word == next[m.source], "message %lu instead of %lu from rank %d",
                  (unsigned long)word,
                  (unsigned long)next[m.source], m.source);
            next[m.source]++;
        }
    }
    CHECK_STATUS(PLC_OK, barrier(self));
}

void messages(uint64_t seed) {
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        in_new_world(ranks, 30000, all_to_all_messages, seed + ranks);
        in_new_world(ranks, 30000, any_source, seed + ranks);
    }
}

/* --- buckets ---------------------------------------------------------------------------------- */
#define BUCKETS 4

static void use_buckets(rank_thread *self) {
    /* None, one, one chunk, several chunks */
    static const uint64_t counts[BUCKETS] = {0, 1, 5000, 40001};
    world *w = self->in;
    plc_arena *arena;
    uint64_t per_rank = 8 * 50000;
    CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, w->shared, per_rank, BUCKETS, &arena));
    float *mine = plc_arena_region(arena, self->rank);
    uint64_t offset = 0, at_element[BUCKETS];
    for (uint32_t b = 0; b < BUCKETS; b++) {
        at_element[b] = offset;
        CHECK_STATUS(PLC_OK, plc_bucket_define(arena, b, offset * 4, counts[b], PLC_F32, PLC_SUM));
        offset += counts[b];
    }
    for (int use = 0; use < 25; use++) {
        uint64_t seed = next_random(&self->seed);
        for (uint32_t b = 0; b < BUCKETS; b++) {
            for (uint64_t i = 0; i < counts[b]; i++)
                mine[at_element[b] + i] = (float)value(seed, self->rank, at_element[b] + i);
            maybe_nap(self);
            CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, b));
        }
        for (uint32_t b = 0; b < BUCKETS; b++) {
            CHECK_STATUS(PLC_OK, plc_bucket_finish(arena, b, -1));
            check_reduced(self, "bucket", mine + at_element[b], seed, PLC_F32, PLC_SUM, 1,
                          at_element[b], counts[b]);
        }
    }
    plc_arena_close(arena);
}

static void in_worlds_with_arena(rank_fn fn, uint64_t seed) {
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        world w = new_world(ranks, 30000);
        uint64_t bytes = plc_arena_bytes(ranks, 8 * 50000, BUCKETS);
        w.shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(w.shared != MAP_FAILED, "mmap: errno %d", errno);
        run_world(&w, fn, seed + ranks);
        munmap(w.shared, bytes);
        end_world(&w);
    }
}

void buckets(uint64_t seed) { in_worlds_with_arena(use_buckets, seed); }

/* Headers ride along with a bucket; its average is weighted by samples, which differ from rank to
 * rank and use to use. */
static double samples_of(uint64_t seed, uint32_t rank) {
    return (double)value(seed, rank + 100, 0) * 3;
}

static double set_weights(plc_arena *arena, uint32_t ranks, uint64_t seed, bool by_samples) {
    double samples = 0, weights[8];
    for (uint32_t r = 0; r < ranks; r++) samples += samples_of(seed, r);
    for (uint32_t r = 0; r < ranks; r++)
        weights[r] = by_samples ? samples_of(seed, r) / samples : 1.0 / ranks;
    plc_arena_set_weights(arena, weights);
    return samples;
}

static void weigh_buckets(rank_thread *self) {
    enum { ELEMENTS = 30000 };
    plc_arena *arena;
    CHECK_STATUS(PLC_OK,
                 plc_arena_open(self->comm, -1, self->in->shared, 8 * 50000, BUCKETS, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, ELEMENTS, PLC_F64, PLC_AVG));
    double *mine = plc_arena_region(arena, self->rank), headers[8 * PLC_HEADER_NUMBERS];
    for (int use = 0; use < 25; use++) {
        uint64_t seed = next_random(&self->seed);
        double header[PLC_HEADER_NUMBERS] = {0, samples_of(seed, self->rank)};
        double samples = set_weights(arena, self->ranks, seed, true);
        for (uint64_t i = 0; i < ELEMENTS; i++) mine[i] = (double)value(seed, self->rank, i);
        maybe_nap(self);
        uint32_t number = plc_arena_write_header(arena, header);
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_OK, plc_bucket_finish(arena, 0, -1));
        plc_arena_read_headers(arena, number, headers);
        for (uint32_t r = 0; r < self->ranks; r++)
            CHECK(headers[r * PLC_HEADER_NUMBERS + 1] == samples_of(seed, r), "header of rank %u",
                  r);
        for (uint64_t i = 0; i < ELEMENTS; i++) {
            double expected = 0;
            for (uint32_t r = 0; r < self->ranks; r++)
                expected += samples_of(seed, r) / samples * (double)value(seed, r, i);
            double error = mine[i] - expected;
            CHECK(error < 1e-9 &&
                  error > -1e-9, "use %d, element %lu: %g instead of %g", use, (unsigned long)i,
                      mine[i],
                  expected);
        }
    }
    plc_arena_close(arena);
}

void weighted_buckets(uint64_t seed) { in_worlds_with_arena(weigh_buckets, seed); }

/* A whole step in two calls: pieces of private memory move in, then header, bucket and signal at
 * once. Every third step the ranks' headers differ, and the bucket is finished by a call of its
 * own. */
static void take_whole_steps(rank_thread *self) {
    enum { PIECES = 3, ELEMENTS = 45000, BUCKET = 0, SIGNALS = 1, OFFSET = 64 };
    static const uint64_t bytes[PIECES] = {8, 8 * 2499, 8 * 42500};
    plc_arena *arena;
    CHECK_STATUS(PLC_OK,
                 plc_arena_open(self->comm, -1, self->in->shared, 8 * 50000, BUCKETS, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, BUCKET, OFFSET, ELEMENTS, PLC_F64, PLC_SUM));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, SIGNALS, 0, 0, PLC_F64, PLC_SUM));
    double *held = malloc(8 * ELEMENTS),
        *mine = (double *)((char *)plc_arena_region(arena, self->rank) + OFFSET);
    CHECK(held != NULL, "malloc: errno %d", errno);
    uint64_t addresses[PIECES], moved = 0;
    for (int p = 0; p < PIECES; p++)
        addresses[p] = (uint64_t)(uintptr_t)held + moved, moved += bytes[p];
    addresses[0] = (uint64_t)(uintptr_t)mine; /* lies there already */
    for (int use = 0; use < 25; use++) {
        uint64_t seed = next_random(&self->seed);
        bool differs = use % 3 == 2;
        double header[PLC_HEADER_NUMBERS] = {0, differs ? 1.0 + self->rank : 1.0, 1, 1};
        uint32_t number;
        for (uint64_t i = 0; i < ELEMENTS; i++) held[i] = (double)value(seed, self->rank, i);
        mine[0] = held[0];
        maybe_nap(self);
        CHECK_STATUS(PLC_OK, plc_arena_fill(arena, OFFSET, PIECES, addresses, bytes));
        CHECK_STATUS(differs ? PLC_PENDING : PLC_OK,
                     plc_arena_step(arena, header, SIGNALS, BUCKET, -1, &number));
        if (differs) CHECK_STATUS(PLC_OK, plc_bucket_finish(arena, BUCKET, -1));
        for (uint64_t i = 0; i < ELEMENTS; i++) {
            double expected = 0;
            for (uint32_t r = 0; r < self->ranks; r++) expected += (double)value(seed, r, i);
            CHECK(mine[i] == expected, "use %d, element %lu: %g instead of %g", use,
                  (unsigned long)i, mine[i], expected);
        }
    }
    /* Does not fit */
    CHECK_STATUS(PLC_INVALID, plc_arena_fill(arena, 8 * 50000 - 8, PIECES, addresses, bytes));
    CHECK_STATUS(PLC_INVALID, plc_arena_fill(arena, UINT64_MAX - 7, 1, addresses, bytes));
    free(held);
    plc_arena_close(arena);
}

void whole_steps(uint64_t seed) { in_worlds_with_arena(take_whole_steps, seed); }

/* Buckets in the ranks' own memory, which share the little room they go through. Every other step
 * by samples. */
static void use_external_buckets(rank_thread *self) {
    enum { ROOM = 16384 };
    /* None, less than a part, many blocks */
    static const uint64_t counts[BUCKETS - 1] = {0, 1, 40001};
    plc_arena *arena;
    CHECK_STATUS(PLC_OK,
                 plc_arena_open(self->comm, -1, self->in->shared, 8 * 50000, BUCKETS, &arena));
    for (uint32_t b = 0; b < BUCKETS - 1; b++)
        CHECK_STATUS(PLC_OK,
                     plc_bucket_define_external(arena, b, 4096, ROOM, counts[b], PLC_F64, PLC_AVG));
    double *mine = malloc(8 * 40001);
    CHECK(mine != NULL, "malloc: errno %d", errno);
    for (int use = 0; use < 20; use++) {
        uint64_t seed = next_random(&self->seed);
        double samples = set_weights(arena, self->ranks, seed, use % 2);
        for (uint32_t b = 0; b < BUCKETS - 1; b++) {
            for (uint64_t i = 0; i < counts[b]; i++) mine[i] = (double)value(seed, self->rank, i);
            maybe_nap(self);
            CHECK_STATUS(PLC_OK, plc_bucket_reduce_external(arena, b, mine, -1));
            for (uint64_t i = 0; i < counts[b]; i++) {
                double expected = 0;
                for (uint32_t r = 0; r < self->ranks; r++)
                    expected += (use % 2 ? samples_of(seed, r) / samples : 1.0 / self->ranks) *
                        (double)value(seed, r, i);
                double error = mine[i] - expected;
                CHECK(error < 1e-9 &&
                      error > -1e-9, "use %d, bucket %u, element %lu: %g instead of %g", use, b,
                      (unsigned long)i, mine[i], expected);
            }
        }
    }
    free(mine);
    plc_arena_close(arena);
}

void external_buckets(uint64_t seed) { in_worlds_with_arena(use_external_buckets, seed); }

/* The eight leaves of a tree, which other ranks hold each time; a rank may hold none. Whatever it
 * holds lies in three arrays, of which the second may be missing. */
static void average_trees(rank_thread *self) {
    enum { ROOM = 16384, LEAVES = 8, ARRAYS = 3, ELEMENTS = 9001 };
    static const uint32_t adds[LEAVES] = {0, 1, 0, 2, 0, 1, 0, 3};
    static const uint64_t many[ARRAYS] = {1, 4000, ELEMENTS}, few[ARRAYS] = {3, 40, 90};
    plc_arena *arena;
    CHECK_STATUS(PLC_OK,
                 plc_arena_open(self->comm, -1, self->in->shared, 8 * 50000, BUCKETS, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define_external(arena, 0, 4096, ROOM, 1, PLC_F64, PLC_SUM));
    double *held = malloc(8 * ELEMENTS * (LEAVES + 1)), *result = held + ELEMENTS * LEAVES;
    CHECK(held != NULL, "malloc: errno %d", errno);
    for (int use = 0; use < 20; use++) {
        uint64_t seed = next_random(&self->seed), inputs[LEAVES * ARRAYS], outputs[ARRAYS];
        uint32_t owners[LEAVES], own = 0;
        const uint64_t *ends = value(seed, 9, 9) % 2 ? many : few;
        double *first = result;
        for (uint32_t n = 0; n < LEAVES; n++) {
            owners[n] = (uint32_t)value(seed, n, 1) % self->ranks;
            if (owners[n] != self->rank) continue;
            double *mine = held + ELEMENTS * own;
            for (uint64_t i = 0; i < ELEMENTS; i++) mine[i] = (double)value(seed, n, i);
            for (uint32_t a = 0; a < ARRAYS; a++)
                inputs[own * ARRAYS + a] = (uint64_t)(uintptr_t)(mine + (a == 0 ? 0 : ends[a - 1]));
            if (n == 5) inputs[own * ARRAYS + 1] = 0;
            else if (own == 0 && use % 2) first = mine; /* in the memory of a node */
            own++;
        }
        for (uint32_t a = 0; a < ARRAYS; a++)
            outputs[a] = (uint64_t)(uintptr_t)(first + (a == 0 ? 0 : ends[a - 1]));
        plc_tree_average what = {.nodes = LEAVES, .owners = owners, .adds = adds, .arrays = ARRAYS,
                                 .dtype = PLC_F64, .ends = ends, .inputs = inputs,
                                 .outputs = outputs, .divisor = 4};
        maybe_nap(self);
        CHECK_STATUS(PLC_OK, plc_arena_average_tree(arena, 0, &what, -1));
        for (uint64_t i = 0; i < ends[ARRAYS - 1]; i++) {
            double expected = 0;
            for (uint32_t n = 0; n < LEAVES; n++)
                expected += n == 5 && i >= ends[0] && i < ends[1] ? 0 : (double)value(seed, n, i);
            CHECK(first[i] == expected / 4, "use %d, element %lu: %g instead of %g", use,
                  (unsigned long)i, first[i], expected / 4);
        }
    }
    static const uint32_t no_root[2] = {0, 0}, nobody[2] = {0, 1000};
    plc_tree_average wrong = {.nodes = 2, .owners = no_root, .adds = no_root, .dtype = PLC_F64,
                              .divisor = 1};
    CHECK_STATUS(PLC_INVALID, plc_arena_average_tree(arena, 0, &wrong, -1));
    wrong.adds = (const uint32_t[]){0, 1}, wrong.owners = nobody;
    CHECK_STATUS(PLC_INVALID, plc_arena_average_tree(arena, 0, &wrong, -1));
    wrong.owners = no_root, wrong.dtype = PLC_I32;
    CHECK_STATUS(PLC_INVALID, plc_arena_average_tree(arena, 0, &wrong, -1));
    wrong.dtype = PLC_F64;
    CHECK_STATUS(PLC_INVALID, plc_arena_average_tree(arena, 1, &wrong, -1)); /* has no room */
    free(held);
    plc_arena_close(arena);
}

void tree_averages(uint64_t seed) { in_worlds_with_arena(average_trees, seed); }

/* --- everything at once: two communicators of the same ranks, used from two threads each ------ */
static void *collectives_in_a_thread(void *argument) {
    random_collectives(argument);
    return NULL;
}

static void two_groups_at_once(rank_thread *self) {
    rank_thread other = *self;
    pthread_t thread;
    other.comm = join_world(self->in->shared, self->rank);
    CHECK(pthread_create(&thread, NULL, collectives_in_a_thread, &other) == 0, "no thread");
    all_to_all_messages(self);
    random_submissions(self);
    pthread_join(thread, NULL);
    plc_comm_leave(other.comm);
    plc_comm_free(other.comm);
}

void two_groups(uint64_t seed) {
    world first = new_world(3, 30000), second = new_world(3, 30000);
    first.shared = &second;
    run_world(&first, two_groups_at_once, seed);
    end_world(&first), end_world(&second);
}

/* Steps of optimizers: arrays of all lengths and types, whole, in parts and with threads. */
#include "scenarios.h"

enum { ARRAYS = 7, ROWS = 6, MOST = 5000 };

/* Each array in memory of its own: a read or write beyond it is seen. */
typedef struct {
    void *at[ROWS][ARRAYS];
    uint64_t addresses[ROWS * ARRAYS], counts[ARRAYS];
    uint32_t kinds[ARRAYS];
} arrays;

static const uint32_t dtypes[] = {PLC_F32, PLC_F64, PLC_F16, PLC_BF16};

static void write_number(void *at, uint64_t index, uint32_t dtype, double value) {
    if (dtype == PLC_F32) ((float *)at)[index] = (float)value;
    else if (dtype == PLC_F64) ((double *)at)[index] = value;
    else if (dtype == PLC_F16) ((uint16_t *)at)[index] = (uint16_t)(0x3000 + (int)(value * 100));
    else ((uint16_t *)at)[index] = (uint16_t)(0x3e00 + (int)(value * 100));
}

static arrays *new_arrays(uint64_t seed) {
    arrays *a = calloc(1, sizeof *a);
    CHECK(a != NULL, "no memory");
    uint64_t state = seed;
    for (uint32_t i = 0; i < ARRAYS; i++) {
        uint32_t dtype = dtypes[below(&state, 4)];
        bool wide = below(&state, 2);
        a->counts[i] = below(&state, 2) ? below(&state, 40) : below(&state, MOST);
        a->kinds[i] = dtype | (below(&state, 2) ? PLC_FIRST_UPDATE : 0) |
                      (wide ? PLC_WIDE_STEP : 0);
        for (uint32_t row = 0; row < ROWS; row++) {
            bool is_step = row == ROWS - 1;
            uint64_t count = is_step ? 1 : a->counts[i];
            uint32_t type = is_step ? (wide ? PLC_F64 : PLC_F32) : dtype;
            void *at = a->at[row][i] = malloc(count * plc_element_bytes(type) + (count == 0));
            CHECK(at != NULL, "no memory");
            for (uint64_t j = 0; j < count; j++)
                write_number(at, j, type, is_step ? i : (double)below(&state, 100) / 100);
            a->addresses[row * ARRAYS + i] = (uint64_t)(uintptr_t)at;
        }
    }
    return a;
}

static void free_arrays(arrays *a) {
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t i = 0; i < ARRAYS; i++) free(a->at[row][i]);
    free(a);
}

static plc_update update_of(const arrays *a, uint32_t rule, uint32_t options) {
    return (plc_update){.rule = rule, .options = options, .lr = 0.1, .weight_decay = 0.01,
                        .eps = 1e-8, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.99,
                        .grad_scale = options & PLC_MAXIMIZE ? 4 : 1, .clip = 1, .parts = 1,
                        .threads = 1, .arrays = ARRAYS, .addresses = a->addresses,
                        .counts = a->counts, .kinds = a->kinds};
}

static void compare(const arrays *one, const arrays *other) {
    for (uint32_t row = 0; row < ROWS - 1; row++)
        for (uint32_t i = 0; i < ARRAYS; i++) {
            uint64_t bytes =
                one->counts[i] * plc_element_bytes(one->kinds[i] & PLC_DTYPE_MASK);
            CHECK(bytes == 0 || memcmp(one->at[row][i], other->at[row][i], bytes) == 0,
                  "row %u of array %u differs", row, i);
        }
}

static void check_journal(const plc_update *u, void *journal, uint64_t updates_made) {
    plc_journal_state state;
    plc_journal_end(journal);
    plc_journal_repair(u, journal);
    plc_journal_read(journal, &state);
    CHECK(state.step == 7 && state.ended == 1, "step %lu", (unsigned long)state.step);
    CHECK(state.begun == updates_made && state.made == updates_made, "%lu begun, %lu made",
          (unsigned long)state.begun, (unsigned long)state.made);
}

void updates(uint64_t seed) {
    for (uint32_t rule = 0; rule < PLC_RULES; rule++)
        for (uint32_t options = 0; options < 16; options++) {
            uint64_t numbers = seed * 100 + rule * 16 + options;
            arrays *whole = new_arrays(numbers), *cut = new_arrays(numbers);
            plc_update u = update_of(whole, rule, options);
            CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
            u = update_of(cut, rule, options);
            u.parts = 1 + (uint32_t)(numbers % 5);
            u.threads = 1 + (uint32_t)(numbers % 4);
            /* Every second one goes through a journal. */
            void *journal = aligned_alloc(64, ALIGN_UP(plc_journal_bytes(), 64));
            CHECK(journal != NULL, "no memory");
            memset(journal, 0, plc_journal_bytes());
            plc_journal_begin(journal, 7);
            if (numbers & 1) u.journal = journal;
            for (u.part = 0; u.part < u.parts; u.part++) {
                /* Who makes a part counts the step for itself: here one counter is for all. */
                for (uint32_t i = 0; u.part > 0 && i < ARRAYS; i++) {
                    void *step = cut->at[ROWS - 1][i];
                    if (cut->kinds[i] & PLC_WIDE_STEP) *(double *)step -= 1;
                    else *(float *)step -= 1;
                }
                CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
            }
            compare(whole, cut);
            check_journal(&u, journal, numbers & 1 ? u.parts : 0);
            compare(whole, cut); /* there was nothing to repair */
            free(journal);
            free_arrays(whole);
            free_arrays(cut);
        }
}

/* --- gradients of several ranks, summed in the pass; each in memory of its own ---------------- */
enum { ELEMENTS = 5 * (int)PLC_NORM_BLOCK_BYTES / 4 + 3, CONTRIBUTORS = 3 };

void sums(uint64_t seed) {
    float *parameter[2], *gradient[CONTRIBUTORS], *average = malloc(ELEMENTS * sizeof(float));
    int64_t distances[CONTRIBUTORS];
    double weights[CONTRIBUTORS], whole[6], cut[6];
    uint64_t state = seed, count = ELEMENTS;
    uint32_t kind = PLC_F32;
    bool even = below(&state, 2);
    CHECK(average != NULL, "no memory");
    for (uint32_t i = 0; i < 2; i++) parameter[i] = calloc(ELEMENTS, sizeof(float));
    for (uint32_t r = 0; r < CONTRIBUTORS; r++) {
        gradient[r] = malloc(ELEMENTS * sizeof(float));
        CHECK(gradient[r] != NULL, "no memory");
        for (uint32_t i = 0; i < ELEMENTS; i++) gradient[r][i] = (float)below(&state, 1000);
        distances[r] = (int64_t)((intptr_t)gradient[r] - (intptr_t)gradient[0]);
        weights[r] = even ? 1.0 / CONTRIBUTORS : 0.25 * (r + 1);
    }
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        average[i] = gradient[0][i] * (float)weights[0];
        for (uint32_t r = 1; r < CONTRIBUTORS; r++)
            average[i] += gradient[r][i] * (float)weights[r];
    }
    for (uint32_t run = 0; run < 2; run++) {
        uint64_t addresses[ROWS] = {(uint64_t)(uintptr_t)parameter[run],
                                    (uint64_t)(uintptr_t)(run == 0 ? average : gradient[0])};
        plc_update u = {.rule = PLC_SGD, .lr = 0.1, .grad_scale = 1, .clip = 0.5, .parts = 1,
                        .threads = 1, .arrays = 1, .addresses = addresses, .counts = &count,
                        .kinds = &kind};
        if (run == 1) {
            u.ranks = CONTRIBUTORS, u.distances = distances, u.weights = weights;
            u.parts = 2, u.threads = 1 + (uint32_t)below(&state, 3);
        }
        CHECK(plc_norm_blocks(&u) == 6, "%lu blocks", (unsigned long)plc_norm_blocks(&u));
        for (u.part = 0; u.part < u.parts; u.part++) {
            CHECK_STATUS(PLC_OK, plc_square_sums(&u, run == 0 ? whole : cut));
            CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
        }
    }
    CHECK(memcmp(whole, cut, sizeof whole) == 0, "the squares differ");
    CHECK(memcmp(parameter[0], parameter[1], ELEMENTS * sizeof(float)) == 0, "the sums differ");
    for (uint32_t r = 0; r < CONTRIBUTORS; r++) free(gradient[r]);
    free(parameter[0]), free(parameter[1]), free(average);
}

/* --- meetings: ranks that have data make an update, the others are not waited for ------------- */
enum { MEETINGS = 200, NUMBERS = 4096 };

typedef struct {
    _Alignas(64) unsigned char attendance[64 * 64];
    float parameter[NUMBERS], gradient[NUMBERS];
} shared_update;

static void meet_and_update(rank_thread *self) {
    shared_update *shared = self->in->shared;
    uint64_t addresses[ROWS] = {(uint64_t)(uintptr_t)shared->parameter,
                                (uint64_t)(uintptr_t)shared->gradient};
    uint64_t count = NUMBERS, brought[2], found[2 * 8];
    uint32_t kind = PLC_F32;
    uint8_t present[8];
    for (uint32_t m = 0; m < MEETINGS; m++) {
        /* The same on all ranks, and at least one comes. */
        uint64_t state = self->seed + m;
        uint32_t ranks = 0, part = 0, certain = (uint32_t)below(&state, self->ranks);
        for (uint32_t r = 0; r < self->ranks; r++) {
            present[r] = r == certain || below(&state, 4) > 0;
            if (r == self->rank) part = ranks;
            ranks += present[r];
        }
        /* Who misses one comes to a later one. */
        CHECK_STATUS(PLC_OK, barrier(self));
        if (!present[self->rank]) continue;
        brought[0] = m;
        brought[1] = self->rank;
        CHECK_STATUS(PLC_OK, plc_meet(self->comm, shared->attendance, 2 * m + 2, present, brought,
                                      found, -1));
        for (uint32_t r = 0; r < self->ranks; r++)
            CHECK(!present[r] || (found[2 * r] == m && found[2 * r + 1] == r), "rank %u", r);
        plc_update u = {.rule = PLC_SGD, .lr = 1, .grad_scale = 1, .clip = 1, .part = part,
                        .parts = ranks, .threads = 1, .arrays = 1, .addresses = addresses,
                        .counts = &count, .kinds = &kind};
        CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
        CHECK_STATUS(PLC_OK, plc_meet(self->comm, shared->attendance, 2 * m + 3, present, brought,
                                      found, -1));
        for (uint32_t i = 0; i < NUMBERS; i += 97)
            CHECK(shared->parameter[i] == -(float)(m + 1), "%g at %u after meeting %u",
                  (double)shared->parameter[i], i, m);
    }
}

void meetings(uint64_t seed) {
    world w = new_world(4, 20000);
    shared_update *shared = aligned_alloc(64, ALIGN_UP(sizeof *shared, 64));
    CHECK(shared != NULL && plc_meeting_bytes(4) <= sizeof shared->attendance, "no memory");
    memset(shared, 0, sizeof *shared);
    for (uint32_t i = 0; i < NUMBERS; i++) shared->gradient[i] = 1;
    w.shared = shared;
    run_world(&w, meet_and_update, seed);
    free(shared);
    end_world(&w);
}

/* --- gradients of which ranks hold the nodes of a tree ---------------------------------------- */
enum { LEAVES = 8, STEPS = 20, LONG = 3 * (int)PLC_NORM_BLOCK_BYTES / 8 + 5, SHORT = 3 };

typedef struct {
    uint64_t addresses[LEAVES][2]; /* of each node's two arrays */
    double longer[LONG], shorter[SHORT];
} tree_update;

static double leaf(uint64_t seed, uint32_t n, uint64_t i) {
    uint64_t state = seed + n * 1000003ull + i;
    return (double)below(&state, 1000);
}

static void sum_trees(rank_thread *self) {
    static const uint32_t adds[LEAVES] = {0, 1, 0, 2, 0, 1, 0, 3};
    tree_update *shared = self->in->shared;
    uint64_t addresses[2 * ROWS] = {(uint64_t)(uintptr_t)shared->longer,
                                    (uint64_t)(uintptr_t)shared->shorter};
    uint64_t counts[2] = {LONG, SHORT};
    uint32_t kinds[2] = {PLC_F64, PLC_F64}, owners[LEAVES];
    for (uint32_t step = 0; step < STEPS; step++) {
        uint64_t seed = next_random(&self->seed);
        double *held[LEAVES] = {NULL};
        for (uint32_t n = 0; n < LEAVES; n++) {
            uint64_t state = seed + n;
            owners[n] = (uint32_t)below(&state, self->ranks);
            if (owners[n] != self->rank) continue;
            held[n] = malloc(8 * (LONG + SHORT));
            CHECK(held[n] != NULL, "no memory");
            for (uint64_t i = 0; i < LONG + SHORT; i++) held[n][i] = leaf(seed, n, i);
            shared->addresses[n][0] = (uint64_t)(uintptr_t)held[n];
            shared->addresses[n][1] = (uint64_t)(uintptr_t)(held[n] + LONG);
        }
        if (self->rank == 0) memset(shared->longer, 0, sizeof shared->longer);
        if (self->rank == 0) memset(shared->shorter, 0, sizeof shared->shorter);
        plc_tree_sum tree = {.nodes = LEAVES, .owners = owners, .adds = adds, .divisor = 4,
                             .addresses = &shared->addresses[0][0], .stride = 2};
        plc_update u = {.rule = PLC_SGD, .lr = 1, .grad_scale = 1, .clip = 1, .part = self->rank,
                        .parts = self->ranks, .threads = 1 + step % 3, .arrays = 2,
                        .addresses = addresses, .counts = counts, .kinds = kinds,
                        .comm = self->comm, .tree = &tree};
        CHECK_STATUS(PLC_OK, barrier(self));
        CHECK_STATUS(PLC_OK, plc_update_arrays(&u));
        CHECK_STATUS(PLC_OK, barrier(self));
        for (uint64_t i = 0; i < LONG + SHORT; i++) {
            double sum = 0, found = i < LONG ? shared->longer[i] : shared->shorter[i - LONG];
            for (uint32_t n = 0; n < LEAVES; n++) sum += leaf(seed, n, i);
            CHECK(found == -sum / 4, "%g instead of %g at %lu", found, -sum / 4, (unsigned long)i);
        }
        kinds[1] = PLC_F16; /* has no sum in this order */
        CHECK_STATUS(PLC_INVALID, plc_update_arrays(&u));
        kinds[1] = PLC_F64, tree.divisor = 0;
        CHECK_STATUS(PLC_INVALID, plc_update_arrays(&u));
        CHECK_STATUS(PLC_OK, barrier(self)); /* nobody reads any more */
        for (uint32_t n = 0; n < LEAVES; n++) free(held[n]);
    }
}

void tree_sums(uint64_t seed) {
    world w = new_world(3, 20000);
    w.shared = calloc(1, sizeof(tree_update));
    CHECK(w.shared != NULL, "no memory");
    run_world(&w, sum_trees, seed);
    free(w.shared);
    end_world(&w);
}

/* --- claims: each thing is claimed once in every round ---------------------------------------- */
enum { ROUNDS = 300, THINGS = 7 };

typedef struct {
    uint64_t words[THINGS];
    uint32_t done[ROUNDS][THINGS]; /* not atomic: whoever has the claim is alone */
} claimed_work;

static void claim_and_work(rank_thread *self) {
    claimed_work *work = self->in->shared;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        uint32_t first = (uint32_t)below(&self->mine, THINGS);
        for (uint32_t i = 0; i < THINGS; i++) {
            uint32_t thing = (first + i) % THINGS;
            if (plc_claim(&work->words[thing], round, self->rank)) work->done[round - 1][thing]++;
        }
        CHECK_STATUS(PLC_OK, barrier(self));
        for (uint32_t thing = 0; thing < THINGS; thing++) {
            CHECK(work->done[round - 1][thing] == 1, "%u times", work->done[round - 1][thing]);
            CHECK(plc_claim(&work->words[thing], round, self->rank) == 0, "claimed again");
        }
        CHECK_STATUS(PLC_OK, barrier(self));
    }
}

void claims(uint64_t seed) {
    world w = new_world(4, 20000);
    claimed_work *work = calloc(1, sizeof *work);
    CHECK(work != NULL, "no memory");
    w.shared = work;
    run_world(&w, claim_and_work, seed);
    free(work);
    end_world(&w);
}

/* Calls that must fail: with the right status, on every rank, in time, and without harm to memory. */
#include "scenarios.h"

#include <sys/syscall.h>
#include <sys/wait.h>

static plc_request allreduce_of(void *data, uint64_t count) {
    return (plc_request){.kind = PLC_ALLREDUCE, .dtype = PLC_F32, .op = PLC_SUM, .root = -1, .count = count,
                         .input = data, .output = data, .timeout_ns = -1};
}

static plc_failure failure_of(seat *at) {
    plc_failure failure;
    plc_comm_failure(at->comm, &failure);
    return failure;
}

/* --- mismatch: every field of the header, and the group works afterwards -------------------------------------------- */
static void each_field_differs(seat *at) {
    enum { KIND, DTYPE, OP, COUNT, LABEL, ROOT, SEQUENCE, BLOCKS, FIELDS };
    float data[600];
    plc_call *calls = calloc(at->ranks, sizeof *calls);
    for (int field = 0; field < FIELDS; field++) {
        uint32_t odd = (uint32_t)field % at->ranks; /* whoever it is that errs */
        bool err = at->rank == odd;
        plc_request q = allreduce_of(data, 100);
        uint64_t blocks[8] = {[0 ... 7] = 10};
        const void *inputs[8] = {[0 ... 7] = data};
        if (field == KIND && err) q = (plc_request){.kind = PLC_BARRIER, .dtype = PLC_BYTES, .timeout_ns = -1};
        if (field == DTYPE && err) q.dtype = PLC_I32;
        if (field == OP && err) q.op = PLC_MAX;
        if (field == COUNT && err) q.count = 600;
        if (field == LABEL) q.kind = PLC_BROADCAST, q.root = 0, q.label = err;
        if (field == ROOT) q.kind = PLC_REDUCE, q.root = err;
        if (field == SEQUENCE && err) at->comm->sequence++;
        if (field == BLOCKS) {
            q.kind = PLC_REDUCE_SCATTER, q.inputs = inputs, q.in_counts = blocks;
            if (err) blocks[0] = 11, blocks[1] = 9;
        }
        CHECK_STATUS(PLC_MISMATCH, plc_run(at->comm, &q));
        if (field == SEQUENCE && err) at->comm->sequence--;
        plc_comm_calls(at->comm, calls);
        if (field == COUNT) CHECK(calls[odd].count == 600 && calls[(odd + 1) % at->ranks].count == 100, "wrong calls");
        for (int i = 0; i < 3; i++) data[i] = (float)at->rank;
        CHECK_STATUS(PLC_OK, plc_allreduce(at->comm, data, 3, PLC_F32, PLC_SUM, -1));
        float expected = (float)(at->ranks * (at->ranks - 1) / 2);
        CHECK(data[0] == expected && data[2] == expected, "field %d: %g instead of %g", field, data[0], expected);
    }
    free(calls);
}

/* The shares of an all-gather and the matrix of an all-to-all are compared as well. */
static void sizes_differ(seat *at) {
    enum { HERE = 3 };
    char from[64] = {0}, to[HERE][64];
    void *outputs[HERE] = {to[0], to[1], to[2]};
    const void *inputs[HERE] = {from, from, from};
    uint64_t eight[HERE] = {8, 8, 8}, odd[HERE] = {8, 9, 8};
    for (uint32_t kind = PLC_ALLGATHER; kind <= PLC_ALLTOALL; kind++) {
        if (kind == PLC_REDUCE_SCATTER) continue;
        for (int wrong = 1; wrong >= 0; wrong--) {
            bool root = at->rank == 0;
            plc_request q = {.kind = kind, .dtype = PLC_BYTES, .root = 0, .count = 8, .input = from, .timeout_ns = -1,
                             .outputs = outputs, .out_counts = root && wrong ? odd : eight,
                             .inputs = inputs, .in_counts = eight};
            uint64_t only_root[HERE] = {8, 0, 0};
            if (kind == PLC_SCATTER) {
                q.out_counts = only_root;
                q.in_counts = wrong ? odd : eight;
                if (!root) q.inputs = NULL;
            }
            if (kind == PLC_GATHER && !root) q.outputs = NULL;
            CHECK_STATUS(wrong ? PLC_MISMATCH : PLC_OK, plc_run(at->comm, &q));
        }
    }
}

void mismatch(uint64_t seed) {
    for (uint32_t ranks = 2; ranks <= 4; ranks++) in_new_world(ranks, 10000, each_field_differs, seed);
    in_new_world(3, 10000, sizes_differ, seed);
}

/* A mismatch is told with its own calls, whatever the thread that runs asynchronous calls has gone on to. */
static void mismatch_then_more(seat *at) {
    float first[8] = {0}, more[20][4];
    plc_call calls[2];
    for (int round = 0; round < 20; round++) {
        plc_request bad = allreduce_of(first, at->rank == 0 ? 8 : 5), good[20];
        CHECK_STATUS(PLC_OK, plc_submit(at->comm, &bad));
        for (int i = 0; i < 20; i++) {
            memset(more[i], 0, sizeof more[i]);
            good[i] = allreduce_of(more[i], 4);
            CHECK_STATUS(PLC_OK, plc_submit(at->comm, &good[i]));
        }
        CHECK_STATUS(PLC_MISMATCH, plc_request_wait(at->comm, &bad, -1));
        plc_comm_calls(at->comm, calls);
        CHECK(calls[0].count == 8 && calls[1].count == 5, "counts %lu and %lu instead of 8 and 5",
              (unsigned long)calls[0].count, (unsigned long)calls[1].count);
        for (int i = 0; i < 20; i++) CHECK_STATUS(PLC_OK, plc_request_wait(at->comm, &good[i], -1));
    }
}

void mismatch_submitted(uint64_t seed) { in_new_world(2, 10000, mismatch_then_more, seed); }

/* --- abort ----------------------------------------------------------------------------------------------------------- */
static void *abort_soon(void *argument) {
    seat *at = argument;
    nap_ns(20 * MS);
    plc_comm_abort(at->comm);
    return NULL;
}

/* Rank 0's second thread aborts while all wait: for a collective, a submitted one, a message, a bucket. */
static void aborted_in(seat *at, int what) {
    pthread_t thread;
    float data[4] = {0};
    if (at->rank == 0) CHECK(pthread_create(&thread, NULL, abort_soon, at) == 0, "no thread");
    if (at->rank != at->ranks - 1) { /* the last rank never comes */
        plc_request q = allreduce_of(data, 4);
        plc_message m = {.peer = (int32_t)at->ranks - 1, .tag = 1, .buffer = data, .bytes = 8, .timeout_ns = -1};
        plc_arena *arena = NULL;
        switch (what) {
        case 0: CHECK_STATUS(PLC_ABORTED, plc_run(at->comm, &q)); break;
        case 1:
            CHECK_STATUS(PLC_OK, plc_submit(at->comm, &q));
            CHECK_STATUS(PLC_ABORTED, plc_request_wait(at->comm, &q, -1));
            break;
        case 2:
            CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
            CHECK_STATUS(PLC_ABORTED, plc_message_wait(at->comm, &m, -1));
            break;
        default:
            CHECK_STATUS(PLC_OK, plc_arena_open(at->comm, -1, at->in->shared, 4096, 1, &arena));
            CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
            CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
            CHECK_STATUS(PLC_ABORTED, plc_bucket_finish(arena, 0, -1));
            plc_arena_close(arena);
        }
        CHECK(failure_of(at).rank == 0, "aborted by rank %d", failure_of(at).rank);
        CHECK_STATUS(PLC_ABORTED, barrier(at)); /* and it stays so */
    }
    if (at->rank == 0) pthread_join(thread, NULL);
    pthread_barrier_wait(&at->in->all); /* the last rank leaves last: nobody may notice that instead */
}

static void aborted_in_run(seat *at) { aborted_in(at, 0); }
static void aborted_in_submit(seat *at) { aborted_in(at, 1); }
static void aborted_in_message(seat *at) { aborted_in(at, 2); }
static void aborted_in_bucket(seat *at) { aborted_in(at, 3); }

static void in_world_with_arena(uint32_t ranks, int64_t timeout_ms, rank_fn fn, uint64_t seed) {
    world w = new_world(ranks, timeout_ms);
    uint64_t bytes = plc_arena_bytes(ranks, 4096, 8);
    w.shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(w.shared != MAP_FAILED, "mmap: errno %d", errno);
    run_world(&w, fn, seed);
    munmap(w.shared, bytes);
    end_world(&w);
}

void abort_by_thread(uint64_t seed) {
    const rank_fn ways[] = {aborted_in_run, aborted_in_submit, aborted_in_message, aborted_in_bucket};
    for (int i = 0; i < 4; i++) in_world_with_arena(3, 30000, ways[i], seed);
}

/* Somewhere in the blocks of a long message, which have no phases of their own. */
static void *abort_at_any_moment(void *argument) {
    seat *at = argument;
    nap_ns((int64_t)below(&at->mine, 3000000));
    plc_comm_abort(at->comm);
    return NULL;
}

static void aborted_between_blocks(seat *at) {
    enum { FLOATS = 50000 };
    float *data = calloc(FLOATS, sizeof *data);
    pthread_t other;
    CHECK_STATUS(PLC_OK, barrier(at));
    if (at->rank == 0) CHECK(pthread_create(&other, NULL, abort_at_any_moment, at) == 0, "no thread");
    int status = PLC_OK;
    for (plc_request q = allreduce_of(data, FLOATS); status == PLC_OK;) status = plc_run(at->comm, &q);
    CHECK(status == PLC_ABORTED, "status %d", status);
    if (at->rank == 0) pthread_join(other, NULL);
    pthread_barrier_wait(&at->in->all);
    free(data);
}

void abort_in_the_rings(uint64_t seed) {
    for (uint64_t i = 0; i < 10; i++) in_new_world(2 + i % 2, 30000, aborted_between_blocks, seed * 100 + i);
}

/* --- callers with a lock: let go while it waits, asked whether to stop, and held again afterwards ---------------------- */
static _Thread_local struct {
    plc_comm *comm;
    int held, let_go, asked, stop_after;
} calling;

static void *let_go(void) {
    CHECK(calling.held == 1, "let go without holding");
    calling.held = 0, calling.let_go++;
    return &calling;
}

static void take(void *state) {
    CHECK(state == &calling && calling.held == 0, "taken twice");
    calling.held = 1;
}

static int wants_to_stop(void) {
    float one = 1;
    CHECK(calling.held == 1, "asked without holding");
    CHECK_STATUS(PLC_NESTED, plc_allreduce(calling.comm, &one, 1, PLC_F32, PLC_SUM, -1));
    return ++calling.asked == calling.stop_after;
}

static void one_caller_stops(seat *at) {
    float number = 1;
    calling.comm = at->comm, calling.held = 1, calling.stop_after = -1;
    plc_comm_called_by(at->comm, &(plc_caller){let_go, take, wants_to_stop});
    if (at->rank == 1) nap_ns(120 * MS);
    CHECK_STATUS(PLC_OK, plc_allreduce(at->comm, &number, 1, PLC_F32, PLC_SUM, -1));
    CHECK(number == 3 && calling.held == 1, "%g", number);
    CHECK(at->rank == 1 || (calling.let_go > 0 && calling.asked > 0), "waited with the lock held");
    calling.asked = 0, calling.stop_after = at->rank == 0 ? 2 : -1;
    if (at->rank != 1) CHECK_STATUS(PLC_ABORTED, plc_allreduce(at->comm, &number, 1, PLC_F32, PLC_SUM, -1));
    CHECK(calling.held == 1, "not given back");
    pthread_barrier_wait(&at->in->all);
    CHECK(failure_of(at).rank == (at->rank == 1 ? -1 : 0), "the wrong rank stopped");
}

void callers(uint64_t seed) { in_new_world(3, 30000, one_caller_stops, seed); }

/* --- time-outs: every rank that waited names the rank that did not come ----------------------------------------------- */
static void check_missing(seat *at, uint32_t expected) {
    plc_failure failure = failure_of(at);
    CHECK(failure.status == PLC_TIMEOUT, "status %u", failure.status);
    CHECK(failure.missing_count == 1 && failure.missing[0] == expected, "rank %u: %u missing, first %u, not rank %u",
          at->rank, failure.missing_count, failure.missing[0], expected);
}

static void one_rank_is_late(seat *at) {
    CHECK_STATUS(PLC_OK, barrier(at));
    if (at->rank == 1) {
        nap_ns(250 * MS);
        CHECK_STATUS(PLC_ABORTED, barrier(at)); /* the others have given up */
    } else {
        if (at->rank == 2) nap_ns(30 * MS); /* its own time is not over when rank 0 gives up */
        CHECK_STATUS(PLC_TIMEOUT, call(at, (plc_request){.kind = PLC_BARRIER, .dtype = PLC_BYTES}));
        check_missing(at, 1);
        CHECK(failure_of(at).sequence == 2, "in call %lu", (unsigned long)failure_of(at).sequence);
    }
}

void late_rank(uint64_t seed) { in_new_world(3, 100, one_rank_is_late, seed); }

static void one_bucket_is_late(seat *at) {
    plc_arena *arena;
    CHECK_STATUS(PLC_OK, plc_arena_open(at->comm, -1, at->in->shared, 4096, 1, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
    for (int use = 0; use < 3; use++) {
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_OK, plc_bucket_finish(arena, 0, -1));
    }
    if (at->rank != 1) {
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_TIMEOUT, plc_bucket_finish(arena, 0, 100 * MS));
        check_missing(at, 1);
    }
    pthread_barrier_wait(&at->in->all);
    plc_arena_close(arena);
}

/* Each field of a definition in turn, in a bucket of its own; nothing is touched, and the group goes on. */
static void definitions_differ(seat *at) {
    enum { OFFSET, NUMBER, DTYPE, OP, FIELDS };
    plc_arena *arena;
    plc_call calls[3];
    CHECK_STATUS(PLC_OK, plc_arena_open(at->comm, -1, at->in->shared, 4096, FIELDS + 1, &arena));
    float *region = plc_arena_region(arena, at->rank);
    for (int i = 0; i < 20; i++) region[i] = 1;
    for (uint32_t field = 0; field <= FIELDS; field++) {
        bool err = at->rank == field % at->ranks;
        bool differs = field < FIELDS;
        CHECK_STATUS(PLC_OK, plc_bucket_define(arena, field, field == OFFSET && err ? 8 : 0,
                                               field == NUMBER && err ? 11 : 10, field == DTYPE && err ? PLC_I32 : PLC_F32,
                                               field == OP && err ? PLC_MAX : PLC_SUM));
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, field));
        CHECK_STATUS(differs ? PLC_MISMATCH : PLC_OK, plc_bucket_finish(arena, field, -1));
        CHECK(region[0] == (differs ? 1.0f : 3.0f), "bucket %u holds %g", field, region[0]);
        if (!differs) continue;
        plc_comm_calls(at->comm, calls);
        const plc_call *odd = &calls[field % at->ranks], *other = &calls[(field + 1) % at->ranks];
        CHECK(odd->kind == PLC_BUCKET && odd->sequence == field, "wrong record");
        CHECK(odd->label != other->label || odd->count != other->count || odd->dtype != other->dtype ||
                  odd->op != other->op, "field %u is the same on both", field);
    }
    pthread_barrier_wait(&at->in->all);
    plc_arena_close(arena);
}

void mismatched_buckets(uint64_t seed) { in_world_with_arena(3, 30000, definitions_differ, seed); }

void late_bucket(uint64_t seed) { in_world_with_arena(3, 30000, one_bucket_is_late, seed); }

/* --- a peer whose process has ended ------------------------------------------------------------------------------------ */
static void last_rank_is_dead(seat *at) {
    uint32_t dead = at->ranks - 1;
    if (at->rank == dead) {
        pthread_barrier_wait(&at->in->all);
        return;
    }
    int64_t start = now_ns();
    CHECK_STATUS(PLC_PEER_LOST, barrier(at));
    CHECK(failure_of(at).rank == (int32_t)dead, "rank %d", failure_of(at).rank);
    CHECK(now_ns() - start < 1000 * MS, "took %ld ms", (long)((now_ns() - start) / MS));
    pthread_barrier_wait(&at->in->all);
}

static void receive_from_the_dead(seat *at) {
    int32_t dead = (int32_t)at->ranks - 1;
    if (at->rank != (uint32_t)dead) {
        char byte;
        plc_message m = {.peer = dead, .tag = 0, .buffer = &byte, .bytes = 1, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
        CHECK_STATUS(PLC_PEER_LOST, plc_message_wait(at->comm, &m, -1));
    }
    pthread_barrier_wait(&at->in->all);
}

void dead_rank(uint64_t seed) {
    pid_t child = fork();
    if (child == 0) _exit(0);
    int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    CHECK(pidfd >= 0, "pidfd_open: errno %d", errno);
    waitpid(child, NULL, 0);
    const rank_fn ways[] = {last_rank_is_dead, receive_from_the_dead};
    for (int i = 0; i < 2; i++) {
        world w = new_world(3, 30000);
        w.pidfds[2] = pidfd;
        run_world(&w, ways[i], seed);
        end_world(&w);
    }
    close(pidfd);
}

/* --- leaving ------------------------------------------------------------------------------------------------------------ */
static void one_leaves_early(seat *at) {
    for (int i = 0; i < 5; i++) CHECK_STATUS(PLC_OK, barrier(at));
    if (at->rank == 1) return; /* leaves at once, while the others may still be in the last barrier */
    CHECK_STATUS(PLC_PEER_LEFT, barrier(at));
    CHECK(failure_of(at).rank == 1, "rank %d", failure_of(at).rank);
}

void leave_early(uint64_t seed) {
    for (int i = 0; i < 20; i++) in_new_world(3, 30000, one_leaves_early, seed);
}

/* A rank leaves while threads of its own wait in every kind of call. They end; nothing they use is gone too soon. */
typedef struct {
    seat *at;
    plc_arena *arena;
    int what;
    _Atomic bool begun;
} waiter;

static void *wait_in_own_thread(void *argument) {
    waiter *w = argument;
    seat *at = w->at;
    char byte;
    plc_message m = {.peer = 1, .tag = 3, .buffer = &byte, .bytes = 1, .timeout_ns = -1};
    plc_request q = {.kind = PLC_BARRIER, .dtype = PLC_BYTES, .timeout_ns = -1};
    int status = PLC_OK;
    atomic_store(&w->begun, true);
    if (w->what < 2) status = plc_run(at->comm, &q); /* two of them: one runs it, one queues */
    if (w->what == 2) status = plc_bucket_finish(w->arena, 0, -1);
    if (w->what == 3) {
        status = plc_receive(at->comm, &m);
        if (status == PLC_OK) status = plc_message_wait(at->comm, &m, -1);
    }
    if (w->what == 4) {
        for (status = PLC_OK; status == PLC_OK;) status = plc_comm_abort(at->comm);
    }
    if (w->what == 5) {
        for (status = PLC_OK; status == PLC_OK || status == PLC_SIZE;) status = plc_receive(at->comm, &m);
    }
    CHECK(status == PLC_ABORTED || status == PLC_PEER_LEFT, "thread %d: status %d", w->what, status);
    return NULL;
}

static void leave_while_own_threads_wait(seat *at) {
    enum { FIRST = 4 }; /* the fifth aborts: a world of its own */
    bool aborting = at->seed % 2;
    int waiters = aborting ? 1 : FIRST;
    if (at->rank == 0) {
        pthread_t threads[FIRST];
        waiter all[FIRST];
        plc_arena *arena;
        CHECK_STATUS(PLC_OK, plc_arena_open(at->comm, -1, at->in->shared, 4096, 1, &arena));
        CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        for (int i = 0; i < waiters; i++) {
            all[i] = (waiter){at, arena, aborting ? 4 : i, false};
            CHECK(pthread_create(&threads[i], NULL, wait_in_own_thread, &all[i]) == 0, "no thread");
            while (!atomic_load(&all[i].begun)) nap_ns(10000);
        }
        nap_ns((int64_t)below(&at->mine, 3 * MS));
        int64_t start = now_ns();
        plc_comm_leave(at->comm);
        CHECK(now_ns() - start < 1000 * MS, "leaving took %ld ms", (long)((now_ns() - start) / MS));
        for (int i = 0; i < waiters; i++) pthread_join(threads[i], NULL);
        CHECK_STATUS(PLC_ABORTED, barrier(at)); /* a call that comes too late */
        plc_comm_free(at->comm);
        plc_arena_close(arena);
        at->comm = NULL;
    }
    pthread_barrier_wait(&at->in->all);
}

void leave_under_own_threads(uint64_t seed) {
    for (uint64_t i = 0; i < 20; i++) in_world_with_arena(2, 30000, leave_while_own_threads_wait, seed * 100 + i);
}

/* --- arguments that cannot be served --------------------------------------------------------------------------------------- */
static void refuse(seat *at) {
    float data[4] = {0};
    plc_request q = allreduce_of(data, 4);
    q.dtype = PLC_BYTES;
    CHECK_STATUS(PLC_INVALID, plc_run(at->comm, &q));
    q.dtype = 99;
    CHECK_STATUS(PLC_INVALID, plc_run(at->comm, &q));
    q = allreduce_of(data, 4), q.kind = 99;
    CHECK_STATUS(PLC_INVALID, plc_run(at->comm, &q));
    q = allreduce_of(data, 4), q.kind = PLC_BROADCAST, q.root = (int32_t)at->ranks;
    CHECK_STATUS(PLC_INVALID, plc_run(at->comm, &q));
    plc_message m = {.peer = (int32_t)at->rank, .buffer = data, .bytes = 4, .timeout_ns = -1};
    CHECK_STATUS(PLC_INVALID, plc_send(at->comm, &m));
    m.peer = PLC_ANY_SOURCE;
    CHECK_STATUS(PLC_INVALID, plc_send(at->comm, &m));
    plc_arena *arena;
    CHECK_STATUS(PLC_OK, plc_arena_open(at->comm, -1, at->in->shared, 4096, 1, &arena));
    CHECK_STATUS(PLC_INVALID, plc_bucket_ready(arena, 0)); /* never defined */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 1, 0, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 0, 1025, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 4, UINT64_MAX / 4 + 1, PLC_F32, PLC_SUM)); /* wraps to 0 bytes */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, UINT64_MAX - 3, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 2, 1, PLC_F32, PLC_SUM)); /* between two elements */
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 4092, 1, PLC_F32, PLC_SUM));
    float one = 1;
    CHECK_STATUS(PLC_INVALID, plc_bucket_reduce_external(arena, 0, &one, -1)); /* a bucket of the region */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 0, 4097, 1, PLC_F32, PLC_SUM)); /* no whole pages */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 64, 4096, 1, PLC_F32, PLC_SUM)); /* beyond the region */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 0, 0, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_OK, plc_bucket_define_external(arena, 0, 0, 4096, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_finish(arena, 0, -1)); /* not a bucket of the region */
    plc_arena_close(arena);
    CHECK_STATUS(PLC_OK, plc_allreduce(at->comm, data, 4, PLC_F32, PLC_SUM, INT64_MAX)); /* and nothing is broken */
}

void wrong_arguments(uint64_t seed) { in_world_with_arena(2, 10000, refuse, seed); }

/* --- messages ---------------------------------------------------------------------------------------------------------------- */
static void send_number(seat *at, int32_t peer, int32_t tag, unsigned char number, uint64_t bytes) {
    plc_message m = {.peer = peer, .tag = tag, .buffer = malloc(bytes), .bytes = bytes, .timeout_ns = -1};
    memset(m.buffer, number, bytes);
    CHECK_STATUS(PLC_OK, plc_send(at->comm, &m));
    CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &m, -1));
    free(m.buffer);
}

/* Messages of one tag stay in order, also when the first had to be put aside for one of another tag and is only half
 * in when its receive is posted. */
static void overtaken(seat *at) {
    enum { LONG = 5 * RING_BYTES };
    CHECK_STATUS(PLC_OK, barrier(at));
    if (at->rank == 1) {
        unsigned char *big = malloc(LONG), small[2] = {2, 2}, other = 9;
        memset(big, 1, LONG);
        plc_message all[3] = {{.peer = 0, .tag = 5, .buffer = big, .bytes = LONG, .timeout_ns = -1},
                              {.peer = 0, .tag = 5, .buffer = small, .bytes = 2, .timeout_ns = -1},
                              {.peer = 0, .tag = 7, .buffer = &other, .bytes = 1, .timeout_ns = -1}};
        for (int i = 0; i < 3; i++) CHECK_STATUS(PLC_OK, plc_send(at->comm, &all[i]));
        for (int i = 0; i < 3; i++) CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &all[i], -1));
        free(big);
    } else {
        unsigned char *big = malloc(LONG), small[2], other;
        plc_message seven = {.peer = 1, .tag = 7, .buffer = &other, .bytes = 1, .timeout_ns = -1};
        plc_message first = {.peer = 1, .tag = 5, .buffer = big, .bytes = LONG, .timeout_ns = -1};
        plc_message second = {.peer = 1, .tag = 5, .buffer = small, .bytes = 2, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &seven)); /* lets the first message of tag 5 be put aside */
        nap_ns((int64_t)below(&at->mine, 200000));
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &first));
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &second));
        CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &first, -1));
        CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &second, -1));
        CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &seven, -1));
        CHECK(big[0] == 1 && big[LONG - 1] == 1 && small[0] == 2 && other == 9, "wrong data");
        free(big);
    }
    CHECK_STATUS(PLC_OK, barrier(at));
}

static void overtaken_often(seat *at) {
    for (int i = 0; i < 150; i++) overtaken(at);
}

void tags_out_of_order(uint64_t seed) { in_new_world(2, 30000, overtaken_often, seed); }

/* What a rank sent before it left arrives. */
static void say_and_leave(seat *at) {
    if (at->rank == 1) {
        nap_ns((int64_t)below(&at->mine, 60 * MS)); /* hits the moment at which the other looks around */
        send_number(at, 0, 1, 7, 100);
    } else {
        unsigned char data[100];
        plc_message m = {.peer = 1, .tag = 1, .buffer = data, .bytes = 100, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
        CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &m, -1));
        CHECK(data[99] == 7, "wrong data");
    }
}

void last_words(uint64_t seed) {
    for (uint64_t i = 0; i < 60; i++) in_new_world(2, 30000, say_and_leave, seed * 100 + i);
}

/* A receive that gives up while its message is half in: the rest is read past, and the memory of the receive is free
 * for another, here one at the same address, which must not pass for the old one. */
static void stream(seat *at, const void *data, uint64_t bytes) {
    channel *c = channel_of(at->comm, at->rank, 0);
    uint64_t head = atomic_load(&c->head);
    for (uint64_t i = 0; i < bytes; i++) c->ring[(head + i) % RING_BYTES] = ((const unsigned char *)data)[i];
    atomic_store(&c->head, head + bytes);
    advance(&at->comm->shared->records[0].doorbell, 1);
}

static void give_up_half_way(seat *at) {
    struct {
        uint64_t bytes;
        int32_t tag;
        uint32_t check;
        unsigned char padding[48];
    } head = {.bytes = 2000, .tag = 4, .check = 0x70616365u};
    unsigned char data[2000] = {0};
    if (at->rank == 1) { /* half a message, by hand */
        stream(at, &head, sizeof head);
        stream(at, data, 100);
        pthread_barrier_wait(&at->in->all); /* the first receive gives up */
        pthread_barrier_wait(&at->in->all); /* the second is done */
        stream(at, data + 100, 1900);
        send_number(at, 0, 4, 5, 10);
    } else if (at->rank == 2) {
        pthread_barrier_wait(&at->in->all);
        send_number(at, 0, 4, 6, 10);
        pthread_barrier_wait(&at->in->all);
    } else {
        plc_message m = {.peer = PLC_ANY_SOURCE, .tag = 4, .buffer = data, .bytes = 2000, .timeout_ns = 100 * MS};
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
        CHECK_STATUS(PLC_TIMEOUT, plc_message_wait(at->comm, &m, -1));
        pthread_barrier_wait(&at->in->all);
        for (int from = 2; from >= 1; from--) {
            m = (plc_message){.peer = PLC_ANY_SOURCE, .tag = 4, .buffer = data, .bytes = 10, .timeout_ns = 5000 * MS};
            CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
            CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &m, -1));
            CHECK(m.source == from && data[9] == 4 + from, "%d from %d", data[9], m.source);
            if (from == 2) pthread_barrier_wait(&at->in->all);
        }
    }
    CHECK_STATUS(PLC_OK, barrier(at));
}

void receive_given_up(uint64_t seed) { in_new_world(3, 30000, give_up_half_way, seed); }

static void sizes_do_not_fit(seat *at) {
    const uint64_t sent[] = {10, 0, 3 * RING_BYTES, 8}, wanted[] = {8, 1, 10, 3 * RING_BYTES};
    unsigned char *data = calloc(1, 4 * RING_BYTES);
    for (int i = 0; i < 4; i++) {
        if (at->rank == 1) {
            plc_message m = {.peer = 0, .tag = 0, .buffer = data, .bytes = sent[i], .timeout_ns = -1};
            bool is_told = sent[i] > RING_BYTES; /* it is still sending when the other looks */
            CHECK_STATUS(PLC_OK, plc_send(at->comm, &m));
            CHECK_STATUS(is_told ? PLC_SIZE : PLC_OK, plc_message_wait(at->comm, &m, -1));
            if (is_told) CHECK(m.found_bytes == wanted[i], "%lu bytes", (unsigned long)m.found_bytes);
        } else {
            plc_message m = {.peer = 1, .tag = 0, .buffer = data, .bytes = wanted[i], .timeout_ns = -1};
            CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
            CHECK_STATUS(PLC_SIZE, plc_message_wait(at->comm, &m, -1));
            CHECK(m.found_bytes == sent[i], "%lu bytes", (unsigned long)m.found_bytes);
        }
    }
    if (at->rank == 1) send_number(at, 0, 0, 6, 5);
    else {
        plc_message m = {.peer = 1, .tag = 0, .buffer = data, .bytes = 5, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(at->comm, &m));
        CHECK_STATUS(PLC_OK, plc_message_wait(at->comm, &m, -1));
        CHECK(data[4] == 6, "wrong data");
    }
    free(data);
    CHECK_STATUS(PLC_OK, barrier(at));
}

void wrong_size(uint64_t seed) { in_new_world(2, 30000, sizes_do_not_fit, seed); }

/* --- texts: read whole while they are written, cut off at their limit, and the last one ends all waits ------------------ */
static void says_and_goes(seat *at) {
    char *heard = malloc(PLC_WORDS_BYTES);
    if (at->rank == 1) {
        for (int i = 0; i < 2000; i++) CHECK_STATUS(PLC_OK, plc_comm_say(at->comm, "0123456789", 10, 0));
        CHECK_STATUS(PLC_OK, plc_comm_say(at->comm, "", 0, 1));
    } else {
        for (uint64_t length = 0; length < 1000;) {
            length = plc_comm_words(at->comm, 1, heard, 1000);
            for (uint64_t i = 0; i < length; i++) CHECK(heard[i] == (char)('0' + i % 10), "torn at %lu", i);
        }
        CHECK_STATUS(PLC_PEER_LEFT, barrier(at));
        CHECK(failure_of(at).rank == 1, "rank %d", failure_of(at).rank);
        CHECK(plc_comm_words(at->comm, 1, heard, PLC_WORDS_BYTES) == PLC_WORDS_BYTES, "more or less than fits");
        CHECK(plc_comm_words(at->comm, 0, heard, PLC_WORDS_BYTES) == 0, "nobody said that");
        CHECK(plc_comm_words(at->comm, at->ranks, heard, 10) == 0, "there is no such rank");
    }
    pthread_barrier_wait(&at->in->all); /* what is noticed is the text's end, not the rank's */
    free(heard);
}

void texts(uint64_t seed) { in_new_world(3, 30000, says_and_goes, seed); }

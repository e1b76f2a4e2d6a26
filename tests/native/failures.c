/* Calls that must fail: with the right status, on every rank, in time, and without harm to
 * memory. */
#include "scenarios.h"

#include <sys/syscall.h>
#include <sys/wait.h>

static plc_request allreduce_of(void *data, uint64_t count) {
    return (plc_request){.kind = PLC_ALLREDUCE, .dtype = PLC_F32, .op = PLC_SUM, .root = -1,
                         .count = count,
                         .input = data, .output = data, .timeout_ns = -1};
}

static plc_failure failure_of(rank_thread *self) {
    plc_failure failure;
    plc_comm_failure(self->comm, &failure);
    return failure;
}

/* --- mismatch: every field of the header, and the group works afterwards ---------------------- */
static void each_field_differs(rank_thread *self) {
    enum { KIND, DTYPE, OP, COUNT, LABEL, ROOT, SEQUENCE, BLOCKS, FIELDS };
    float data[600];
    plc_call *calls = calloc(self->ranks, sizeof *calls);
    for (int field = 0; field < FIELDS; field++) {
        uint32_t odd = (uint32_t)field % self->ranks; /* whoever it is that errs */
        bool err = self->rank == odd;
        plc_request q = allreduce_of(data, 100);
        uint64_t blocks[8] = {[0 ... 7] = 10};
        const void *inputs[8] = {[0 ... 7] = data};
        if (field == KIND && err)
            q = (plc_request){.kind = PLC_BARRIER, .dtype = PLC_BYTES, .timeout_ns = -1};
        if (field == DTYPE && err) q.dtype = PLC_I32;
        if (field == OP && err) q.op = PLC_MAX;
        if (field == COUNT && err) q.count = 600;
        if (field == LABEL) q.kind = PLC_BROADCAST, q.root = 0, q.label = err;
        if (field == ROOT) q.kind = PLC_REDUCE, q.root = err;
        if (field == SEQUENCE && err) self->comm->sequence++;
        if (field == BLOCKS) {
            q.kind = PLC_REDUCE_SCATTER, q.inputs = inputs, q.in_counts = blocks;
            if (err) blocks[0] = 11, blocks[1] = 9;
        }
        CHECK_STATUS(PLC_MISMATCH, plc_run(self->comm, &q));
        if (field == SEQUENCE && err) self->comm->sequence--;
        plc_comm_calls(self->comm, calls);
        if (field == COUNT)
            CHECK(calls[odd].count == 600 &&
                  calls[(odd + 1) % self->ranks].count == 100, "wrong calls");
        for (int i = 0; i < 3; i++) data[i] = (float)self->rank;
        CHECK_STATUS(PLC_OK, plc_allreduce(self->comm, data, 3, PLC_F32, PLC_SUM, -1));
        float expected = (float)(self->ranks * (self->ranks - 1) / 2);
        CHECK(data[0] == expected &&
              data[2] == expected, "field %d: %g instead of %g", field, data[0], expected);
    }
    free(calls);
}

/* The shares of an all-gather and the matrix of an all-to-all are compared as well. */
static void sizes_differ(rank_thread *self) {
    enum { HERE = 3 };
    char from[64] = {0}, to[HERE][64];
    void *outputs[HERE] = {to[0], to[1], to[2]};
    const void *inputs[HERE] = {from, from, from};
    uint64_t eight[HERE] = {8, 8, 8}, odd[HERE] = {8, 9, 8};
    for (uint32_t kind = PLC_ALLGATHER; kind <= PLC_ALLTOALL; kind++) {
        if (kind == PLC_REDUCE_SCATTER) continue;
        for (int wrong = 1; wrong >= 0; wrong--) {
            bool root = self->rank == 0;
            plc_request q =
                {.kind = kind, .dtype = PLC_BYTES, .root = 0, .count = 8, .input = from,
                 .timeout_ns = -1,
                             .outputs = outputs, .out_counts = root && wrong ? odd : eight,
                             .inputs = inputs, .in_counts = eight};
            uint64_t only_root[HERE] = {8, 0, 0};
            if (kind == PLC_SCATTER) {
                q.out_counts = only_root;
                q.in_counts = wrong ? odd : eight;
                if (!root) q.inputs = NULL;
            }
            if (kind == PLC_GATHER && !root) q.outputs = NULL;
            CHECK_STATUS(wrong ? PLC_MISMATCH : PLC_OK, plc_run(self->comm, &q));
        }
    }
}

void mismatch(uint64_t seed) {
    for (uint32_t ranks = 2; ranks <= 4; ranks++)
        in_new_world(ranks, 10000, each_field_differs, seed);
    in_new_world(3, 10000, sizes_differ, seed);
}

/* A mismatch is told with its own calls, whatever the thread that runs asynchronous calls has gone
 * on to. */
static void mismatch_then_more(rank_thread *self) {
    float first[8] = {0}, more[20][4];
    plc_call calls[2];
    for (int round = 0; round < 20; round++) {
        plc_request bad = allreduce_of(first, self->rank == 0 ? 8 : 5), good[20];
        CHECK_STATUS(PLC_OK, plc_submit(self->comm, &bad));
        for (int i = 0; i < 20; i++) {
            memset(more[i], 0, sizeof more[i]);
            good[i] = allreduce_of(more[i], 4);
            CHECK_STATUS(PLC_OK, plc_submit(self->comm, &good[i]));
        }
        CHECK_STATUS(PLC_MISMATCH, plc_request_wait(self->comm, &bad, -1));
        plc_comm_calls(self->comm, calls);
        CHECK(calls[0].count == 8 && calls[1].count == 5, "counts %lu and %lu instead of 8 and 5",
              (unsigned long)calls[0].count, (unsigned long)calls[1].count);
        for (int i = 0; i < 20; i++)
            CHECK_STATUS(PLC_OK, plc_request_wait(self->comm, &good[i], -1));
    }
}

void mismatch_submitted(uint64_t seed) { in_new_world(2, 10000, mismatch_then_more, seed); }

/* --- abort ------------------------------------------------------------------------------------ */
static _Atomic uint32_t waiting; /* ranks whose call has begun */

static void *abort_soon(void *argument) {
    rank_thread *self = argument;
    while (atomic_load(&waiting) < self->ranks - 1) nap_ns(MS);
    nap_ns(20 * MS);
    plc_comm_abort(self->comm);
    return NULL;
}

/* Rank 0's second thread aborts while all wait: for a collective, a submitted one, a message, a
 * bucket. */
static void aborted_in(rank_thread *self, int what) {
    pthread_t thread;
    float data[4] = {0};
    if (self->rank == 0) CHECK(pthread_create(&thread, NULL, abort_soon, self) == 0, "no thread");
    if (self->rank != self->ranks - 1) { /* the last rank never comes */
        plc_request q = allreduce_of(data, 4);
        plc_message m =
            {.peer = (int32_t)self->ranks - 1, .tag = 1, .buffer = data, .bytes = 8,
             .timeout_ns = -1};
        plc_arena *arena = NULL;
        switch (what) {
        case 0:
            atomic_fetch_add(&waiting, 1);
            CHECK_STATUS(PLC_ABORTED, plc_run(self->comm, &q));
            break;
        case 1:
            CHECK_STATUS(PLC_OK, plc_submit(self->comm, &q));
            atomic_fetch_add(&waiting, 1);
            CHECK_STATUS(PLC_ABORTED, plc_request_wait(self->comm, &q, -1));
            break;
        case 2:
            CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
            atomic_fetch_add(&waiting, 1);
            CHECK_STATUS(PLC_ABORTED, plc_message_wait(self->comm, &m, -1));
            break;
        default:
            CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, self->in->shared, 4096, 1, &arena));
            CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
            CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
            atomic_fetch_add(&waiting, 1);
            CHECK_STATUS(PLC_ABORTED, plc_bucket_finish(arena, 0, -1));
            plc_arena_close(arena);
        }
        CHECK(failure_of(self).rank == 0, "aborted by rank %d", failure_of(self).rank);
        CHECK_STATUS(PLC_ABORTED, barrier(self)); /* and it stays so */
    }
    if (self->rank == 0) pthread_join(thread, NULL);
    /* The last rank leaves last: nobody may notice that instead */
    pthread_barrier_wait(&self->in->all);
}

static void aborted_in_run(rank_thread *self) { aborted_in(self, 0); }
static void aborted_in_submit(rank_thread *self) { aborted_in(self, 1); }
static void aborted_in_message(rank_thread *self) { aborted_in(self, 2); }
static void aborted_in_bucket(rank_thread *self) { aborted_in(self, 3); }

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
    const rank_fn ways[] =
        {aborted_in_run, aborted_in_submit, aborted_in_message, aborted_in_bucket};
    for (int i = 0; i < 4; i++) {
        atomic_store(&waiting, 0);
        in_world_with_arena(3, 30000, ways[i], seed);
    }
}

/* Somewhere in the blocks of a long message, which have no phases of their own. */
static void *abort_at_any_moment(void *argument) {
    rank_thread *self = argument;
    nap_ns((int64_t)below(&self->mine, 3000000));
    plc_comm_abort(self->comm);
    return NULL;
}

static void aborted_between_blocks(rank_thread *self) {
    enum { FLOATS = 50000 };
    float *data = calloc(FLOATS, sizeof *data);
    pthread_t other;
    CHECK_STATUS(PLC_OK, barrier(self));
    if (self->rank == 0)
        CHECK(pthread_create(&other, NULL, abort_at_any_moment, self) == 0, "no thread");
    int status = PLC_OK;
    for (plc_request q = allreduce_of(data, FLOATS); status == PLC_OK;)
        status = plc_run(self->comm, &q);
    CHECK(status == PLC_ABORTED, "status %d", status);
    if (self->rank == 0) pthread_join(other, NULL);
    pthread_barrier_wait(&self->in->all);
    free(data);
}

void abort_in_pipeline(uint64_t seed) {
    for (uint64_t i = 0; i < 10; i++)
        in_new_world(2 + i % 2, 30000, aborted_between_blocks, seed * 100 + i);
}

/* --- the GIL: released during waits, signals checked, and held again afterwards --------------- */
static _Thread_local struct {
    plc_comm *comm;
    int held, released, checked, interrupt_after;
} gil;

static void *release_gil(void) {
    CHECK(gil.held == 1, "released without holding");
    gil.held = 0, gil.released++;
    return &gil;
}

static void acquire_gil(void *state) {
    CHECK(state == &gil && gil.held == 0, "acquired twice");
    gil.held = 1;
}

static int check_signals(void) {
    float one = 1;
    CHECK(gil.held == 1, "checked without holding");
    CHECK_STATUS(PLC_NESTED, plc_allreduce(gil.comm, &one, 1, PLC_F32, PLC_SUM, -1));
    return ++gil.checked == gil.interrupt_after;
}

static void one_is_interrupted(rank_thread *self) {
    float number = 1;
    gil.comm = self->comm, gil.held = 1, gil.interrupt_after = -1;
    plc_comm_set_interpreter(self->comm,
                             &(plc_interpreter){release_gil, acquire_gil, check_signals});
    if (self->rank == 1) nap_ns(120 * MS);
    CHECK_STATUS(PLC_OK, plc_allreduce(self->comm, &number, 1, PLC_F32, PLC_SUM, -1));
    CHECK(number == 3 && gil.held == 1, "%g", number);
    CHECK(self->rank == 1 ||
          (gil.released > 0 && gil.checked > 0), "waited with the lock held");
    gil.checked = 0, gil.interrupt_after = self->rank == 0 ? 2 : -1;
    if (self->rank != 1)
        CHECK_STATUS(PLC_ABORTED, plc_allreduce(self->comm, &number, 1, PLC_F32, PLC_SUM, -1));
    CHECK(gil.held == 1, "not given back");
    pthread_barrier_wait(&self->in->all);
    CHECK(failure_of(self).rank == (self->rank == 1 ? -1 : 0), "the wrong rank stopped");
}

void interpreter_lock(uint64_t seed) { in_new_world(3, 30000, one_is_interrupted, seed); }

/* --- time-outs: every rank that waited names the rank that did not come ----------------------- */
static void check_missing(rank_thread *self, uint32_t expected) {
    plc_failure failure = failure_of(self);
    CHECK(failure.status == PLC_TIMEOUT, "status %u", failure.status);
    CHECK(failure.missing_count == 1 &&
          failure.missing[0] == expected, "rank %u: %u missing, first %u, not rank %u",
          self->rank, failure.missing_count, failure.missing[0], expected);
}

static void one_rank_is_late(rank_thread *self) {
    CHECK_STATUS(PLC_OK, barrier(self));
    if (self->rank == 1) {
        nap_ns(250 * MS);
        CHECK_STATUS(PLC_ABORTED, barrier(self)); /* the others have given up */
    } else {
        if (self->rank == 2) nap_ns(30 * MS); /* its own time is not over when rank 0 gives up */
        CHECK_STATUS(PLC_TIMEOUT,
                     call(self, (plc_request){.kind = PLC_BARRIER, .dtype = PLC_BYTES}));
        check_missing(self, 1);
        CHECK(failure_of(self).sequence == 2, "in call %lu",
              (unsigned long)failure_of(self).sequence);
    }
}

void late_rank(uint64_t seed) { in_new_world(3, 100, one_rank_is_late, seed); }

static void one_bucket_is_late(rank_thread *self) {
    plc_arena *arena;
    CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, self->in->shared, 4096, 1, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
    for (int use = 0; use < 3; use++) {
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_OK, plc_bucket_finish(arena, 0, -1));
    }
    if (self->rank != 1) {
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_TIMEOUT, plc_bucket_finish(arena, 0, 100 * MS));
        check_missing(self, 1);
    }
    pthread_barrier_wait(&self->in->all);
    plc_arena_close(arena);
}

/* Each field of a definition in turn, in a bucket of its own; nothing is touched, and the group
 * goes on. */
static void definitions_differ(rank_thread *self) {
    enum { OFFSET, NUMBER, DTYPE, OP, FIELDS };
    plc_arena *arena;
    plc_call calls[3];
    CHECK_STATUS(PLC_OK,
                 plc_arena_open(self->comm, -1, self->in->shared, 4096, FIELDS + 1, &arena));
    float *region = plc_arena_region(arena, self->rank);
    for (int i = 0; i < 20; i++) region[i] = 1;
    for (uint32_t field = 0; field <= FIELDS; field++) {
        bool err = self->rank == field % self->ranks;
        bool differs = field < FIELDS;
        CHECK_STATUS(PLC_OK, plc_bucket_define(arena, field, field == OFFSET && err ? 8 : 0,
                                               field == NUMBER && err ? 11 : 10, field == DTYPE &&
                                                   err ? PLC_I32 : PLC_F32,
                                               field == OP && err ? PLC_MAX : PLC_SUM));
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, field));
        CHECK_STATUS(differs ? PLC_MISMATCH : PLC_OK, plc_bucket_finish(arena, field, -1));
        CHECK(region[0] == (differs ? 1.0f : 3.0f), "bucket %u holds %g", field, region[0]);
        if (!differs) continue;
        plc_comm_calls(self->comm, calls);
        const plc_call *odd = &calls[field % self->ranks],
            *other = &calls[(field + 1) % self->ranks];
        CHECK(odd->kind == PLC_BUCKET && odd->sequence == field, "wrong record");
        CHECK(odd->label != other->label || odd->count != other->count ||
              odd->dtype != other->dtype ||
                  odd->op != other->op, "field %u is the same on both", field);
    }
    pthread_barrier_wait(&self->in->all);
    plc_arena_close(arena);
}

/* One rank waits in a bucket, the others in a collective: by itself, or behind a request. */
static void ranks_diverge(rank_thread *self) {
    plc_arena *arena;
    plc_call calls[3];
    int64_t start = now_ns();
    CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, self->in->shared, 4096, 1, &arena));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_OK, barrier(self));
    if (self->rank == 0) {
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        CHECK_STATUS(PLC_DIVERGED, plc_bucket_finish(arena, 0, -1));
    } else if (self->rank == 1) {
        CHECK_STATUS(PLC_DIVERGED, barrier(self));
    } else {
        plc_request request = {.kind = PLC_BARRIER, .root = -1, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_submit(self->comm, &request));
        CHECK_STATUS(PLC_DIVERGED, plc_request_wait(self->comm, &request, -1));
    }
    CHECK(now_ns() - start < 20000 * MS, "took %ld ms", (long)((now_ns() - start) / MS));
    plc_comm_calls(self->comm, calls);
    CHECK(calls[0].kind == PLC_BUCKET && calls[0].sequence == 0, "rank 0: %u", calls[0].kind);
    CHECK(calls[1].kind == PLC_BARRIER, "rank 1: %u", calls[1].kind);
    CHECK_STATUS(PLC_DIVERGED, barrier(self));
    pthread_barrier_wait(&self->in->all);
    plc_arena_close(arena);
}

void diverged(uint64_t seed) { in_world_with_arena(3, 30000, ranks_diverge, seed); }

void mismatched_buckets(uint64_t seed) { in_world_with_arena(3, 30000, definitions_differ, seed); }

void late_bucket(uint64_t seed) { in_world_with_arena(3, 30000, one_bucket_is_late, seed); }

/* --- a peer whose process has ended ----------------------------------------------------------- */
static void last_rank_is_dead(rank_thread *self) {
    uint32_t dead = self->ranks - 1;
    if (self->rank == dead) {
        pthread_barrier_wait(&self->in->all);
        return;
    }
    int64_t start = now_ns();
    CHECK_STATUS(PLC_PEER_LOST, barrier(self));
    CHECK(failure_of(self).rank == (int32_t)dead, "rank %d", failure_of(self).rank);
    CHECK(now_ns() - start < 1000 * MS, "took %ld ms", (long)((now_ns() - start) / MS));
    pthread_barrier_wait(&self->in->all);
}

static void receive_from_the_dead(rank_thread *self) {
    int32_t dead = (int32_t)self->ranks - 1;
    if (self->rank != (uint32_t)dead) {
        char byte;
        plc_message m = {.peer = dead, .tag = 0, .buffer = &byte, .bytes = 1, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
        CHECK_STATUS(PLC_PEER_LOST, plc_message_wait(self->comm, &m, -1));
    }
    pthread_barrier_wait(&self->in->all);
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

/* --- leaving ---------------------------------------------------------------------------------- */
static void one_leaves_early(rank_thread *self) {
    for (int i = 0; i < 5; i++) CHECK_STATUS(PLC_OK, barrier(self));
    /* Leaves at once, while the others may still be in the last barrier */
    if (self->rank == 1) return;
    CHECK_STATUS(PLC_PEER_LEFT, barrier(self));
    CHECK(failure_of(self).rank == 1, "rank %d", failure_of(self).rank);
}

void leave_early(uint64_t seed) {
    for (int i = 0; i < 20; i++) in_new_world(3, 30000, one_leaves_early, seed);
}

/* A rank leaves while threads of its own wait in every kind of call. They end; nothing they use is
 * gone too soon. */
typedef struct {
    rank_thread *self;
    plc_arena *arena;
    int what;
    _Atomic bool begun;
} waiter;

static void *wait_in_own_thread(void *argument) {
    waiter *w = argument;
    rank_thread *self = w->self;
    char byte;
    plc_message m = {.peer = 1, .tag = 3, .buffer = &byte, .bytes = 1, .timeout_ns = -1};
    plc_request q = {.kind = PLC_BARRIER, .dtype = PLC_BYTES, .timeout_ns = -1};
    int status = PLC_OK;
    atomic_store(&w->begun, true);
    if (w->what < 2) status = plc_run(self->comm, &q); /* two of them: one runs it, one queues */
    if (w->what == 2) status = plc_bucket_finish(w->arena, 0, -1);
    if (w->what == 3) {
        status = plc_receive(self->comm, &m);
        if (status == PLC_OK) status = plc_message_wait(self->comm, &m, -1);
    }
    if (w->what == 4) {
        for (status = PLC_OK; status == PLC_OK;) status = plc_comm_abort(self->comm);
    }
    if (w->what == 5) {
        for (status = PLC_OK; status == PLC_OK || status == PLC_SIZE;)
            status = plc_receive(self->comm, &m);
    }
    CHECK(status == PLC_ABORTED ||
          status == PLC_PEER_LEFT, "thread %d: status %d", w->what, status);
    return NULL;
}

static void leave_while_own_threads_wait(rank_thread *self) {
    enum { FIRST = 4 }; /* the fifth aborts: a world of its own */
    bool aborting = self->seed % 2;
    int waiters = aborting ? 1 : FIRST;
    if (self->rank == 0) {
        pthread_t threads[FIRST];
        waiter all[FIRST];
        plc_arena *arena;
        CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, self->in->shared, 4096, 1, &arena));
        CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 0, 10, PLC_F32, PLC_SUM));
        CHECK_STATUS(PLC_OK, plc_bucket_ready(arena, 0));
        for (int i = 0; i < waiters; i++) {
            all[i] = (waiter){self, arena, aborting ? 4 : i, false};
            CHECK(pthread_create(&threads[i], NULL, wait_in_own_thread, &all[i]) == 0, "no thread");
            while (!atomic_load(&all[i].begun)) nap_ns(10000);
        }
        nap_ns((int64_t)below(&self->mine, 3 * MS));
        int64_t start = now_ns();
        plc_comm_leave(self->comm);
        CHECK(now_ns() - start < 1000 * MS, "leaving took %ld ms", (long)((now_ns() - start) / MS));
        for (int i = 0; i < waiters; i++) pthread_join(threads[i], NULL);
        CHECK_STATUS(PLC_ABORTED, barrier(self)); /* a call that comes too late */
        plc_comm_free(self->comm);
        plc_arena_close(arena);
        self->comm = NULL;
    }
    pthread_barrier_wait(&self->in->all);
}

void leave_under_own_threads(uint64_t seed) {
    for (uint64_t i = 0; i < 20; i++)
        in_world_with_arena(2, 30000, leave_while_own_threads_wait, seed * 100 + i);
}

/* --- arguments that cannot be served ---------------------------------------------------------- */
static void refuse(rank_thread *self) {
    float data[4] = {0};
    plc_request q = allreduce_of(data, 4);
    q.dtype = PLC_BYTES;
    CHECK_STATUS(PLC_INVALID, plc_run(self->comm, &q));
    q.dtype = 99;
    CHECK_STATUS(PLC_INVALID, plc_run(self->comm, &q));
    q = allreduce_of(data, 4), q.kind = 99;
    CHECK_STATUS(PLC_INVALID, plc_run(self->comm, &q));
    q = allreduce_of(data, 4), q.kind = PLC_BROADCAST, q.root = (int32_t)self->ranks;
    CHECK_STATUS(PLC_INVALID, plc_run(self->comm, &q));
    plc_message m = {.peer = (int32_t)self->rank, .buffer = data, .bytes = 4, .timeout_ns = -1};
    CHECK_STATUS(PLC_INVALID, plc_send(self->comm, &m));
    m.peer = PLC_ANY_SOURCE;
    CHECK_STATUS(PLC_INVALID, plc_send(self->comm, &m));
    plc_arena *arena;
    CHECK_STATUS(PLC_OK, plc_arena_open(self->comm, -1, self->in->shared, 4096, 1, &arena));
    CHECK_STATUS(PLC_INVALID, plc_bucket_ready(arena, 0)); /* never defined */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 1, 0, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 0, 1025, PLC_F32, PLC_SUM));
    /* Wraps to 0 bytes */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 4, UINT64_MAX / 4 + 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, UINT64_MAX - 3, 1, PLC_F32, PLC_SUM));
    /* Between two elements */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define(arena, 0, 2, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_OK, plc_bucket_define(arena, 0, 4092, 1, PLC_F32, PLC_SUM));
    float one = 1;
    CHECK_STATUS(PLC_INVALID,
                 plc_bucket_reduce_external(arena, 0, &one, -1)); /* a bucket of the region */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 0, 4097, 1, PLC_F32,
                                                         PLC_SUM)); /* no whole pages */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 64, 4096, 1, PLC_F32,
                                                         PLC_SUM)); /* beyond the region */
    CHECK_STATUS(PLC_INVALID, plc_bucket_define_external(arena, 0, 0, 0, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_OK, plc_bucket_define_external(arena, 0, 0, 4096, 1, PLC_F32, PLC_SUM));
    CHECK_STATUS(PLC_INVALID, plc_bucket_finish(arena, 0, -1)); /* not a bucket of the region */
    plc_arena_close(arena);
    /* And nothing is broken */
    CHECK_STATUS(PLC_OK, plc_allreduce(self->comm, data, 4, PLC_F32, PLC_SUM, INT64_MAX));
}

void wrong_arguments(uint64_t seed) { in_world_with_arena(2, 10000, refuse, seed); }

/* --- messages --------------------------------------------------------------------------------- */
static void send_number(rank_thread *self, int32_t peer, int32_t tag, unsigned char number,
                        uint64_t bytes) {
    plc_message m =
        {.peer = peer, .tag = tag, .buffer = malloc(bytes), .bytes = bytes, .timeout_ns = -1};
    memset(m.buffer, number, bytes);
    CHECK_STATUS(PLC_OK, plc_send(self->comm, &m));
    CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
    free(m.buffer);
}

/* Messages of one tag stay in order, also when the first had to be kept as unexpected for one of
 * another tag and is only half in when its receive is posted. */
static void overtaken(rank_thread *self) {
    enum { LONG = 5 * RING_BYTES };
    CHECK_STATUS(PLC_OK, barrier(self));
    if (self->rank == 1) {
        unsigned char *big = malloc(LONG), small[2] = {2, 2}, other = 9;
        memset(big, 1, LONG);
        plc_message all[3] = {{.peer = 0, .tag = 5, .buffer = big, .bytes = LONG, .timeout_ns = -1},
                              {.peer = 0, .tag = 5, .buffer = small, .bytes = 2, .timeout_ns = -1},
                              {.peer = 0, .tag = 7, .buffer = &other, .bytes = 1,
                               .timeout_ns = -1}};
        for (int i = 0; i < 3; i++) CHECK_STATUS(PLC_OK, plc_send(self->comm, &all[i]));
        for (int i = 0; i < 3; i++) CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &all[i], -1));
        free(big);
    } else {
        unsigned char *big = malloc(LONG), small[2], other;
        plc_message seven = {.peer = 1, .tag = 7, .buffer = &other, .bytes = 1, .timeout_ns = -1};
        plc_message first = {.peer = 1, .tag = 5, .buffer = big, .bytes = LONG, .timeout_ns = -1};
        plc_message second = {.peer = 1, .tag = 5, .buffer = small, .bytes = 2, .timeout_ns = -1};
        /* Lets the first message of tag 5 be kept as unexpected */
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &seven));
        nap_ns((int64_t)below(&self->mine, 200000));
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &first));
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &second));
        CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &first, -1));
        CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &second, -1));
        CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &seven, -1));
        CHECK(big[0] == 1 && big[LONG - 1] == 1 && small[0] == 2 && other == 9, "wrong data");
        free(big);
    }
    CHECK_STATUS(PLC_OK, barrier(self));
}

static void overtaken_often(rank_thread *self) {
    for (int i = 0; i < 150; i++) overtaken(self);
}

void tags_out_of_order(uint64_t seed) { in_new_world(2, 30000, overtaken_often, seed); }

/* What a rank sent before it left arrives. */
static void send_and_leave(rank_thread *self) {
    if (self->rank == 1) {
        /* Hits the moment at which the other looks around */
        nap_ns((int64_t)below(&self->mine, 60 * MS));
        send_number(self, 0, 1, 7, 100);
    } else {
        unsigned char data[100];
        plc_message m = {.peer = 1, .tag = 1, .buffer = data, .bytes = 100, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
        CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
        CHECK(data[99] == 7, "wrong data");
    }
}

void sent_before_leaving(uint64_t seed) {
    for (uint64_t i = 0; i < 60; i++) in_new_world(2, 30000, send_and_leave, seed * 100 + i);
}

/* A receive that gives up while its message is half in: the rest is read past, and the memory of
 * the receive is free for another, here one at the same address, which must not pass for the old
 * one. */
static void stream(rank_thread *self, const void *data, uint64_t bytes) {
    channel *c = channel_of(self->comm, self->rank, 0);
    uint64_t head = atomic_load(&c->head);
    for (uint64_t i = 0; i < bytes; i++)
        c->ring[(head + i) % RING_BYTES] = ((const unsigned char *)data)[i];
    atomic_store(&c->head, head + bytes);
    advance(&self->comm->shared->records[0].doorbell, 1);
}

static void give_up_half_way(rank_thread *self) {
    struct {
        uint64_t bytes;
        int32_t tag;
        uint32_t check;
        unsigned char padding[48];
    } head = {.bytes = 2000, .tag = 4, .check = 0x70616365u};
    unsigned char data[2000] = {0};
    if (self->rank == 1) { /* half a message, by hand */
        stream(self, &head, sizeof head);
        stream(self, data, 100);
        pthread_barrier_wait(&self->in->all); /* the first receive gives up */
        pthread_barrier_wait(&self->in->all); /* the second is done */
        stream(self, data + 100, 1900);
        send_number(self, 0, 4, 5, 10);
    } else if (self->rank == 2) {
        pthread_barrier_wait(&self->in->all);
        send_number(self, 0, 4, 6, 10);
        pthread_barrier_wait(&self->in->all);
    } else {
        plc_message m =
            {.peer = PLC_ANY_SOURCE, .tag = 4, .buffer = data, .bytes = 2000,
             .timeout_ns = 100 * MS};
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
        CHECK_STATUS(PLC_TIMEOUT, plc_message_wait(self->comm, &m, -1));
        pthread_barrier_wait(&self->in->all);
        for (int from = 2; from >= 1; from--) {
            m =
                (plc_message){.peer = PLC_ANY_SOURCE, .tag = 4, .buffer = data, .bytes = 10,
                              .timeout_ns = 5000 * MS};
            CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
            CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
            CHECK(m.source == from && data[9] == 4 + from, "%d from %d", data[9], m.source);
            if (from == 2) pthread_barrier_wait(&self->in->all);
        }
    }
    CHECK_STATUS(PLC_OK, barrier(self));
}

void receive_given_up(uint64_t seed) { in_new_world(3, 30000, give_up_half_way, seed); }

static void sizes_do_not_fit(rank_thread *self) {
    const uint64_t sent[] = {10, 0, 3 * RING_BYTES, 8}, wanted[] = {8, 1, 10, 3 * RING_BYTES};
    unsigned char *data = calloc(1, 4 * RING_BYTES);
    for (int i = 0; i < 4; i++) {
        if (self->rank == 1) {
            plc_message m =
                {.peer = 0, .tag = 0, .buffer = data, .bytes = sent[i], .timeout_ns = -1};
            bool is_told = sent[i] > RING_BYTES; /* it is still sending when the other looks */
            CHECK_STATUS(PLC_OK, plc_send(self->comm, &m));
            CHECK_STATUS(is_told ? PLC_SIZE : PLC_OK, plc_message_wait(self->comm, &m, -1));
            if (is_told)
                CHECK(m.found_bytes == wanted[i], "%lu bytes", (unsigned long)m.found_bytes);
        } else {
            plc_message m =
                {.peer = 1, .tag = 0, .buffer = data, .bytes = wanted[i], .timeout_ns = -1};
            CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
            CHECK_STATUS(PLC_SIZE, plc_message_wait(self->comm, &m, -1));
            CHECK(m.found_bytes == sent[i], "%lu bytes", (unsigned long)m.found_bytes);
        }
    }
    if (self->rank == 1) send_number(self, 0, 0, 6, 5);
    else {
        plc_message m = {.peer = 1, .tag = 0, .buffer = data, .bytes = 5, .timeout_ns = -1};
        CHECK_STATUS(PLC_OK, plc_receive(self->comm, &m));
        CHECK_STATUS(PLC_OK, plc_message_wait(self->comm, &m, -1));
        CHECK(data[4] == 6, "wrong data");
    }
    free(data);
    CHECK_STATUS(PLC_OK, barrier(self));
}

void wrong_size(uint64_t seed) { in_new_world(2, 30000, sizes_do_not_fit, seed); }

/* --- error texts: never read in half, cut off at their limit; the last one ends all waits ----- */
static void publishes_and_leaves(rank_thread *self) {
    char *found = malloc(PLC_ERROR_TEXT_BYTES);
    if (self->rank == 1) {
        for (int i = 0; i < 2000; i++)
            CHECK_STATUS(PLC_OK, plc_comm_publish_error(self->comm, "0123456789", 10, 0));
        CHECK_STATUS(PLC_OK, plc_comm_publish_error(self->comm, "", 0, 1));
    } else {
        for (uint64_t length = 0; length < 1000;) {
            length = plc_comm_error_text(self->comm, 1, found, 1000);
            for (uint64_t i = 0; i < length; i++)
                CHECK(found[i] == (char)('0' + i % 10), "torn at %lu", i);
        }
        CHECK_STATUS(PLC_PEER_LEFT, barrier(self));
        CHECK(failure_of(self).rank == 1, "rank %d", failure_of(self).rank);
        CHECK(plc_comm_error_text(self->comm, 1, found,
                                  PLC_ERROR_TEXT_BYTES) == PLC_ERROR_TEXT_BYTES,
                                      "more or less than fits");
        CHECK(plc_comm_error_text(self->comm, 0, found, PLC_ERROR_TEXT_BYTES) == 0,
              "nobody published that");
        CHECK(plc_comm_error_text(self->comm, self->ranks, found, 10) == 0,
              "there is no such rank");
    }
    pthread_barrier_wait(&self->in->all); /* what is noticed is the text's end, not the rank's */
    free(found);
}

void error_texts(uint64_t seed) { in_new_world(3, 30000, publishes_and_leaves, seed); }

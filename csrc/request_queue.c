/* Running collectives: at once on the caller's thread, or in order on one thread per communicator.
 *
 * A synchronous call runs on its own thread only when nothing is queued or running; otherwise it
 * queues behind the others. So all ranks run their calls in the order they made them.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "internal.h"

#define SHORT_BYTES (64 * 1024u) /* done in microseconds: not worth releasing the GIL */
#define WAIT_SLICE_NS (50 * 1000 * 1000)

static bool request_is_valid(const plc_comm *comm, const plc_request *q) {
    if (q->kind >= PLC_KINDS || q->dtype >= PLC_DTYPES) return false;
    bool reduces = q->kind == PLC_ALLREDUCE || q->kind == PLC_REDUCE ||
                   q->kind == PLC_REDUCE_SCATTER;
    if (reduces && !can_reduce(q->dtype, q->op)) return false;
    if (q->kind >= PLC_HOSTS_BEGIN && q->input == NULL) return false;
    bool rooted = q->kind == PLC_REDUCE || q->kind == PLC_BROADCAST || q->kind == PLC_GATHER ||
                  q->kind == PLC_SCATTER;
    return !rooted || (q->root >= 0 && (uint32_t)q->root < comm->ranks);
}

/* For the error, which may be asked for when the next call has been compared already. */
static void keep_mismatch(plc_comm *comm) {
    pthread_mutex_lock(&comm->failure_lock);
    memcpy(comm->mismatched, comm->last_calls, comm->ranks * sizeof *comm->mismatched);
    pthread_mutex_unlock(&comm->failure_lock);
}

static int execute(plc_comm *comm, const plc_request *q) {
    static int (*const collectives[PLC_KINDS])(op_context *) = {
        [PLC_BARRIER] = run_barrier,
        [PLC_ALLREDUCE] = run_allreduce,
        [PLC_REDUCE] = run_reduce,
        [PLC_BROADCAST] = run_broadcast,
        [PLC_ALLGATHER] = run_allgather,
        [PLC_GATHER] = run_allgather,
        [PLC_SCATTER] = run_alltoall,
        [PLC_REDUCE_SCATTER] = run_reduce_scatter,
        [PLC_ALLTOALL] = run_alltoall,
        [PLC_HOSTS_BEGIN] = run_hosts_begin,
        [PLC_HOSTS_FINISH] = run_hosts_finish,
        [PLC_HOSTS_ABANDON] = run_hosts_abandon,
    };
    if (!request_is_valid(comm, q)) return PLC_INVALID;
    int failure = known_failure(comm);
    if (failure != PLC_OK) return failure;
    /* Written by one thread at a time. */
    atomic_fetch_add_explicit(&comm->sequence, 1, memory_order_relaxed);
    op_context ctx = {comm, q, deadline_after(comm, q->timeout_ns), next_slot(comm), q->label};
    int status = collectives[q->kind](&ctx);
    if (status == PLC_MISMATCH) keep_mismatch(comm);
    return status;
}

static void finish(plc_request *q, int status) {
    q->status = (uint32_t)status;
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&q->finished;
    atomic_store(finished, 1);
    futex_wake_all(finished);
}

static void *worker_main(void *argument) {
    plc_comm *comm = argument;
    pthread_mutex_lock(&comm->queue_lock);
    for (;;) {
        while ((comm->queue_head == NULL || comm->running) && !comm->stopping)
            pthread_cond_wait(&comm->queue_changed, &comm->queue_lock);
        if (comm->stopping) break;
        plc_request *q = comm->queue_head;
        comm->running = true;
        pthread_mutex_unlock(&comm->queue_lock);
        int status = execute(comm, q);
        pthread_mutex_lock(&comm->queue_lock);
        comm->running = false;
        comm->queue_head = q->next;
        if (comm->queue_head == NULL) comm->queue_tail = NULL;
        pthread_cond_broadcast(&comm->queue_changed);
        finish(q, status); /* last: the request may be freed from here on */
    }
    while (comm->queue_head != NULL) {
        plc_request *q = comm->queue_head;
        comm->queue_head = q->next;
        finish(q, PLC_ABORTED);
    }
    pthread_mutex_unlock(&comm->queue_lock);
    return NULL;
}

/* With the lock held. */
static int append(plc_comm *comm, plc_request *q) {
    if (comm->stopping) return PLC_ABORTED; /* nobody would run it */
    if (!comm->worker_started) {
        int error = pthread_create(&comm->worker, NULL, worker_main, comm);
        if (error != 0) {
            errno = error;
            return PLC_SYSTEM;
        }
        comm->worker_started = true;
    }
    q->status = PLC_PENDING;
    q->finished = 0;
    q->next = NULL;
    if (comm->queue_tail == NULL) comm->queue_head = q;
    else comm->queue_tail->next = q;
    comm->queue_tail = q;
    pthread_cond_broadcast(&comm->queue_changed);
    return PLC_OK;
}

int plc_submit(plc_comm *comm, plc_request *q) {
    if (!comm_enter(comm)) return PLC_ABORTED;
    pthread_mutex_lock(&comm->queue_lock);
    int status = append(comm, q);
    pthread_mutex_unlock(&comm->queue_lock);
    comm_exit(comm);
    return status;
}

/* A request ends by itself at its own deadline, so waiting without a limit is safe. */
static bool wait_until_finished(plc_comm *comm, plc_request *q, int64_t deadline) {
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&q->finished;
    if (atomic_load(finished) != 0) return true;
    gil_release();
    atomic_fetch_add(&comm->request_waits, 1);
    bool done = true;
    while (done && atomic_load(finished) == 0) {
        int64_t left = deadline - now_ns();
        done = left > 0 && !gil_interrupted();
        if (done) futex_wait(finished, 0, MIN(left, WAIT_SLICE_NS));
    }
    atomic_fetch_sub(&comm->request_waits, 1);
    return done;
}

/* Another thread is running; the request is on our stack and must not outlive this call. */
static int wait_queued(plc_comm *comm, plc_request *q) {
    if (!wait_until_finished(comm, q, INT64_MAX)) {
        plc_comm_abort(comm);
        wait_until_finished(comm, q, INT64_MAX);
    }
    return (int)q->status;
}

static int run_in_turn(plc_comm *comm, plc_request *q, gil_scope *scope) {
    if (gil_in_collective(comm)) return PLC_NESTED;
    pthread_mutex_lock(&comm->queue_lock);
    bool idle = comm->queue_head == NULL && !comm->running;
    int status = PLC_OK;
    if (idle) comm->running = true;
    else status = append(comm, q);
    pthread_mutex_unlock(&comm->queue_lock);
    if (status != PLC_OK) return status;
    if (!idle) return wait_queued(comm, q);
    scope->in_collective = true;
    status = execute(comm, q);
    scope->in_collective = false;
    q->status = (uint32_t)status;
    pthread_mutex_lock(&comm->queue_lock);
    comm->running = false;
    if (comm->queue_head != NULL) pthread_cond_broadcast(&comm->queue_changed);
    pthread_mutex_unlock(&comm->queue_lock);
    return status;
}

static uint64_t bytes_of(const plc_request *q) { return q->count * plc_element_bytes(q->dtype); }

int plc_run(plc_comm *comm, plc_request *q) {
    gil_scope scope;
    if (!comm_enter(comm)) return PLC_ABORTED;
    gil_scope_enter(&scope, comm);
    if (bytes_of(q) > SHORT_BYTES || q->inputs != NULL || q->outputs != NULL) gil_release();
    int status = run_in_turn(comm, q, &scope);
    gil_scope_exit(&scope);
    comm_exit(comm);
    return status;
}

int plc_request_wait(plc_comm *comm, plc_request *q, int64_t timeout_ns) {
    gil_scope scope;
    gil_scope_enter(&scope, comm);
    int64_t deadline = timeout_ns < 0 ? INT64_MAX : deadline_after(comm, timeout_ns);
    bool finished = wait_until_finished(comm, q, deadline);
    gil_scope_exit(&scope);
    return finished ? (int)q->status : PLC_PENDING;
}

int plc_allreduce(plc_comm *comm, void *data, uint64_t count, uint32_t dtype, uint32_t op,
                  int64_t timeout_ns) {
    plc_request q = {.kind = PLC_ALLREDUCE, .dtype = dtype, .op = op, .root = -1, .count = count,
                     .input = data, .output = data, .factor = 1.0, .timeout_ns = timeout_ns};
    return plc_run(comm, &q);
}

void request_queue_close(plc_comm *comm) {
    pthread_mutex_lock(&comm->queue_lock);
    comm->stopping = true;
    pthread_cond_broadcast(&comm->queue_changed);
    pthread_mutex_unlock(&comm->queue_lock);
    if (comm->worker_started) pthread_join(comm->worker, NULL);
}

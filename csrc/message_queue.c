/* Messages between two ranks: tags, any source, any number in flight at once.
 *
 * Each ordered pair of ranks has a ring of bytes. A message is a head and its bytes, streamed
 * through the ring, so memory does not grow with its size. One progress thread per communicator,
 * started with the first message that cannot finish at once, moves whatever can move and otherwise
 * sleeps on its rank's doorbell, which peers ring when they moved something.
 *
 * A message without a matching receive stays in the ring (its sender waits). Only when a receive
 * with another tag must get past it is it moved to memory of its own, as an unexpected message.
 */
#include <errno.h>
#include <stdlib.h>

#include "internal.h"

#define LIVENESS_CHECK_NS (50 * 1000 * 1000)

typedef struct {
    uint64_t bytes;
    int32_t tag;
    uint32_t check; /* HEAD_CHECK: the stream is where we think it is */
    unsigned char padding[CACHE_LINE - 16];
} message_head;
#define HEAD_CHECK 0x70616365u

/* A message that came before its receive, complete or still streaming in. */
typedef struct unexpected {
    struct unexpected *next;
    uint32_t source;
    int32_t tag;
    uint64_t bytes;
    unsigned char data[];
} unexpected;

/* What is coming in from one peer. */
typedef struct {
    bool open; /* a head was read, its bytes are still coming */
    message_head incoming;
    uint64_t moved;
    /* Where its bytes go: straight into the receiver's buffer, or into memory of its own, or
     * nowhere because its receive has given up. */
    plc_message *target;
    unexpected *held;
    bool discard;
} inflow;

struct message_queue {
    pthread_mutex_t lock;
    pthread_t progress_thread;
    bool thread_started;
    _Atomic bool stopping;
    plc_message *sends, *receives; /* in the order they were posted */
    unexpected *unexpected;        /* complete, in order of arrival */
    uint32_t sent[PLC_MAX_RANKS];  /* messages gone to each peer */
    uint32_t begun[PLC_MAX_RANKS]; /* messages of each peer whose head was read */
    inflow inflows[];
};

static void complete(plc_message *m, uint32_t status) {
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&m->finished;
    m->status = status;
    atomic_store(finished, 1);
    futex_wake_all(finished);
}

static void list_append(plc_message **list, plc_message *m) {
    m->next = NULL;
    while (*list != NULL) list = (plc_message **)&(*list)->next;
    *list = m;
}

static void list_remove(plc_message **list, plc_message *m) {
    while (*list != NULL && *list != m) list = (plc_message **)&(*list)->next;
    if (*list == m) *list = m->next;
}

/* --- the ring --------------------------------------------------------------------------------- */
static uint64_t ring_write(const plc_comm *comm, channel *c, const void *from, uint64_t bytes) {
    uint64_t size = comm->config.ring_bytes;
    uint64_t at = atomic_load_explicit(&c->head, memory_order_relaxed);
    uint64_t room = size - (at - atomic_load_explicit(&c->tail, memory_order_acquire));
    uint64_t n = MIN(bytes, room), offset = at & (size - 1), first = MIN(n, size - offset);
    memcpy(c->ring + offset, from, first);
    memcpy(c->ring, (const char *)from + first, n - first);
    atomic_store_explicit(&c->head, at + n, memory_order_release);
    return n;
}

static uint64_t ring_used(channel *c) {
    uint64_t tail = atomic_load_explicit(&c->tail, memory_order_relaxed);
    return atomic_load_explicit(&c->head, memory_order_acquire) - tail;
}

static uint64_t ring_peek(const plc_comm *comm, channel *c, void *to, uint64_t bytes) {
    uint64_t size = comm->config.ring_bytes;
    uint64_t at = atomic_load_explicit(&c->tail, memory_order_relaxed);
    uint64_t n = MIN(bytes, ring_used(c)), offset = at & (size - 1), first = MIN(n, size - offset);
    memcpy(to, c->ring + offset, first);
    memcpy((char *)to + first, c->ring, n - first);
    return n;
}

static void ring_consume(channel *c, uint64_t n) {
    uint64_t at = atomic_load_explicit(&c->tail, memory_order_relaxed);
    atomic_store_explicit(&c->tail, at + n, memory_order_release);
}

static void wake_peer(plc_comm *comm, uint32_t rank) {
    advance(&comm->shared->records[rank].doorbell, 1);
}

/* --- sending ---------------------------------------------------------------------------------- */
/* `moved` counts head and bytes; the head goes only when it fits whole. */
static bool send_some(plc_comm *comm, plc_message *m) {
    channel *c = channel_of(comm, comm->rank, (uint32_t)m->peer);
    uint64_t total = sizeof(message_head) + m->bytes;
    bool moved = false;
    if (m->moved == 0) {
        if (comm->config.ring_bytes - ring_used(c) < sizeof(message_head)) return false;
        message_head h = {.bytes = m->bytes, .tag = m->tag, .check = HEAD_CHECK};
        ring_write(comm, c, &h, sizeof h);
        m->moved = sizeof h;
        moved = true;
    }
    while (m->moved < total) {
        const char *rest = (char *)m->buffer + (m->moved - sizeof(message_head));
        uint64_t n = ring_write(comm, c, rest, total - m->moved);
        if (n == 0) break;
        m->moved += n;
        moved = true;
    }
    if (moved) wake_peer(comm, (uint32_t)m->peer);
    return moved;
}

/* A message longer than the ring ends after its receiver has begun to read it, and has recorded
 * whether it expects another size. A shorter one may still be in the ring unseen: its sender never
 * learns of a wrong size. */
static uint32_t sent_status(const plc_comm *comm, message_queue *queue, plc_message *m) {
    channel *c = channel_of(comm, comm->rank, (uint32_t)m->peer);
    uint32_t number = ++queue->sent[m->peer];
    if (sizeof(message_head) + m->bytes <= comm->config.ring_bytes) return PLC_OK;
    if (atomic_load_explicit(&c->refused, memory_order_acquire) != number) return PLC_OK;
    m->found_bytes = c->wanted_bytes;
    return PLC_SIZE;
}

/* Messages to one peer leave in the order they were posted: only the first of each may move. */
static bool send_all(plc_comm *comm, message_queue *queue) {
    bool moved = false, blocked[PLC_MAX_RANKS] = {false};
    for (plc_message *m = queue->sends, *next; m != NULL; m = next) {
        next = m->next;
        if (blocked[m->peer]) continue;
        moved |= send_some(comm, m);
        if (m->moved < sizeof(message_head) + m->bytes) {
            blocked[m->peer] = true;
            continue;
        }
        list_remove(&queue->sends, m);
        complete(m, sent_status(comm, queue, m));
    }
    return moved;
}

/* --- receiving -------------------------------------------------------------------------------- */
static bool matches(const plc_message *m, uint32_t source, int32_t tag) {
    return (m->peer == PLC_ANY_SOURCE || (uint32_t)m->peer == source) && m->tag == tag;
}

static bool has_inflow(const plc_comm *comm, const message_queue *queue, const plc_message *m) {
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (queue->inflows[r].open && queue->inflows[r].target == m) return true;
    return false;
}

static plc_message *find_receive(const plc_comm *comm, const message_queue *queue, uint32_t source,
                                 int32_t tag) {
    for (plc_message *m = queue->receives; m != NULL; m = m->next)
        if (matches(m, source, tag) && !has_inflow(comm, queue, m)) return m;
    return NULL;
}

/* Some receive must get past the message at the front of this channel. */
static bool is_blocking_receive(const plc_comm *comm, const message_queue *queue, uint32_t source) {
    for (plc_message *m = queue->receives; m != NULL; m = m->next)
        if ((m->peer == PLC_ANY_SOURCE || (uint32_t)m->peer == source) &&
            !has_inflow(comm, queue, m))
            return true;
    return false;
}

static void deliver(message_queue *queue, plc_message *m, uint32_t source, uint64_t bytes,
                    const void *data) {
    m->source = (int32_t)source;
    m->found_bytes = bytes;
    list_remove(&queue->receives, m);
    if (bytes == m->bytes && data != NULL && bytes > 0) memcpy(m->buffer, data, bytes);
    complete(m, bytes == m->bytes ? PLC_OK : PLC_SIZE);
}

static bool begin_message(plc_comm *comm, message_queue *queue, uint32_t source) {
    inflow *in = &queue->inflows[source];
    channel *c = channel_of(comm, source, comm->rank);
    if (ring_used(c) < sizeof(message_head)) return false;
    ring_peek(comm, c, &in->incoming, sizeof(message_head));
    /* Memory was overwritten: nothing in this channel can be trusted. */
    if (in->incoming.check != HEAD_CHECK) {
        record_failure(comm, PLC_SYSTEM, (int32_t)source);
        return false;
    }
    in->target = find_receive(comm, queue, source, in->incoming.tag);
    in->held = NULL;
    if (in->target == NULL && !is_blocking_receive(comm, queue, source)) return false;
    if (in->target == NULL || in->target->bytes != in->incoming.bytes) {
        /* Also a message of the wrong size is read to its end, so that the channel stays usable. */
        in->held = malloc(sizeof(unexpected) + in->incoming.bytes);
        if (in->held == NULL) return false;
        *in->held =
            (unexpected){.source = source, .tag = in->incoming.tag, .bytes = in->incoming.bytes};
    }
    queue->begun[source]++;
    if (in->target != NULL && in->target->bytes != in->incoming.bytes) {
        c->wanted_bytes = in->target->bytes;
        atomic_store_explicit(&c->refused, queue->begun[source], memory_order_release);
    }
    in->open = true;
    in->discard = false;
    in->moved = 0;
    ring_consume(c, sizeof(message_head));
    return true;
}

static void end_message(const plc_comm *comm, message_queue *queue, uint32_t source) {
    inflow *in = &queue->inflows[source];
    /* Its receive may have come while it was streaming in; the next message of its tag must not get
     * there first. */
    if (in->target == NULL && !in->discard)
        in->target = find_receive(comm, queue, source, in->incoming.tag);
    in->open = false;
    if (in->discard) {
        free(in->held);
    } else if (in->held == NULL) {
        deliver(queue, in->target, source, in->incoming.bytes, NULL);
    } else if (in->target != NULL) {
        deliver(queue, in->target, source, in->incoming.bytes, in->held->data);
        free(in->held);
    } else {
        unexpected **last = &queue->unexpected;
        while (*last != NULL) last = &(*last)->next;
        *last = in->held;
    }
    in->target = NULL;
    in->held = NULL;
}

/* Move what is there of the open message to where it belongs. */
static uint64_t drain(const plc_comm *comm, channel *c, const inflow *in) {
    uint64_t rest = in->incoming.bytes - in->moved, n = MIN(rest, ring_used(c));
    if (!in->discard && n > 0) {
        unsigned char *to = in->held != NULL ? in->held->data : in->target->buffer;
        ring_peek(comm, c, to + in->moved, n);
    }
    ring_consume(c, n);
    return n;
}

static bool receive_some(plc_comm *comm, message_queue *queue, uint32_t source) {
    inflow *in = &queue->inflows[source];
    channel *c = channel_of(comm, source, comm->rank);
    bool moved = false;
    for (;;) {
        if (!in->open && !begin_message(comm, queue, source)) break;
        uint64_t n = drain(comm, c, in);
        in->moved += n;
        moved = true;
        if (in->moved < in->incoming.bytes) {
            if (n == 0) {
                moved = false;
                break;
            }
            wake_peer(comm, source); /* there is room again */
            continue;
        }
        end_message(comm, queue, source);
        wake_peer(comm, source);
    }
    return moved;
}

/* An unexpected message may be what a new receive wants. */
static bool match_unexpected(const plc_comm *comm, message_queue *queue) {
    bool moved = false;
    for (unexpected **at = &queue->unexpected; *at != NULL;) {
        unexpected *held = *at;
        plc_message *m = find_receive(comm, queue, held->source, held->tag);
        if (m == NULL) {
            at = &held->next;
            continue;
        }
        *at = held->next;
        deliver(queue, m, held->source, held->bytes, held->data);
        free(held);
        moved = true;
    }
    return moved;
}

static bool make_progress(plc_comm *comm, message_queue *queue) {
    bool moved = send_all(comm, queue) | match_unexpected(comm, queue);
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (r != comm->rank) moved |= receive_some(comm, queue, r);
    return moved;
}

/* --- failures --------------------------------------------------------------------------------- */
static void complete_all(plc_message **list, uint32_t status) {
    while (*list != NULL) {
        plc_message *m = *list;
        *list = m->next;
        complete(m, status);
    }
}

typedef struct {
    bool any, gone[PLC_MAX_RANKS], left[PLC_MAX_RANKS];
} gone_peers;

/* Who is gone. What is moved afterwards includes everything they sent: nobody is given up with a
 * message in flight. */
static void find_gone_peers(const plc_comm *comm, gone_peers *who) {
    who->any = false;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        who->gone[r] = rank_is_gone(comm, r, &who->left[r]);
        who->any |= who->gone[r];
    }
}

/* PLC_OK while somebody may still answer this message. */
static int message_status(const plc_comm *comm, const plc_message *m, const gone_peers *who,
                          int64_t now) {
    bool left = false, any_lives = !who->any;
    for (uint32_t r = 0; r < comm->ranks && !any_lives; r++) {
        bool concerned = m->peer == PLC_ANY_SOURCE ? r != comm->rank : r == (uint32_t)m->peer;
        if (concerned && !who->gone[r]) any_lives = true;
        if (concerned && who->gone[r]) left = who->left[r];
    }
    if (!any_lives) return left ? PLC_PEER_LEFT : PLC_PEER_LOST;
    return now >= m->deadline_ns ? PLC_TIMEOUT : PLC_OK;
}

static bool is_peer_of(const plc_comm *comm, uint32_t rank, const void *message) {
    (void)comm;
    return (int32_t)rank == ((const plc_message *)message)->peer;
}

/* The receive is its caller's again: not even its address may be compared with from here on. */
static void discard_rest(inflow *in) {
    in->discard = true;
    in->target = NULL;
}

static void fail_unanswerable(plc_comm *comm, message_queue *queue, plc_message **list,
                              const gone_peers *who) {
    int64_t now = now_ns();
    for (plc_message *m = *list, *next; m != NULL; m = next) {
        next = m->next;
        int status = message_status(comm, m, who, now);
        if (status == PLC_OK) continue;
        for (uint32_t r = 0; r < comm->ranks; r++)
            if (queue->inflows[r].open && queue->inflows[r].target == m)
                discard_rest(&queue->inflows[r]);
        /* Half a message cannot be taken back: the channel, and with it the group, is lost. */
        if (m->is_send && m->moved > 0) {
            if (status == PLC_TIMEOUT) record_timeout(comm, comm->rank, is_peer_of, m);
            else record_failure(comm, (uint32_t)status, m->peer);
        }
        list_remove(list, m);
        complete(m, (uint32_t)status);
    }
}

/* --- the progress thread ---------------------------------------------------------------------- */
static void *progress_main(void *argument) {
    plc_comm *comm = argument;
    message_queue *queue = comm->messages;
    event_count *doorbell = &comm->shared->records[comm->rank].doorbell;
    int64_t next_look = now_ns() + LIVENESS_CHECK_NS;
    gone_peers who;
    while (!atomic_load(&queue->stopping)) {
        uint32_t seen = atomic_load(&doorbell->value);
        pthread_mutex_lock(&queue->lock);
        bool moved = make_progress(comm, queue);
        bool waiting = queue->sends != NULL || queue->receives != NULL;
        int failure = waiting ? known_failure(comm) : PLC_OK;
        if (failure != PLC_OK) {
            complete_all(&queue->sends, (uint32_t)failure);
            complete_all(&queue->receives, (uint32_t)failure);
        }
        if (!moved && waiting && now_ns() >= next_look) {
            find_gone_peers(comm, &who);
            moved = make_progress(comm, queue); /* what they sent before they went */
            fail_unanswerable(comm, queue, &queue->sends, &who);
            fail_unanswerable(comm, queue, &queue->receives, &who);
            next_look = now_ns() + LIVENESS_CHECK_NS;
        }
        pthread_mutex_unlock(&queue->lock);
        if (!moved)
            wait_change(comm, doorbell, seen,
                        now_ns() + (waiting ? LIVENESS_CHECK_NS : 1000000000));
    }
    return NULL;
}

static message_queue *open_queue(plc_comm *comm) {
    pthread_mutex_lock(&comm->message_lock);
    if (comm->messages == NULL) {
        message_queue *queue = calloc(1, sizeof *queue + comm->ranks * sizeof(inflow));
        if (queue != NULL) pthread_mutex_init(&queue->lock, NULL);
        comm->messages = queue;
    }
    message_queue *queue = comm->messages;
    pthread_mutex_unlock(&comm->message_lock);
    return queue;
}

static int start_progress_thread(plc_comm *comm, message_queue *queue) {
    if (queue->thread_started) return PLC_OK;
    int error = pthread_create(&queue->progress_thread, NULL, progress_main, comm);
    if (error != 0) {
        errno = error;
        return PLC_SYSTEM;
    }
    queue->thread_started = true;
    return PLC_OK;
}

static int post_message(plc_comm *comm, plc_message *m, bool is_send) {
    bool any = !is_send && m->peer == PLC_ANY_SOURCE;
    if (!any &&
        (m->peer < 0 || (uint32_t)m->peer >= comm->ranks || (uint32_t)m->peer == comm->rank))
        return PLC_INVALID;
    int failure = known_failure(comm);
    if (failure != PLC_OK) return failure;
    message_queue *queue = open_queue(comm);
    if (queue == NULL) {
        errno = ENOMEM;
        return PLC_SYSTEM;
    }
    m->is_send = is_send;
    m->moved = m->found_bytes = 0;
    m->source = m->peer;
    m->status = PLC_PENDING;
    m->finished = 0;
    m->deadline_ns = deadline_after(comm, m->timeout_ns);
    pthread_mutex_lock(&queue->lock);
    list_append(is_send ? &queue->sends : &queue->receives, m);
    make_progress(comm, queue); /* a short message is often gone, or there, at once */
    int status = m->finished ? PLC_OK : start_progress_thread(comm, queue);
    if (status != PLC_OK) list_remove(is_send ? &queue->sends : &queue->receives, m);
    bool finished = m->finished;
    pthread_mutex_unlock(&queue->lock);
    if (status == PLC_OK && !finished) wake_peer(comm, comm->rank);
    return status;
}

static int enter_and_post(plc_comm *comm, plc_message *m, bool is_send) {
    if (!comm_enter(comm)) return PLC_ABORTED;
    int status = post_message(comm, m, is_send);
    comm_exit(comm);
    return status;
}

int plc_send(plc_comm *comm, plc_message *m) { return enter_and_post(comm, m, true); }

int plc_receive(plc_comm *comm, plc_message *m) { return enter_and_post(comm, m, false); }

static bool wait_until_finished(plc_comm *comm, plc_message *m, int64_t deadline) {
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&m->finished;
    int64_t spin_end = now_ns() + comm->config.spin_ns;
    while (atomic_load(finished) == 0) {
        int64_t now = now_ns();
        if (now < spin_end) continue;
        gil_release();
        if (now >= deadline || gil_interrupted()) return false;
        futex_wait(finished, 0, MIN(deadline - now, LIVENESS_CHECK_NS));
    }
    return true;
}

int plc_message_wait(plc_comm *comm, plc_message *m, int64_t timeout_ns) {
    gil_scope scope;
    gil_scope_enter(&scope, comm);
    int64_t deadline = timeout_ns < 0 ? INT64_MAX : deadline_after(comm, timeout_ns);
    bool moved = wait_until_finished(comm, m, deadline);
    gil_scope_exit(&scope);
    return moved ? (int)m->status : PLC_PENDING;
}

void message_queue_close(plc_comm *comm) {
    message_queue *queue = comm->messages;
    if (queue == NULL) return;
    atomic_store(&queue->stopping, true);
    wake_peer(comm, comm->rank);
    if (queue->thread_started) pthread_join(queue->progress_thread, NULL);
    complete_all(&queue->sends, PLC_ABORTED);
    complete_all(&queue->receives, PLC_ABORTED);
    for (unexpected *a = queue->unexpected, *next; a != NULL; a = next) {
        next = a->next;
        free(a);
    }
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (queue->inflows[r].open) free(queue->inflows[r].held);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
    comm->messages = NULL;
}

/* Messages between two ranks: tags, any source, any number under way at once.
 *
 * Each ordered pair of ranks has a ring of bytes. A message is a head and its bytes, streamed through the ring, so
 * memory does not grow with its size. One thread per communicator, started with the first message that cannot finish
 * at once, moves whatever can move and otherwise sleeps on its rank's doorbell, which peers ring when they moved
 * something. A message for which nobody asked stays in the ring (its sender waits); only when a receive with another
 * tag must get past it is it put aside in memory of its own.
 */
#include <errno.h>
#include <stdlib.h>

#include "internal.h"

#define LOOK_AROUND_EVERY_NS (50 * 1000 * 1000)

typedef struct {
    uint64_t bytes;
    int32_t tag;
    uint32_t check; /* HEAD_CHECK: the stream is where we think it is */
    unsigned char padding[CACHE_LINE - 16];
} head;
#define HEAD_CHECK 0x70616365u

/* A message that came before its receive, or is streaming in aside. */
typedef struct aside {
    struct aside *next;
    uint32_t source;
    int32_t tag;
    uint64_t bytes;
    unsigned char data[];
} aside;

/* What is coming in from one peer. */
typedef struct {
    bool open;            /* a head was read, its bytes are still coming */
    head incoming;
    uint64_t moved;
    plc_message *target;  /* goes straight into the receiver's buffer, or */
    aside *kept;          /* is put aside, or, */
    bool discard;         /* its receive having given up, is read past */
} inlet;

struct post_office {
    pthread_mutex_t lock;
    pthread_t carrier;
    bool carrier_started;
    _Atomic bool stopping;
    plc_message *sends, *receives; /* in the order they were posted */
    aside *asides;                 /* complete, in order of arrival */
    uint32_t sent[PLC_MAX_RANKS];  /* messages gone to each peer */
    uint32_t begun[PLC_MAX_RANKS]; /* messages of each peer whose head was read */
    inlet inlets[];
};

static void complete(plc_message *m, uint32_t status) {
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&m->finished;
    m->status = status;
    atomic_store(finished, 1);
    futex_wake_all(finished);
}

static void append(plc_message **list, plc_message *m) {
    m->next = NULL;
    while (*list != NULL) list = (plc_message **)&(*list)->next;
    *list = m;
}

static void take_out(plc_message **list, plc_message *m) {
    while (*list != NULL && *list != m) list = (plc_message **)&(*list)->next;
    if (*list == m) *list = m->next;
}

/* --- the ring ---------------------------------------------------------------------------------------------------- */
static uint64_t ring_write(const plc_comm *comm, channel *c, const void *from, uint64_t bytes) {
    uint64_t size = comm->config.ring_bytes, at = atomic_load_explicit(&c->head, memory_order_relaxed);
    uint64_t room = size - (at - atomic_load_explicit(&c->tail, memory_order_acquire));
    uint64_t n = MIN(bytes, room), offset = at & (size - 1), first = MIN(n, size - offset);
    memcpy(c->ring + offset, from, first);
    memcpy(c->ring, (const char *)from + first, n - first);
    atomic_store_explicit(&c->head, at + n, memory_order_release);
    return n;
}

static uint64_t ring_used(channel *c) {
    return atomic_load_explicit(&c->head, memory_order_acquire) - atomic_load_explicit(&c->tail, memory_order_relaxed);
}

static uint64_t ring_peek(const plc_comm *comm, channel *c, void *to, uint64_t bytes) {
    uint64_t size = comm->config.ring_bytes, at = atomic_load_explicit(&c->tail, memory_order_relaxed);
    uint64_t n = MIN(bytes, ring_used(c)), offset = at & (size - 1), first = MIN(n, size - offset);
    memcpy(to, c->ring + offset, first);
    memcpy((char *)to + first, c->ring, n - first);
    return n;
}

static void ring_consume(channel *c, uint64_t n) {
    uint64_t at = atomic_load_explicit(&c->tail, memory_order_relaxed);
    atomic_store_explicit(&c->tail, at + n, memory_order_release);
}

static void ring_bell(plc_comm *comm, uint32_t rank) { advance(&comm->shared->records[rank].doorbell, 1); }

/* --- sending ------------------------------------------------------------------------------------------------------ */
/* `moved` counts head and bytes; the head goes only when it fits whole. */
static bool push(plc_comm *comm, plc_message *m) {
    channel *c = channel_of(comm, comm->rank, (uint32_t)m->peer);
    uint64_t total = sizeof(head) + m->bytes;
    bool moved = false;
    if (m->moved == 0) {
        if (comm->config.ring_bytes - ring_used(c) < sizeof(head)) return false;
        head h = {.bytes = m->bytes, .tag = m->tag, .check = HEAD_CHECK};
        ring_write(comm, c, &h, sizeof h);
        m->moved = sizeof h;
        moved = true;
    }
    while (m->moved < total) {
        uint64_t n = ring_write(comm, c, (char *)m->buffer + (m->moved - sizeof(head)), total - m->moved);
        if (n == 0) break;
        m->moved += n;
        moved = true;
    }
    if (moved) ring_bell(comm, (uint32_t)m->peer);
    return moved;
}

/* A message longer than the ring ends when its receiver has begun to read it, and has said if it wants another size.
 * A shorter one may lie in the ring unseen: that nobody can tell yet, so it is never told. */
static uint32_t sent_status(const plc_comm *comm, post_office *post, plc_message *m) {
    channel *c = channel_of(comm, comm->rank, (uint32_t)m->peer);
    uint32_t number = ++post->sent[m->peer];
    if (sizeof(head) + m->bytes <= comm->config.ring_bytes) return PLC_OK;
    if (atomic_load_explicit(&c->refused, memory_order_acquire) != number) return PLC_OK;
    m->found_bytes = c->wanted_bytes;
    return PLC_SIZE;
}

/* Messages to one peer leave in the order they were posted: only the first of each may move. */
static bool push_all(plc_comm *comm, post_office *post) {
    bool moved = false, blocked[PLC_MAX_RANKS] = {false};
    for (plc_message *m = post->sends, *next; m != NULL; m = next) {
        next = m->next;
        if (blocked[m->peer]) continue;
        moved |= push(comm, m);
        if (m->moved < sizeof(head) + m->bytes) {
            blocked[m->peer] = true;
            continue;
        }
        take_out(&post->sends, m);
        complete(m, sent_status(comm, post, m));
    }
    return moved;
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */
static bool wants(const plc_message *m, uint32_t source, int32_t tag) {
    return (m->peer == PLC_ANY_SOURCE || (uint32_t)m->peer == source) && m->tag == tag;
}

static bool is_taken(const plc_comm *comm, const post_office *post, const plc_message *m) {
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (post->inlets[r].open && post->inlets[r].target == m) return true;
    return false;
}

static plc_message *waiting_for(const plc_comm *comm, const post_office *post, uint32_t source, int32_t tag) {
    for (plc_message *m = post->receives; m != NULL; m = m->next)
        if (wants(m, source, tag) && !is_taken(comm, post, m)) return m;
    return NULL;
}

/* Some receive must get past what stands at the front of this channel. */
static bool someone_waits_behind(const plc_comm *comm, const post_office *post, uint32_t source) {
    for (plc_message *m = post->receives; m != NULL; m = m->next)
        if ((m->peer == PLC_ANY_SOURCE || (uint32_t)m->peer == source) && !is_taken(comm, post, m)) return true;
    return false;
}

static void deliver(post_office *post, plc_message *m, uint32_t source, uint64_t bytes, const void *data) {
    m->source = (int32_t)source;
    m->found_bytes = bytes;
    take_out(&post->receives, m);
    if (bytes == m->bytes && data != NULL && bytes > 0) memcpy(m->buffer, data, bytes);
    complete(m, bytes == m->bytes ? PLC_OK : PLC_SIZE);
}

static bool begin(plc_comm *comm, post_office *post, uint32_t source) {
    inlet *in = &post->inlets[source];
    channel *c = channel_of(comm, source, comm->rank);
    if (ring_used(c) < sizeof(head)) return false;
    ring_peek(comm, c, &in->incoming, sizeof(head));
    if (in->incoming.check != HEAD_CHECK) { /* someone wrote where it should not: nothing in this channel can be trusted */
        raise_failure(comm, PLC_SYSTEM, (int32_t)source);
        return false;
    }
    in->target = waiting_for(comm, post, source, in->incoming.tag);
    in->kept = NULL;
    if (in->target == NULL && !someone_waits_behind(comm, post, source)) return false;
    if (in->target == NULL || in->target->bytes != in->incoming.bytes) {
        /* Also a message of the wrong size is read to its end, so that the channel stays usable. */
        in->kept = malloc(sizeof(aside) + in->incoming.bytes);
        if (in->kept == NULL) return false;
        *in->kept = (aside){.source = source, .tag = in->incoming.tag, .bytes = in->incoming.bytes};
    }
    post->begun[source]++;
    if (in->target != NULL && in->target->bytes != in->incoming.bytes) {
        c->wanted_bytes = in->target->bytes;
        atomic_store_explicit(&c->refused, post->begun[source], memory_order_release);
    }
    in->open = true;
    in->discard = false;
    in->moved = 0;
    ring_consume(c, sizeof(head));
    return true;
}

static void end(const plc_comm *comm, post_office *post, uint32_t source) {
    inlet *in = &post->inlets[source];
    /* Its receive may have come while it was put aside; the next message of its tag must not get there first. */
    if (in->target == NULL && !in->discard) in->target = waiting_for(comm, post, source, in->incoming.tag);
    in->open = false;
    if (in->discard) {
        free(in->kept);
    } else if (in->kept == NULL) {
        deliver(post, in->target, source, in->incoming.bytes, NULL);
    } else if (in->target != NULL) {
        deliver(post, in->target, source, in->incoming.bytes, in->kept->data);
        free(in->kept);
    } else {
        aside **last = &post->asides;
        while (*last != NULL) last = &(*last)->next;
        *last = in->kept;
    }
    in->target = NULL;
    in->kept = NULL;
}

/* Move what is there of the open message to where it belongs. */
static uint64_t take(const plc_comm *comm, channel *c, const inlet *in) {
    uint64_t rest = in->incoming.bytes - in->moved, n = MIN(rest, ring_used(c));
    if (!in->discard && n > 0)
        ring_peek(comm, c, (in->kept != NULL ? in->kept->data : (unsigned char *)in->target->buffer) + in->moved, n);
    ring_consume(c, n);
    return n;
}

static bool pull(plc_comm *comm, post_office *post, uint32_t source) {
    inlet *in = &post->inlets[source];
    channel *c = channel_of(comm, source, comm->rank);
    bool moved = false;
    for (;;) {
        if (!in->open && !begin(comm, post, source)) break;
        uint64_t n = take(comm, c, in);
        in->moved += n;
        moved = true;
        if (in->moved < in->incoming.bytes) {
            if (n == 0) {
                moved = false;
                break;
            }
            ring_bell(comm, source); /* there is room again */
            continue;
        }
        end(comm, post, source);
        ring_bell(comm, source);
    }
    return moved;
}

/* A message put aside earlier may be what a new receive wants. */
static bool match_asides(const plc_comm *comm, post_office *post) {
    bool moved = false;
    for (aside **at = &post->asides; *at != NULL;) {
        aside *kept = *at;
        plc_message *m = waiting_for(comm, post, kept->source, kept->tag);
        if (m == NULL) {
            at = &kept->next;
            continue;
        }
        *at = kept->next;
        deliver(post, m, kept->source, kept->bytes, kept->data);
        free(kept);
        moved = true;
    }
    return moved;
}

static bool move_all(plc_comm *comm, post_office *post) {
    bool moved = push_all(comm, post) | match_asides(comm, post);
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (r != comm->rank) moved |= pull(comm, post, r);
    return moved;
}

/* --- failures ----------------------------------------------------------------------------------------------------- */
static void fail_all(plc_message **list, uint32_t status) {
    while (*list != NULL) {
        plc_message *m = *list;
        *list = m->next;
        complete(m, status);
    }
}

typedef struct {
    bool any, gone[PLC_MAX_RANKS], left[PLC_MAX_RANKS];
} absence;

/* Who is gone. What is moved afterwards includes everything they sent: nobody is given up with a message on its way. */
static void note_absence(const plc_comm *comm, absence *who) {
    who->any = false;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        who->gone[r] = rank_is_gone(comm, r, &who->left[r]);
        who->any |= who->gone[r];
    }
}

/* PLC_OK while somebody may still answer this message. */
static int verdict(const plc_comm *comm, const plc_message *m, const absence *who, int64_t now) {
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
static void read_past(inlet *in) {
    in->discard = true;
    in->target = NULL;
}

static void look_after(plc_comm *comm, post_office *post, plc_message **list, const absence *who) {
    int64_t now = now_ns();
    for (plc_message *m = *list, *next; m != NULL; m = next) {
        next = m->next;
        int status = verdict(comm, m, who, now);
        if (status == PLC_OK) continue;
        for (uint32_t r = 0; r < comm->ranks; r++)
            if (post->inlets[r].open && post->inlets[r].target == m) read_past(&post->inlets[r]);
        /* Half a message cannot be taken back: the channel, and with it the group, is lost. */
        if (m->is_send && m->moved > 0) {
            if (status == PLC_TIMEOUT) raise_timeout(comm, comm->rank, is_peer_of, m);
            else raise_failure(comm, (uint32_t)status, m->peer);
        }
        take_out(list, m);
        complete(m, (uint32_t)status);
    }
}

/* --- the carrier --------------------------------------------------------------------------------------------------- */
static void *carry(void *argument) {
    plc_comm *comm = argument;
    post_office *post = comm->post;
    signal_word *bell = &comm->shared->records[comm->rank].doorbell;
    int64_t next_look = now_ns() + LOOK_AROUND_EVERY_NS;
    absence who;
    while (!atomic_load(&post->stopping)) {
        uint32_t seen = atomic_load(&bell->value);
        pthread_mutex_lock(&post->lock);
        bool moved = move_all(comm, post), waiting = post->sends != NULL || post->receives != NULL;
        int failure = waiting ? known_failure(comm) : PLC_OK;
        if (failure != PLC_OK) fail_all(&post->sends, (uint32_t)failure), fail_all(&post->receives, (uint32_t)failure);
        if (!moved && waiting && now_ns() >= next_look) {
            note_absence(comm, &who);
            moved = move_all(comm, post); /* their last words */
            look_after(comm, post, &post->sends, &who);
            look_after(comm, post, &post->receives, &who);
            next_look = now_ns() + LOOK_AROUND_EVERY_NS;
        }
        pthread_mutex_unlock(&post->lock);
        if (!moved) wait_change(comm, bell, seen, now_ns() + (waiting ? LOOK_AROUND_EVERY_NS : 1000000000));
    }
    return NULL;
}

static post_office *open_office(plc_comm *comm) {
    pthread_mutex_lock(&comm->post_lock);
    if (comm->post == NULL) {
        post_office *post = calloc(1, sizeof *post + comm->ranks * sizeof(inlet));
        if (post != NULL) pthread_mutex_init(&post->lock, NULL);
        comm->post = post;
    }
    post_office *post = comm->post;
    pthread_mutex_unlock(&comm->post_lock);
    return post;
}

static int start_carrier(plc_comm *comm, post_office *post) {
    if (post->carrier_started) return PLC_OK;
    int error = pthread_create(&post->carrier, NULL, carry, comm);
    if (error != 0) {
        errno = error;
        return PLC_SYSTEM;
    }
    post->carrier_started = true;
    return PLC_OK;
}

static int post_message(plc_comm *comm, plc_message *m, bool is_send) {
    bool any = !is_send && m->peer == PLC_ANY_SOURCE;
    if (!any && (m->peer < 0 || (uint32_t)m->peer >= comm->ranks || (uint32_t)m->peer == comm->rank)) return PLC_INVALID;
    int failure = known_failure(comm);
    if (failure != PLC_OK) return failure;
    post_office *post = open_office(comm);
    if (post == NULL) {
        errno = ENOMEM;
        return PLC_SYSTEM;
    }
    m->is_send = is_send;
    m->moved = m->found_bytes = 0;
    m->source = m->peer;
    m->status = PLC_PENDING;
    m->finished = 0;
    m->deadline_ns = deadline_after(comm, m->timeout_ns);
    pthread_mutex_lock(&post->lock);
    append(is_send ? &post->sends : &post->receives, m);
    move_all(comm, post); /* a short message is often gone, or there, at once */
    int status = m->finished ? PLC_OK : start_carrier(comm, post);
    if (status != PLC_OK) take_out(is_send ? &post->sends : &post->receives, m);
    bool finished = m->finished;
    pthread_mutex_unlock(&post->lock);
    if (status == PLC_OK && !finished) ring_bell(comm, comm->rank);
    return status;
}

static int step_in_and_post(plc_comm *comm, plc_message *m, bool is_send) {
    if (!step_in(comm)) return PLC_ABORTED;
    int status = post_message(comm, m, is_send);
    step_out(comm);
    return status;
}

int plc_send(plc_comm *comm, plc_message *m) { return step_in_and_post(comm, m, true); }

int plc_receive(plc_comm *comm, plc_message *m) { return step_in_and_post(comm, m, false); }

static bool wait_until_moved(plc_comm *comm, plc_message *m, int64_t deadline) {
    _Atomic uint32_t *finished = (_Atomic uint32_t *)&m->finished;
    int64_t spin_end = now_ns() + comm->config.spin_ns;
    while (atomic_load(finished) == 0) {
        int64_t now = now_ns();
        if (now < spin_end) continue;
        caller_waits();
        if (now >= deadline || caller_stops()) return false;
        futex_wait(finished, 0, MIN(deadline - now, LOOK_AROUND_EVERY_NS));
    }
    return true;
}

int plc_message_wait(plc_comm *comm, plc_message *m, int64_t timeout_ns) {
    caller_scope scope;
    caller_enters(&scope, comm);
    bool moved = wait_until_moved(comm, m, timeout_ns < 0 ? INT64_MAX : deadline_after(comm, timeout_ns));
    caller_returns(&scope);
    return moved ? (int)m->status : PLC_PENDING;
}

void post_office_close(plc_comm *comm) {
    post_office *post = comm->post;
    if (post == NULL) return;
    atomic_store(&post->stopping, true);
    ring_bell(comm, comm->rank);
    if (post->carrier_started) pthread_join(post->carrier, NULL);
    fail_all(&post->sends, PLC_ABORTED);
    fail_all(&post->receives, PLC_ABORTED);
    for (aside *a = post->asides, *next; a != NULL; a = next) {
        next = a->next;
        free(a);
    }
    for (uint32_t r = 0; r < comm->ranks; r++)
        if (post->inlets[r].open) free(post->inlets[r].kept);
    pthread_mutex_destroy(&post->lock);
    free(post);
    comm->post = NULL;
}

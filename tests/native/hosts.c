/* Reductions over hosts: each host is a world of its own, and what connects them are queues. */
#include "scenarios.h"

#define MAX_HOSTS 3
#define MAX_LOCAL 3
#define MAX_BLOCKS 8
#define ROUNDS 40

/* --- a wire: one queue for each lane and pair of hosts ---------------------------------------- */
typedef struct message {
    struct message *next;
    unsigned char data[];
} message;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    message *first;
    bool is_cut;
} queue;

typedef struct {
    uint32_t hosts, lanes;
    world worlds[MAX_HOSTS];
    queue queues[MAX_LOCAL][MAX_HOSTS][MAX_HOSTS]; /* lane, from, to */
} network;

/* One rank's end of it, for one call. */
typedef struct {
    network *net;
    uint32_t host, lane;
    uint64_t capacity;
    message *taken[4 * MAX_BLOCKS * MAX_HOSTS]; /* its own copies, which it may read till the end */
    uint32_t takes, sends_left;
    message *received[MAX_HOSTS];
} wire_end;

static message *new_message(uint64_t bytes) {
    message *m = malloc(sizeof *m + bytes);
    m->next = NULL;
    return m;
}

static int take(void *context, void **data) {
    wire_end *end = context;
    message *m = end->taken[end->takes++] = new_message(end->capacity);
    *data = m->data;
    return 0;
}

static void post(queue *q, message *m) {
    pthread_mutex_lock(&q->lock);
    message **last = &q->first;
    while (*last != NULL) last = &(*last)->next;
    *last = m;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
}

static int send_to(void *context, int32_t host, uint64_t bytes) {
    wire_end *end = context;
    if (end->sends_left-- == 0) return 1;
    for (uint32_t to = 0; to < end->net->hosts; to++) {
        if (to == end->host || (host >= 0 && to != (uint32_t)host)) continue;
        message *copy = new_message(bytes);
        memcpy(copy->data, end->taken[end->takes - 1]->data, bytes);
        post(&end->net->queues[end->lane][end->host][to], copy);
    }
    return 0;
}

static int receive_from(void *context, uint32_t host, const void **data) {
    wire_end *end = context;
    queue *q = &end->net->queues[end->lane][host][end->host];
    pthread_mutex_lock(&q->lock);
    while (q->first == NULL && !q->is_cut) pthread_cond_wait(&q->changed, &q->lock);
    message *m = q->first;
    if (m != NULL) q->first = m->next;
    pthread_mutex_unlock(&q->lock);
    if (m == NULL) return 1;
    CHECK(end->received[host] == NULL, "a message was not released");
    end->received[host] = m;
    *data = m->data;
    return 0;
}

static int release_from(void *context, uint32_t host) {
    wire_end *end = context;
    free(end->received[host]);
    end->received[host] = NULL;
    return 0;
}

static void close_end(wire_end *end) {
    for (uint32_t i = 0; i < end->takes; i++) free(end->taken[i]);
    for (uint32_t host = 0; host < MAX_HOSTS; host++) free(end->received[host]);
}

static void for_each_queue(network *net, void (*act)(queue *q)) {
    for (uint32_t lane = 0; lane < net->lanes; lane++)
        for (uint32_t from = 0; from < net->hosts; from++)
            for (uint32_t to = 0; to < net->hosts; to++) act(&net->queues[lane][from][to]);
}

static void open_queue(queue *q) {
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->changed, NULL);
}

/* Everything that is on its way is lost. */
static void empty_queue(queue *q) {
    while (q->first != NULL) {
        message *m = q->first;
        q->first = m->next;
        free(m);
    }
}

static void cut_queue(queue *q) {
    pthread_mutex_lock(&q->lock);
    q->is_cut = true;
    pthread_cond_broadcast(&q->changed);
    pthread_mutex_unlock(&q->lock);
}

static void close_queue(queue *q) {
    empty_queue(q);
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
}

/* --- a call ----------------------------------------------------------------------------------- */
typedef struct {
    uint32_t dtype, in_pieces, rounds, depth;
    int32_t root; /* -1: all ranks get the result */
    uint64_t count, slice, divisor;
    uint64_t values; /* the seed of the numbers */
} plan;

static plan random_plan(network *net, uint64_t *seed) {
    plan p = {.values = next_random(seed), .root = -1, .divisor = 1};
    p.dtype = below(seed, 2) ? PLC_F32 : PLC_I64;
    p.in_pieces = below(seed, 2);
    p.rounds = p.dtype == PLC_F32 && below(seed, 2);
    p.depth = 1 + (uint32_t)below(seed, PLC_MAX_DEPTH);
    p.slice = 1 + below(seed, 3000);
    p.count = 1 + below(seed, p.slice * net->lanes * MAX_BLOCKS);
    if (p.dtype == PLC_F32 && below(seed, 3) == 0) p.divisor = 2;
    if (net->hosts == 2 && !p.in_pieces && below(seed, 3) == 0)
        p.root = (int32_t)below(seed, net->worlds[0].ranks + net->worlds[1].ranks);
    return p;
}

static float number(const plan *p, uint32_t rank, uint64_t i) {
    uint64_t state = p->values ^ ((uint64_t)rank << 40) ^ i;
    return (float)(1 + below(&state, 3));
}

static void cut(uint64_t start, uint64_t count, uint32_t parts, uint64_t *starts,
                uint64_t *counts) {
    uint64_t length = (count + parts - 1) / parts;
    for (uint32_t part = 0; part < parts; part++) {
        uint64_t from = MIN(part * length, count);
        starts[part] = start + from;
        counts[part] = MIN(length, count - from);
    }
}

typedef struct {
    wire_end end;
    plc_hosts_reduction job;
    uint64_t starts[MAX_BLOCKS * MAX_LOCAL], counts[MAX_BLOCKS * MAX_LOCAL];
    uint64_t piece_starts[MAX_BLOCKS * MAX_HOSTS], piece_counts[MAX_BLOCKS * MAX_HOSTS];
} rank_call;

static uint32_t host_of(const rank_thread *self, const network *net) {
    for (uint32_t host = 0; host < net->hosts; host++)
        if (self->in == &net->worlds[host]) return host;
    CHECK(false, "no host");
    return 0;
}

static uint32_t first_rank(const network *net, uint32_t host) {
    uint32_t first = 0;
    for (uint32_t h = 0; h < host; h++) first += net->worlds[h].ranks;
    return first;
}

static rank_call *new_call(rank_thread *self, network *net, const plan *p) {
    rank_call *c = calloc(1, sizeof *c);
    uint32_t host = host_of(self, net), rank = first_rank(net, host) + self->rank;
    uint64_t block = p->slice * net->lanes, element = plc_element_bytes(p->dtype);
    c->end = (wire_end){.net = net, .host = host, .lane = self->rank,
                        .capacity = p->slice * element, .sends_left = UINT32_MAX};
    bool at_root = p->root < 0 || ((uint32_t)p->root >= first_rank(net, host) &&
                                   (uint32_t)p->root < first_rank(net, host) + self->ranks);
    c->job = (plc_hosts_reduction){
        .wire = {&c->end, take, send_to, receive_from, release_from},
        .host = host, .hosts = net->hosts, .lanes = net->lanes, .depth = p->depth,
        .in_pieces = p->in_pieces, .dtype = p->dtype, .op = PLC_SUM, .op_between = PLC_SUM,
        .rounds = p->rounds, .factor = 1.0, .divisor = p->divisor,
        .sends = p->root < 0 || !at_root, .receives = at_root,
        .reads = p->root < 0 || (uint32_t)p->root == rank,
        .data = malloc(p->count * element),
        .blocks = (p->count + block - 1) / block,
        .slice_starts = c->starts, .slice_counts = c->counts,
        .piece_starts = c->piece_starts, .piece_counts = c->piece_counts,
        .scratch = malloc((p->depth + 2) * p->slice * element),
        .row_bytes = p->slice * element};
    CHECK(c->job.blocks <= MAX_BLOCKS, "too many blocks");
    for (uint64_t b = 0; b < c->job.blocks; b++) {
        uint64_t *starts = c->starts + b * net->lanes, *counts = c->counts + b * net->lanes;
        cut(b * block, MIN(block, p->count - b * block), net->lanes, starts, counts);
        if (self->rank < net->lanes)
            cut(0, counts[self->rank], net->hosts, c->piece_starts + b * net->hosts,
                c->piece_counts + b * net->hosts);
    }
    for (uint64_t i = 0; i < p->count; i++) {
        if (p->dtype == PLC_F32) ((float *)c->job.data)[i] = number(p, rank, i);
        else ((int64_t *)c->job.data)[i] = (int64_t)number(p, rank, i);
    }
    return c;
}

static void free_call(rank_call *c) {
    close_end(&c->end);
    free(c->job.data);
    free(c->job.scratch);
    free(c);
}

static int step(rank_thread *self, uint32_t kind, const rank_call *c) {
    return call(self, (plc_request){.kind = kind, .dtype = PLC_BYTES, .root = -1,
                                    .count = c->job.blocks, .input = &c->job});
}

/* Sums of small integers: exact in every type and order, rounded or not. */
static void check_result(const rank_thread *self, network *net, const plan *p,
                         const rank_call *c) {
    uint32_t ranks = first_rank(net, net->hosts);
    uint32_t mine = first_rank(net, c->end.host) + self->rank;
    for (uint64_t i = 0; i < p->count; i++) {
        float expected = 0;
        for (uint32_t rank = 0; rank < ranks; rank++) expected += number(p, rank, i);
        expected /= (float)p->divisor;
        if (!c->job.reads) expected = number(p, mine, i);
        float found = p->dtype == PLC_F32 ? ((float *)c->job.data)[i]
                                          : (float)((int64_t *)c->job.data)[i];
        CHECK(found == expected, "rank %u, element %lu of %lu: %g instead of %g", mine,
              (unsigned long)i, (unsigned long)p->count, found, expected);
    }
}

/* --- worlds that run side by side ------------------------------------------------------------- */
typedef struct {
    world *of;
    rank_fn run;
    uint64_t seed;
    pthread_t thread;
} host_thread;

static void *host_main(void *argument) {
    host_thread *host = argument;
    run_world(host->of, host->run, host->seed);
    return NULL;
}

static void run_hosts(uint32_t hosts, const uint32_t *ranks, rank_fn run, uint64_t seed) {
    network *net = calloc(1, sizeof *net);
    host_thread threads[MAX_HOSTS];
    net->hosts = hosts;
    net->lanes = MAX_LOCAL;
    for (uint32_t host = 0; host < hosts; host++) {
        net->worlds[host] = new_world(ranks[host], 60000);
        net->worlds[host].shared = net;
        net->lanes = MIN(net->lanes, ranks[host]);
    }
    for_each_queue(net, open_queue);
    for (uint32_t host = 0; host < hosts; host++) {
        threads[host] = (host_thread){&net->worlds[host], run, seed, 0};
        CHECK(pthread_create(&threads[host].thread, NULL, host_main, &threads[host]) == 0,
              "no thread");
    }
    for (uint32_t host = 0; host < hosts; host++) pthread_join(threads[host].thread, NULL);
    for_each_queue(net, close_queue);
    for (uint32_t host = 0; host < hosts; host++) end_world(&net->worlds[host]);
    free(net);
}

static const uint32_t placements[][MAX_HOSTS] = {{1, 1}, {2, 2}, {3, 3}, {1, 3}, {2, 3},
                                                 {1, 1, 1}, {2, 2, 2}, {3, 1, 2}};

static void on_all_placements(rank_fn run, uint64_t seed) {
    for (size_t i = 0; i < sizeof placements / sizeof *placements; i++)
        run_hosts(placements[i][2] == 0 ? 2 : 3, placements[i], run, seed + i);
}

/* A call of this host alone, through the same memory. */
static void sum_on_host(rank_thread *self) {
    float numbers[2000];
    uint64_t count = 1 + below(&self->seed, 2000);
    for (uint64_t i = 0; i < count; i++) numbers[i] = (float)(self->rank + 1);
    CHECK_STATUS(PLC_OK, plc_allreduce(self->comm, numbers, count, PLC_F32, PLC_SUM, -1));
    for (uint64_t i = 0; i < count; i++)
        CHECK(numbers[i] == (float)(self->ranks * (self->ranks + 1) / 2), "element %lu: %g",
              (unsigned long)i, numbers[i]);
}

/* --- scenarios -------------------------------------------------------------------------------- */
static void reduce_at_random(rank_thread *self) {
    network *net = self->in->shared;
    for (int round = 0; round < ROUNDS; round++) {
        plan p = random_plan(net, &self->seed);
        rank_call *c = new_call(self, net, &p);
        CHECK_STATUS(PLC_OK, step(self, PLC_HOSTS_BEGIN, c));
        if (below(&self->seed, 3) == 0) CHECK_STATUS(PLC_OK, barrier(self));
        if (below(&self->mine, 4) == 0) nap_ns((int64_t)below(&self->mine, 200000));
        CHECK_STATUS(PLC_OK, step(self, PLC_HOSTS_FINISH, c));
        check_result(self, net, &p, c);
        free_call(c);
        if (below(&self->seed, 2) == 0) sum_on_host(self);
    }
}

void hosts_reductions(uint64_t seed) { on_all_placements(reduce_at_random, seed); }

/* Take what the other hosts have sent, or will, of a call that was abandoned. */
static void pass_over(rank_thread *self, network *net, const plan *p) {
    wire_end end = {.net = net, .host = host_of(self, net), .lane = self->rank};
    uint64_t block = p->slice * net->lanes;
    uint64_t sent = MIN(p->depth + 1ull, (p->count + block - 1) / block);
    const void *data;
    for (uint32_t from = 0; from < net->hosts; from++)
        for (uint64_t i = 0; from != end.host && i < sent; i++) {
            CHECK(receive_from(&end, from, &data) == 0, "the wire is cut");
            release_from(&end, from);
        }
}

/* Half of the calls are abandoned by all hosts: the tensor is as it was, and the next one
 * succeeds. */
static void reduce_or_abandon(rank_thread *self) {
    network *net = self->in->shared;
    for (int round = 0; round < ROUNDS; round++) {
        plan p = random_plan(net, &self->seed);
        p.root = -1;
        bool abandons = below(&self->seed, 2) == 0;
        rank_call *c = new_call(self, net, &p);
        CHECK_STATUS(PLC_OK, step(self, PLC_HOSTS_BEGIN, c));
        if (abandons) {
            c->job.reads = 0; /* for the check: as it was */
            CHECK_STATUS(PLC_OK, step(self, PLC_HOSTS_ABANDON, c));
        } else {
            CHECK_STATUS(PLC_OK, step(self, PLC_HOSTS_FINISH, c));
        }
        check_result(self, net, &p, c);
        free_call(c);
        if (below(&self->seed, 2) == 0) sum_on_host(self);
        if (abandons && self->rank < net->lanes) pass_over(self, net, &p);
    }
}

void hosts_abandoned(uint64_t seed) { on_all_placements(reduce_or_abandon, seed); }

/* A message cannot be sent: its rank knows, and ends the wait of all others, here by hand. */
static void fail_on_the_wire(rank_thread *self) {
    network *net = self->in->shared;
    plan p = random_plan(net, &self->seed);
    p.root = -1;
    p.count = p.slice * net->lanes * (MAX_BLOCKS - 1);
    rank_call *c = new_call(self, net, &p);
    bool fails = host_of(self, net) == 0 && self->rank == 0;
    if (fails) c->end.sends_left = (uint32_t)below(&self->seed, MAX_BLOCKS - 1);
    int status = step(self, PLC_HOSTS_BEGIN, c);
    if (status == PLC_OK) status = step(self, PLC_HOSTS_FINISH, c);
    CHECK(status == PLC_WIRE || (!fails && (status == PLC_ABORTED || status == PLC_OK)),
          "status %d", status);
    if (status != PLC_OK) {
        plc_comm_abort(self->comm);
        for_each_queue(net, cut_queue);
    }
    free_call(c);
}

void hosts_wire_fails(uint64_t seed) {
    for (uint64_t round = 0; round < 5; round++) on_all_placements(fail_on_the_wire, seed + round);
}

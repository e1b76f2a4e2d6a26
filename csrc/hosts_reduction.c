/* A reduction over the ranks of several hosts: sums inside the host, messages between hosts, and
 * results given out inside the host, all at once. backend/hierarchical_reduce.py has the algorithm
 * and plans the blocks.
 *
 * A block goes through these steps, in parts that stay in the second-level cache:
 *   1. stage    a rank copies what it has of the other lanes' slices into its ring
 *   2. sum      it sums what all ranks of the host have of its own slice, into a message if that
 *               goes whole; when all parts are summed, the slice is sent
 *   3. combine  it sums the hosts' sums into its tensor and into its other ring
 *   4. fetch    it copies the other lanes' slices from theirs
 * A rank runs 1 and 2 for block k, then 3 and 4 for block k - depth, whose messages have had that
 * long to arrive. Where slices are cut into pieces, 3 comes in two: the host's own piece is summed
 * and sent on, and what the other hosts sent is collected `depth` blocks later.
 *
 * Inside the host each rank goes at its own pace: it waits for a part that it reads, and before it
 * overwrites one that may not have been read. All ranks take the same steps in the same order, and
 * each waits only for steps that come before its own, so none waits in a circle.
 *
 * Nothing is written to the tensor before PLC_HOSTS_FINISH: by then the caller has heard from the
 * other hosts that they make the same call. If they do not, PLC_HOSTS_ABANDON ends it.
 */
#include "internal.h"
#include "pipeline.h"

typedef struct {
    plc_comm *comm;
    plc_hosts_reduction *job;
    pipeline progress; /* only what waiting and counting need */
    uint64_t element, wire_element;
    bool has_lane;
} reduction;

typedef struct {
    uint64_t from, count; /* in elements */
} range;

/* --- where things are ------------------------------------------------------------------------- */
static range slice_of(const reduction *r, uint64_t block, uint32_t lane) {
    uint64_t at = block * r->job->lanes + lane;
    return (range){r->job->slice_starts[at], r->job->slice_counts[at]};
}

static range piece_of(const reduction *r, uint64_t block, uint32_t host) {
    uint64_t at = block * r->job->hosts + host;
    return (range){r->job->piece_starts[at], r->job->piece_counts[at]};
}

/* A part of a slice, relative to it. Slices of a block differ in length: it may be empty. */
static range part_of(const reduction *r, uint64_t block, uint32_t lane, uint64_t part) {
    uint64_t count = slice_of(r, block, lane).count, longest = r->job->part_bytes / r->element;
    uint64_t from = MIN(part * longest, count);
    return (range){from, MIN(longest, count - from)};
}

static uint64_t parts_of(const reduction *r, uint64_t block) {
    uint64_t longest = 0;
    for (uint32_t lane = 0; lane < r->job->lanes; lane++)
        longest = MAX(longest, slice_of(r, block, lane).count);
    return (longest * r->element + r->job->part_bytes - 1) / r->job->part_bytes;
}

static unsigned char *data_at(const reduction *r, uint64_t index) {
    return (unsigned char *)r->job->data + index * r->element;
}

static unsigned char *row(const reduction *r, uint64_t number) {
    return (unsigned char *)r->job->scratch + number * r->job->row_bytes;
}

/* The slot of the call has a ring of parts for other lanes, the other slot one of results. */
static unsigned char *staged_by(const reduction *r, uint32_t rank, uint32_t lane, uint64_t number) {
    uint64_t stage_bytes = r->comm->config.slot_bytes / RING_DEPTH;
    uint32_t index = lane < rank ? lane : lane - 1; /* a rank stages all slices but its own */
    return slot_of(r->comm, rank, r->job->slot) + number % RING_DEPTH * stage_bytes +
           index * r->job->part_bytes;
}

static unsigned char *result_of(const reduction *r, uint32_t lane, uint64_t number) {
    return slot_of(r->comm, lane, r->job->slot ^ 1u) + number % RING_DEPTH * r->job->part_bytes;
}

/* Where this rank keeps its host's sum of a slice that is not sent whole. The only rank of a host
 * has it in its tensor, which changes only when the sum is not needed any more. */
static unsigned char *kept_sum(const reduction *r, uint64_t block) {
    const plc_hosts_reduction *job = r->job;
    if (job->in_pieces && r->comm->ranks == 1 && job->op != PLC_PREMUL_SUM)
        return data_at(r, slice_of(r, block, r->comm->rank).from);
    return row(r, block % (job->depth + 1u));
}

/* --- 1. stage, 2. sum ------------------------------------------------------------------------- */
static int stage_part(reduction *r, uint64_t block, uint64_t part) {
    plc_hosts_reduction *job = r->job;
    uint64_t number = job->staged;
    if (number >= RING_DEPTH) {
        int status = pipeline_wait(&r->progress, PART_SUMMED, number - RING_DEPTH + 1);
        if (status != PLC_OK) return status;
    }
    for (uint32_t lane = 0; lane < job->lanes; lane++) {
        if (lane == r->comm->rank) continue;
        range p = part_of(r, block, lane, part);
        memcpy(staged_by(r, r->comm->rank, lane, number),
               data_at(r, slice_of(r, block, lane).from + p.from), p.count * r->element);
    }
    job->staged++;
    pipeline_count(&r->progress, PART_STAGED);
    return PLC_OK;
}

/* The host's sum of a part of this rank's slice, where it is kept or sent from. */
static void sum_part(const reduction *r, uint64_t block, uint64_t part, unsigned char *message) {
    const plc_hosts_reduction *job = r->job;
    uint32_t rank = r->comm->rank;
    range p = part_of(r, block, rank, part);
    const void *inputs[PLC_MAX_RANKS];
    for (uint32_t other = 0; other < r->comm->ranks; other++)
        inputs[other] = staged_by(r, other, rank, job->summed);
    inputs[rank] = data_at(r, slice_of(r, block, rank).from + p.from);
    bool is_kept = message == NULL;
    /* What is rounded passes through the last row, and stays in cache. */
    bool rounds_now = job->rounds && !job->in_pieces;
    unsigned char *share = is_kept ? kept_sum(r, block) : message;
    unsigned char *sum = rounds_now ? row(r, job->depth + 1u) : share + p.from * r->element;
    if (sum != inputs[rank])
        reduce_block(sum, inputs, r->comm->ranks, p.count, job->dtype, job->op, job->factor);
    if (rounds_now)
        plc_round_to_bf16((uint16_t *)share + p.from, (const float *)sum, p.count);
}

static int sum_in_turn(reduction *r, uint64_t block, uint64_t part, unsigned char *message) {
    int status = pipeline_wait(&r->progress, PART_STAGED, r->job->summed + 1);
    if (status != PLC_OK) return status;
    if (r->has_lane) sum_part(r, block, part, message);
    r->job->summed++;
    pipeline_count(&r->progress, PART_SUMMED);
    return PLC_OK;
}

static void put_on_wire(const reduction *r, void *message, const void *numbers, uint64_t count) {
    if (r->job->rounds) plc_round_to_bf16(message, numbers, count);
    else memcpy(message, numbers, count * r->element);
}

static int send_pieces(const reduction *r, uint64_t block) {
    const plc_wire *wire = &r->job->wire;
    const unsigned char *sum = kept_sum(r, block);
    for (uint32_t host = 0; host < r->job->hosts; host++) {
        if (host == r->job->host) continue;
        range piece = piece_of(r, block, host);
        void *message;
        if (wire->take(wire->context, &message) != 0) return PLC_WIRE;
        put_on_wire(r, message, sum + piece.from * r->element, piece.count);
        if (wire->send(wire->context, (int32_t)host, piece.count * r->wire_element) != 0)
            return PLC_WIRE;
    }
    return PLC_OK;
}

static int contribute(reduction *r, uint64_t block) {
    plc_hosts_reduction *job = r->job;
    const plc_wire *wire = &job->wire;
    bool sends_whole = r->has_lane && job->sends && !job->in_pieces;
    void *message = NULL;
    if (sends_whole && wire->take(wire->context, &message) != 0) return PLC_WIRE;
    job->sent[block % (PLC_MAX_DEPTH + 1)] = message;
    uint64_t parts = parts_of(r, block);
    int status = PLC_OK;
    for (uint64_t part = 0; part <= parts; part++) {
        if (part < parts) status = stage_part(r, block, part);
        if (status == PLC_OK && part > 0) status = sum_in_turn(r, block, part - 1, message);
        if (status != PLC_OK) return status;
    }
    if (sends_whole) {
        uint64_t count = slice_of(r, block, r->comm->rank).count;
        return wire->send(wire->context, -1, count * r->wire_element) == 0 ? PLC_OK : PLC_WIRE;
    }
    return r->has_lane && job->in_pieces ? send_pieces(r, block) : PLC_OK;
}

/* --- 3. combine ------------------------------------------------------------------------------- */
/* Wait for the next message of every other host. */
static int receive_all(const reduction *r, const void **messages) {
    const plc_wire *wire = &r->job->wire;
    for (uint32_t host = 0; host < r->job->hosts; host++)
        if (host != r->job->host && wire->receive(wire->context, host, &messages[host]) != 0)
            return PLC_WIRE;
    return PLC_OK;
}

static int release_all(const reduction *r) {
    const plc_wire *wire = &r->job->wire;
    for (uint32_t host = 0; host < r->job->hosts; host++)
        if (host != r->job->host && wire->release(wire->context, host) != 0) return PLC_WIRE;
    return PLC_OK;
}

/* The sum of the hosts' shares, in order of host. */
static void sum_shares(const reduction *r, void *to, const void *const *shares, uint64_t from,
                       uint64_t count) {
    const plc_hosts_reduction *job = r->job;
    const void *inputs[PLC_MAX_HOSTS];
    for (uint32_t host = 0; host < job->hosts; host++)
        inputs[host] = (const unsigned char *)shares[host] + from * r->wire_element;
    if (job->rounds) plc_sum_of_bf16(to, (const uint16_t *const *)inputs, job->hosts, count);
    else reduce_block(to, inputs, job->hosts, count, job->dtype, job->op_between, 1.0);
    if (job->divisor > 1) plc_scale_local(to, count, job->dtype, job->divisor);
}

/* Make a part of this rank's slice known inside the host. `shares`: NULL if it is complete. */
static int publish_part(reduction *r, uint64_t block, uint64_t part, const void *const *shares) {
    plc_hosts_reduction *job = r->job;
    uint64_t number = job->combined;
    if (number >= RING_DEPTH) {
        int status = pipeline_wait(&r->progress, PART_FETCHED, number - RING_DEPTH + 1);
        if (status != PLC_OK) return status;
    }
    if (r->has_lane) {
        range p = part_of(r, block, r->comm->rank, part);
        unsigned char *own = data_at(r, slice_of(r, block, r->comm->rank).from + p.from);
        unsigned char *result = result_of(r, r->comm->rank, number);
        if (shares != NULL) sum_shares(r, job->reads ? own : result, shares, p.from, p.count);
        if (job->reads && r->comm->ranks > 1) memcpy(result, own, p.count * r->element);
    }
    job->combined++;
    pipeline_count(&r->progress, PART_COMBINED);
    return PLC_OK;
}

/* --- 4. fetch --------------------------------------------------------------------------------- */
static int fetch_part(reduction *r, uint64_t block, uint64_t part) {
    plc_hosts_reduction *job = r->job;
    uint64_t number = job->fetched;
    int status = pipeline_wait(&r->progress, PART_COMBINED, number + 1);
    if (status != PLC_OK) return status;
    for (uint32_t lane = 0; job->reads && lane < job->lanes; lane++) {
        if (lane == r->comm->rank) continue;
        range p = part_of(r, block, lane, part);
        memcpy(data_at(r, slice_of(r, block, lane).from + p.from), result_of(r, lane, number),
               p.count * r->element);
    }
    job->fetched++;
    pipeline_count(&r->progress, PART_FETCHED);
    return PLC_OK;
}

static int distribute(reduction *r, uint64_t block, const void *const *shares) {
    uint64_t parts = parts_of(r, block);
    int status = PLC_OK;
    for (uint64_t part = 0; part <= parts; part++) {
        if (part < parts) status = publish_part(r, block, part, shares);
        if (status == PLC_OK && part > 0) status = fetch_part(r, block, part - 1);
        if (status != PLC_OK) return status;
    }
    return PLC_OK;
}

static int combine_whole(reduction *r, uint64_t block) {
    const void *shares[PLC_MAX_HOSTS];
    if (!r->has_lane) return distribute(r, block, NULL);
    int status = receive_all(r, shares);
    if (status != PLC_OK) return status;
    void *sent = r->job->sent[block % (PLC_MAX_DEPTH + 1)];
    shares[r->job->host] = sent != NULL ? sent : kept_sum(r, block);
    status = distribute(r, block, shares);
    return status == PLC_OK ? release_all(r) : status;
}

/* Sum this host's piece of the slice, and send the sum to the other hosts. */
static int combine_piece(reduction *r, uint64_t block) {
    plc_hosts_reduction *job = r->job;
    const plc_wire *wire = &job->wire;
    const void *shares[PLC_MAX_HOSTS];
    void *message;
    int status = receive_all(r, shares);
    if (status != PLC_OK) return status;
    if (wire->take(wire->context, &message) != 0) return PLC_WIRE;
    range piece = piece_of(r, block, job->host);
    unsigned char *mine = kept_sum(r, block) + piece.from * r->element;
    unsigned char *total = data_at(r, slice_of(r, block, r->comm->rank).from + piece.from);
    if (job->rounds) {
        unsigned char *rounded = row(r, job->depth + 1u);
        plc_round_to_bf16((uint16_t *)rounded, (const float *)mine, piece.count);
        mine = rounded;
    }
    shares[job->host] = mine;
    sum_shares(r, total, shares, 0, piece.count);
    put_on_wire(r, message, total, piece.count);
    /* All hosts have the same bits. */
    if (job->rounds) expand_bf16((float *)total, message, piece.count);
    status = release_all(r);
    if (status != PLC_OK) return status;
    return wire->send(wire->context, -1, piece.count * r->wire_element) == 0 ? PLC_OK : PLC_WIRE;
}

/* Take the other hosts' sums of their pieces: the slice is complete then. */
static int collect_pieces(reduction *r, uint64_t block) {
    const void *messages[PLC_MAX_HOSTS];
    int status = receive_all(r, messages);
    for (uint32_t host = 0; status == PLC_OK && host < r->job->hosts; host++) {
        if (host == r->job->host) continue;
        range piece = piece_of(r, block, host);
        unsigned char *to = data_at(r, slice_of(r, block, r->comm->rank).from + piece.from);
        if (r->job->rounds) expand_bf16((float *)to, messages[host], piece.count);
        else memcpy(to, messages[host], piece.count * r->element);
    }
    return status == PLC_OK ? release_all(r) : status;
}

/* What is done for blocks whose messages have had time to arrive, when block `step` is on its
 * way. */
static int advance_blocks(reduction *r, uint64_t step) {
    const plc_hosts_reduction *job = r->job;
    uint64_t depth = job->depth;
    if (!job->receives) return PLC_OK;
    bool combines = step >= depth && step - depth < job->blocks;
    if (!job->in_pieces) return combines ? combine_whole(r, step - depth) : PLC_OK;
    int status = combines && r->has_lane ? combine_piece(r, step - depth) : PLC_OK;
    if (status != PLC_OK || step < 2 * depth || step - 2 * depth >= job->blocks) return status;
    if (r->has_lane) status = collect_pieces(r, step - 2 * depth);
    return status == PLC_OK ? distribute(r, step - 2 * depth, NULL) : status;
}

/* --- the call --------------------------------------------------------------------------------- */
static reduction reduction_of(const op_context *ctx) {
    plc_comm *comm = ctx->comm;
    plc_hosts_reduction *job = (plc_hosts_reduction *)(uintptr_t)ctx->request->input;
    uint64_t element = plc_element_bytes(job->dtype);
    return (reduction){
        .comm = comm,
        .job = job,
        .progress = {.comm = comm,
                     .deadline = ctx->deadline,
                     .progress = comm->shared->records[0].parts,
                     .progress_stride = sizeof(rank_record),
                     .first = comm->parts},
        .element = element,
        .wire_element = job->rounds ? sizeof(uint16_t) : element,
        .has_lane = comm->rank < job->lanes,
    };
}

static bool is_valid(const plc_comm *comm, const plc_hosts_reduction *job) {
    return job->hosts > 1 && job->hosts <= PLC_MAX_HOSTS && job->host < job->hosts &&
           job->lanes > 0 && job->lanes <= comm->ranks && job->depth > 0 &&
           job->depth <= PLC_MAX_DEPTH && job->blocks > 0 && can_reduce(job->dtype, job->op) &&
           can_reduce(job->dtype, job->op_between) && (!job->rounds || job->dtype == PLC_F32);
}

/* How many blocks are summed before the first result is needed. */
static uint64_t blocks_ahead(const plc_hosts_reduction *job) {
    return MIN(job->blocks, job->depth + 1u);
}

int run_hosts_begin(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    reduction r = reduction_of(ctx);
    plc_hosts_reduction *job = r.job;
    if (!is_valid(comm, job)) return PLC_INVALID;
    uint32_t staged = MAX(MIN(job->lanes, comm->ranks - 1), 1u); /* by one rank, at the most */
    job->slot = ctx->slot;
    job->part_bytes = comm->config.slot_bytes / RING_DEPTH / staged / CACHE_LINE * CACHE_LINE;
    job->staged = job->summed = job->combined = job->fetched = 0;
    int status = enter_and_compare(ctx, ctx->request->count);
    for (uint64_t block = 0; status == PLC_OK && block < blocks_ahead(job); block++)
        status = contribute(&r, block);
    return status;
}

int run_hosts_finish(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    reduction r = reduction_of(ctx);
    plc_hosts_reduction *job = r.job;
    uint64_t steps = job->blocks + job->depth * (job->in_pieces ? 2u : 1u);
    int status = PLC_OK;
    /* The first blocks are summed. Their number is short of the depth if there are so few. */
    for (uint64_t step = job->depth; status == PLC_OK && step < steps; step++) {
        if (step >= blocks_ahead(job) && step < job->blocks) status = contribute(&r, step);
        if (status == PLC_OK) status = advance_blocks(&r, step);
    }
    /* Until what this rank staged was read. Its results may still be read: the next use takes the
     * slot of this one again. */
    if (status == PLC_OK) status = pipeline_wait(&r.progress, PART_SUMMED, job->summed);
    if (status != PLC_OK) return status;
    rank_record *mine = &comm->shared->records[comm->rank];
    if (job->combined == 0) { /* a host that only sends */
        advance(&mine->parts[PART_COMBINED], (uint32_t)job->summed);
        advance(&mine->parts[PART_FETCHED], (uint32_t)job->summed);
    }
    comm->parts += (uint32_t)job->summed;
    comm->slot = job->slot;
    return PLC_OK;
}

/* All ranks of the host abandon it, after PLC_HOSTS_BEGIN. */
int run_hosts_abandon(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    plc_hosts_reduction *job = reduction_of(ctx).job;
    int status = next_phase(comm, ctx->deadline); /* nobody reads a ring from here on */
    if (status != PLC_OK) return status;
    rank_record *mine = &comm->shared->records[comm->rank];
    advance(&mine->parts[PART_COMBINED], (uint32_t)job->summed);
    advance(&mine->parts[PART_FETCHED], (uint32_t)job->summed);
    comm->parts += (uint32_t)job->summed;
    return PLC_OK;
}

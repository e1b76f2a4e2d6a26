/* See pipeline.h. */
#include "pipeline.h"

static const pipeline_steps sums_over_ranks;

void pipeline_plan(pipeline *p) {
    uint32_t ranks = p->comm->ranks;
    p->steps = &sums_over_ranks;
    p->bytes = p->count * plc_element_bytes(p->dtype);
    p->stage_bytes = p->ring_bytes / RING_DEPTH;
    uint64_t most = p->stage_bytes / (ranks - 1) / CACHE_LINE * CACHE_LINE;
    p->blocks = (p->bytes + most * ranks - 1) / (most * ranks);
    uint64_t parts = p->blocks * ranks;
    /* Even: a short last block would leave ranks idle. */
    p->part = parts == 0 ? 0 : ALIGN_UP((p->bytes + parts - 1) / parts, CACHE_LINE);
}

/* Where part `rank` of a block begins, and how long it is. */
static uint64_t part_at(const pipeline *p, uint64_t block, uint32_t rank, uint64_t *bytes) {
    uint64_t from = MIN((block * p->comm->ranks + rank) * p->part, p->bytes);
    *bytes = MIN(p->bytes - from, p->part);
    return from;
}

static unsigned char *staged_by(const pipeline *p, uint32_t rank, uint32_t part, uint64_t block) {
    uint32_t index = part < rank ? part : part - 1; /* a rank stages all parts but its own */
    return p->stages + rank * p->stride + block % RING_DEPTH * p->stage_bytes + index * p->part;
}

static unsigned char *summed_by(const pipeline *p, uint32_t rank, uint64_t block) {
    return p->sums + rank * p->stride + block % RING_DEPTH * p->part;
}

static event_count *progress_of(const pipeline *p, uint32_t rank, int step) {
    return (event_count *)((char *)p->progress + rank * p->progress_stride) + step;
}

static bool is_that_rank(const plc_comm *comm, uint32_t rank, const void *that) {
    (void)comm;
    return rank == *(const uint32_t *)that;
}

int pipeline_wait(const pipeline *p, int step, uint64_t blocks) {
    plc_comm *comm = p->comm;
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        event_count *progress = progress_of(p, r, step);
        uint32_t target = p->first + (uint32_t)blocks;
        int status = wait_for(comm, progress, target, p->deadline, is_that_rank, &r, NULL);
        if (status != PLC_OK) return status;
    }
    return PLC_OK;
}

void pipeline_count(const pipeline *p, int step) {
    advance(progress_of(p, p->comm->rank, step), 1);
}

static void apply_weight(const pipeline *p, uint64_t block) {
    uint64_t n, from = part_at(p, block, 0, &n);
    uint64_t end = MIN(from + p->comm->ranks * p->part, p->bytes);
    unsigned char *data = p->output + from;
    const void *only = data;
    reduce_block(data, &only, 1, (end - from) / plc_element_bytes(p->dtype), p->dtype,
                 PLC_PREMUL_SUM, p->weight);
}

void pipeline_stage(const pipeline *p, uint64_t block) {
    const plc_comm *comm = p->comm;
    uint64_t n;
    if (p->weight != 1.0) apply_weight(p, block);
    for (uint32_t r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        uint64_t from = part_at(p, block, r, &n);
        memcpy(staged_by(p, comm->rank, r, block), p->input + from, n);
    }
}

static int stage_in_turn(const pipeline *p, uint64_t block, bool staged) {
    int status = block < RING_DEPTH ? PLC_OK : pipeline_wait(p, SUMMED, block - RING_DEPTH + 1);
    if (status != PLC_OK) return status;
    if (!staged) p->steps->stage(p, block);
    pipeline_count(p, STAGED);
    return PLC_OK;
}

static void sum_part(const pipeline *p, uint64_t block) {
    const plc_comm *comm = p->comm;
    uint64_t bytes, from = part_at(p, block, comm->rank, &bytes);
    uint64_t count = bytes / plc_element_bytes(p->dtype);
    const void *inputs[PLC_MAX_RANKS];
    for (uint32_t r = 0; r < comm->ranks; r++)
        inputs[r] = r == comm->rank ? p->input + from : staged_by(p, r, comm->rank, block);
    unsigned char *sums = summed_by(p, comm->rank, block);
    if (p->reads)
        reduce_block_twice(p->output + from, sums, inputs, comm->ranks, count, p->dtype, p->op,
                           p->factor);
    else reduce_block(sums, inputs, comm->ranks, count, p->dtype, p->op, p->factor);
}

static int sum_in_turn(const pipeline *p, uint64_t block) {
    int status = pipeline_wait(p, STAGED, block + 1);
    if (status == PLC_OK && block >= RING_DEPTH)
        status = pipeline_wait(p, FETCHED, block - RING_DEPTH + 1);
    if (status != PLC_OK) return status;
    p->steps->sum(p, block);
    pipeline_count(p, SUMMED);
    return PLC_OK;
}

static void fetch_parts(const pipeline *p, uint64_t block) {
    const plc_comm *comm = p->comm;
    for (uint32_t r = 0; p->reads && r < comm->ranks; r++) {
        uint64_t n, from = part_at(p, block, r, &n);
        if (r != comm->rank) memcpy(p->output + from, summed_by(p, r, block), n);
    }
}

static int fetch_in_turn(const pipeline *p, uint64_t block) {
    int status = pipeline_wait(p, SUMMED, block + 1);
    if (status != PLC_OK) return status;
    p->steps->fetch(p, block);
    pipeline_count(p, FETCHED);
    return PLC_OK;
}

static const pipeline_steps sums_over_ranks = {pipeline_stage, sum_part, fetch_parts};

int pipeline_run(const pipeline *p, bool staged) {
    int status = PLC_OK;
    for (uint64_t step = 0; status == PLC_OK && step < p->blocks + 2; step++) {
        if (step < p->blocks) status = stage_in_turn(p, step, staged && step == 0);
        if (status == PLC_OK && step >= 1 && step - 1 < p->blocks)
            status = sum_in_turn(p, step - 1);
        if (status == PLC_OK && step >= 2) status = fetch_in_turn(p, step - 2);
    }
    return status;
}

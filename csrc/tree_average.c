/* Averages in the order of a tree: ranks hold sums of some of its nodes, each of them the rest of
 * the way to the root is made of, and all get the root divided by a number.
 *
 * A pipeline (pipeline.h) through the memory of an external bucket. A rank stages a block of each
 * of its nodes, sums its part of the block over all nodes, and fetches the sums of all parts. Every
 * byte is read from memory once and written once, however many nodes there are; all else stays in
 * cache. What ranks hold differs from call to call, so the sizes of blocks do, too; the areas for
 * stages and for sums do not, because a peer may still be fetching the sums of the call before.
 *
 * Short rows are summed whole by every rank, which saves waiting for each other's sums.
 */
#include "pipeline.h"
#include "tree_sum.h"

#define SHORT_BYTES (1024 * 1024) /* of all nodes together */
#define CHUNK 512ull              /* elements of a short row that pass through the cache at once */

typedef struct {
    pipeline base; /* first: the steps are given this */
    const plc_tree_average *what;
    tree_shape shape;
    uint64_t element;
} tree_pipeline;

static tree_shape shape_of(const plc_tree_average *w) {
    return (tree_shape){w->nodes, w->adds, w->divisor};
}

static const tree_pipeline *tree_of(const pipeline *p) { return (const tree_pipeline *)p; }

static uint64_t row_length(const plc_tree_average *w) {
    return w->arrays == 0 ? 0 : w->ends[w->arrays - 1];
}

/* --- rows of arrays --------------------------------------------------------------------------- */

static uint32_t array_at(const plc_tree_average *w, uint64_t position) {
    uint32_t low = 0, high = w->arrays - 1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (w->ends[middle] > position) high = middle;
        else low = middle + 1;
    }
    return low;
}

static unsigned char *address_at(const tree_pipeline *t, const uint64_t *arrays, uint32_t array,
                                 uint64_t position) {
    uint64_t start = array == 0 ? 0 : t->what->ends[array - 1];
    return (unsigned char *)(uintptr_t)arrays[array] + (position - start) * t->element;
}

static void copy_from_row(const tree_pipeline *t, const uint64_t *arrays, uint64_t from,
                          uint64_t end, unsigned char *to) {
    if (from >= end) return;
    for (uint32_t i = array_at(t->what, from); from < end; i++) {
        uint64_t stop = MIN(t->what->ends[i], end), bytes = (stop - from) * t->element;
        if (arrays[i] == 0) memset(to, 0, bytes);
        else memcpy(to, address_at(t, arrays, i, from), bytes);
        to += bytes, from = stop;
    }
}

static void copy_to_row(const tree_pipeline *t, const uint64_t *arrays, uint64_t from, uint64_t end,
                        const unsigned char *source) {
    if (from >= end) return;
    for (uint32_t i = array_at(t->what, from); from < end; i++) {
        uint64_t stop = MIN(t->what->ends[i], end), bytes = (stop - from) * t->element;
        memcpy(address_at(t, arrays, i, from), source, bytes);
        source += bytes, from = stop;
    }
}

/* A range of a row where it lies, if it does not cross the end of an array; else NULL. */
static const unsigned char *in_one_array(const tree_pipeline *t, const uint64_t *arrays,
                                         uint64_t from, uint64_t end) {
    if (from >= end) return NULL;
    uint32_t i = array_at(t->what, from);
    return arrays[i] == 0 || end > t->what->ends[i] ? NULL : address_at(t, arrays, i, from);
}

/* --- blocks and parts ------------------------------------------------------------------------- */

/* Part `rank` of a block, as a range of the row. */
static void part_range(const tree_pipeline *t, uint64_t block, uint32_t rank, uint64_t *from,
                       uint64_t *end) {
    const pipeline *p = &t->base;
    uint64_t length = row_length(t->what), part = p->part / t->element;
    *from = MIN((block * p->comm->ranks + rank) * part, length);
    *end = MIN(*from + part, length);
}

static unsigned char *staged_by(const tree_pipeline *t, uint32_t rank, uint32_t node,
                                uint32_t part, uint64_t block) {
    const pipeline *p = &t->base;
    return p->stages + rank * p->stride + block % RING_DEPTH * p->stage_bytes +
           ((uint64_t)node * p->comm->ranks + part) * p->part;
}

static unsigned char *summed_by(const tree_pipeline *t, uint32_t rank, uint64_t block) {
    return t->base.sums + rank * t->base.stride + block % RING_DEPTH * t->base.part;
}

static void stage(const pipeline *p, uint64_t block) {
    const tree_pipeline *t = tree_of(p);
    const uint64_t *arrays = t->what->inputs;
    uint32_t own = 0;
    for (uint32_t n = 0; n < t->what->nodes; n++) {
        if (t->what->owners[n] != p->comm->rank) continue;
        for (uint32_t r = 0; r < p->comm->ranks; r++) {
            uint64_t from, end;
            part_range(t, block, r, &from, &end);
            /* Its own part this rank reads where it is. */
            if (r == p->comm->rank && in_one_array(t, arrays, from, end) != NULL) continue;
            copy_from_row(t, arrays, from, end, staged_by(t, p->comm->rank, own, r, block));
        }
        own++, arrays += t->what->arrays;
    }
}

/* --- sums ------------------------------------------------------------------------------------- */

static void sum(const pipeline *p, uint64_t block) {
    const tree_pipeline *t = tree_of(p);
    const plc_tree_average *w = t->what;
    uint32_t held[PLC_MAX_RANKS] = {0};
    const unsigned char *nodes[w->nodes];
    uint64_t from, end;
    part_range(t, block, p->comm->rank, &from, &end);
    for (uint32_t n = 0; n < w->nodes; n++) {
        uint32_t owner = w->owners[n], number = held[owner]++;
        nodes[n] = owner != p->comm->rank ? NULL
                                          : in_one_array(t, w->inputs + number * w->arrays, from,
                                                         end);
        if (nodes[n] == NULL) nodes[n] = staged_by(t, owner, number, p->comm->rank, block);
    }
    average_nodes(&t->shape, w->dtype, nodes, end - from, summed_by(t, p->comm->rank, block));
}

static void fetch(const pipeline *p, uint64_t block) {
    const tree_pipeline *t = tree_of(p);
    for (uint32_t r = 0; r < p->comm->ranks; r++) {
        uint64_t from, end;
        part_range(t, block, r, &from, &end);
        copy_to_row(t, t->what->outputs, from, end, summed_by(t, r, block));
    }
}

/* --- short rows ------------------------------------------------------------------------------- */

static uint64_t short_stride(const tree_pipeline *t) {
    return ALIGN_UP(row_length(t->what) * t->element, CACHE_LINE);
}

static unsigned char *staged_row(const tree_pipeline *t, uint32_t rank, uint32_t node) {
    return t->base.stages + rank * t->base.stride + node * short_stride(t);
}

static void stage_rows(const tree_pipeline *t) {
    const plc_tree_average *w = t->what;
    uint32_t rank = t->base.comm->rank, own = 0;
    for (uint32_t n = 0; n < w->nodes; n++) {
        if (w->owners[n] != rank) continue;
        copy_from_row(t, w->inputs + (uint64_t)own * w->arrays, 0, row_length(w),
                      staged_row(t, rank, own));
        own++;
    }
}

static void average_rows(const tree_pipeline *t) {
    const plc_tree_average *w = t->what;
    uint32_t held[PLC_MAX_RANKS] = {0};
    const unsigned char *nodes[w->nodes];
    double chunk[CHUNK];
    for (uint32_t n = 0; n < w->nodes; n++)
        nodes[n] = staged_row(t, w->owners[n], held[w->owners[n]]++);
    for (uint64_t from = 0, end; from < row_length(w); from = end) {
        end = MIN(from + CHUNK, row_length(w));
        average_nodes(&t->shape, w->dtype, nodes, end - from, (unsigned char *)chunk);
        copy_to_row(t, w->outputs, from, end, (const unsigned char *)chunk);
        for (uint32_t n = 0; n < w->nodes; n++) nodes[n] += (end - from) * t->element;
    }
}

static int run_short(tree_pipeline *t) {
    t->base.blocks = 1;
    stage_rows(t);
    pipeline_count(&t->base, STAGED);
    int status = pipeline_wait(&t->base, STAGED, 1);
    if (status != PLC_OK) return status;
    average_rows(t);
    pipeline_count(&t->base, SUMMED);
    pipeline_count(&t->base, FETCHED);
    return PLC_OK;
}

/* --- the call --------------------------------------------------------------------------------- */

static bool is_valid(const plc_comm *comm, const plc_tree_average *w) {
    const tree_shape shape = shape_of(w);
    for (uint32_t n = 0; n < w->nodes; n++)
        if (w->owners[n] >= comm->ranks) return false;
    return (w->dtype == PLC_F32 || w->dtype == PLC_F64) && is_tree(&shape);
}

static uint32_t most_nodes_of_a_rank(const plc_comm *comm, const plc_tree_average *w) {
    uint32_t held[PLC_MAX_RANKS] = {0}, most = 0;
    for (uint32_t n = 0; n < w->nodes; n++) held[w->owners[n]]++;
    for (uint32_t r = 0; r < comm->ranks; r++) most = MAX(most, held[r]);
    return most;
}

static uint64_t stage_room(const pipeline *p) {
    return p->ring_bytes / 3 * 2 / CACHE_LINE * CACHE_LINE;
}

static bool is_short(const tree_pipeline *t) {
    uint64_t nodes = most_nodes_of_a_rank(t->base.comm, t->what), row = short_stride(t);
    return row > 0 && row * t->what->nodes <= SHORT_BYTES && row * nodes <= stage_room(&t->base);
}

static int plan(tree_pipeline *t) {
    static const pipeline_steps steps = {stage, sum, fetch};
    pipeline *p = &t->base;
    uint64_t ranks = p->comm->ranks, nodes = most_nodes_of_a_rank(p->comm, t->what);
    uint64_t stages = stage_room(p);
    uint64_t sums = p->ring_bytes - stages;
    uint64_t most = MIN(stages / RING_DEPTH / (nodes * ranks), sums / RING_DEPTH);
    most = most / CACHE_LINE * CACHE_LINE;
    if (most == 0) return PLC_INVALID;
    p->steps = &steps;
    p->sums = p->stages + stages;
    p->bytes = row_length(t->what) * t->element;
    p->blocks = (p->bytes + most * ranks - 1) / (most * ranks);
    uint64_t parts = p->blocks * ranks;
    p->part = parts == 0 ? 0 : ALIGN_UP((p->bytes + parts - 1) / parts, CACHE_LINE);
    p->stage_bytes = nodes * ranks * p->part;
    return PLC_OK;
}

static int average_tree(plc_arena *arena, uint32_t index, const plc_tree_average *what,
                        int64_t timeout_ns) {
    tree_pipeline t = {.what = what,
                       .shape = shape_of(what),
                       .element = plc_element_bytes(what->dtype)};
    int status = arena_rings(arena, index, &t.base);
    if (status == PLC_OK) status = plan(&t);
    if (status != PLC_OK) return status;
    bool whole = is_short(&t);
    if (!whole) gil_release();
    t.base.deadline = deadline_after(t.base.comm, timeout_ns);
    /* Nobody reads what this rank has staged in the call before. */
    status = pipeline_wait(&t.base, FETCHED, 0);
    if (status == PLC_OK) status = whole ? run_short(&t) : pipeline_run(&t.base, false);
    if (status == PLC_OK) arena_count_blocks(arena, &t.base);
    return status;
}

int plc_arena_average_tree(plc_arena *arena, uint32_t index, const plc_tree_average *what,
                           int64_t timeout_ns) {
    plc_comm *comm = arena_comm(arena);
    if (!is_valid(comm, what)) return PLC_INVALID;
    if (!comm_enter(comm)) return PLC_ABORTED;
    gil_scope scope;
    gil_scope_enter(&scope, comm);
    int status = average_tree(arena, index, what, timeout_ns);
    gil_scope_exit(&scope);
    comm_exit(comm);
    return status;
}

/* Parts of a pass over the arrays of an update: one of this process, divided among its threads; and
 * the sums over ranks that a pass begins with where backward has left them to it.
 *
 * A sum has the bits of a bucket's (buckets.c): where all ranks weigh the same, each number is
 * scaled and added, and the sum is rounded; otherwise what each rank brings is scaled and rounded
 * before it is added. A sum in the order of a tree has the bits of a tree average (tree_average.c).
 *
 * Threads live for one call: a step of an optimizer is long where they pay, nothing has to be kept
 * between calls, and a fork finds nothing of them.
 */
#include "journal.h"

#include <signal.h>
#include <stdlib.h>

#include "tree_sum.h"

#define MAX_THREADS 256u
/* Read of other ranks' own memory at once, of all of them together: one system call takes as long
 * as it takes to copy some kilobytes, and this much stays in a second-level cache. */
#define READ_BYTES (256u * 1024)

static bool is_uniform(const plc_update *u, double *factor) {
    *factor = 0;
    for (uint32_t r = 0; r < u->ranks && *factor == 0; r++) *factor = u->weights[r];
    for (uint32_t r = 0; r < u->ranks; r++)
        if (u->weights[r] != 0 && u->weights[r] != *factor) return false;
    return true;
}

static uint32_t summands_of(const plc_update *u) {
    return u->tree != NULL ? u->tree->nodes : u->ranks;
}

/* The rank that has summand `s`. */
static uint32_t owner_of(const plc_update *u, uint32_t s) {
    return u->tree != NULL ? u->tree->owners[s] : u->members[s];
}

/* Where the owner of a summand has this array in its own memory; 0: it is mapped here. */
static uint64_t private_address(const plc_update *u, uint32_t s, uint32_t array) {
    if (u->comm == NULL || owner_of(u, s) == u->comm->rank) return 0;
    if (u->tree != NULL) return u->tree->addresses[s * u->tree->stride + array];
    return u->private_addresses[u->members[s] * u->private_stride + array];
}

/* Read bytes from..end of an array, as many as there is room for, of every summand that is in its
 * owner's own memory. */
static int read_gradients(const update_part *part, uint32_t array, uint64_t from, uint64_t end) {
    const plc_update *u = part->update;
    gradient_reads *reads = part->reads;
    if (reads->status != PLC_OK) return reads->status;
    if (reads->array == array && from >= reads->begin && from < reads->end) return PLC_OK;
    reads->array = array;
    reads->begin = from;
    reads->end = MIN(from + reads->room, end);
    for (uint32_t s = 0; s < summands_of(u) && reads->status == PLC_OK; s++) {
        uint64_t at = private_address(u, s, array);
        if (at != 0)
            reads->status = direct_read(u->comm, owner_of(u, s), reads->bytes + s * reads->room,
                                        at + from, reads->end - from);
    }
    return reads->status;
}

/* Where a summand that is mapped here has this array. */
static const char *mapped_address(const plc_update *u, uint32_t s, uint32_t array) {
    if (u->tree != NULL)
        return (const char *)(uintptr_t)u->tree->addresses[s * u->tree->stride + array];
    return (const char *)address(u, GRADIENT, array) + u->distances[s];
}

/* Where all summands are, from byte `from` of an array on. */
static void find_gradients(const update_part *part, uint32_t array, uint64_t from,
                           const void **inputs) {
    const plc_update *u = part->update;
    const gradient_reads *reads = part->reads;
    for (uint32_t s = 0; s < summands_of(u); s++) {
        if (private_address(u, s, array) == 0) inputs[s] = mapped_address(u, s, array) + from;
        else inputs[s] = reads->bytes + s * reads->room + (from - reads->begin);
    }
}

static tree_shape shape_of(const plc_tree_sum *tree) {
    return (tree_shape){tree->nodes, tree->adds, tree->divisor};
}

bool is_valid_tree(const plc_update *u) {
    const tree_shape shape = shape_of(u->tree);
    if (u->comm == NULL) return false;
    for (uint32_t n = 0; n < u->tree->nodes; n++)
        if (u->tree->owners[n] >= u->comm->ranks) return false;
    return is_tree(&shape);
}

static void add_ranks(const update_part *part, const void **inputs, uint64_t count,
                      uint32_t dtype) {
    const plc_update *u = part->update;
    double factor;
    if (is_uniform(u, &factor)) {
        reduce_block(part->block, inputs, u->ranks, count, dtype, PLC_PREMUL_SUM, factor);
        return;
    }
    for (uint32_t r = 0; r < u->ranks; r++) {
        void *scaled = part->block + (1 + (uint64_t)r) * BLOCK_BYTES;
        reduce_block(scaled, &inputs[r], 1, count, dtype, PLC_PREMUL_SUM, u->weights[r]);
        inputs[r] = scaled;
    }
    reduce_block(part->block, inputs, u->ranks, count, dtype, PLC_SUM, 1.0);
}

const void *summed_gradients(const update_part *part, uint32_t array, uint64_t first,
                             uint64_t count, uint64_t end) {
    const plc_update *u = part->update;
    const uint32_t dtype = dtype_of(u, array);
    const uint64_t bytes = plc_element_bytes(dtype), from = first * bytes;
    if (!is_summed(u)) return (const char *)address(u, GRADIENT, array) + from;
    const void *inputs[summands_of(u)];
    if (part->reads != NULL && read_gradients(part, array, from, end * bytes) != PLC_OK)
        return NULL;
    find_gradients(part, array, from, inputs);
    if (u->tree != NULL) {
        const tree_shape shape = shape_of(u->tree);
        average_nodes(&shape, dtype, (const unsigned char *const *)inputs, count, part->block);
    } else {
        add_ranks(part, inputs, count, dtype);
    }
    return part->block;
}

/* A thread's room: for the sum, and for what each rank brings if that is scaled first. */
static uint64_t block_bytes(const plc_update *u) {
    double factor;
    if (!is_summed(u)) return 0;
    if (u->tree != NULL) return BLOCK_BYTES;
    return BLOCK_BYTES * (is_uniform(u, &factor) ? 1 : 1 + (uint64_t)u->ranks);
}

/* Of what is read of each summand in another rank's own memory. */
static uint64_t read_room(const plc_update *u) {
    uint32_t summands = summands_of(u);
    if (u->comm == NULL || (u->tree == NULL && summands < 2)) return 0;
    return MAX(READ_BYTES / MAX(summands - 1, 1u) / BLOCK_BYTES, 1u) * BLOCK_BYTES;
}

static void *run_thread(void *argument) {
    const update_part *part = argument;
    part->run(part);
    return NULL;
}

static void run_in_threads(update_part *parts, uint32_t threads) {
    bool started[MAX_THREADS] = {false};
    sigset_t all, before;
    sigfillset(&all); /* signals are for the caller's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t t = 1; t < threads; t++)
        started[t] = pthread_create(&parts[t].thread, NULL, run_thread, &parts[t]) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (uint32_t t = 0; t < threads; t++)
        if (!started[t]) parts[t].run(&parts[t]);
    for (uint32_t t = 0; t < threads; t++)
        if (started[t]) pthread_join(parts[t].thread, NULL);
}

int run_part(const update_part *pass, uint64_t units) {
    const plc_update *u = pass->update;
    rank_journal *journal = pass->journal;
    const uint32_t most = journal == NULL ? MAX_THREADS : PLC_JOURNAL_SLOTS;
    const uint32_t threads = MAX(1u, MIN(u->threads, most));
    const uint64_t first = units * u->part / u->parts, end = units * (u->part + 1) / u->parts;
    const uint64_t sums = block_bytes(u), reads = read_room(u);
    const uint64_t room = sums + reads * summands_of(u);
    unsigned char *blocks = room == 0 ? NULL : aligned_alloc(CACHE_LINE, room * threads);
    if (room > 0 && blocks == NULL) return PLC_SYSTEM;
    if (u->comm != NULL && !comm_enter(u->comm)) {
        free(blocks);
        return PLC_ABORTED;
    }
    update_part parts[MAX_THREADS];
    gradient_reads read[MAX_THREADS];
    for (uint32_t t = 0; t < threads; t++) {
        parts[t] = *pass;
        parts[t].first = first + (end - first) * t / threads;
        parts[t].end = first + (end - first) * (t + 1) / threads;
        parts[t].block = blocks == NULL ? NULL : blocks + room * t;
        parts[t].slot = journal == NULL ? NULL : &journal->slots[t];
        parts[t].reads = reads == 0 ? NULL : &read[t];
        read[t] = (gradient_reads){.room = reads, .bytes = parts[t].block + sums};
    }
    if (journal != NULL) begin_update(journal, parts, threads);
    run_in_threads(parts, threads);
    int status = PLC_OK;
    for (uint32_t t = 0; t < threads && status == PLC_OK; t++) status = read[t].status;
    /* Otherwise the slots go on to say how far it came. */
    if (journal != NULL && status == PLC_OK) end_update(journal);
    free(blocks);
    if (u->comm != NULL) comm_exit(u->comm);
    return status;
}

/* Parts of a pass over the arrays of an update: one of this process, divided among its threads; and
 * the sums over ranks that a pass begins with where backward has left them to it.
 *
 * A sum has the bits of a bucket's (buckets.c): where all ranks weigh the same, each number is
 * scaled and added, and the sum is rounded; otherwise what each rank brings is scaled and rounded
 * before it is added.
 *
 * Threads live for one call: a step of an optimizer is long where they pay, nothing has to be kept
 * between calls, and a fork finds nothing of them.
 */
#include "update.h"

#include <signal.h>
#include <stdlib.h>

#define MAX_THREADS 256u

static bool is_uniform(const plc_update *u, double *factor) {
    *factor = 0;
    for (uint32_t r = 0; r < u->ranks && *factor == 0; r++) *factor = u->weights[r];
    for (uint32_t r = 0; r < u->ranks; r++)
        if (u->weights[r] != 0 && u->weights[r] != *factor) return false;
    return true;
}

const void *summed_gradients(const update_part *part, const void *gradients, uint32_t dtype,
                             uint64_t count) {
    const plc_update *u = part->update;
    if (u->ranks == 0) return gradients;
    const void *inputs[PLC_MAX_RANKS];
    double factor;
    for (uint32_t r = 0; r < u->ranks; r++)
        inputs[r] = (const char *)gradients + u->distances[r];
    if (is_uniform(u, &factor)) {
        reduce_block(part->block, inputs, u->ranks, count, dtype, PLC_PREMUL_SUM, factor);
        return part->block;
    }
    for (uint32_t r = 0; r < u->ranks; r++) {
        void *scaled = part->block + (1 + (uint64_t)r) * BLOCK_BYTES;
        reduce_block(scaled, &inputs[r], 1, count, dtype, PLC_PREMUL_SUM, u->weights[r]);
        inputs[r] = scaled;
    }
    reduce_block(part->block, inputs, u->ranks, count, dtype, PLC_SUM, 1.0);
    return part->block;
}

/* A thread's room: for the sum, and for what each rank brings if that is scaled first. */
static uint64_t block_bytes(const plc_update *u) {
    double factor;
    if (u->ranks == 0) return 0;
    return BLOCK_BYTES * (is_uniform(u, &factor) ? 1 : 1 + (uint64_t)u->ranks);
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
    const uint32_t threads = MAX(1u, MIN(u->threads, MAX_THREADS));
    const uint64_t first = units * u->part / u->parts, end = units * (u->part + 1) / u->parts;
    const uint64_t room = block_bytes(u);
    unsigned char *blocks = room == 0 ? NULL : aligned_alloc(CACHE_LINE, room * threads);
    if (room > 0 && blocks == NULL) return PLC_SYSTEM;
    update_part parts[MAX_THREADS];
    for (uint32_t t = 0; t < threads; t++) {
        parts[t] = *pass;
        parts[t].first = first + (end - first) * t / threads;
        parts[t].end = first + (end - first) * (t + 1) / threads;
        parts[t].block = blocks == NULL ? NULL : blocks + room * t;
    }
    run_in_threads(parts, threads);
    free(blocks);
    return PLC_OK;
}

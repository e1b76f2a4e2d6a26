/* A journal makes an update that several processes make in shared memory safe under kills.
 *
 * Each thread goes block by block. The kernel computes the new numbers of a block, parameters and
 * state, into the thread's slot of the journal; a mark says that they are whole; they are copied to
 * where they belong; a mark says that they are there. A process that is killed stops between two
 * instructions. So if a block is not marked whole, its place has not been touched; and if it is,
 * copying it again makes its place right, whatever is there. All who find it may copy it at once:
 * they write the same bytes.
 *
 * Blocks are small, so that all of this stays in the first-level cache and the processor reads the
 * next block from memory while it copies this one: the journal costs about 3 % of an AdamW update.
 * (Old numbers kept beforehand, to be put back, cost 50 %: reading them waits for memory.)
 */
#ifndef PACELINE_JOURNAL_H
#define PACELINE_JOURNAL_H

#include "update.h"

#define JOURNAL_BLOCK_BYTES 512u /* of one array: a number of whole lines */
#define JOURNAL_ROWS 4           /* the parameter and three arrays of state */

/* One thread's part of the update that is being made, in lines: `first` to `next` have their new
 * numbers, those of `next` to `whole` are in `rows`, the rest up to `end` is untouched. */
struct journal_slot {
    _Alignas(CACHE_LINE) _Atomic uint64_t first, next, whole, end;
    /* A line apart: rows whose addresses differ by a power of two compete for places in cache. */
    _Alignas(CACHE_LINE) unsigned char rows[JOURNAL_ROWS][JOURNAL_BLOCK_BYTES + CACHE_LINE];
};

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t step; /* as plc_journal_begin was told */
    _Atomic uint64_t begun, made;               /* updates of this step */
    _Atomic uint64_t ended;                     /* the rank does not go on with this step */
    journal_slot slots[PLC_JOURNAL_SLOTS];
} rank_journal;

/* An update begins, each thread with its lines; it is over. */
void begin_update(rank_journal *journal, const update_part *parts, uint32_t threads);
void end_update(rank_journal *journal);

static inline void *journal_row(journal_slot *slot, uint32_t row) {
    return slot->rows[row == PARAMETER ? 0 : 1 + row - STATE];
}

/* Only the compiler has to keep the order of marks and what is between them: see above. A block
 * begins with the line that is next; returns the line after it. */
static inline uint64_t mark_whole(journal_slot *slot, uint64_t bytes) {
    uint64_t line = atomic_load_explicit(&slot->next, memory_order_relaxed) +
                    (bytes + LINE_BYTES - 1) / LINE_BYTES;
    atomic_store_explicit(&slot->whole, line, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    return line;
}

static inline void mark_written(journal_slot *slot, uint64_t line) {
    atomic_store_explicit(&slot->next, line, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
}

/* Whole blocks in a loop that the compiler knows the length of. */
static inline __attribute__((always_inline)) void copy_block(void *to, const void *from,
                                                             uint64_t bytes) {
    typedef uint64_t words __attribute__((vector_size(32), aligned(1), may_alias));
    if (bytes != JOURNAL_BLOCK_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    for (uint32_t i = 0; i < JOURNAL_BLOCK_BYTES / sizeof(words); i++)
        ((words *)to)[i] = ((const words *)from)[i];
}

#endif

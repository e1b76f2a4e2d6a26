/* The journal of a rank: how far it is in the update it makes, and how others finish the block that
 * it was killed in. What is marked when, and why that is enough: journal.h. */
#include "journal.h"

uint64_t plc_journal_bytes(void) { return sizeof(rank_journal); }

void plc_journal_begin(void *journal, uint64_t step) {
    rank_journal *j = journal;
    /* In this order: whatever is found says nothing wrong about the former step or this one. */
    atomic_store(&j->step, 0);
    atomic_store(&j->begun, 0);
    atomic_store(&j->made, 0);
    atomic_store(&j->ended, 0);
    atomic_store(&j->step, step);
}

void plc_journal_end(void *journal) { atomic_store(&((rank_journal *)journal)->ended, 1); }

void plc_journal_note(void *journal, uint64_t begun, uint64_t made) {
    rank_journal *j = journal;
    atomic_store(&j->begun, begun);
    atomic_store(&j->made, made);
}

void begin_update(rank_journal *journal, const update_part *parts, uint32_t threads) {
    for (uint32_t t = 0; t < PLC_JOURNAL_SLOTS; t++) {
        journal_slot *slot = &journal->slots[t];
        uint64_t first = t < threads ? parts[t].first : 0;
        atomic_store(&slot->first, first);
        atomic_store(&slot->next, first);
        atomic_store(&slot->whole, first);
        atomic_store(&slot->end, t < threads ? parts[t].end : 0);
    }
    atomic_fetch_add(&journal->begun, 1);
}

void end_update(rank_journal *journal) { atomic_fetch_add(&journal->made, 1); }

void plc_journal_read(const void *journal, plc_journal_state *out) {
    const rank_journal *j = journal;
    out->step = atomic_load(&j->step);
    out->begun = atomic_load(&j->begun);
    out->made = atomic_load(&j->made);
    out->ended = atomic_load(&j->ended);
    for (uint32_t t = 0; t < PLC_JOURNAL_SLOTS; t++) {
        out->lines[t][0] = atomic_load(&j->slots[t].first);
        out->lines[t][1] = atomic_load(&j->slots[t].next);
    }
}

/* A block lies in one array. */
static void repeat_block(const plc_update *u, journal_slot *slot, uint64_t line, uint64_t lines) {
    uint64_t begins = 0;
    uint32_t i = 0;
    for (; i < u->arrays && begins + lines_of(u, i) <= line; i++) begins += lines_of(u, i);
    if (i == u->arrays) return; /* another update than this one */
    uint64_t from = (line - begins) * LINE_BYTES;
    uint64_t bytes = MIN(lines * LINE_BYTES, bytes_of(u, i) - from);
    for (uint32_t row = PARAMETER; row < STEP; row++)
        if (writes_row(u, row))
            memcpy((char *)address(u, row, i) + from, journal_row(slot, row), bytes);
}

void plc_journal_repair(const plc_update *u, void *journal) {
    rank_journal *j = journal;
    if (atomic_load(&j->begun) <= atomic_load(&j->made)) return; /* slots are of no update */
    for (uint32_t t = 0; t < PLC_JOURNAL_SLOTS; t++) {
        journal_slot *slot = &j->slots[t];
        uint64_t next = atomic_load(&slot->next), whole = atomic_load(&slot->whole);
        if (whole <= next) continue;
        repeat_block(u, slot, next, whole - next);
        /* Others may be copying the same: whoever is first is right. */
        atomic_store(&slot->next, whole);
    }
}

/* Claims: things that are to be done once, by whichever rank comes first.
 *
 * A word per thing holds the last round in which it was claimed, and the rank that claimed it then.
 * Rounds grow, so that nobody has to clear the words between two of them: a word of an earlier
 * round is free. One compare-and-set decides; nobody waits.
 */
#include "internal.h"

int plc_claim(void *word, uint64_t round, uint32_t rank) {
    _Atomic uint64_t *claim = word;
    uint64_t seen = atomic_load(claim);
    while (seen >> PLC_CLAIM_RANK_BITS < round)
        if (atomic_compare_exchange_weak(claim, &seen, round << PLC_CLAIM_RANK_BITS | rank))
            return 1;
    return 0;
}

/* Many arrays in one call: the gradients of a model's parameters, each at its own address.
 *
 * A model has hundreds of small ones, and a call for each would cost more than the work.
 */
#include <string.h>

#include "internal.h"

#define MAX_OTHERS 1023

void plc_copy_pieces(uint32_t pieces, const uint64_t *to, const uint64_t *from,
                     const uint64_t *bytes) {
    for (uint32_t i = 0; i < pieces; i++)
        if (bytes[i] > 0)
            memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], bytes[i]);
}

uint32_t plc_compare_pieces(uint32_t pieces, const uint64_t *one, const uint64_t *other,
                            const uint64_t *bytes, uint8_t *differs) {
    uint32_t differing = 0;
    for (uint32_t i = 0; i < pieces; i++) {
        const void *a = (const void *)(uintptr_t)one[i], *b = (const void *)(uintptr_t)other[i];
        differs[i] = bytes[i] > 0 && memcmp(a, b, bytes[i]) != 0;
        differing += differs[i];
    }
    return differing;
}

int plc_add_pieces(uint32_t pieces, const uint64_t *to, uint32_t others, const uint64_t *from,
                   const uint64_t *counts, const uint32_t *dtypes) {
    const void *terms[MAX_OTHERS + 1];
    if (others == 0 || others > MAX_OTHERS) return PLC_INVALID;
    for (uint32_t i = 0; i < pieces; i++)
        if (!can_reduce(dtypes[i], PLC_SUM)) return PLC_INVALID;
    for (uint32_t i = 0; i < pieces; i++) {
        terms[0] = (const void *)(uintptr_t)to[i];
        for (uint32_t r = 0; r < others; r++)
            terms[r + 1] = (const void *)(uintptr_t)from[(uint64_t)r * pieces + i];
        reduce_block((void *)(uintptr_t)to[i], terms, others + 1, counts[i], dtypes[i], PLC_SUM,
                     1.0);
    }
    return PLC_OK;
}

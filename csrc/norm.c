/* The squares of gradients, for their norm: one sum for each block, in double precision.
 *
 * A block is summed in eight lanes, element i in lane i % 8, whatever the instruction set; blocks
 * are cut from each array's begin, so neither parts nor threads show in the sums.
 */
#include "numbers.h"
#include "update.h"

typedef double (*squares_kernel)(const void *numbers, uint64_t count);

#define KERNELS "norm_for_isa.h"
#include "for_each_isa.h"

static const squares_kernel *const tables[] = BY_INSTRUCTION_SET(squares);

static uint64_t blocks_of(const plc_update *u, uint32_t array) {
    return (bytes_of(u, array) + BLOCK_BYTES - 1) / BLOCK_BYTES;
}

uint64_t plc_norm_blocks(const plc_update *u) {
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < u->arrays; i++) blocks += blocks_of(u, i);
    return blocks;
}

static void add_squares(const update_part *part) {
    const plc_update *u = part->update;
    const squares_kernel *kernels = part->kernels;
    uint64_t begins = 0;
    for (uint32_t i = 0; i < u->arrays && begins < part->end; i++) {
        const uint32_t dtype = dtype_of(u, i);
        const uint64_t bytes = plc_element_bytes(dtype), per_block = BLOCK_BYTES / bytes;
        const uint64_t ends = begins + blocks_of(u, i);
        for (uint64_t b = MAX(begins, part->first); b < MIN(ends, part->end); b++) {
            uint64_t from = (b - begins) * per_block, n = MIN(u->counts[i] - from, per_block);
            const void *at = summed_gradients(part, i, from, n, u->counts[i]);
            if (at == NULL) return;
            part->out[b] = kernels[dtype](at, n);
        }
        begins = ends;
    }
}

int plc_square_sums_with(const char *name, const plc_update *u, double *sums) {
    int set = choose_instruction_set(name);
    if (set < 0 || !is_valid_update(u)) return PLC_INVALID;
    update_part pass = {.update = u, .run = add_squares, .kernels = tables[set], .out = sums};
    return run_part(&pass, plc_norm_blocks(u));
}

int plc_square_sums(const plc_update *u, double *sums) {
    return plc_square_sums_with(NULL, u, sums);
}

/* The numbers of a root from those of the nodes. A few at a time, so that the sums on the way stay
 * in the first-level cache however many nodes there are. */
#include "tree_sum.h"

#include "numbers.h"

#define CHUNK 512ull /* elements */

/* The sum of two, the same divided, and a division alone. */
typedef struct {
    void (*add)(void *out, const void *left, const void *right, uint64_t count);
    void (*average)(void *out, const void *left, const void *right, uint64_t count,
                    uint64_t divisor);
    void (*divide)(void *out, const void *from, uint64_t count, uint64_t divisor);
} tree_kernels;

#define KERNELS "tree_sum_for_isa.h"
#include "for_each_isa.h"

static const tree_kernels *const tables[] = BY_INSTRUCTION_SET(kernels);

bool is_tree(const tree_shape *tree) {
    uint32_t depth = 0;
    for (uint32_t n = 0; n < tree->nodes; n++) {
        if (++depth > TREE_MOST_LEVELS + 1 || tree->adds[n] >= depth) return false;
        depth -= tree->adds[n];
    }
    return depth == 1 && tree->divisor != 0;
}

static void average_chunk(const tree_shape *tree, const tree_kernels *kernels,
                          const unsigned char *const *nodes, uint64_t at, uint64_t count,
                          void *out) {
    double sums[TREE_MOST_LEVELS + 1][CHUNK];
    const void *stack[TREE_MOST_LEVELS + 2];
    uint32_t depth = 0, left = tree->nodes - 1; /* additions that are still to be made */
    for (uint32_t n = 0; n < tree->nodes; n++) {
        stack[depth++] = nodes[n] + at;
        for (uint32_t i = 0; i < tree->adds[n]; i++, depth--, left--) {
            const void **pair = &stack[depth - 2];
            if (left == 1) {
                kernels->average(out, pair[0], pair[1], count, tree->divisor);
            } else {
                kernels->add(sums[depth - 2], pair[0], pair[1], count);
                pair[0] = sums[depth - 2];
            }
        }
    }
    if (tree->nodes == 1) kernels->divide(out, stack[0], count, tree->divisor);
}

void average_nodes(const tree_shape *tree, uint32_t dtype, const unsigned char *const *nodes,
                   uint64_t count, unsigned char *out) {
    const tree_kernels *kernels = &tables[choose_instruction_set(NULL)][dtype == PLC_F64];
    const uint64_t element = plc_element_bytes(dtype);
    for (uint64_t from = 0; from < count; from += CHUNK) {
        uint64_t at = from * element;
        average_chunk(tree, kernels, nodes, at, MIN(count - from, CHUNK), out + at);
    }
}

/* The way from the nodes of a tree to its root, number by number, where all of them are at hand. */
#ifndef PACELINE_TREE_SUM_H
#define PACELINE_TREE_SUM_H

#include "internal.h"

#define TREE_MOST_LEVELS 32

/* After a node is taken up, `adds` additions follow, each of the two sums that were made last. */
typedef struct {
    uint32_t nodes;
    const uint32_t *adds;
    uint64_t divisor;
} tree_shape;

/* Whether the additions lead from the nodes to one root. */
bool is_tree(const tree_shape *tree);

/* `count` numbers of the root, divided, from as many of each node: PLC_F32 or PLC_F64. `out` is
 * none of the nodes. */
void average_nodes(const tree_shape *tree, uint32_t dtype, const unsigned char *const *nodes,
                   uint64_t count, unsigned char *out);

#endif

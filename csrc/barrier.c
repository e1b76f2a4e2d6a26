/* Barrier: the phase every collective starts with, and nothing else. */
#include "internal.h"

int run_barrier(op_context *ctx) { return enter_and_compare(ctx, 0); }

/* All-to-all and scatter: a slot is cut into one part per receiver; after a phase, each rank
 * collects its parts. One phase a round of parts. The first round also carries both size tables of
 * every rank, so that all ranks can check the whole matrix of sizes and reach the same conclusion.
 */
#include "internal.h"

typedef struct {
    uint64_t tables, part; /* bytes of the size tables, bytes of a part */
} slot_layout;

static slot_layout lay_out_slot(const plc_comm *comm, bool first) {
    uint64_t tables = first ? ALIGN_UP(2 * comm->ranks * sizeof(uint64_t), CACHE_LINE) : 0;
    uint64_t part = (comm->config.slot_bytes - tables) / comm->ranks;
    return (slot_layout){tables, part / 16 * 16}; /* 16: no element is split */
}

/* sent[r], then wanted[r], in elements. A rank that sends or wants nothing writes 0. */
static uint64_t *tables_of(const op_context *ctx, uint32_t rank) {
    return (uint64_t *)slot_of(ctx->comm, rank, ctx->slot);
}

static void write_tables(const op_context *ctx) {
    const plc_request *q = ctx->request;
    uint32_t ranks = ctx->comm->ranks;
    uint64_t *sent = tables_of(ctx, ctx->comm->rank), *wanted = sent + ranks;
    for (uint32_t r = 0; r < ranks; r++) {
        sent[r] = q->inputs == NULL ? 0 : q->in_counts[r];
        wanted[r] = q->outputs == NULL ? 0 : q->out_counts[r];
    }
}

static bool sizes_match(const op_context *ctx, uint64_t *longest) {
    uint32_t ranks = ctx->comm->ranks;
    *longest = 0;
    for (uint32_t from = 0; from < ranks; from++) {
        const uint64_t *sent = tables_of(ctx, from);
        for (uint32_t to = 0; to < ranks; to++) {
            if (sent[to] != tables_of(ctx, to)[ranks + from]) return false;
            *longest = MAX(*longest, sent[to]);
        }
    }
    return true;
}

int run_alltoall(op_context *ctx) {
    plc_comm *comm = ctx->comm;
    const plc_request *q = ctx->request;
    uint64_t element = plc_element_bytes(q->dtype), longest = 0;
    for (uint64_t done = 0;;) {
        bool first = done == 0;
        slot_layout layout = lay_out_slot(comm, first);
        if (!first) ctx->slot = next_slot(comm);
        if (first) write_tables(ctx);
        unsigned char *parts = slot_of(comm, comm->rank, ctx->slot) + layout.tables;
        for (uint32_t r = 0; q->inputs != NULL && r < comm->ranks; r++) {
            uint64_t bytes = q->in_counts[r] * element;
            if (done < bytes)
                memcpy(parts + r * layout.part, (const char *)q->inputs[r] + done,
                       MIN(bytes - done, layout.part));
        }
        int status = first ? enter_and_compare(ctx, q->count) : next_phase(comm, ctx->deadline);
        if (status != PLC_OK) return status;
        if (first && !sizes_match(ctx, &longest)) return PLC_MISMATCH;
        for (uint32_t r = 0; q->outputs != NULL && r < comm->ranks; r++) {
            uint64_t bytes = q->out_counts[r] * element;
            const unsigned char *theirs =
                slot_of(comm, r, ctx->slot) + layout.tables + comm->rank * layout.part;
            if (done < bytes)
                memcpy((char *)q->outputs[r] + done, theirs, MIN(bytes - done, layout.part));
        }
        done += layout.part;
        if (done >= longest * element) return PLC_OK;
    }
}

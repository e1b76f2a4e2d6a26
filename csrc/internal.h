/* What the files of the core share: the layout of the segment and the steps of every collective.
 *
 * Vocabulary
 *   segment      the shared memory of one communicator
 *   record       one per rank in the segment: its state and the call it is making
 *   slot         staging memory; each rank owns two and writes them in turn
 *   phase        a point that all ranks have reached; numbered from 1, the same on every rank
 *   event count  a counter in shared memory that ranks wait on
 *
 * Design
 * Waits. Collectives and buckets block on a peer only in wait_for (wait.c): it spins, then sleeps
 * on a futex in slices, and between slices checks for an abort, a peer that died or left, and the
 * deadline. So no collective has error handling of its own beyond returning the status. Messages
 * (message_queue.c) sleep on futexes as well; their progress thread makes the same checks for each
 * of them. Flags (flags.c) belong to no communicator: they check the deadline and the other
 * process, and have nothing to abort.
 *
 * Headers before data. Every collective starts with enter_and_compare (phases.c): each rank
 * publishes its call, all wait for each other, and each compares all calls. They see the same
 * headers and reach the same conclusion, so either all ranks go on or all return PLC_MISMATCH
 * with no data touched.
 *
 * Why two slots are enough: a rank writes slot S in use u, then passes a phase, then everyone
 * reads. It writes S again in use u+2, after the phase of use u+1, which every rank reached only
 * after it had read use u.
 */
#ifndef PACELINE_INTERNAL_H
#define PACELINE_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "paceline_core.h"

#define CACHE_LINE 64
#define SEGMENT_MAGIC 0x50414345434f5245ull /* "PACECORE" */
#define ALIGN_UP(x, a) (((x) + (a) - 1) / (a) * (a))
/* Each argument is evaluated once: some of them read what other ranks are changing. */
#define MIN(a, b) ({ __auto_type a_ = (a); __auto_type b_ = (b); a_ < b_ ? a_ : b_; })
#define MAX(a, b) ({ __auto_type a_ = (a); __auto_type b_ = (b); a_ > b_ ? a_ : b_; })

enum { STATE_ABSENT = 0, STATE_JOINED = 1, STATE_LEFT = 2 };

/* A counter that ranks wait on. It only grows; whoever advances it wakes the sleepers. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} event_count;

/* Where a rank sleeps, for peers that sleep elsewhere; see divergence.c. */
enum { IN_COLLECTIVE, IN_BUCKET, WAIT_PLACES };
#define CALL_WORDS (sizeof(plc_call) / sizeof(uint64_t))
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t number; /* odd while the note stands */
    _Atomic uint32_t blocks;                      /* the program waits, not a thread of ours */
    _Atomic uint64_t call[CALL_WORDS];
} wait_note;

enum { STAGED, SUMMED, FETCHED, PIPELINE_STEPS }; /* see pipeline.h */
enum { PART_STAGED, PART_SUMMED, PART_COMBINED, PART_FETCHED, HOSTS_STEPS }; /* hosts_reduction.c */

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t state;
    int32_t pid;
    /* By slot in use, so that a fast rank does not overwrite what is being read. */
    _Alignas(CACHE_LINE) plc_call calls[2];
    /* For direct reads: where this rank's data is in its own memory, a word there that peers try to
     * read, and whether this rank could read every peer's. */
    uint64_t input_at[2], output_at[2];
    uint64_t probe_at;
    uint32_t reads_all;
    _Alignas(CACHE_LINE) _Atomic uint32_t phase; /* last phase this rank reached */
    event_count progress[PIPELINE_STEPS]; /* blocks this rank has staged, summed and fetched */
    event_count parts[HOSTS_STEPS];       /* the same of reductions over hosts */
    event_count doorbell;                 /* advanced by peers when a message channel moved */
    wait_note waits[WAIT_PLACES];
    plc_call diverged; /* where this rank was when ranks were found to diverge */
} rank_record;

typedef struct {
    uint64_t magic;
    uint32_t abi;
    uint32_t ranks;
    uint64_t nonce[2];
    uint64_t bytes, slots_at, channels_at, error_texts_at;
    plc_config config;
    _Alignas(CACHE_LINE) _Atomic uint64_t failure; /* the first one wins: status and rank */
    _Atomic uint32_t divergence_claimed; /* by the rank that writes down who is where */
    event_count arrivals;
    rank_record records[];
} segment;

/* One direction between two ranks: a ring of bytes. Only the sender moves head, only the receiver
 * tail. `refused` is the number of the last message whose receive expected another size, which is
 * `wanted_bytes`. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t head;
    _Alignas(CACHE_LINE) _Atomic uint64_t tail;
    _Atomic uint32_t refused;
    uint64_t wanted_bytes;
    _Alignas(CACHE_LINE) unsigned char ring[];
} channel;

/* The error a rank leaves for its peers to read. It only grows, so nobody ever reads half of it. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t length;
    char text[PLC_ERROR_TEXT_BYTES];
} error_text;

typedef struct message_queue message_queue;

struct plc_comm {
    uint32_t rank, ranks;
    segment *shared;
    bool owns_mapping;
    plc_config config;
    int *pidfds;               /* by rank, -1 where unknown */
    uint32_t phase;            /* last phase this rank reached */
    uint32_t slot;             /* which of the two slots the next use writes */
    uint32_t blocks;           /* blocks that went through the pipeline so far */
    uint32_t parts;            /* parts of reductions over hosts so far */
    uint32_t arenas;           /* opened so far; their numbers are the same on every rank */
    bool direct;               /* every rank may read every other's memory */
    _Atomic uint64_t sequence; /* calls made */
    plc_call *last_calls;
    plc_call *mismatched; /* the calls of the last mismatch, under failure_lock */
    plc_failure failure;
    _Atomic uint32_t failed; /* failure.status, readable without the lock */
    _Atomic bool leaving;    /* this rank is leaving: its own waits end */
    _Atomic uint32_t inside; /* threads of this process inside a call */
    _Atomic uint32_t request_waits; /* those of the program that wait for a request */
    int32_t owner;           /* pid of the process that joined */
    plc_interpreter interpreter; /* zeros: the caller has no GIL */
    pthread_mutex_t failure_lock;

    /* Asynchronous requests run on one thread, in the order they were submitted. */
    pthread_mutex_t queue_lock;
    pthread_cond_t queue_changed;
    pthread_t worker;
    bool worker_started, stopping, running;
    plc_request *queue_head, *queue_tail;

    message_queue *messages; /* made on first use */
    pthread_mutex_t message_lock;
};

/* --- wait.c ----------------------------------------------------------------------------------- */
int64_t now_ns(void);
int64_t deadline_after(const plc_comm *comm, int64_t timeout_ns);
/* Wait until event - target >= 0 (modulo 2^32). `needed` names the ranks whose absence matters
 * (NULL: all others). `call`: what this rank is doing, where peers may be doing something else
 * (NULL: they are known to be at the same thing). */
typedef bool (*needed_fn)(const plc_comm *comm, uint32_t rank, const void *context);
int wait_for(plc_comm *comm, event_count *event, uint32_t target, int64_t deadline,
             needed_fn needed, const void *context, const plc_call *call);
/* Wait until the count differs from `seen`, at most until `deadline`: PLC_OK or PLC_TIMEOUT. Checks
 * nothing else. */
int wait_change(const plc_comm *comm, event_count *event, uint32_t seen, int64_t deadline);
void advance(event_count *event, uint32_t by); /* add and wake */
void wake(event_count *event);
bool rank_is_gone(const plc_comm *comm, uint32_t rank, bool *left);
int record_failure(plc_comm *comm, uint32_t status, int32_t rank);
/* The deadline of `timed_out_rank` passed while it, and this rank, needed others: those are
 * recorded as missing. */
int record_timeout(plc_comm *comm, uint32_t timed_out_rank, needed_fn needed,
                   const void *context);
int known_failure(plc_comm *comm); /* PLC_OK, or what the group already failed with */
void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns);
void futex_wake_all(_Atomic uint32_t *word);

/* --- divergence.c ----------------------------------------------------------------------------- */
typedef struct {
    uint32_t rank, number;
    int64_t since_ns; /* 0: nothing seen */
} divergence;
bool note_wait(plc_comm *comm, const plc_call *call);
void end_wait(plc_comm *comm, const plc_call *call);
/* PLC_PENDING, or PLC_DIVERGED once it is certain that a rank this one needs needs this one
 * elsewhere. */
int check_divergence(plc_comm *comm, const plc_call *mine, needed_fn needed, const void *context,
                     divergence *seen);

/* --- buckets.c -------------------------------------------------------------------------------- */
/* Whether this rank has marked its arrival in the use of a bucket that a peer's note names. */
bool has_been_in_bucket(const plc_comm *comm, const plc_call *note);

/* --- gil.c ------------------------------------------------------------------------------------ */
typedef struct gil_scope {
    plc_comm *comm;
    const plc_interpreter *interpreter; /* NULL: no GIL */
    void *thread_state;
    bool released, interrupted;
    bool in_collective; /* a collective is on this thread's stack */
    struct gil_scope *outer;
} gil_scope;
void gil_scope_enter(gil_scope *scope, plc_comm *comm);
void gil_scope_exit(gil_scope *scope);
void gil_release(void);     /* before anything long; does nothing if it was released already */
bool gil_interrupted(void); /* check signals; true at most once a call */
bool gil_in_collective(const plc_comm *comm);

/* --- comm.c ----------------------------------------------------------------------------------- */
unsigned char *slot_of(const plc_comm *comm, uint32_t rank, uint32_t slot);
channel *channel_of(const plc_comm *comm, uint32_t from, uint32_t to);
/* Around every call that uses more than the handle: leaving waits until nobody is inside, and
 * nobody enters after. */
bool comm_enter(plc_comm *comm);
void comm_exit(plc_comm *comm);

/* --- phases.c: the steps of a collective ------------------------------------------------------ */
typedef struct {
    plc_comm *comm;
    const plc_request *request;
    int64_t deadline;
    uint32_t slot;  /* the slot in use */
    uint64_t label; /* compared, as the rest of the call */
} op_context;
uint32_t next_slot(plc_comm *comm);
int next_phase(plc_comm *comm, int64_t deadline);
int first_phase(plc_comm *comm, int64_t deadline, const plc_call *call);
/* First phase of every collective: publish this rank's call, wait for all ranks, compare. */
int enter_and_compare(op_context *ctx, uint64_t count);
bool calls_match(const plc_comm *comm, const plc_call *calls, bool same_count);

/* --- one function per collective, each in its file -------------------------------------------- */
int run_barrier(op_context *ctx);
int run_allreduce(op_context *ctx);
int run_reduce(op_context *ctx);
int run_broadcast(op_context *ctx);
int run_allgather(op_context *ctx); /* and gather */
int run_reduce_scatter(op_context *ctx);
int run_alltoall(op_context *ctx); /* and scatter */
int run_hosts_begin(op_context *ctx);
int run_hosts_finish(op_context *ctx);
int run_hosts_abandon(op_context *ctx);

/* --- instruction_sets.c ----------------------------------------------------------------------- */
/* The number of the best set this machine has, or of the one with this name; -1 if there is none.
 * Best first: avx512, avx2 and sse2 on x86-64, one set elsewhere. */
int choose_instruction_set(const char *name);

/* --- kernels.c -------------------------------------------------------------------------------- */
bool can_reduce(uint32_t dtype, uint32_t op);
/* out[i] = op over ranks of inputs[r][i], r ascending. out may be one of the inputs. */
void reduce_block(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                  uint32_t dtype, uint32_t op, double factor);
/* The same, written to two places in one pass. Neither may be an input but `out`. */
void reduce_block_twice(void *out, void *copy, const void *const *inputs, uint32_t ranks,
                        uint64_t count, uint32_t dtype, uint32_t op, double factor);
void reduce_block_for(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                      uint32_t dtype, uint32_t op, double factor, uint64_t divisor);

/* --- rounding.c ------------------------------------------------------------------------------- */
void expand_bf16(float *out, const uint16_t *values, uint64_t count);

/* --- direct_read.c ---------------------------------------------------------------------------- */
/* Copy from a peer's own memory. */
int direct_read(plc_comm *comm, uint32_t rank, void *to, uint64_t from, uint64_t bytes);

/* --- message_queue.c -------------------------------------------------------------------------- */
void message_queue_close(plc_comm *comm);

/* --- request_queue.c -------------------------------------------------------------------------- */
void request_queue_close(plc_comm *comm);

#endif

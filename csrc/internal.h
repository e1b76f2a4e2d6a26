/* What the files of the core share: the layout of the segment and the steps every collective is made of.
 *
 * Vocabulary
 *   segment   one piece of shared memory per communicator
 *   record    one per rank in the segment: who it is, what it is calling
 *   slot      staging memory; each rank owns two and writes them in turn
 *   phase     all ranks have arrived; numbered from 1, the same on every rank
 *
 * Why two slots are enough: a rank writes slot S in use u, then passes a phase, then everyone reads. It writes S
 * again in use u+2, after the phase of use u+1, at which every rank arrived only when it had read use u.
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

/* A word that ranks wait on: it only grows, and whoever makes it grow wakes the sleepers. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} signal_word;

enum { STAGED, SUMMED, FETCHED, RING_STEPS }; /* see rings.h */

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t state;
    int32_t pid;
    _Alignas(CACHE_LINE) plc_call calls[2]; /* by slot in use, so that a fast rank does not overwrite what is read */
    uint64_t input_at[2], output_at[2];     /* where its data lies in its own memory, for direct reads */
    uint64_t probe_at;                      /* a word in its memory, to find out whether peers may read there */
    uint32_t reads_all;                     /* it could read every peer's word */
    _Alignas(CACHE_LINE) _Atomic uint32_t phase; /* last phase this rank arrived at */
    signal_word progress[RING_STEPS]; /* blocks this rank has staged, summed and fetched */
    signal_word doorbell;             /* rung by peers when a message channel moved */
} rank_record;

typedef struct {
    uint64_t magic;
    uint32_t abi;
    uint32_t ranks;
    uint64_t nonce[2];
    uint64_t bytes, slots_at, channels_at;
    plc_config config;
    _Alignas(CACHE_LINE) _Atomic uint64_t failure; /* first failure wins: status, rank and what it concerns */
    signal_word arrivals;
    rank_record records[];
} segment;

/* One direction between two ranks: a ring of bytes. Only the sender moves head, only the receiver tail. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t head;
    _Alignas(CACHE_LINE) _Atomic uint64_t tail;
    _Atomic uint32_t refused; /* number of the last message whose receive wanted another size, and which size */
    uint64_t wanted_bytes;
    _Alignas(CACHE_LINE) unsigned char ring[];
} channel;

typedef struct post_office post_office;

struct plc_comm {
    uint32_t rank, ranks;
    segment *shared;
    bool owns_mapping;
    plc_config config;
    int *pidfds; /* by rank, -1 where unknown */
    uint32_t phase;    /* last phase this rank arrived at */
    uint32_t slot;     /* which of the two slots the next use writes */
    uint32_t blocks;   /* blocks that went through the rings so far */
    bool direct;       /* every rank may read every other's memory */
    _Atomic uint64_t sequence; /* calls made */
    plc_call *last_calls;
    plc_call *mismatched; /* the calls of the last mismatch, under failure_lock */
    plc_failure failure;
    _Atomic uint32_t failed; /* failure.status, readable without the lock */
    _Atomic bool leaving;    /* this rank is leaving: its own waits end */
    _Atomic uint32_t inside; /* threads of this process inside a call */
    int32_t owner;           /* the process that joined */
    plc_caller caller;       /* zeros: a caller without a lock */
    pthread_mutex_t failure_lock;

    /* Asynchronous requests run on one thread, in the order they were submitted. */
    pthread_mutex_t queue_lock;
    pthread_cond_t queue_changed;
    pthread_t worker;
    bool worker_started, stopping, running;
    plc_request *queue_head, *queue_tail;

    post_office *post; /* messages; made on first use */
    pthread_mutex_t post_lock;
};

/* --- wait.c ----------------------------------------------------------------------------------------------------- */
int64_t now_ns(void);
int64_t deadline_after(const plc_comm *comm, int64_t timeout_ns);
/* Wait until word - target >= 0 (modulo 2^32). `needed` names the ranks whose absence matters (NULL: all others). */
typedef bool (*needed_fn)(const plc_comm *comm, uint32_t rank, const void *context);
int wait_for(plc_comm *comm, signal_word *word, uint32_t target, int64_t deadline, needed_fn needed, const void *context);
/* Wait until the word differs from `seen`, at most until `deadline`: PLC_OK or PLC_TIMEOUT. Checks nothing else. */
int wait_change(const plc_comm *comm, signal_word *word, uint32_t seen, int64_t deadline);
void advance(signal_word *word, uint32_t by); /* add and wake */
void wake(signal_word *word);
bool rank_is_gone(const plc_comm *comm, uint32_t rank, bool *left);
int raise_failure(plc_comm *comm, uint32_t status, int32_t rank);
/* The time of rank `whose` was up while it, and this rank, needed others: those are named as missing. */
int raise_timeout(plc_comm *comm, uint32_t whose, needed_fn needed, const void *context);
int known_failure(plc_comm *comm); /* PLC_OK, or what the group already failed with */
void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns);
void futex_wake_all(_Atomic uint32_t *word);

/* --- caller.c ---------------------------------------------------------------------------------------------------- */
typedef struct caller_scope {
    plc_comm *comm;
    const plc_caller *caller; /* NULL: no lock */
    void *state;
    bool let_go, stopped, executes; /* executes: a collective is on this thread's stack */
    struct caller_scope *outer;
} caller_scope;
void caller_enters(caller_scope *scope, plc_comm *comm);
void caller_returns(caller_scope *scope);
void caller_waits(void); /* about to take long: let the lock go */
bool caller_stops(void); /* ask; true at most once a call */
bool caller_is_inside(const plc_comm *comm);

/* --- comm.c ----------------------------------------------------------------------------------------------------- */
unsigned char *slot_of(const plc_comm *comm, uint32_t rank, uint32_t slot);
channel *channel_of(const plc_comm *comm, uint32_t from, uint32_t to);
/* Around every call that uses more than the handle: leaving waits until nobody is inside, and nobody enters after. */
bool step_in(plc_comm *comm);
void step_out(plc_comm *comm);

/* --- phases.c: the steps of a collective ------------------------------------------------------------------------- */
typedef struct {
    plc_comm *comm;
    const plc_request *request;
    int64_t deadline;
    uint32_t slot;  /* the slot pair in use */
    uint64_t label; /* compared, as the rest of the call */
} passage;
uint32_t next_slot(plc_comm *comm);
int arrive(plc_comm *comm, int64_t deadline); /* one phase */
/* First phase of every collective: say what this rank calls, wait for all, compare. */
int meet(passage *at, uint64_t count);
bool calls_agree(const plc_comm *comm, const plc_call *calls, bool same_count);

/* --- one function per collective, each in its file ----------------------------------------------------------------- */
int run_barrier(passage *at);
int run_allreduce(passage *at);
int run_reduce(passage *at);
int run_broadcast(passage *at);
int run_allgather(passage *at); /* and gather */
int run_reduce_scatter(passage *at);
int run_alltoall(passage *at); /* and scatter */

/* --- kernels.c ---------------------------------------------------------------------------------------------------- */
bool can_reduce(uint32_t dtype, uint32_t op);
/* out[i] = op over ranks of inputs[r][i], r ascending. out may be one of the inputs. */
void reduce_block(void *out, const void *const *inputs, uint32_t ranks, uint64_t count, uint32_t dtype, uint32_t op,
                  double factor);
/* The same, written to two places in one pass. Neither may be an input but `out`. */
void reduce_block_twice(void *out, void *copy, const void *const *inputs, uint32_t ranks, uint64_t count,
                        uint32_t dtype, uint32_t op, double factor);
void reduce_block_for(void *out, const void *const *inputs, uint32_t ranks, uint64_t count, uint32_t dtype, uint32_t op,
                      double factor, uint64_t divisor);

/* --- direct.c ------------------------------------------------------------------------------------------------------ */
/* Copy from a peer's own memory. */
int read_from(plc_comm *comm, uint32_t rank, void *to, uint64_t from, uint64_t bytes);

/* --- messages.c --------------------------------------------------------------------------------------------------- */
void post_office_close(plc_comm *comm);
/* --- queue.c ------------------------------------------------------------------------------------------------------ */
void queue_close(plc_comm *comm);

#endif

/* The C ABI of Paceline's native core: collectives over shared memory for the ranks of one host.
 *
 * Plain C, no torch, no Python. Every function that can fail returns a plc_status; nothing prints,
 * nothing exits. Every wait has a deadline, notices peers that died, and can be ended by
 * plc_comm_abort from another thread. No global state: a process may hold any number of
 * communicators.
 */
#ifndef PACELINE_CORE_H
#define PACELINE_CORE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PLC_API __attribute__((visibility("default")))

/* Raised whenever this file changes in a way that older callers would not survive. */
#define PLC_ABI_VERSION 12

#define PLC_MAX_RANKS 1024
#define PLC_ANY_SOURCE (-1)
#define PLC_ERROR_TEXT_BYTES (16 * 1024) /* room for the error a rank publishes */

typedef enum {
    PLC_OK = 0,
    PLC_MISMATCH = 1,  /* ranks made different calls; plc_comm_calls lists them */
    PLC_TIMEOUT = 2,   /* the deadline passed; plc_comm_failure names who is missing */
    PLC_PEER_LOST = 3, /* a peer's process ended */
    PLC_PEER_LEFT = 4, /* a peer left the communicator in good order while this rank needed it */
    PLC_ABORTED = 5,   /* plc_comm_abort was called, here or by a peer, or a peer gave up */
    PLC_INVALID = 6,   /* arguments that cannot be served */
    PLC_SYSTEM = 7,    /* a system call failed; errno is kept */
    PLC_PENDING = 8,   /* not finished yet */
    PLC_SIZE = 9,      /* a message and the buffer given for it have different sizes */
    PLC_NESTED = 10,   /* called by a signal handler within a call on the same communicator */
    PLC_DIVERGED = 11, /* ranks wait for each other in different places; see plc_comm_calls */
    PLC_WIRE = 12,     /* what carries messages to other hosts failed; its owner knows why */
} plc_status;

typedef enum {
    PLC_U8, PLC_I8, PLC_U16, PLC_I16, PLC_U32, PLC_I32, PLC_U64, PLC_I64,
    PLC_F16, PLC_BF16, PLC_F32, PLC_F64, PLC_C32, PLC_C64, PLC_C128, PLC_BOOL,
    PLC_BYTES, /* any element type, moved and never reduced */
    PLC_DTYPES
} plc_dtype;

typedef enum {
    PLC_SUM, PLC_AVG, PLC_PRODUCT, PLC_MIN, PLC_MAX, PLC_BAND, PLC_BOR, PLC_BXOR, PLC_PREMUL_SUM,
    PLC_OPS
} plc_op;

typedef enum {
    PLC_BARRIER, PLC_ALLREDUCE, PLC_REDUCE, PLC_BROADCAST, PLC_ALLGATHER, PLC_GATHER,
    PLC_SCATTER, PLC_REDUCE_SCATTER, PLC_ALLTOALL,
    PLC_HOSTS_BEGIN, PLC_HOSTS_FINISH, PLC_HOSTS_ABANDON, /* input: a plc_hosts_reduction */
    PLC_KINDS,
    PLC_BUCKET = PLC_KINDS, /* no call: the definition of a bucket, where the ranks' differ, or a
                             * wait in one: sequence is the bucket, label the number of its arena */
    PLC_ELSEWHERE,          /* no wait in this communicator */
} plc_kind;

typedef struct plc_comm plc_comm;

/* The header of a call: what a rank publishes before anyone touches data. Peers compare it. */
typedef struct {
    uint64_t sequence; /* number of this call on this communicator */
    uint32_t kind, dtype, op;
    int32_t root;
    uint64_t count; /* elements (bytes for PLC_BYTES) this rank contributes */
    uint64_t label; /* the caller's own, for example the element type behind PLC_BYTES */
} plc_call;

/* One collective. Pointers stay valid until it has finished. */
typedef struct {
    uint32_t kind, dtype, op;
    int32_t root;
    uint64_t label;
    uint64_t count;             /* elements of `input` (REDUCE_SCATTER: of each equal block) */
    const void *input;
    void *output;               /* may equal input */
    const void *const *inputs;  /* one pointer a rank: SCATTER (root), REDUCE_SCATTER, ALLTOALL */
    void *const *outputs;       /* one pointer a rank: ALLGATHER, GATHER (root), ALLTOALL */
    const uint64_t *in_counts;  /* elements a rank, beside inputs */
    const uint64_t *out_counts; /* elements a rank, beside outputs */
    double factor;              /* PLC_PREMUL_SUM */
    int64_t timeout_ns;         /* relative; negative: the communicator's */
    /* Filled in by the core. */
    uint32_t status;            /* plc_status, PLC_PENDING until done */
    uint32_t finished;          /* becomes 1, a futex word */
    void *next;
} plc_request;

/* How a rank reaches the ranks of its lane, one on each other host. Messages between two hosts
 * arrive in the order in which they were sent. Each call returns 0, or something else if it
 * failed. */
typedef struct {
    void *context;
    /* The memory of the next message to send. */
    int (*take)(void *context, void **data);
    /* Send `bytes` of the memory taken last, to one host or, with -1, to all others. It may be read
     * from then on, not written. */
    int (*send)(void *context, int32_t host, uint64_t bytes);
    /* Wait for the next message from a host; `data` is valid until it is released. */
    int (*receive)(void *context, uint32_t host, const void **data);
    int (*release)(void *context, uint32_t host);
} plc_wire;

#define PLC_MAX_HOSTS 1024
#define PLC_MAX_DEPTH 4

/* A reduction over the ranks of several hosts, as one rank of one of them sees it. Blocks, slices
 * and pieces: see backend/hierarchical_reduce.py, which plans them. All but `data`, `scratch`, the
 * wire and what concerns one rank is the same on all ranks of a host. */
typedef struct {
    plc_wire wire;
    uint32_t host, hosts;  /* the number of this host, and how many there are */
    uint32_t lanes;        /* ranks below this have a wire */
    uint32_t depth;        /* blocks on their way: the ones behind them are summed meanwhile */
    uint32_t in_pieces;    /* each host sums a piece of a slice, and sends the sum to the others */
    uint32_t dtype;
    uint32_t op, op_between; /* inside a host, and of the hosts' results */
    uint32_t rounds;         /* float32 that crosses as bfloat16 */
    double factor;           /* of `op` */
    uint64_t divisor;        /* of the final sum, or 1 */
    uint32_t sends, receives; /* whether this host sends its sums, and gets the others' */
    uint32_t reads;           /* whether this rank gets the result */
    void *data;               /* this rank's numbers, replaced by the result */
    uint64_t blocks;
    const uint64_t *slice_starts, *slice_counts; /* by block and lane, in elements */
    const uint64_t *piece_starts, *piece_counts; /* of this rank's slices, by block and host */
    void *scratch;        /* depth + 2 rows */
    uint64_t row_bytes;   /* room for the longest slice each */
    /* The core's own, between PLC_HOSTS_BEGIN and the end. */
    uint32_t slot;
    uint64_t part_bytes, staged, summed, combined, fetched;
    void *sent[PLC_MAX_DEPTH + 1];
} plc_hosts_reduction;

/* One message between two ranks. */
typedef struct {
    int32_t peer;       /* source or destination; PLC_ANY_SOURCE for a receive */
    int32_t tag;
    void *buffer;
    uint64_t bytes;
    int64_t timeout_ns;
    /* Filled in by the core. */
    int32_t source;     /* who sent it */
    uint32_t is_send;
    uint64_t found_bytes; /* for PLC_SIZE: the peer's size */
    uint64_t moved;
    int64_t deadline_ns;
    uint32_t status;
    uint32_t finished;
    void *next;
} plc_message;

typedef struct {
    uint64_t slot_bytes; /* staging per rank and buffer; bounds memory whatever the message size */
    uint64_t ring_bytes; /* staging per ordered pair of ranks, for messages; a power of two */
    int64_t timeout_ns;  /* default deadline of every call */
    int64_t spin_ns;     /* how long a wait spins before it sleeps */
} plc_config;

typedef struct {
    uint32_t status;
    int32_t rank;      /* the peer concerned, -1 if none; PLC_TIMEOUT: whose deadline passed */
    uint64_t sequence; /* call in which it was noticed */
    uint32_t missing_count;
    uint32_t missing[PLC_MAX_RANKS]; /* ranks that had not arrived */
} plc_failure;

/* --- about the library ------------------------------------------------------------------------ */
PLC_API int plc_abi_version(void);
PLC_API const char *plc_instruction_set(void);
PLC_API uint64_t plc_element_bytes(uint32_t dtype);
/* out = op over inputs[0..ranks-1], in that order, with the arithmetic of ALLREDUCE. */
PLC_API int plc_reduce_local(void *out, const void *const *inputs, uint32_t ranks, uint64_t count,
                             uint32_t dtype, uint32_t op, double factor);
/* The same with the instructions of one set by name ("avx2"), to compare them; PLC_INVALID where
 * there are none. */
PLC_API int plc_reduce_with(const char *instruction_set, void *out, const void *const *inputs,
                            uint32_t ranks, uint64_t count, uint32_t dtype, uint32_t op,
                            double factor);
/* As above with an average over `divisor` contributions (PLC_AVG); for sums that continue
 * elsewhere. */
PLC_API int plc_scale_local(void *data, uint64_t count, uint32_t dtype, uint64_t divisor);
/* float32 rounded to bfloat16, and the float32 sum of such arrays, in that order; at least two. */
PLC_API void plc_round_to_bf16(uint16_t *out, const float *values, uint64_t count);
PLC_API int plc_sum_of_bf16(float *out, const uint16_t *const *inputs, uint32_t ranks,
                            uint64_t count);
/* A digest of bytes, the same on every machine of one byte order. */
PLC_API uint64_t plc_digest(const void *data, uint64_t bytes, uint64_t seed);

/* --- communicators ---------------------------------------------------------------------------- */
PLC_API uint64_t plc_segment_bytes(uint32_t ranks, const plc_config *config);
/* Prepare a fresh mapping-sized file for `ranks` ranks. Called once, by the rank that made the
 * descriptor. */
PLC_API int plc_segment_format(int fd, uint32_t ranks, const plc_config *config,
                               const uint64_t nonce[2]);
/* Join through a descriptor, or through an existing mapping when fd is -1 (ranks as threads).
 * pidfds: one descriptor a rank, -1 where liveness cannot be watched; owned by the caller, kept
 * open while the communicator lives. */
PLC_API int plc_comm_join(int fd, void *mapping, uint32_t rank, uint32_t ranks,
                          const uint64_t nonce[2], const plc_config *config, const int *pidfds,
                          plc_comm **out);
/* Called by all ranks once all have joined: find out whether all may read each other's memory. */
PLC_API int plc_comm_probe_direct_reads(plc_comm *comm, int allow_direct);
PLC_API int plc_comm_reads_directly(const plc_comm *comm); /* what came of it */
/* Leave the group: peers see it, waits of this rank's other threads end with PLC_ABORTED, as do
 * later calls. Memory and threads are released; the handle itself stays valid until plc_comm_free,
 * which the last user calls. In a forked child neither touches what belongs to the parent. */
PLC_API void plc_comm_leave(plc_comm *comm);
PLC_API void plc_comm_free(plc_comm *comm);
PLC_API int plc_comm_abort(plc_comm *comm);
/* Whether a rank can do nothing here any more: its process ended, with all threads, or it left. */
PLC_API int plc_comm_is_gone(const plc_comm *comm, uint32_t rank);
PLC_API void plc_comm_failure(plc_comm *comm, plc_failure *out);
PLC_API void plc_comm_calls(plc_comm *comm, plc_call *out); /* each rank's, in the last mismatch */
PLC_API uint64_t plc_comm_sequence(plc_comm *comm);
/* So that peers can name each other. */
PLC_API int plc_comm_peer_pid(plc_comm *comm, uint32_t rank);
PLC_API int plc_comm_peer_left(plc_comm *comm, uint32_t rank);
/* Publish an error text, which peers can read whatever becomes of this process. It is appended to
 * what this rank published before; what does not fit is cut off. `leaving`: nobody waits for this
 * rank any more (PLC_PEER_LEFT). Call it from one thread at a time. */
PLC_API int plc_comm_publish_error(plc_comm *comm, const char *text, uint64_t bytes, int leaving);
/* The error text of a rank, at most `room` bytes of it; returns how many. */
PLC_API uint64_t plc_comm_error_text(plc_comm *comm, uint32_t rank, char *out, uint64_t room);

/* --- callers with a global interpreter lock (GIL) --------------------------------------------- */
/* A caller that sets these makes the calls marked [GIL] with its lock held. Short ones keep it;
 * before a wait or a long copy the core releases it. While it waits, now and then and after every
 * signal, it lets the interpreter run its signal handlers. If one of them raised, a collective
 * aborts the group (peers learn it), while a wait for something asynchronous just ends. */
typedef struct {
    void *(*release_gil)(void);
    void (*acquire_gil)(void *thread_state); /* what release_gil returned */
    int (*check_signals)(void);              /* with the GIL held; not 0: a handler raised */
} plc_interpreter;
PLC_API void plc_comm_set_interpreter(plc_comm *comm, const plc_interpreter *interpreter);

/* --- collectives ------------------------------------------------------------------------------ */
PLC_API int plc_run(plc_comm *comm, plc_request *request);    /* [GIL] returns when done */
PLC_API int plc_submit(plc_comm *comm, plc_request *request); /* returns at once */
PLC_API int plc_request_wait(plc_comm *comm, plc_request *request, int64_t timeout_ns); /* [GIL] */
/* The most frequent call, without a plc_request. [GIL] */
PLC_API int plc_allreduce(plc_comm *comm, void *data, uint64_t count, uint32_t dtype, uint32_t op,
                          int64_t timeout_ns);

/* --- messages --------------------------------------------------------------------------------- */
PLC_API int plc_send(plc_comm *comm, plc_message *message);
PLC_API int plc_receive(plc_comm *comm, plc_message *message);
PLC_API int plc_message_wait(plc_comm *comm, plc_message *message, int64_t timeout_ns); /* [GIL] */

/* --- buckets: buffers that live in shared memory and are reduced where they lie
 * ---------------------------------- */
typedef struct plc_arena plc_arena;
PLC_API uint64_t plc_arena_bytes(uint32_t ranks, uint64_t bytes_per_rank, uint32_t buckets);
/* Map through a descriptor of plc_arena_bytes zero bytes, or use an existing mapping when fd is -1
 * (ranks as threads). */
PLC_API int plc_arena_open(plc_comm *comm, int fd, void *mapping, uint64_t bytes_per_rank,
                           uint32_t buckets, plc_arena **out);
PLC_API void plc_arena_close(plc_arena *arena);
PLC_API void *plc_arena_region(plc_arena *arena, uint32_t rank);
/* Describe bucket `index`: `count` elements at `offset` of every rank's region. The same on all
 * ranks: where they differ plc_bucket_finish says PLC_MISMATCH on all of them, and plc_comm_calls
 * who said what. */
PLC_API int plc_bucket_define(plc_arena *arena, uint32_t index, uint64_t offset, uint64_t count,
                              uint32_t dtype, uint32_t op);
/* This rank's share of the bucket is in place. Never blocks. */
PLC_API int plc_bucket_ready(plc_arena *arena, uint32_t index);
/* Wait until the bucket holds the result on every rank, helping with the sums meanwhile. [GIL] */
PLC_API int plc_bucket_finish(plc_arena *arena, uint32_t index, int64_t timeout_ns);

/* A bucket whose numbers stay in every rank's own memory: `ring_bytes` at `offset` of every rank's
 * region carry them across. Buckets may share that room. */
PLC_API int plc_bucket_define_external(plc_arena *arena, uint32_t index, uint64_t offset,
                                       uint64_t ring_bytes, uint64_t count, uint32_t dtype,
                                       uint32_t op);
/* Replace the numbers at `data` by the result over all ranks; waits for them. Such buckets come in
 * the same order on all ranks. [GIL] */
PLC_API int plc_bucket_reduce_external(plc_arena *arena, uint32_t index, void *data,
                                       int64_t timeout_ns);

/* --- tree averages: sums of nodes of a binary tree, which ranks hold, and a division at its root
 * ------------------------------ */
typedef struct {
    /* All nodes, in the order of the leaves below them. After a node is taken up, `adds` additions
     * follow, each of the two sums that were made last: left plus right. */
    uint32_t nodes;
    const uint32_t *owners; /* the rank that holds each */
    const uint32_t *adds;
    /* A node is a row of arrays, which lie anywhere in memory. */
    uint32_t arrays, dtype; /* PLC_F32 or PLC_F64 */
    const uint64_t *ends;   /* of each array in the row, in elements */
    const uint64_t *inputs; /* `arrays` addresses for each of this rank's nodes; 0: zeros */
    const uint64_t *outputs; /* where this rank wants the result; may be those of a node */
    uint64_t divisor;
} plc_tree_average;
/* All ranks, each with its nodes, once they know that all are there; the same on all of them but
 * for inputs and outputs. The room is that of an external bucket, used for nothing else. [GIL] */
PLC_API int plc_arena_average_tree(plc_arena *arena, uint32_t index, const plc_tree_average *what,
                                   int64_t timeout_ns);

/* --- pieces: many arrays at their own addresses, in one call; no communicator needed
 * ------------------------------ */
PLC_API void plc_copy_pieces(uint32_t pieces, const uint64_t *to, const uint64_t *from,
                             const uint64_t *bytes);
/* Set `differs[i]` to whether piece i has other bytes at `one` than at `other`; how many do. */
PLC_API uint32_t plc_compare_pieces(uint32_t pieces, const uint64_t *one, const uint64_t *other,
                                    const uint64_t *bytes, uint8_t *differs);
/* Add to each array at `to` those of `others` owners, in their order and rounded once. `from` has
 * `pieces` addresses for each owner, one owner after the other. PLC_INVALID, and nothing is
 * written, if a type cannot be added. */
PLC_API int plc_add_pieces(uint32_t pieces, const uint64_t *to, uint32_t others,
                           const uint64_t *from, const uint64_t *counts, const uint32_t *dtypes);

/* --- updates: one step of an optimizer over many arrays, in one call; no communicator needed
 * ------------------------------ */
typedef enum { PLC_SGD, PLC_ADAM, PLC_ADAGRAD, PLC_RULES } plc_rule;

/* Options of an update. */
#define PLC_MAXIMIZE 1u
#define PLC_NESTEROV 2u        /* PLC_SGD */
#define PLC_AMSGRAD 4u         /* PLC_ADAM */
#define PLC_DECOUPLED_DECAY 8u /* PLC_ADAM: the weights decay, not the gradient: AdamW */

/* Gradients of which ranks hold sums over some nodes of a tree (see plc_tree_average), while an
 * update needs the root, divided. Every rank reads those of the others in their own memory. */
typedef struct {
    uint32_t nodes;
    const uint32_t *owners; /* ranks of the update's `comm` */
    const uint32_t *adds;
    uint64_t divisor;
    /* That of array i of node n is at addresses[n * stride + i] in the memory of its owner. */
    const uint64_t *addresses;
    uint64_t stride;
} plc_tree_sum;

/* What an array is: its plc_dtype, and: */
#define PLC_DTYPE_MASK 0xffu
#define PLC_FIRST_UPDATE 0x100u /* PLC_SGD: there is no momentum yet */
#define PLC_WIDE_STEP 0x200u    /* its number of steps is a double, not a float */

typedef struct {
    uint32_t rule, options;
    double lr, weight_decay;
    double eps;                 /* PLC_ADAM, PLC_ADAGRAD */
    double momentum, dampening; /* PLC_SGD */
    double beta1, beta2;        /* PLC_ADAM */
    double lr_decay;            /* PLC_ADAGRAD */
    double grad_scale;          /* gradients are divided by it, and stay so unless they are summed
                                 * here; 1: left alone */
    double clip;                /* and then multiplied by it; 1: left alone */
    uint32_t part, parts;       /* this call makes one part of the update, from 0 on */
    uint32_t threads;           /* how many threads this call may use */
    uint32_t arrays;
    /* `arrays` addresses each of: parameters, gradients, three arrays of state, numbers of steps
     * made. SGD: momentum. Adam: the averages of gradients and of their squares, the largest of
     * the latter (PLC_AMSGRAD). Adagrad: the sum of squares. 0 for what the rule does not have. */
    const uint64_t *addresses;
    const uint64_t *counts; /* elements */
    const uint32_t *kinds;  /* see PLC_DTYPE_MASK */
    /* Gradients that are still to be summed: those at the addresses above belong to this rank, and
     * those of rank r, mapped here as well, lie `distances[r]` bytes further on. The sum is that of
     * a bucket: in this order, each with its weight. 0: the gradients are used as they are. */
    uint32_t ranks;
    const int64_t *distances;
    const double *weights;
    /* Those that are not mapped here are read from their rank's own memory. The gradient of array i
     * that is `r` in the order above is at private_addresses[members[r] * private_stride + i] of
     * rank members[r] of `comm`; 0: it is mapped. `comm` is NULL if all are. */
    plc_comm *comm;
    const uint32_t *members;
    const uint64_t *private_addresses;
    uint64_t private_stride;
    /* Instead of all that: the gradient is the root of a tree, for arrays of PLC_F32 and PLC_F64.
     * NULL: it is not. `comm` is given. */
    const plc_tree_sum *tree;
    void *journal; /* this rank's, if others make parts of the update as well; or NULL */
} plc_update;
/* Update the parameters and the state, and count the step. Parts end at multiples of 64 bytes from
 * an array's begin; whoever makes one counts the step for itself. The bits depend neither on parts
 * nor on threads. PLC_INVALID, and nothing is written, for other types than floats. A rank whose
 * gradients can no longer be read ends the call with the status of that failure; every element is
 * then as before the step, or as after it. */
PLC_API int plc_update_arrays(const plc_update *update);
/* The same with the instructions of one set by name, to compare them. */
PLC_API int plc_update_with(const char *instruction_set, const plc_update *update);
/* For the norm of all gradients: a sum of squares for each block of PLC_NORM_BLOCK_BYTES, each
 * array beginning a new one, in order. plc_square_sums writes those of one part of the update. A
 * block is summed in one order wherever parts begin, so a norm made of all of them in order has the
 * same bits at any number of parts. `grad_scale` and `clip` are not applied. */
#define PLC_NORM_BLOCK_BYTES 16384u
PLC_API uint64_t plc_norm_blocks(const plc_update *update);
PLC_API int plc_square_sums(const plc_update *update, double *sums);
PLC_API int plc_square_sums_with(const char *instruction_set, const plc_update *update,
                                 double *sums);

/* --- journals: what is known of an update whose process was killed
 * ------------------------------ */
#define PLC_JOURNAL_SLOTS 16u /* threads that an update with a journal can use */
PLC_API uint64_t plc_journal_bytes(void); /* of shared memory for each rank, zero at first */
/* A step begins, of as many updates as there are calls until the next; numbers of steps are not 0.
 * The rank will make no more of this step. */
PLC_API void plc_journal_begin(void *journal, uint64_t step);
PLC_API void plc_journal_end(void *journal);
/* For what is not an update of this core: so many are begun and made. */
PLC_API void plc_journal_note(void *journal, uint64_t begun, uint64_t made);
typedef struct {
    uint64_t step, begun, made; /* made: updates that are complete; begun: this one or one more */
    uint64_t ended;
    uint64_t lines[PLC_JOURNAL_SLOTS][2]; /* of the update begun last, from and to: made */
} plc_journal_state;
PLC_API void plc_journal_read(const void *journal, plc_journal_state *out);
/* Finish the block that a process was writing when it ended; `update` is the one that it had begun,
 * as this process would make it. May be called by several processes. */
PLC_API void plc_journal_repair(const plc_update *update, void *journal);

/* --- meetings: some ranks of a communicator wait for each other
 * ------------------------------ */
#define PLC_MEETING_NUMBERS 2
PLC_API uint64_t plc_meeting_bytes(uint32_t ranks); /* of shared memory, zero at first */
/* Come to the meeting of this number, and wait for the ranks that `present` says (a byte per rank,
 * this one's included). `out`: what each of them brought, PLC_MEETING_NUMBERS per rank. Numbers
 * grow from meeting to meeting, even and odd in turn, and are the same on all who come. [GIL] */
PLC_API int plc_meet(plc_comm *comm, void *meeting, uint32_t number, const uint8_t *present,
                     const uint64_t *numbers, uint64_t *out, int64_t timeout_ns);

/* --- claims: things that are to be done once, by whichever rank comes first
 * ------------------ */
#define PLC_CLAIM_RANK_BITS 16
/* 1 if this call claimed the word (8 bytes of shared memory, zero at first) for this round, 0 if it
 * was claimed already. Rounds begin with 1 and grow. A word holds the round, shifted by
 * PLC_CLAIM_RANK_BITS, and the rank of its last claim. */
PLC_API int plc_claim(void *word, uint64_t round, uint32_t rank);

/* --- flags: words in shared memory that one process raises and another waits for; no communicator
 * needed ---------- */
PLC_API uint64_t plc_flag_bytes(void); /* memory of a flag, aligned to as much, zero at first */
PLC_API void plc_flag_raise(void *flag); /* adds one */
/* Wait until the flag was raised `target` times (modulo 2^32). PLC_PEER_LOST if the process behind
 * pidfd ended first, PLC_PENDING after timeout_ns: wait again. */
PLC_API int plc_flag_wait(void *flag, uint32_t target, int pidfd, int64_t spin_ns,
                          int64_t timeout_ns);
/* A message in one call: copy arrays as plc_copy_pieces does, write the first two words of a
 * notice, raise the flag. Whoever waited for the flag sees all of it. */
PLC_API void plc_hand_over(void *flag, uint64_t *notice, uint64_t first, uint64_t second,
                           uint32_t pieces, const uint64_t *to, const uint64_t *from,
                           const uint64_t *bytes);
/* Headers: a few numbers that ride along, whatever they mean. A rank writes its header, then marks
 * its arrival; whoever sees a bucket complete sees the headers all ranks wrote before it. Every
 * rank writes the same sequence of headers, at most two of them before it finishes a bucket that it
 * was ready for afterwards. Returns the header's number. */
#define PLC_HEADER_NUMBERS 8
PLC_API uint32_t plc_arena_write_header(plc_arena *arena, const double *header);
/* All ranks' headers with this number, one of the last two that this rank wrote; older ones may be
 * overwritten. PLC_HEADER_NUMBERS per rank. */
PLC_API void plc_arena_read_headers(plc_arena *arena, uint32_t number, double *out);
/* From now on an average is the sum of every rank's numbers times its weight: one weight per rank,
 * the same on all ranks, set before this rank waits for a bucket. A rank whose weight is 0 brings
 * zeros. */
PLC_API void plc_arena_set_weights(plc_arena *arena, const double *weights);
/* Copy pieces of memory one after the other into this rank's region. A piece that lies there
 * already stays. */
PLC_API int plc_arena_fill(plc_arena *arena, uint64_t offset, uint32_t pieces,
                           const uint64_t *addresses, const uint64_t *bytes);
/* A whole exchange: a header, bucket `index`, and the empty bucket `signals` that says all headers
 * are written. If the ranks' headers are equal, byte by byte, so are their weights. PLC_PENDING
 * when they differ: read them, set the weights, then finish the bucket. [GIL] */
PLC_API int plc_arena_step(plc_arena *arena, const double *header, uint32_t signals, uint32_t index,
                           int64_t timeout_ns, uint32_t *number);

#ifdef __cplusplus
}
#endif
#endif

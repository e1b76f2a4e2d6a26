/* Communicators: format a segment, join it, leave it, and ask about it. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

int plc_abi_version(void) { return PLC_ABI_VERSION; }

static uint64_t records_end(uint32_t ranks) {
    return ALIGN_UP(offsetof(segment, records) + ranks * sizeof(rank_record), 4096);
}

static uint64_t channel_bytes(const plc_config *config) {
    return sizeof(channel) + config->ring_bytes;
}

uint64_t plc_segment_bytes(uint32_t ranks, const plc_config *config) {
    uint64_t slots = 2ull * ranks * config->slot_bytes;
    uint64_t channels = (uint64_t)ranks * ranks * channel_bytes(config);
    uint64_t error_texts = ALIGN_UP(ranks * sizeof(error_text), 4096);
    return ALIGN_UP(records_end(ranks) + slots + channels, 4096) + error_texts;
}

unsigned char *slot_of(const plc_comm *comm, uint32_t rank, uint32_t slot) {
    const segment *s = comm->shared;
    return (unsigned char *)s + s->slots_at + (2ull * rank + slot) * s->config.slot_bytes;
}

channel *channel_of(const plc_comm *comm, uint32_t from, uint32_t to) {
    const segment *s = comm->shared;
    uint64_t index = (uint64_t)from * comm->ranks + to;
    return (channel *)((unsigned char *)s + s->channels_at + index * channel_bytes(&s->config));
}

static error_text *error_text_of(const plc_comm *comm, uint32_t rank) {
    return (error_text *)((unsigned char *)comm->shared + comm->shared->error_texts_at) + rank;
}

static bool config_is_valid(uint32_t ranks, const plc_config *c) {
    bool whole_pages = c->slot_bytes >= 4096 && c->slot_bytes % 4096 == 0;
    /* The size tables of an all-to-all must fit, and every rank's part of a slot must hold an
     * element. */
    bool room_for_all = c->slot_bytes >= 64ull * ranks;
    bool power_of_two = c->ring_bytes >= 4096 && (c->ring_bytes & (c->ring_bytes - 1)) == 0;
    return ranks >= 1 && ranks <= PLC_MAX_RANKS && whole_pages && room_for_all && power_of_two;
}

int plc_segment_format(int fd, uint32_t ranks, const plc_config *config, const uint64_t nonce[2]) {
    if (!config_is_valid(ranks, config)) return PLC_INVALID;
    uint64_t bytes = plc_segment_bytes(ranks, config);
    if (ftruncate(fd, (off_t)bytes) != 0) return PLC_SYSTEM;
    segment *s = mmap(NULL, records_end(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) return PLC_SYSTEM;
    s->abi = PLC_ABI_VERSION;
    s->ranks = ranks;
    s->nonce[0] = nonce[0];
    s->nonce[1] = nonce[1];
    s->bytes = bytes;
    s->slots_at = records_end(ranks);
    s->channels_at = s->slots_at + 2ull * ranks * config->slot_bytes;
    s->error_texts_at = bytes - ALIGN_UP(ranks * sizeof(error_text), 4096);
    s->config = *config;
    s->magic = SEGMENT_MAGIC;
    munmap(s, records_end(ranks));
    return PLC_OK;
}

static bool segment_matches(const segment *s, uint32_t ranks, const uint64_t nonce[2]) {
    return s->magic == SEGMENT_MAGIC && s->abi == PLC_ABI_VERSION && s->ranks == ranks &&
           s->nonce[0] == nonce[0] && s->nonce[1] == nonce[1];
}

int plc_comm_join(int fd, void *mapping, uint32_t rank, uint32_t ranks, const uint64_t nonce[2],
                  const plc_config *config, const int *pidfds, plc_comm **out) {
    if (!config_is_valid(ranks, config) || rank >= ranks) return PLC_INVALID;
    uint64_t bytes = plc_segment_bytes(ranks, config);
    segment *s = mapping;
    if (s == NULL) s = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) return PLC_SYSTEM;
    plc_comm *comm = calloc(1, sizeof *comm);
    int *fds = malloc(ranks * sizeof *fds);
    plc_call *calls = calloc(2ull * ranks, sizeof *calls);
    if (!segment_matches(s, ranks, nonce) || s->bytes != bytes || comm == NULL || fds == NULL ||
        calls == NULL) {
        bool out_of_memory = comm == NULL || fds == NULL || calls == NULL;
        free(comm), free(fds), free(calls);
        if (mapping == NULL) munmap(s, bytes);
        errno = out_of_memory ? ENOMEM : EPROTO;
        return PLC_SYSTEM;
    }
    for (uint32_t r = 0; r < ranks; r++) fds[r] = pidfds == NULL ? -1 : pidfds[r];
    comm->rank = rank;
    comm->ranks = ranks;
    comm->shared = s;
    comm->owns_mapping = mapping == NULL;
    comm->config = *config;
    comm->pidfds = fds;
    comm->last_calls = calls;
    comm->mismatched = calls + ranks;
    comm->failure.rank = -1;
    comm->owner = (int32_t)getpid();
    pthread_mutex_init(&comm->failure_lock, NULL);
    pthread_mutex_init(&comm->queue_lock, NULL);
    pthread_cond_init(&comm->queue_changed, NULL);
    pthread_mutex_init(&comm->message_lock, NULL);
    s->records[rank].pid = (int32_t)getpid();
    atomic_store(&s->records[rank].state, STATE_JOINED);
    *out = comm;
    return PLC_OK;
}

/* Sequentially consistent on both sides: either leaving sees this thread inside, or this thread
 * sees the leaving. */
bool comm_enter(plc_comm *comm) {
    atomic_fetch_add(&comm->inside, 1);
    if (!atomic_load(&comm->leaving)) return true;
    comm_exit(comm);
    return false;
}

void comm_exit(plc_comm *comm) {
    if (atomic_fetch_sub(&comm->inside, 1) == 1 && atomic_load(&comm->leaving))
        futex_wake_all(&comm->inside);
}

static void wait_until_all_exited(plc_comm *comm) {
    for (uint32_t inside; (inside = atomic_load(&comm->inside)) != 0;)
        futex_wait(&comm->inside, inside, 10000000);
}

static void announce_leaving(plc_comm *comm) {
    segment *s = comm->shared;
    atomic_store(&s->records[comm->rank].state, STATE_LEFT);
    for (uint32_t r = 0; r < comm->ranks; r++) advance(&s->records[r].doorbell, 1);
    futex_wake_all(&s->arrivals.value);
}

static void release(plc_comm *comm) {
    if (comm->owns_mapping) munmap(comm->shared, comm->shared->bytes);
    free(comm->pidfds);
    free(comm->last_calls);
    comm->shared = NULL;
    comm->pidfds = NULL;
    comm->last_calls = comm->mismatched = NULL;
}

void plc_comm_leave(plc_comm *comm) {
    /* A forked child has the memory, but is no rank and has none of the threads. */
    bool ours = comm->owner == (int32_t)getpid();
    /* If it was set, this rank has left before. Setting it ends our threads' waits. */
    if (atomic_exchange(&comm->leaving, true)) return;
    if (ours) {
        futex_wake_all(&comm->shared->arrivals.value);
        request_queue_close(comm);
        wait_until_all_exited(comm);
        message_queue_close(comm);
        announce_leaving(comm);
    }
    release(comm);
}

void plc_comm_free(plc_comm *comm) {
    plc_comm_leave(comm);
    pthread_mutex_destroy(&comm->failure_lock);
    pthread_mutex_destroy(&comm->queue_lock);
    pthread_cond_destroy(&comm->queue_changed);
    pthread_mutex_destroy(&comm->message_lock);
    free(comm);
}

/* May be called from any thread, while others wait. */
int plc_comm_abort(plc_comm *comm) {
    if (!comm_enter(comm)) return PLC_ABORTED;
    record_failure(comm, PLC_ABORTED, (int32_t)comm->rank);
    for (uint32_t r = 0; r < comm->ranks; r++) advance(&comm->shared->records[r].doorbell, 1);
    comm_exit(comm);
    return PLC_OK;
}

void plc_comm_failure(plc_comm *comm, plc_failure *out) {
    pthread_mutex_lock(&comm->failure_lock);
    *out = comm->failure;
    pthread_mutex_unlock(&comm->failure_lock);
}

void plc_comm_calls(plc_comm *comm, plc_call *out) {
    memset(out, 0, comm->ranks * sizeof *out);
    if (!comm_enter(comm)) return;
    pthread_mutex_lock(&comm->failure_lock);
    memcpy(out, comm->mismatched, comm->ranks * sizeof *out);
    pthread_mutex_unlock(&comm->failure_lock);
    comm_exit(comm);
}

uint64_t plc_comm_sequence(plc_comm *comm) { return atomic_load(&comm->sequence); }

int plc_comm_peer_pid(plc_comm *comm, uint32_t rank) {
    if (rank >= comm->ranks || !comm_enter(comm)) return -1;
    int pid = comm->shared->records[rank].pid;
    comm_exit(comm);
    return pid;
}

int plc_comm_peer_left(plc_comm *comm, uint32_t rank) {
    if (rank >= comm->ranks || !comm_enter(comm)) return 0;
    int left = atomic_load(&comm->shared->records[rank].state) == STATE_LEFT;
    comm_exit(comm);
    return left;
}

int plc_comm_publish_error(plc_comm *comm, const char *text, uint64_t bytes, int leaving) {
    if (!comm_enter(comm)) return PLC_ABORTED;
    error_text *mine = error_text_of(comm, comm->rank);
    uint64_t length = atomic_load(&mine->length);
    uint64_t fits = MIN(bytes, PLC_ERROR_TEXT_BYTES - length);
    memcpy(mine->text + length, text, fits);
    atomic_store_explicit(&mine->length, length + fits, memory_order_release);
    if (leaving) announce_leaving(comm);
    comm_exit(comm);
    return PLC_OK;
}

uint64_t plc_comm_error_text(plc_comm *comm, uint32_t rank, char *out, uint64_t room) {
    if (rank >= comm->ranks || !comm_enter(comm)) return 0;
    error_text *theirs = error_text_of(comm, rank);
    uint64_t length = MIN(atomic_load_explicit(&theirs->length, memory_order_acquire), room);
    memcpy(out, theirs->text, length);
    comm_exit(comm);
    return length;
}

/* main NAME [SEED]: run one scenario; without a name, list them. */
#include "scenarios.h"

typedef struct {
    const char *name;
    void (*run)(uint64_t seed);
} scenario;

#define SCENARIO(name) {#name, name}
static const scenario scenarios[] = {
    SCENARIO(collectives),
    SCENARIO(direct),
    SCENARIO(submissions),
    SCENARIO(messages),
    SCENARIO(buckets),
    SCENARIO(weighted_buckets),
    SCENARIO(whole_steps),
    SCENARIO(external_buckets),
    SCENARIO(tree_averages),
    SCENARIO(two_groups),
    SCENARIO(digests),
    SCENARIO(updates),
    SCENARIO(sums),
    SCENARIO(tree_sums),
    SCENARIO(meetings),
    SCENARIO(claims),
    SCENARIO(hosts_reductions),
    SCENARIO(hosts_abandoned),
    SCENARIO(hosts_wire_fails),
    SCENARIO(mismatch),
    SCENARIO(mismatch_submitted),
    SCENARIO(abort_by_thread),
    SCENARIO(late_rank),
    SCENARIO(late_bucket),
    SCENARIO(mismatched_buckets),
    SCENARIO(diverged),
    SCENARIO(abort_in_pipeline),
    SCENARIO(interpreter_lock),
    SCENARIO(dead_rank),
    SCENARIO(leave_early),
    SCENARIO(error_texts),
    SCENARIO(leave_under_own_threads),
    SCENARIO(wrong_arguments),
    SCENARIO(tags_out_of_order),
    SCENARIO(sent_before_leaving),
    SCENARIO(receive_given_up),
    SCENARIO(wrong_size),
};

int main(int argc, char **argv) {
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    alarm(100); /* a hang is a failure too */
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        if (argc < 2) puts(scenarios[i].name);
        else if (strcmp(argv[1], scenarios[i].name) == 0) return scenarios[i].run(seed), 0;
    }
    return argc < 2 ? 0 : 2;
}

/* Each scenario ends by itself and exits the program with an error if something is not as it should
 * be. */
#ifndef PACELINE_TEST_SCENARIOS_H
#define PACELINE_TEST_SCENARIOS_H

#include "world.h"

/* stress.c: what must succeed */
void collectives(uint64_t seed);
void direct(uint64_t seed);
void submissions(uint64_t seed);
void messages(uint64_t seed);
void buckets(uint64_t seed);
void weighted_buckets(uint64_t seed);
void whole_steps(uint64_t seed);
void external_buckets(uint64_t seed);
void tree_averages(uint64_t seed);
void two_groups(uint64_t seed);

/* digests.c: prints a line for each kernel */
void digests(uint64_t seed);

/* updates.c */
void updates(uint64_t seed);
void sums(uint64_t seed);
void tree_sums(uint64_t seed);
void meetings(uint64_t seed);
void claims(uint64_t seed);

/* hosts.c */
void hosts_reductions(uint64_t seed);
void hosts_abandoned(uint64_t seed);
void hosts_wire_fails(uint64_t seed);

/* failures.c: what must fail, in the right way, on every rank */
void mismatch(uint64_t seed);
void mismatch_submitted(uint64_t seed);
void abort_by_thread(uint64_t seed);
void late_rank(uint64_t seed);
void late_bucket(uint64_t seed);
void mismatched_buckets(uint64_t seed);
void diverged(uint64_t seed);
void abort_in_pipeline(uint64_t seed);
void interpreter_lock(uint64_t seed);
void dead_rank(uint64_t seed);
void leave_early(uint64_t seed);
void leave_under_own_threads(uint64_t seed);
void wrong_arguments(uint64_t seed);

/* failures.c: messages that meet failures or each other */
void tags_out_of_order(uint64_t seed);
void sent_before_leaving(uint64_t seed);
void error_texts(uint64_t seed);
void receive_given_up(uint64_t seed);
void wrong_size(uint64_t seed);

#endif

"""Starting ranks and joining them to a group.

init              init_process_group() and the questions a script asks about its rank
process_context   what a process holds while it is a member of a group
placement         agrees with all ranks on who is where
store             opens the store through which ranks meet
backend_choice    which backend for which device
resources         cores, accelerators, threads per rank

supervisor        the launcher's side of a job: `paceline run` and `paceline.spawn` use it
fork_server       loads torch once and forks the ranks
rank_main         what a rank runs
rank_process      how the fork server makes a process that becomes a rank
messages          between these three
output            the ranks' output on the screen
spawn             paceline.spawn()

elastic_server    the fork server of an elastic job: starts ranks at any time
membership        decides who belongs to it; pure
generation        who trains together
job_page          tells ranks and `paceline ps` about it
elastic_job       a rank's view of its job
elastic_group     the default group of a rank, generation after generation

save_request      save_requested(), and save_listener, which does the work
"""

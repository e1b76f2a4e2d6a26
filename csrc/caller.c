/* Callers with a lock around their interpreter: when it is let go, and when they are asked whether to go on.
 *
 * What a thread is inside of is kept per thread: a call runs on its caller's thread, or on one of ours that has none.
 * Asking may run a signal handler, which may call again; scopes nest.
 */
#include "internal.h"

static _Thread_local caller_scope *innermost;

void plc_comm_called_by(plc_comm *comm, const plc_caller *caller) { comm->caller = *caller; }

void caller_enters(caller_scope *scope, plc_comm *comm) {
    *scope = (caller_scope){.comm = comm, .outer = innermost};
    if (comm->caller.let_go != NULL) scope->caller = &comm->caller;
    innermost = scope;
}

void caller_returns(caller_scope *scope) {
    innermost = scope->outer;
    if (scope->let_go) scope->caller->take(scope->state);
}

void caller_waits(void) {
    caller_scope *scope = innermost;
    if (scope == NULL || scope->caller == NULL || scope->let_go) return;
    scope->state = scope->caller->let_go();
    scope->let_go = true;
}

bool caller_stops(void) {
    caller_scope *scope = innermost;
    if (scope == NULL || scope->caller == NULL || scope->stopped) return false;
    if (scope->let_go) scope->caller->take(scope->state);
    scope->let_go = false;
    scope->stopped = scope->caller->wants_to_stop() != 0;
    caller_waits();
    return scope->stopped;
}

bool caller_is_inside(const plc_comm *comm) {
    for (const caller_scope *scope = innermost; scope != NULL; scope = scope->outer)
        if (scope->comm == comm && scope->executes) return true;
    return false;
}

/* Callers with a global interpreter lock (GIL): when it is released, and when signals are checked.
 *
 * The scope a thread is in is kept per thread: a call runs on its caller's thread, or on one of
 * ours that has no interpreter. Checking signals may run a handler that calls the core again, so
 * scopes nest.
 */
#include "internal.h"

static _Thread_local gil_scope *innermost;

void plc_comm_set_interpreter(plc_comm *comm, const plc_interpreter *interpreter) {
    comm->interpreter = *interpreter;
}

void gil_scope_enter(gil_scope *scope, plc_comm *comm) {
    *scope = (gil_scope){.comm = comm, .outer = innermost};
    if (comm->interpreter.release_gil != NULL) scope->interpreter = &comm->interpreter;
    innermost = scope;
}

void gil_scope_exit(gil_scope *scope) {
    innermost = scope->outer;
    if (scope->released) scope->interpreter->acquire_gil(scope->thread_state);
}

void gil_release(void) {
    gil_scope *scope = innermost;
    if (scope == NULL || scope->interpreter == NULL || scope->released) return;
    scope->thread_state = scope->interpreter->release_gil();
    scope->released = true;
}

bool gil_interrupted(void) {
    gil_scope *scope = innermost;
    if (scope == NULL || scope->interpreter == NULL || scope->interrupted) return false;
    if (scope->released) scope->interpreter->acquire_gil(scope->thread_state);
    scope->released = false;
    scope->interrupted = scope->interpreter->check_signals() != 0;
    gil_release();
    return scope->interrupted;
}

bool gil_in_collective(const plc_comm *comm) {
    for (const gil_scope *scope = innermost; scope != NULL; scope = scope->outer)
        if (scope->comm == comm && scope->in_collective) return true;
    return false;
}

"""`paceline.ray.launch(fn, num_workers)`: the ranks are Ray actors, on a cluster that runs or a
local one.

    import paceline

    def train(config):
        paceline.init_process_group()      # inside a worker: finds its rank, joins the others
        ...
        return paceline.rank()

    results = paceline.ray.launch(train, num_workers=4, args=({"lr": 0.1},))

Needs `pip install paceline[ray]`. Workers of one node share memory, nodes are joined by Gloo or
NCCL: the group does that by itself, Ray only places the processes. Inside Ray Train's
`TorchTrainer` nothing of this is needed: Ray Train starts the ranks and the group itself, and a
training function uses Paceline's classes there as it would torch's.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, LaunchError

__all__ = ["launch"]

_PLACEMENT_TIMEOUT_S = 300.0


def launch(
    fn: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    placement_timeout_s: float = _PLACEMENT_TIMEOUT_S,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_workers` Ray actors; returns each rank's result, in rank
    order.

    Connects to the cluster the environment names (RAY_ADDRESS) or one that `ray.init` was called
    for, else starts a local one and shuts it down afterwards. `resources_per_worker` is as in Ray:
    {"CPU": 2, "GPU": 1, ...}; default one CPU.

    Resources for all workers are reserved before any starts; if the cluster has not enough within
    `placement_timeout_s`, raises `ConfigError` with what it has and what was requested. The first
    error of a rank is raised here, the others are killed; a worker that died gives a `LaunchError`
    with its rank. Ctrl-C kills all of them.
    """
    ray = _import_ray()
    if num_workers < 1:
        raise ConfigError(f"num_workers should be 1 or more but is {num_workers}")
    resources = dict(resources_per_worker or {"CPU": 1.0})
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(log_to_driver=True, include_dashboard=False, configure_logging=False)
    try:
        group = _reserve(ray, num_workers, resources, placement_timeout_s)
        try:
            return _run(
                ray,
                group,
                fn,
                num_workers,
                tuple(args),
                dict(kwargs or {}),
                resources,
                dict(env or {}),
            )
        finally:
            ray.util.remove_placement_group(group)
    finally:
        if started_here:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError("paceline.ray needs Ray: pip install 'paceline[ray]'") from error
    return ray


def _reserve(ray: Any, workers: int, resources: dict[str, float], timeout_s: float) -> Any:
    """A place for every worker, packed on as few nodes as possible: neighbours share memory."""
    group = ray.util.placement_group([resources] * workers, strategy="PACK")
    if group.wait(timeout_s):
        return group
    ray.util.remove_placement_group(group)
    raise ConfigError(
        f"the Ray cluster has no place for {workers} workers with {resources} each: it has "
        f"{ray.cluster_resources()} in all, {ray.available_resources()} free, and none became free "
        f"within {timeout_s:g} s"
    )


class _Worker:
    """One rank. `address` is called on all workers before `run` is called on any."""

    def address(self) -> tuple[str, str, int]:
        """This node's identity and address, and a free port for rank 0 to serve the store."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        ray_api: Any = ray  # Ray's annotations are partial
        return ray_api.get_runtime_context().get_node_id(), ray_api.util.get_node_ip_address(), port

    def run(self, variables: dict[str, str], payload: bytes) -> bytes:
        """Runs in the actor's main thread, so that the function may handle signals."""
        import os

        import cloudpickle

        from paceline.launch.init import destroy_process_group

        os.environ.update(variables)
        fn, args, kwargs = cloudpickle.loads(payload)
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            error.add_note(f"raised by rank {variables['RANK']}:\n{traceback.format_exc()}")
            return bytes(cloudpickle.dumps((time.time(), None, _portable(error))))
        finally:
            destroy_process_group()
        return bytes(cloudpickle.dumps((time.time(), result, None)))


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling, else one with the same message."""
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        replacement = LaunchError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            replacement.add_note(note)
        return replacement
    return error


def _run(
    ray: Any,
    group: Any,
    fn: Callable[..., Any],
    workers: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    resources: dict[str, float],
    env: dict[str, str],
) -> list[Any]:
    import cloudpickle
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actors = []
    try:
        for index in range(workers):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {**_as_options(resources), "scheduling_strategy": strategy, "max_restarts": 0}
            actors.append(ray.remote(_Worker).options(**options).remote())
        addresses = ray.get([actor.address.remote() for actor in actors])
        payload = cloudpickle.dumps((fn, args, kwargs))
        variables = [{**env, **v} for v in _variables(addresses)]
        calls = [actor.run.remote(v, payload) for actor, v in zip(actors, variables, strict=True)]
        return _collect(ray, calls)
    finally:
        for actor in actors:
            ray.kill(actor)


def _as_options(resources: dict[str, float]) -> dict[str, Any]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {
        named[key]: value for key, value in resources.items() if key in named
    }
    options["resources"] = {key: value for key, value in resources.items() if key not in named}
    return options


def _variables(addresses: Sequence[tuple[str, str, int]]) -> list[dict[str, str]]:
    """Each rank's variables, as torchrun would set them."""
    nodes = [node for node, _, _ in addresses]
    _, address, port = addresses[0]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(addresses)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "PACELINE_LAUNCHER": "Ray",
        }
        for rank, node in enumerate(nodes)
    ]


def _collect(ray: Any, calls: list[Any]) -> list[Any]:
    """Results in rank order; the first error in time is raised as soon as it is known."""
    import cloudpickle

    ranks = {call: rank for rank, call in enumerate(calls)}
    results: dict[int, Any] = {}
    waiting = list(calls)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        # Others may have failed at the same moment: the clock decides which was first.
        more, waiting = (
            ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
        )
        errors = []
        for call in [*ready, *more]:
            rank = ranks[call]
            try:
                when, results[rank], error = cloudpickle.loads(ray.get(call))
            except ray.exceptions.RayError as lost:
                reason = str(lost).strip().partition("\n")[0]
                when, error = (
                    time.time(),
                    LaunchError(f"rank {rank}, a Ray actor, died: {reason}", rank=rank),
                )
            if error is not None:
                errors.append((when, rank, error))
        if errors:
            raise min(errors, key=lambda item: item[:2])[2]
    return [results[rank] for rank in range(len(calls))]

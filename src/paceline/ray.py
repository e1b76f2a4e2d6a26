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

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, LaunchError
from paceline.launch.messages import ElasticConfig
from paceline.ray_elastic import ElasticRun, NewActor
from paceline.ray_workers import Outcome, Worker

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
    elastic: tuple[int, int] | None = None,
) -> list[Any]:
    """Call a function on Ray actors, the ranks of a job.

    Connects to the cluster the environment names (RAY_ADDRESS) or one that `ray.init` was called
    for, else starts a local one and shuts it down afterwards. Resources for all workers are
    reserved before any starts. Ctrl-C kills all of them.

    Args:
        fn: called as `fn(*args, **kwargs)` on every rank.
        num_workers: how many ranks.
        args: its arguments, the same for all.
        kwargs: its keyword arguments.
        resources_per_worker: as in Ray: {"CPU": 2, "GPU": 1, ...}; default one CPU.
        env: variables to set in the ranks.
        placement_timeout_s: how long to wait for the resources.
        elastic: `(min, max)` makes it an elastic job, in which `fn` trains with
            `paceline.Training`: an actor that dies is replaced, and costs neither a sample nor a
            bit. There is a place for `max` actors; `num_workers` are started, and `paceline scale`
            on the driver's host changes their number.

    Returns:
        Each rank's result, in rank order; in an elastic job, of those that were there at the
        end.

    Raises:
        ConfigError: Ray is not installed, or the cluster has not enough resources; says what it has
            and what was requested.
        LaunchError: a worker died. The first error of a rank is raised as it is; the others are
            killed.

    Example:
        ```python
        def train(lr):
            paceline.init_process_group()
            return paceline.rank()

        results = paceline.ray.launch(train, num_workers=2, args=(0.1,))
        ```
    """
    ray = _import_ray()
    if num_workers < 1:
        raise ConfigError(f"num_workers should be 1 or more but is {num_workers}")
    config = None if elastic is None else _elastic_config(elastic, num_workers)
    places = num_workers if config is None else config.max_ranks
    resources = dict(resources_per_worker or {"CPU": 1.0})
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(log_to_driver=True, include_dashboard=False, configure_logging=False)
    try:
        group = _reserve(ray, places, resources, placement_timeout_s)
        try:
            new_actor = _actor_factory(ray, group, resources)
            payload = _pickled(fn, tuple(args), dict(kwargs or {}))
            if config is None:
                return _run(ray, new_actor, payload, num_workers, dict(env or {}))
            return _run_elastically(ray, new_actor, payload, config, dict(env or {}))
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


def _elastic_config(elastic: tuple[int, int], workers: int) -> ElasticConfig:
    try:
        least, most = elastic
    except (TypeError, ValueError):
        raise ConfigError(f"elastic should be (min, max) but is {elastic!r}") from None
    if not 1 <= least <= workers <= most:
        raise ConfigError(
            f"elastic=(min, max) should be 1 <= min <= num_workers <= max, but num_workers is "
            f"{workers} and elastic is {elastic!r}"
        )
    return ElasticConfig(least, most, workers)


def _actor_factory(ray: Any, group: Any, resources: dict[str, float]) -> NewActor:
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )

    def new_actor(kind: type, place: int | None) -> Any:
        if place is None:
            # Beside the driver: no other node is to be one that the job cannot lose.
            beside = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            return ray.remote(kind).options(num_cpus=0, scheduling_strategy=beside).remote()
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
        options = {**_as_options(resources), "scheduling_strategy": strategy, "max_restarts": 0}
        return ray.remote(kind).options(**options).remote()

    return new_actor


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps((fn, args, kwargs)))


def _run(
    ray: Any, new_actor: NewActor, payload: bytes, workers: int, env: dict[str, str]
) -> list[Any]:
    actors: list[Any] = []
    try:
        for place in range(workers):
            actors.append(new_actor(Worker, place))
        addresses = ray.get([actor.address.remote() for actor in actors])
        variables = [{**env, **v} for v in _variables(addresses)]
        calls = [actor.run.remote(v, payload) for actor, v in zip(actors, variables, strict=True)]
        return _collect(ray, calls)
    finally:
        for actor in actors:
            ray.kill(actor)


def _run_elastically(
    ray: Any, new_actor: NewActor, payload: bytes, config: ElasticConfig, env: dict[str, str]
) -> list[Any]:
    job = ElasticRun(ray, new_actor, payload, config, env)
    try:
        return job.run()
    finally:
        job.close()


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
                outcome: Outcome = cloudpickle.loads(ray.get(call))
            except ray.exceptions.RayError as lost:
                reason = str(lost).strip().partition("\n")[0]
                death = LaunchError(f"rank {rank}, a Ray actor, died: {reason}", rank=rank)
                outcome = Outcome(time.time(), error=death)
            results[rank] = outcome.result
            if outcome.error is not None:
                errors.append((outcome.when, rank, outcome.error))
        if errors:
            raise min(errors, key=lambda item: item[:2])[2]
    return [results[rank] for rank in range(len(calls))]

"""`paceline.ray.launch` and Ray Train on a real local Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import paceline
from paceline.errors import ConfigError
from tests.harness.exact_models import digest, make, run, train
from tests.harness.launched import launched, ray_environment, wait_for_files, write_script

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# One cluster for all: starting one takes longer than everything that is done on it.
SCRIPT = """
    import logging, os, signal, sys, time, warnings
    warnings.simplefilter("ignore")
    import ray, torch, paceline
    from paceline.errors import ConfigError, LaunchError

    ray.init(num_cpus=3, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    class Local:
        def __init__(self, value): self.value = value

    def average(base, scale=1.0):
        import torch, torch.distributed as dist
        paceline.init_process_group()
        value = torch.tensor([base + paceline.rank()])
        dist.all_reduce(value)
        here = paceline.launch.init.placement()
        place = (here.source, here.rank, here.local_rank, here.local_world_size)
        return Local((*place, dist.get_backend(), scale * value.item()))

    results = paceline.ray.launch(average, 2, args=(10.0,), kwargs={"scale": 2.0})
    print("results", [r.value for r in results], flush=True)

    def train_exactly():
        from tests.harness.exact_models import train
        paceline.init_process_group()
        return paceline.world_size(), train("cnn", 3)
    print("training", *paceline.ray.launch(train_exactly, 2), flush=True)

    def fail():
        if paceline.rank() == 1:
            raise FileNotFoundError("no such sample")
        time.sleep(300)
    try:
        paceline.ray.launch(fail, 2)
    except FileNotFoundError as error:
        print("error", error, "raised by rank 1" in error.__notes__[0], flush=True)

    def die():
        if paceline.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    try:
        paceline.ray.launch(die, 2)
    except LaunchError as error:
        print("death", error.rank, flush=True)

    try:
        paceline.ray.launch(average, 2, resources_per_worker={"CPU": 64}, placement_timeout_s=1)
    except ConfigError as error:
        print("no place", "no place for 2 workers with {'CPU': 64}" in str(error), flush=True)

    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 3.0 and time.monotonic() < deadline:
        time.sleep(0.1)
    print("free again", ray.available_resources()["CPU"], flush=True)
    ray.shutdown()
"""


def test_results_errors_and_deaths(tmp_path):
    with launched(
        [sys.executable, str(write_script(tmp_path, SCRIPT))], env=ray_environment(tmp_path)
    ) as job:
        code = job.wait(280)
        assert code == 0, job.stdout + job.stderr[-3000:]
        assert job.left_after(15.0) == []
    place = "('Ray', {0}, {0}, 2, 'paceline', 42.0)"
    assert f"results [{place.format(0)}, {place.format(1)}]" in job.stdout
    trained = (2, train("cnn", 3))
    assert f"training {trained} {trained}" in job.stdout
    assert "error no such sample True" in job.stdout
    assert "death 0" in job.stdout
    assert "no place True" in job.stdout
    assert "free again 3.0" in job.stdout


ELASTIC = """
    import logging, os, signal, sys, time, warnings
    warnings.simplefilter("ignore")
    import ray, torch, paceline

    ray.init(num_cpus=3, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    def train_elastically():
        # Rank 1 dies after the first step; the other one waits for its replacement. That one tells
        # the driver late how far it is, and ends after the other one.
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from paceline import ray_workers
        from paceline.launch.elastic_job import ElasticJob, current_elastic_job
        from tests.harness.exact_models import digest, make, run
        job = current_elastic_job()
        if job.member == 2:
            ray_workers._LOOK_S = 300.0
            ElasticJob.settled = lambda *_: None
        steps = []
        def after_step(*_):
            steps.append(1)
            if len(steps) == 1 and job.member == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + 120
            while len(steps) == 2 and job.latest() < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        paceline.init_process_group()
        hook = register_optimizer_step_post_hook(after_step)
        model, optimizer, training = make("cnn")
        generation = job.wait_beyond(-1, 60.0)
        metrics = run("cnn", model, optimizer, training, 6)
        hook.remove()
        deadline = time.monotonic() + 60
        while job.member == 2 and not job.has_lost(generation) and time.monotonic() < deadline:
            time.sleep(0.01)
        return job.member, digest(model, optimizer, metrics[-1:])
    print("elastic", *paceline.ray.launch(train_elastically, 2, elastic=(1, 2)), flush=True)

    def fail_elastically():
        paceline.init_process_group()
        raise FileNotFoundError("no such sample")
    try:
        paceline.ray.launch(fail_elastically, 2, elastic=(1, 2))
    except FileNotFoundError as error:
        print("elastic error", error, flush=True)

    ray.shutdown()
"""


def test_an_actor_of_an_elastic_job_is_replaced(tmp_path):
    command = [sys.executable, str(write_script(tmp_path, ELASTIC))]
    with launched(command, env=ray_environment(tmp_path)) as job:
        code = job.wait(280)
        assert code == 0, job.stdout + job.stderr[-3000:]
        assert job.left_after(15.0) == []
    model, optimizer, training = make("cnn")
    undisturbed = digest(model, optimizer, run("cnn", model, optimizer, training, 6)[-1:])
    assert f"elastic {(0, undisturbed)} {(2, undisturbed)}" in job.stdout, job.stderr[-3000:]
    assert re.search(
        r"paceline: rank 1 .* at step \d+: 1 rank goes on \(generation 1\)", job.stderr
    )
    assert re.search(r"paceline: rank 1 .* joins: 2 ranks go on \(generation 2\)", job.stderr)
    assert "elastic error no such sample" in job.stdout


RAY_TRAIN = """
    import logging, pathlib, sys, warnings
    warnings.simplefilter("ignore")
    import ray, paceline
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def set_up():
        import paceline      # registers the backend before Ray Train asks for it

    ray.init(num_cpus=3, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
             runtime_env={"worker_process_setup_hook": set_up})

    def train_loop(config):
        import torch, torch.distributed as dist
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(3, 2)).sum().backward()
        numbers = f"{paceline.rank()} {paceline.local_rank()} {paceline.world_size()}"
        file = pathlib.Path(config["folder"], f"rank-{paceline.rank()}")
        file.write_text(f"{dist.get_backend()} {numbers}")

    settings = TorchConfig(backend="paceline")
    scaling = ScalingConfig(num_workers=2)
    options = {"torch_config": settings, "scaling_config": scaling}
    TorchTrainer(train_loop, train_loop_config={"folder": sys.argv[1]}, **options).fit()
    ray.shutdown()
"""


def test_inside_ray_train(tmp_path):
    pytest.importorskip(
        "pandas", reason="Ray Train's own dependencies are not installed: pip install 'ray[train]'"
    )
    pytest.importorskip(
        "pyarrow", reason="Ray Train's own dependencies are not installed: pip install 'ray[train]'"
    )
    command = [sys.executable, str(write_script(tmp_path, RAY_TRAIN)), str(tmp_path)]
    with launched(command, env=ray_environment(tmp_path)) as job:
        code = job.wait(280)
        assert code == 0, job.stdout + job.stderr[-3000:]
        assert job.left_after(15.0) == []
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}").read_text() == f"paceline {rank} {rank} 2"


CANCELLED = """
    import warnings
    warnings.simplefilter("ignore")
    import os, pathlib, sys, time, paceline
    def forever(folder):
        pathlib.Path(folder, f"up-{paceline.rank()}").write_text("up")
        time.sleep(300)
    try:
        paceline.ray.launch(forever, 1, args=(sys.argv[1],))     # starts a cluster of its own
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_ends_the_workers_and_a_cluster_it_started(tmp_path):
    with launched(
        [sys.executable, str(write_script(tmp_path, CANCELLED)), str(tmp_path)],
        env=ray_environment(tmp_path),
    ) as job:
        wait_for_files(tmp_path / "up-0", timeout=90)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait(60) == 130
        assert job.left_after(15.0) == []


def test_without_ray_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['ray'] = None; import paceline\n"
        "try: paceline.ray.launch(print, 1)\n"
        "except paceline.ConfigError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[ray]'" in done.stdout


@pytest.mark.parametrize("elastic", [(3, 4), (1, 1), (0, 2), (1,), 2])
def test_elastic_bounds_that_make_no_sense(elastic):
    with pytest.raises(ConfigError, match="elastic"):
        paceline.ray.launch(print, 2, elastic=elastic)

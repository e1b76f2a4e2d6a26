"""`paceline.ray.launch(elastic=)` on a Ray cluster of several nodes, one of which is lost."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

from paceline.bench import simulated_hosts
from tests.harness.exact_models import digest, make, run
from tests.harness.launched import launched, ray_environment, wait_for_files, write_script

NODES = """
    import logging, os, pathlib, sys, time, warnings
    warnings.simplefilter("ignore")
    import ray, torch, paceline
    from ray.cluster_utils import Cluster

    folder = pathlib.Path(sys.argv[1])
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    (folder / "address").write_text(cluster.address)
    ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    for number in range(3):
        while sum(node["Alive"] for node in ray.nodes()) < number + 2:  # the head is one, too
            time.sleep(0.05)
        (folder / f"node-{number}").write_text("yes")

    def train_elastically(folder):
        # All wait after the second step, until a rank was lost with its node and replaced.
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from paceline.launch.elastic_job import current_elastic_job
        from tests.harness.exact_models import digest, make, run
        job = current_elastic_job()
        steps = []
        def after_step(*_):
            steps.append(1)
            deadline = time.monotonic() + 200
            if len(steps) == 2:
                mark = os.environ["PACELINE_TEST_MARK"]
                (folder / f"node-of-{job.member}").write_text(mark)
            while len(steps) == 2 and job.latest() < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        paceline.init_process_group()
        hook = register_optimizer_step_post_hook(after_step)
        model, optimizer, training = make("cnn")
        metrics = run("cnn", model, optimizer, training, 6)
        hook.remove()
        spans_hosts = job.wait_beyond(job.latest() - 1, 1.0).spans_hosts
        return job.member, spans_hosts, digest(model, optimizer, metrics[-1:])
    try:
        print("nodes", *paceline.ray.launch(train_elastically, 2, args=(folder,), elastic=(1, 2)))
    finally:
        ray.shutdown()
        # The head goes last: without it, Ray's agents on the nodes wait for it instead of ending.
        (folder / "is-over").write_text("yes")
        deadline = time.monotonic() + 120
        while not (folder / "nodes-ended").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.shutdown()
"""


@pytest.mark.netns
@pytest.mark.timeout(600)
def test_an_actor_whose_node_is_lost_is_replaced_on_another_one(tmp_path):
    """Nodes have IPC namespaces of their own: they share no memory, and are connected by Gloo."""
    if reason := simulated_hosts.why_not():
        pytest.skip(reason)
    driver = [sys.executable, str(write_script(tmp_path, NODES)), str(tmp_path)]
    ray = str(pathlib.Path(sys.executable).with_name("ray"))
    with contextlib.ExitStack() as stack:
        # A place of its own, short enough for sockets: `ray.init` of any other program would find
        # this cluster.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        environment = {**ray_environment(tmp_path), "RAY_TMPDIR": folder}
        job = stack.enter_context(launched(driver, env=environment))
        wait_for_files(tmp_path / "address", timeout=120)
        address = (tmp_path / "address").read_text()
        node = ["unshare", "--ipc", ray, "start", f"--address={address}", "--num-cpus=1", "--block"]
        nodes = []
        for number in range(3):
            # One after the other: Ray gives nodes that start at the same time the same socket.
            start = launched(node, env=environment, stdout=subprocess.DEVNULL)
            nodes.append(stack.enter_context(start))
            wait_for_files(tmp_path / f"node-{number}", timeout=60)
        wait_for_files(*(tmp_path / f"node-of-{member}" for member in (0, 1)), timeout=200)
        (lost,) = [each for each in nodes if each.mark == (tmp_path / "node-of-1").read_text()]
        for pid in lost.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for_files(tmp_path / "is-over", timeout=200)
        for each in nodes:
            each.process.terminate()
        for each in nodes:
            each.wait(60)
            assert each.left_after(30.0) == []
        (tmp_path / "nodes-ended").touch()
        code = job.wait(60)
        assert code == 0, job.stdout + job.stderr[-3000:]
        assert job.left_after(15.0) == []
    model, optimizer, training = make("cnn")
    undisturbed = digest(model, optimizer, run("cnn", model, optimizer, training, 6)[-1:])
    # Ray may have tried to replace it on the node that was being lost.
    first, replacement = (0, True, undisturbed), rf"\(\d+, True, '{undisturbed}'\)"
    assert re.search(rf"nodes {re.escape(str(first))} {replacement}", job.stdout), job.stdout

"""The heap keeps what a step frees, unless someone decided otherwise."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

# Steps that take and free 64 MiB, in pieces below the size that always goes back to the system.
PROGRAM = """
import ctypes, os, resource
from paceline._malloc import keep_freed_memory
answer = keep_freed_memory({processes})
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # no huge pages: they would make few faults of many
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(16 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in reversed(blocks):
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    faults_of_a_step()
print(answer, faults_of_a_step())
"""
PAGES = 4 * (16 << 20) // mmap.PAGESIZE


def run(env, processes=1):
    """What keep_freed_memory returned, and how many pages a step of 64 MiB got from the system."""
    ours = {"PATH": "/usr/bin:/bin", **env}
    program = PROGRAM.format(processes=processes)
    done = subprocess.run(
        [sys.executable, "-c", program], env=ours, capture_output=True, text=True, check=True
    )
    said, faults = done.stdout.split()
    return said == "True", int(faults)


def test_a_step_finds_the_memory_of_the_step_before():
    said, faults = run({})
    assert said
    assert faults < PAGES / 10


@pytest.mark.parametrize(
    "env",
    [
        {"PACELINE_KEEP_MEMORY": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_who_decided_otherwise_is_obeyed(env):
    said, faults = run(env)
    assert not said
    assert faults > PAGES / 2


def test_what_is_kept_is_a_share_of_the_hosts_memory():
    assert run({}, processes=10**9) == (False, pytest.approx(PAGES, rel=0.5))

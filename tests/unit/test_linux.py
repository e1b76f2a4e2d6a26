"""Facts about processes, checked on processes made for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from paceline import _linux


def test_a_process_is_described_and_its_end_is_noticed():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"],
                             stdin=subprocess.PIPE)  # fmt: skip
    pidfd = os.pidfd_open(child.pid)
    try:
        stat = _linux.read_stat(child.pid)
        assert stat is not None
        assert (stat.parent, stat.has_ended, stat.is_stopped) == (os.getpid(), False, False)
        assert "python" in stat.command
        assert _linux.read_stat(child.pid, child.pid) is not None
        assert child.pid in set(_linux.process_ids())
        assert child.pid in _linux.descendants(os.getpid())
        assert _linux.is_running(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        deadline = time.monotonic() + 10
        while _linux.is_running(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _linux.is_running(child.pid)
        assert _linux.exit_code_of(child.pid, pidfd) == 3
    finally:
        child.wait()
        os.close(pidfd)
    assert _linux.read_stat(child.pid) is None


def test_a_command_with_parentheses_and_spaces(tmp_path):
    program = tmp_path / "a) b (c"
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    child = subprocess.Popen([program], stdin=subprocess.PIPE)
    try:
        stat = _linux.read_stat(child.pid)
        assert stat is not None
        assert stat.parent == os.getpid()
    finally:
        child.communicate()


def test_a_byte_is_locked_for_one_opening_until_that_is_closed():
    behind_its_end = 10**18
    memory = _linux.anonymous_memory("paceline-test", 4096)
    first, second = (_linux.open_descriptor_of(os.getpid(), memory) for _ in range(2))
    copy = os.dup(first)
    _linux.lock_byte(first, behind_its_end)
    os.close(first)
    with pytest.raises(BlockingIOError):
        _linux.lock_byte(second, behind_its_end)
    _linux.lock_byte(second, behind_its_end + 1)
    os.close(copy)
    _linux.lock_byte(second, behind_its_end)
    os.close(second)
    os.close(memory)


def test_new_sockets_are_found_and_tcp_connections_given_up_when_silent():
    before = _linux.open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with (
            socket.create_connection(address) as tcp,
            socket.socket(type=socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_UNIX) as unix,
        ):
            new = {fd for name, fd in _linux.open_sockets().items() if name not in before}
            assert new == {each.fileno() for each in (server, tcp, udp, unix)}
            for descriptor in new:
                _linux.give_up_when_silent(descriptor, 15)
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
            assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert not udp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_anonymous_memory_is_opened_through_its_owner():
    owner = _linux.anonymous_memory("paceline-test", 4096)
    other = _linux.open_descriptor_of(os.getpid(), owner)
    try:
        with mmap.mmap(owner, 4096) as mine, mmap.mmap(other, 4096) as theirs:
            mine[0] = 7
            assert theirs[0] == 7
    finally:
        os.close(owner)
        os.close(other)


def test_caught_signals_are_seen():
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert _linux.catches_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert not _linux.catches_signal(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("way", [_linux._scan_page_tables, _linux._read_page_tables])
def test_pages_of_a_private_mapping_that_were_written(way):
    """Not those that were read, nor those written in the file."""
    page = mmap.PAGESIZE
    descriptor = _linux.anonymous_memory("paceline", 8 * page)
    try:
        file = mmap.mmap(descriptor, 8 * page)
        own = mmap.mmap(
            descriptor, 8 * page, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    with file, own:
        begin = ctypes.addressof(anchor := ctypes.c_char.from_buffer(own))
        del anchor
        assert own[0] == own[5 * page] == 0
        file[5 * page] = 1
        own[page], own[2 * page + 7], own[7 * page] = 1, 1, 1
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            found = way(pagemap, begin, begin + 8 * page)
        finally:
            os.close(pagemap)
        pages = {at for first, end in found for at in range(first, end, page)}
        assert pages == {begin + index * page for index in (1, 2, 7)}
        own.madvise(mmap.MADV_DONTNEED)
        assert own[page] == 0
        assert _linux.written_pages(begin, begin + 8 * page) == []
    assert _linux.can_find_written_pages()

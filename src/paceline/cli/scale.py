"""`paceline scale`: change the number of ranks of a running elastic job."""

from __future__ import annotations

import argparse
import os
import time

from paceline.errors import ConfigError, PacelineError
from paceline.launch.elastic_job import request_line
from paceline.launch.job_page import JobPage, Word, find_job_pages

__all__ = ["add_arguments", "run", "send_scale_request"]

_ANSWER_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", default="", help="the beginning of its id, if there are several"
    )
    parser.add_argument("ranks", type=int, help="how many ranks it shall have")


def run(options: argparse.Namespace) -> int:
    pages = find_job_pages(options.job)
    try:
        page = _only_one(pages, options.job)
        before = page.words[Word.TARGET]
        _scale(page, options.ranks)
        print(f"job {page.job[:8]}: from {before} to {options.ranks} ranks")
    finally:
        for page in pages:
            page.close()
    return 0


def _only_one(pages: list[JobPage], job: str) -> JobPage:
    if not pages:
        wanted = f" whose id begins with {job!r}" if job else ""
        raise ConfigError(
            f"none of your elastic jobs{wanted} is running on this host; `paceline run --elastic "
            "MIN:MAX` starts one"
        )
    if len({page.job for page in pages}) > 1:
        names = ", ".join(page.job[:8] for page in pages)
        raise ConfigError(f"several elastic jobs are running: name one of {names}")
    return pages[0]


def _scale(page: JobPage, ranks: int) -> None:
    low, high = page.words[Word.MIN_RANKS], page.words[Word.MAX_RANKS]
    if not low <= ranks <= high:
        raise ConfigError(
            f"job {page.job[:8]} was started with --elastic {low}:{high}, so its number of ranks "
            f"should be from {low} to {high} but is {ranks}"
        )
    send_scale_request(page, ranks)
    deadline = time.monotonic() + _ANSWER_S
    while page.words[Word.TARGET] != ranks:
        if time.monotonic() > deadline:
            raise PacelineError(
                f"the launcher of job {page.job[:8]} did not answer within {_ANSWER_S:g} s"
            )
        time.sleep(0.01)


def send_scale_request(page: JobPage, ranks: int) -> None:
    """Through the fork server's own descriptor, which the kernel opens for the same user only."""
    path = f"/proc/{page.words[Word.SERVER_PID]}/fd/{page.words[Word.REQUESTS_FD]}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PacelineError(f"job {page.job[:8]} has just ended") from None
    with open(descriptor, "wb", buffering=0) as pipe:
        pipe.write(request_line("scale", ranks=ranks))

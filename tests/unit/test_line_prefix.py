"""`--log-prefix`: what is shown before each line of a rank."""

from __future__ import annotations

import re
import socket

import pytest

from paceline.errors import ConfigError
from paceline.launch.line_prefix import LinePrefix
from paceline.launch.output import Output


def test_by_default_the_rank_is_in_brackets():
    assert LinePrefix(width=2).render(7, 3, 0) == b"[ 7] "
    assert LinePrefix(colour=True).render(1, 1, 0) == b"\x1b[33m[1]\x1b[0m "


def test_a_template_has_any_of_the_fields():
    prefix = LinePrefix("{rank:03}/{local_rank} {host} g{generation} {{x}} ")
    host = socket.gethostname()
    assert prefix.render(12, 4, 2).decode() == f"012/4 {host} g2 {{x}} "
    assert re.fullmatch(rb"\d\d:\d\d:\d\d> ", LinePrefix("{time}> ").render(0, 0, 0))
    assert LinePrefix("r{rank} ", colour=True).render(0, 0, 0) == b"\x1b[36mr0 \x1b[0m"


def test_an_empty_template_leaves_lines_as_they_are():
    assert LinePrefix("", colour=True).render(5, 5, 0) == b""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{pid} ", r"has the field \{pid\}, but may have only \{rank\} \{local_rank\} \{host\}"),
        ("{} ", r"has the field \{\}"),
        ("{rank.real}", r"has the field \{rank.real\}"),
        ("{rank", "should be a template such as"),
        ("rank}", "should be a template such as"),
        ("{rank:q}", "should be a template such as .*Unknown format code"),
        ("{rank:{width}}", "should be a template such as"),
    ],
)
def test_a_wrong_template_is_refused_with_the_fields_there_are(template, words):
    with pytest.raises(ConfigError, match=words):
        LinePrefix(template)


def test_lines_are_prefixed_with_the_generation_they_are_shown_in():
    shown = []
    output = Output(2, lambda stream, data: shown.append((stream, data)), prefix="{generation}:")
    output.feed(0, 1, b"a\n")
    output.begin_generation(1)
    output.feed(1, 2, b"b\nc\n")
    assert shown == [(1, b"0:a\n"), (2, b"1:b\n1:c\n")]

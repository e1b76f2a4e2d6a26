"""A page of the manual as a program: its code blocks in their order.

    ```python                      run, after the ones before it, in one process
    ```python title="train.py"     written to a file of that name
    ```diff title="train.py"       the new side is written to the file, the old one to old_train.py
    ```console                     lines after `$ ` whose programs and scripts are there are run

A comment before a block changes that: `<!-- test: skip, why -->` leaves the next block out,
`<!-- test: needs lightning -->` leaves it out where that package is not installed, `<!-- test:
setup ... -->` is code that the reader need not see.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import shlex

__all__ = ["Block", "ManualPage"]

_FENCE = re.compile(
    r"(?:<!-- test: skip, (?P<why>[^>]*?) -->\s*\n|<!-- test: needs (?P<needs>\w+) -->\s*\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```$"
    r"|<!-- test: setup\n(?P<setup>.*?)-->",
    re.DOTALL | re.MULTILINE,
)
_IN_PROCESS = {"python", "setup"}
_PROGRAMS = {"paceline", "python", "torchrun", "mpirun"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One piece of code on a page."""

    line: int
    language: str
    title: str | None
    code: str
    skipped: str | None = None
    needs: str | None = None

    @property
    def is_run(self) -> bool:
        """Whether it is to be run, here."""
        is_missing = self.needs is not None and importlib.util.find_spec(self.needs) is None
        return self.skipped is None and not is_missing


class ManualPage:
    """The code of one page."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.blocks = [*_blocks(path.read_text())]

    @property
    def has_code(self) -> bool:
        return any(
            block.language in {*_IN_PROCESS, "diff"} or self._commands(block)
            for block in self.blocks
            if block.is_run
        )

    def run_blocks(self) -> None:
        """Run the blocks that need no process of their own, each at its line of the page."""
        names: dict[str, object] = {"__name__": "__main__"}
        for block in self.blocks:
            if block.is_run and block.title is None and block.language in _IN_PROCESS:
                code = "\n" * (block.line - 1) + block.code
                exec(compile(code, str(self.path), "exec"), names)

    def write_files(self, directory: pathlib.Path) -> None:
        """What the page names by a title."""
        for block in self.blocks:
            if block.title is None or not block.is_run:
                continue
            if block.language == "diff":
                (directory / block.title).write_text(_side(block.code, "+"))
                (directory / f"old_{block.title}").write_text(_side(block.code, "-"))
            else:
                (directory / block.title).write_text(block.code)

    def commands(self, directory: pathlib.Path) -> list[str]:
        """What the page types into a terminal and can be run here."""
        return [
            command
            for block in self.blocks
            if block.is_run
            for command in self._commands(block)
            if all((directory / word).exists() for word in _scripts(command))
        ]

    @staticmethod
    def _commands(block: Block) -> list[str]:
        if block.language != "console":
            return []
        lines = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
        return [line for line in lines if line.split()[0] in _PROGRAMS and _scripts(line)]


def _blocks(text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        if match["setup"] is not None:
            line = text.count("\n", 0, match.start("setup")) + 1
            found.append(Block(line, "setup", None, match["setup"]))
            continue
        indent, code = match["indent"], match["code"]
        if indent:
            code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(
            Block(line, match["language"], match["title"], code, match["why"], match["needs"])
        )
    return found


def _side(diff: str, sign: str) -> str:
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in {sign, " ", ""})


def _scripts(command: str) -> list[str]:
    return [word for word in shlex.split(command, comments=True) if word.endswith(".py")]

"""Builds the documentation in site/: `make docs`.

    python tools/build_docs.py              # everything
    python tools/build_docs.py --reference  # write docs/reference/cli.md anew

Beside each page of HTML stands its text (`ddp.html`, `ddp.md`), and `llms.txt` lists them: a
program that reads documentation needs no layout.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import import_module

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS_PAGE = DOCS / "reference" / "cli.md"
_FEW_WORDS = (
    "Data-parallel training for PyTorch: exact gradients, shared-memory speed, clear errors."
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument(
        "--reference", action="store_true", help="write the generated pages instead"
    )
    parser.add_argument("--site", type=pathlib.Path, default=ROOT / "site")
    options = parser.parse_args()
    if options.reference:
        COMMANDS_PAGE.write_text(command_reference())
    else:
        build(options.site)


def build(site: pathlib.Path) -> None:
    """Build everything into this directory; raises if a link leads nowhere."""
    with tempfile.TemporaryDirectory() as directory:
        # Whoever builds elsewhere, such as a test, leaves this tree as it is.
        project = pathlib.Path(directory)
        shutil.copytree(DOCS, project / "docs")
        # Their pages link to the programs, which are served beside them.
        shutil.copytree(ROOT / "examples", project / "docs" / "examples", dirs_exist_ok=True)
        shutil.copy(ROOT / "zensical.toml", project)
        (project / "src").symlink_to(ROOT / "src")
        subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"], cwd=project, check=True
        )
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(project / "site", site)
    for page in pages():
        twin = site / page.relative_to(DOCS)
        twin.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, twin)
    (site / "llms.txt").write_text(list_of_pages())


def pages() -> list[pathlib.Path]:
    """Every page of the manual."""
    return sorted(DOCS.rglob("*.md"))


def list_of_pages() -> str:
    """`llms.txt`: the shelves of the manual and the text of each page."""
    lines = ["# Paceline", "", f"> {_FEW_WORDS}", ""]
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    for shelf in config["project"]["nav"]:
        for title, entries in shelf.items():
            lines += [f"## {title}", ""]
            lines += [f"- [{name}]({path})" for name, path in _entries(entries)]
            lines.append("")
    return "\n".join(lines)


def _entries(entries: list[str | dict[str, str]]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if isinstance(entry, str):
            yield _heading(DOCS / entry), entry
        else:
            yield from entry.items()


def _heading(page: pathlib.Path) -> str:
    return page.read_text().partition("\n")[0].removeprefix("# ")


# --- the command line -----------------------------------------------------------------------------


def command_reference() -> str:
    """The page about the command line, made from its parsers."""
    from paceline.cli.main import COMMANDS

    text = "# Command line\n\nMade from the parsers; `paceline COMMAND --help` says the same.\n"
    for name, (module, summary) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"paceline {name}", add_help=False)
        import_module(module).add_arguments(parser)
        text += f"\n## paceline {name}\n\n{summary[0].upper()}{summary[1:]}.\n"
        text += "".join(_tables(parser))
    return text


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    nested = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    plain = [action for action in parser._actions if action not in nested]
    if rows := [row for action in plain if (row := _row(action))]:
        yield "\n| | |\n|---|---|\n" + "".join(rows)
    for action in nested:
        summaries = {choice.dest: choice.help for choice in action._choices_actions}
        for name, sub in action.choices.items():
            yield f"\n### {parser.prog} {name}\n\n{_sentence(summaries.get(name) or '')}\n"
            yield from _tables(sub)


def _row(action: argparse.Action) -> str | None:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return None
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = [f"`{name} {value}`".replace(" `", "`") for name in action.option_strings]
    shown = ", ".join(names) if names else f"`{action.metavar or action.dest}`"
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"| {shown} | {' '.join(text.split())} |\n"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


if __name__ == "__main__":
    main()

"""`paceline completion SHELL`: a script that lets a shell complete the command line.

Made from the parsers, so that it knows every command, option and choice; for the ids of running
jobs the script asks this command.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import pathlib
from collections.abc import Callable, Iterator

from paceline.cli.main import COMMANDS

__all__ = ["Command", "Kind", "Option", "Value", "add_arguments", "describe_commands", "run"]

_LONGEST_HELP = 72
_JOB = "job"  # the name of an argument that is the id of a job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "shell", nargs="?", choices=tuple(_WRITERS),
        help="print its script: `source <(paceline completion bash)`, the same for zsh, "
        "`paceline completion fish | source`",
    )  # fmt: skip
    what.add_argument(
        "--jobs", action="store_true", help="print the ids of running jobs: what a script asks for"
    )


def run(options: argparse.Namespace) -> int:
    if options.jobs:
        _print_jobs()
    else:
        print("\n".join(_WRITERS[options.shell](describe_commands())))
    return 0


def _print_jobs() -> None:
    from paceline.diagnostics.page_reader import find_pages

    for job in sorted({page.job[:8] for page in find_pages()}):
        print(job)


# -- what there is to complete ---------------------------------------------------------------------


class Kind(enum.Enum):
    """What a value is."""

    TEXT = enum.auto()
    FILE = enum.auto()
    DIRECTORY = enum.auto()
    JOB = enum.auto()
    WORD = enum.auto()  # one of a few


@dataclasses.dataclass(frozen=True)
class Value:
    """What follows an option, or stands for itself."""

    kind: Kind
    name: str
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    help: str
    value: Value | None


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: `path` is () for `paceline` itself, ("bench", "ddp") for that benchmark."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    values: tuple[Value, ...]
    commands: tuple[Command, ...]
    is_followed_by_script: bool = False


def describe_commands() -> Command:
    """`paceline` and everything below it."""
    commands = []
    for name, (module, summary) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(module).add_arguments(parser)
        commands.append(_describe(parser, (name,), summary))
    options = (
        Option(("-h", "--help"), "show help", None),
        Option(("--version",), "show the version", None),
    )
    return Command((), "", options, (), tuple(commands))


def _describe(parser: argparse.ArgumentParser, path: tuple[str, ...], summary: str) -> Command:
    options, values, commands = [], [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
            commands += [
                _describe(sub, (*path, name), summaries.get(name, ""))
                for name, sub in action.choices.items()
            ]
        elif action.option_strings:
            value = None if action.nargs == 0 else _value(action)
            options.append(Option(tuple(action.option_strings), _plain(action.help or ""), value))
        elif action.nargs != argparse.REMAINDER:
            values.append(_value(action))
    return Command(
        path,
        _plain(summary),
        tuple(options),
        tuple(values),
        tuple(commands),
        any(action.nargs == argparse.REMAINDER for action in parser._actions),
    )


def _value(action: argparse.Action) -> Value:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if action.choices is not None:
        return Value(Kind.WORD, name, tuple(map(str, action.choices)))
    if action.type is pathlib.Path:
        is_directory = "DIR" in name.upper()
        return Value(Kind.DIRECTORY if is_directory else Kind.FILE, name)
    return Value(Kind.JOB if action.dest == _JOB else Kind.TEXT, name)


def _plain(text: str) -> str:
    """Help in a line, without what shells take for something else."""
    words = " ".join(text.replace("%(default)s", "").replace("%%", "%").split())
    words = "".join(each for each in words if each not in '"`[]\\$')
    return words if len(words) <= _LONGEST_HELP else f"{words[: _LONGEST_HELP - 3].rstrip()}..."


def _all_commands(command: Command) -> Iterator[Command]:
    yield command
    for each in command.commands:
        yield from _all_commands(each)


def _words_of_options(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


# -- bash ------------------------------------------------------------------------------------------

_BASH_WALK = """\
_paceline() {
    local cur=${COMP_WORDS[COMP_CWORD]} path="" pending="" given=0 i word
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ -n $pending ]]; then
            [[ $word == "=" ]] || pending=""
        elif [[ $word == -* ]]; then
            pending=$(_paceline_value "$path" "$word")
        elif [[ " $(_paceline_commands "$path") " == *" $word "* ]]; then
            path=${path:+$path }$word
        elif _paceline_takes_script "$path"; then
            return
        else
            given=$((given + 1))
        fi
    done
    [[ $cur == "=" ]] && cur=""
    if [[ -n $pending ]]; then
        _paceline_complete "$pending"
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$(_paceline_options "$path")" -- "$cur"))
    elif [[ -n $(_paceline_commands "$path") ]]; then
        COMPREPLY=($(compgen -W "$(_paceline_commands "$path")" -- "$cur"))
    else
        _paceline_complete "$(_paceline_argument "$path" "$given")"
    fi
}
_paceline_complete() {
    case $1 in
        words*) COMPREPLY=($(compgen -W "${1#words }" -- "$cur")) ;;
        jobs) COMPREPLY=($(compgen -W "$(paceline completion --jobs 2>/dev/null)" -- "$cur")) ;;
        directory) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$cur")) ;;
        text) compopt +o default +o bashdefault 2>/dev/null ;;
    esac
}
complete -o bashdefault -o default -F _paceline paceline"""


def _bash(root: Command) -> Iterator[str]:
    commands = list(_all_commands(root))
    yield "# Completion of paceline for bash, made by `paceline completion bash`."
    yield from _bash_cases(
        "commands", [(_path(each), _names(each.commands)) for each in commands if each.commands]
    )
    yield from _bash_cases("options", [(_path(each), _words_of_options(each)) for each in commands])
    yield from _bash_cases(
        "value",
        [
            (f"{_path(each)}:{name}", _bash_value(option.value))
            for each in commands
            for option in each.options
            if option.value is not None
            for name in option.names
        ],
        key="$1:$2",
    )
    yield from _bash_cases(
        "argument",
        [
            (f"{_path(each)}:{index}", _bash_value(value))
            for each in commands
            for index, value in enumerate(each.values)
        ],
        key="$1:$2",
    )
    scripts = " | ".join(f"'{_path(each)}'" for each in commands if each.is_followed_by_script)
    yield f"_paceline_takes_script() {{ case $1 in {scripts}) return 0 ;; esac; return 1; }}"
    yield _BASH_WALK


def _bash_cases(name: str, cases: list[tuple[str, str]], key: str = "$1") -> Iterator[str]:
    yield f'_paceline_{name}() {{\n    case "{key}" in'
    for pattern, words in cases:
        yield f"        '{pattern}') echo '{words}' ;;"
    yield "    esac\n}"


def _path(command: Command) -> str:
    return " ".join(command.path)


def _names(commands: tuple[Command, ...]) -> str:
    return " ".join(command.path[-1] for command in commands)


def _bash_value(value: Value) -> str:
    if value.kind is Kind.WORD:
        return f"words {' '.join(value.words)}"
    return {Kind.JOB: "jobs", Kind.DIRECTORY: "directory", Kind.FILE: "file"}.get(
        value.kind, "text"
    )


# -- zsh -------------------------------------------------------------------------------------------


def _zsh(root: Command) -> Iterator[str]:
    yield "#compdef paceline\n# Completion of paceline for zsh, made by `paceline completion zsh`."
    yield "_paceline_jobs() { compadd -- $(paceline completion --jobs 2>/dev/null) }"
    for command in _all_commands(root):
        yield from _zsh_function(command)
    yield (
        'if [[ "${funcstack[1]}" == "_paceline" ]]; then\n    _paceline "$@"\n'
        "else\n    compdef _paceline paceline\nfi"
    )


def _zsh_function(command: Command) -> Iterator[str]:
    specs = [spec for option in command.options for spec in _zsh_option(option)]
    yield f"{_function(command)}() {{"
    if command.commands:
        specs += ["1: :->command", "*:: :->argument"]
        yield "    local context state line\n    typeset -A opt_args"
        yield f"    _arguments -C {_quoted(specs)}"
        described = _quoted([_zsh_described(each) for each in command.commands])
        yield f"    local -a commands=({described})"
        yield "    case $state in\n        command) _describe command commands ;;"
        yield "        argument) case $words[1] in"
        for each in command.commands:
            yield f"            {each.path[-1]}) {_function(each)} ;;"
        yield "        esac ;;\n    esac"
    else:
        specs += [
            f"{index}: :{_zsh_action(value)}" for index, value in enumerate(command.values, 1)
        ]
        if command.is_followed_by_script:
            specs += ["1:script:_files", "*:argument:_files"]
        yield f"    _arguments -s {_quoted(specs)}"
    yield "}"


def _zsh_described(command: Command) -> str:
    return "{}:{}".format(command.path[-1], command.help.replace(":", r"\:"))


def _zsh_option(option: Option) -> Iterator[str]:
    for name in option.names:
        if option.value is None:
            yield f"{name}[{option.help}]"
        else:
            is_long = name.startswith("--")
            value = f":{option.value.name.replace(':', ' ')}:{_zsh_action(option.value)}"
            yield f"{name}{'=' if is_long else '+'}[{option.help}]{value}"


def _zsh_action(value: Value) -> str:
    match value.kind:
        case Kind.WORD:
            return f"({' '.join(value.words)})"
        case Kind.JOB:
            return "_paceline_jobs"
        case Kind.DIRECTORY:
            return "_files -/"
        case Kind.FILE:
            return "_files"
    return " "


def _function(command: Command) -> str:
    return "_".join(("_paceline", *command.path)).replace("-", "_")


def _quoted(words: list[str]) -> str:
    return " ".join("'{}'".format(word.replace("'", r"'\''")) for word in words)


# -- fish ------------------------------------------------------------------------------------------

_FISH_FUNCTION = """\
function __paceline_at --description 'whether these commands were given'
    set -l words (commandline -opc)
    set -e words[1]
    test (count $words) -ge (count $argv); or return 1
    for i in (seq (count $argv))
        test "$words[$i]" = "$argv[$i]"; or return 1
    end
end
function __paceline_before_command --description 'whether one of these commands may follow'
    set -l words (commandline -opc)
    test (count $words) -eq (math 1 + (count $argv)); and __paceline_at $argv
end"""


def _fish(root: Command) -> Iterator[str]:
    yield "# Completion of paceline for fish, made by `paceline completion fish`."
    yield _FISH_FUNCTION
    for command in _all_commands(root):
        before = f"-n '{' '.join(('__paceline_before_command', *command.path))}'"
        for each in command.commands:
            yield f"complete -c paceline -f {before} -a {each.path[-1]} {_fish_help(each.help)}"
        at = f"-n '__paceline_at {_path(command)}'" if command.path else before
        for option in command.options:
            yield f"complete -c paceline {at} {_fish_option(option)}"
        for value in command.values:
            if value.kind not in {Kind.FILE, Kind.DIRECTORY}:
                yield f"complete -c paceline -f {at} {_fish_words(value)}".rstrip()


def _fish_option(option: Option) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name[1:]}"
        for name in option.names
    )
    value = ""
    if option.value is not None:
        value = {Kind.FILE: " -r -F", Kind.DIRECTORY: " -x -a '(__fish_complete_directories)'"}.get(
            option.value.kind, f" -x {_fish_words(option.value)}".rstrip()
        )
    return f"{names}{value} {_fish_help(option.help)}"


def _fish_help(text: str) -> str:
    return "-d '{}'".format(text.replace("'", r"\'"))


def _fish_words(value: Value) -> str:
    match value.kind:
        case Kind.WORD:
            return f"-a '{' '.join(value.words)}'"
        case Kind.JOB:
            return "-a '(paceline completion --jobs 2>/dev/null)'"
    return ""


_WRITERS: dict[str, Callable[[Command], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}

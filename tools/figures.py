"""One set of figures: what `paceline bench` has written to benchmarks/results/, and every table and
plot that is made from it.

    make figures                                  measure all of it again, then write
    python -m tools.figures                       write tables and plots from the files
    python -m tools.figures --measure ddp launch  measure these again, then write

A table stands in README.md or a page of the manual between `<!-- figures: NAME -->` and `<!-- end
of figures -->`. Whatever is between the two is written by this program, as soon as the file is
there that it is made from.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tools.svg_chart import Axis, BarChart, Chart

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

# Result -> what it is measured with, each in less than four minutes. Those between hosts need root.
MEASUREMENTS: dict[str, str] = {
    "collectives": "paceline bench collectives",
    "collectives-hosts": "paceline bench collectives --max-bytes 67108864 --hosts 2x2",
    "collectives-hosts-1gbit": (
        "paceline bench collectives --max-bytes 67108864 --hosts 2x2 --link 1gbit"
    ),
    "ddp": "paceline bench ddp --rounds 20",
    "ddp-hosts": "paceline bench ddp --hosts 2x2 --link 1gbit",
    "dp": "paceline bench dp --rounds 8",
    "elastic": "paceline bench elastic --steps 100 --rounds 1 --kills 5",
    "launch": "paceline bench launch --repeats 2",
    "observe": "paceline bench observe --rounds 150",
    "optim": "paceline bench optim --rounds 9",
    "sampler": "paceline bench sampler --rounds 1",
    "training": "paceline bench training --rounds 8 --shards-per-rank 1,2,4",
}
_MODELS = {
    "mlp-64": "small MLP, 17 thousand parameters",
    "mlp-100-layers": "MLP of 100 layers",
    "cnn-batchnorm": "convolutions and BatchNorm",
    "mlp-17m": "MLP of 17 million parameters",
    "transformer": "transformer, 6 layers",
    "lstm": "LSTM, 2 layers",
}
_WAYS = {  # of `paceline bench optim`, by what the manual calls them
    "forward and backward alone": "forward and backward alone",
    "torch, default": "torch, default",
    "torch, fused": "torch, fused",
    "paceline + torch fused": "ours + torch fused",
    "paceline.optim": "`shared=False`",
    "paceline.optim, shared": "`shared=True`",
    "one pass": "`one_pass=True`",
}
_BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of figures -->)",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A file that `paceline bench --json` has written."""

    command: str
    machine: dict[str, Any]
    figures: dict[str, Any]

    @property
    def source(self) -> str:
        """Where the figures come from, in a line."""
        machine = self.machine
        return (
            f"`{self.command}`: {machine['cpu']}, {machine['cores']} cores, torch "
            f"{machine['torch']}, Paceline {machine['paceline']}, {machine['date']}."
        )


@functools.cache
def result(name: str) -> Result:
    """The figures of that name."""
    written = json.loads(_file(name).read_text())
    return Result(written["command"], written["machine"], written["figures"])


# --- tables ---------------------------------------------------------------------------------------


def readme() -> str:
    """The table of README.md: stock PyTorch, Paceline, and the command that measures both."""
    rows = [*_all_reduce_rows(), *_step_rows(), *_other_rows()]
    columns = ("", "stock PyTorch", "Paceline", "times as good", "repeat with")
    return _table(columns, rows) + f"\n{_conditions(result('ddp'))}\n"


def _all_reduce_rows() -> Iterable[Sequence[str]]:
    times = _all_reduce_times()
    for nbytes in (4 << 10, 1 << 20, 64 << 20):
        stock, ours = times[nbytes]["gloo"], times[nbytes]["paceline"]
        what = f"all-reduce of {_size(nbytes)} between two ranks of a host"
        yield _comparison(what, stock, ours, _time, "collectives")


def _step_rows() -> Iterable[Sequence[str]]:
    for name, step in _ddp_steps().items():
        what = f"training step, {_MODELS[name]}"
        *cells, ratio, command = _comparison(what, step.stock, step.ours, _time, "ddp")
        yield *cells, f"{ratio} (even)" if step.is_even else ratio, command


def _other_rows() -> Iterable[Sequence[str]]:
    launch = result("launch").figures["2 ranks"]
    what = "from the command to the first step, 2 ranks"
    yield _comparison(what, launch["torchrun"], launch["paceline"], _time, "launch")
    sampler = result("sampler").figures
    stock, ours = (
        sampler[kind] for kind in ("torch DistributedSampler", "paceline GlobalBatchSampler")
    )
    what = "shuffled order of 100 million samples: first index"
    yield _comparison(what, stock["first_s"], ours["first_s"], _time, "sampler")
    yield _comparison("... memory", stock["memory_mb"], ours["memory_mb"], _mib, "sampler")


def _comparison(
    what: str, stock: float, ours: float, shown: Callable[[float], str], name: str
) -> Sequence[str]:
    return what, shown(stock), shown(ours), _ratio(stock / ours), f"`{result(name).command}`"


def collectives() -> str:
    """All-reduces of every size."""
    rows = []
    for nbytes, row in _all_reduce_times().items():
        ours, core, limit, in_place = (
            row[key] for key in ("paceline", "core", "limit", "in place")
        )
        cells = [_size(nbytes), _time(ours), _ratio(row["gloo"] / ours)]
        cells += [f"{row['mpi'] / ours:.2f}" if "mpi" in row else "-", f"{limit / ours:.0%}"]
        cells += [_time(core), f"{row['mpi'] / core:.2f}" if "mpi" in row else "-"]
        rows.append([*cells, f"{nbytes / in_place / 1e9:.1f} GB/s, {limit / in_place:.0%}"])
    columns = ("message", "through torch", "x Gloo", "x Open MPI", "of limit", "core call")
    return _page_table("collectives", (*columns, "x Open MPI", "in place, of limit"), rows)


def ddp() -> str:
    """Training steps of DistributedDataParallel."""
    measured = result("ddp").figures["models"]
    rows = [
        (
            _MODELS[name],
            _time(step.stock),
            step.setting,
            _time(step.ours),
            _ratio(step.stock / step.ours),
            f"{step.low:.2f} to {step.high:.2f}",
            f"{step.ours * 1e6 / measured[name]['microseconds']['plain']:.2f}",
        )
        for name, step in _ddp_steps().items()
    ]
    columns = ("model", "torch, best setting", "which is", "Paceline", "times as fast")
    return _page_table(
        "ddp", (*columns, "half of the rounds", "over a step without exchange"), rows
    )


def dp() -> str:
    """Training steps of DataParallel."""
    rows = []
    for name, times in result("dp").figures.items():
        shown = [_time(times[way] / 1e6) for way in ("ideal", "bare", "ddp", "paceline")]
        ratios = [_ratio(times[way] / times["paceline"]) for way in ("ideal", "bare", "ddp")]
        rows.append((_MODELS[name], *shown, *ratios))
    columns = ("model", "ideal", "bare", "our DDP", "`DataParallel`")
    return _page_table("dp", (*columns, "to the ideal", "to bare", "to our DDP"), rows)


def optim_alone() -> str:
    """An optimizer's step in one process."""
    rows = [
        (_MODELS[name], *(_time(us / 1e6) for us in times.values()))
        for name, times in result("optim").figures["one_process_us"].items()
    ]
    return _page_table("optim", ("model", "torch's loop", "`fused=True`", "`paceline.optim`"), rows)


def optim_steps() -> str:
    """Whole training steps, by optimizer."""
    rows = [
        (f"{_MODELS[name]}, {optimizer}", *(_time(times[way] / 1e6) for way in _WAYS))
        for name, measured in result("optim").figures["step_us"].items()
        for optimizer, times in measured.items()
    ]
    return _page_table("optim", ("", *_WAYS.values()), rows)


def optim_memory() -> str:
    """What training adds to the memory of all ranks together."""
    figures = result("optim").figures
    rows = [
        (
            ranks,
            *(_mib(amount) for amount in used.values()),
            _mib(figures["least_memory_mib"][ranks]),
        )
        for ranks, used in figures["memory_mib"].items()
    ]
    ways = [_WAYS[way] for way in next(iter(figures["memory_mib"].values()))]
    return _page_table("optim", ("ranks", *ways, "at least"), rows)


def collectives_hosts() -> str:
    """All-reduces between simulated hosts, over a link of 1 Gbit/s and without a limit."""
    limited = _all_reduce_times("collectives-hosts-1gbit", "p50_s")
    free = _all_reduce_times("collectives-hosts", "p50_s")
    rows = []
    for nbytes, row in limited.items():
        cells = [_size(nbytes)]
        for times in (row, free[nbytes]):
            # Short messages are not rounded: theirs is the same call.
            for way in ("paceline", "bfloat16") if nbytes > 64 << 10 else ("paceline", None):
                cells += (
                    ["", ""]
                    if way is None
                    else [_time(times[way]), _ratio(times["gloo"] / times[way])]
                )
        rows.append(cells)
    columns = ("message", "1 Gbit/s", "x Gloo", "bfloat16", "x Gloo")
    columns += ("no limit", "x Gloo", "bfloat16", "x Gloo")
    sources_of_both = [result(name) for name in ("collectives-hosts-1gbit", "collectives-hosts")]
    return _table(columns, rows) + "\n" + "\n".join(each.source for each in sources_of_both) + "\n"


def ddp_hosts() -> str:
    """A training step between simulated hosts."""
    times = result("ddp-hosts").figures["milliseconds"]["mlp-17m"]
    stock = min(ms for way, ms in times.items() if way.startswith("torch"))
    rows = [
        ("torch's class on Gloo", _time(stock / 1e3), ""),
        *(
            (shown, _time(times[way] / 1e3), _ratio(stock / times[way]))
            for way, shown in (("paceline", "Paceline"), ("bfloat16", "Paceline, bfloat16"))
        ),
        ("without any exchange", _time(times["plain"] / 1e3), ""),
    ]
    return _page_table("ddp-hosts", ("", "step", "times as fast"), rows)


def sampler() -> str:
    """Shuffled orders."""
    rows = [
        (
            f"{owner} `{kind}`",
            _time(found["first_s"]),
            _mib(found["memory_mb"]),
            f"{found['per_second'] / 1e6:.1f} million",
        )
        for (owner, kind), found in (
            (name.split(), found) for name, found in result("sampler").figures.items()
        )
    ]
    columns = ("sampler", "first index", "extra memory", "indices per second")
    return _page_table("sampler", columns, rows)


def training() -> str:
    """Steps of paceline.Training by number of shards."""
    rows = []
    for name, times in result("training").figures.items():
        for count in [int(key.split()[1]) for key in times if key.startswith("bare")]:
            bare, ours = times[f"bare {count}"], times[f"training {count}"]
            shown = [_time(us / 1e6) for us in (times["ddp"], bare, ours)]
            ratios = [f"{ours / bare:.2f}", f"{ours / times['ddp']:.2f}"]
            rows.append((_MODELS[name], str(2 * count), *shown, *ratios))
    columns = ("model", "shards", "`DistributedDataParallel`", "bare loop", "`Training`")
    return _page_table("training", (*columns, "over bare", "over DDP"), rows)


def elastic() -> str:
    """What an elastic job costs, and how long it takes to recover."""
    rows = []
    for name, found in result("elastic").figures.items():
        shown = [_time(found[key]) for key in ("plain", "elastic")]
        recovery = ("next step", "next step, longest", "whole again", "whole again, longest")
        rows.append(
            (
                _MODELS[name],
                *shown,
                f"{found['ratio']:.2f}",
                *(_time(found[key]) for key in recovery),
            )
        )
    columns = ("model", "step, plain job", "step, elastic job", "ratio")
    columns += ("next step after a kill", "longest", "replaced after", "longest")
    return _page_table("elastic", columns, rows)


def launch() -> str:
    """From the command to the first step."""
    rows = [
        (
            ranks,
            _time(best["torchrun"]),
            _time(best["paceline"]),
            _ratio(best["torchrun"] / best["paceline"]),
        )
        for ranks, best in result("launch").figures.items()
    ]
    return _page_table("launch", ("", "torchrun", "paceline run", "times as fast"), rows)


def observe() -> str:
    """What recording costs."""
    figures = result("observe").figures
    rows = [
        (
            mode,
            str(calls),
            f"{microseconds:.1f} us",
            f"{microseconds / figures['off_ms'] / 10:.2f} %",
            f"{(figures['ratios'][mode][0] - 1):+.1%}",
        )
        for mode, (calls, microseconds) in figures["notes"].items()
    ]
    columns = ("recorded", "calls in a step", "together", "of the step", "median step, against off")
    return _page_table("observe", columns, rows)


def sources() -> str:
    """Every file with its command and its machine."""
    rows = [
        (f"`{name}.json`", f"`{result(name).command}`", *_facts(result(name)))
        for name in MEASUREMENTS
        if _file(name).exists()
    ]
    return _table(("file", "command", "processor", "torch", "Paceline", "measured"), rows)


def _facts(found: Result) -> Sequence[str]:
    machine = found.machine
    return (
        f"{machine['cpu']}, {machine['cores']} cores",
        machine["torch"],
        machine["paceline"],
        machine["date"],
    )


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "collectives": collectives,
    "collectives-hosts": collectives_hosts,
    "ddp": ddp,
    "ddp-hosts": ddp_hosts,
    "dp": dp,
    "optim-alone": optim_alone,
    "optim-steps": optim_steps,
    "optim-memory": optim_memory,
    "sampler": sampler,
    "training": training,
    "elastic": elastic,
    "launch": launch,
    "observe": observe,
    "sources": sources,
}


def _all_reduce_times(
    name: str = "collectives", which: str = "min_s"
) -> dict[int, dict[str, float]]:
    """The time in seconds, by bytes and contestant: of the quickest call, or another of them."""
    times: dict[int, dict[str, float]] = {}
    for entry in result(name).figures["times"]:
        times.setdefault(entry["bytes"], {})[entry["contestant"]] = entry[which]
    return times


@dataclasses.dataclass(frozen=True)
class _Step:
    """Seconds of a step of ours and of torch's class at its best setting; and between which ratios
    of the two half of the rounds were.
    """

    ours: float
    stock: float
    setting: str
    low: float
    high: float

    @property
    def is_even(self) -> bool:
        """Whether rounds contradict each other about who is faster."""
        return self.low <= 1 <= self.high


def _ddp_steps() -> dict[str, _Step]:
    steps = {}
    for name, measured in result("ddp").figures["models"].items():
        times = measured["microseconds"]
        stock = {variant: us for variant, us in times.items() if variant.startswith("torch")}
        best = min(stock, key=lambda variant: stock[variant])
        setting = best.removeprefix("torch (").removesuffix(")")
        low, _, high = measured["over_paceline"][best]
        steps[name] = _Step(times["paceline"] / 1e6, stock[best] / 1e6, setting, low, high)
    return steps


def _page_table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return f"{_table(columns, rows)}\n{result(name).source}\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    sides = [
        "---:" if _has_numbers([row[at] for row in rows]) else "---" for at in range(len(columns))
    ]
    lines = [columns, sides, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _has_numbers(cells: Sequence[str]) -> bool:
    return all(not cell or cell[0].isdigit() or cell[0] in "+-" for cell in cells)


def _conditions(steps: Result) -> str:
    machine = steps.machine
    return (
        f"Two ranks with one thread each on {machine['cpu']}, {machine['cores']} cores, torch "
        f"{machine['torch']}; both sides in turn. Steps are medians of {steps.figures['rounds']} "
        "rounds, with torch's class at the best of four settings; *even*: some rounds say that it "
        "is faster, some that ours is. The other times are the best of all calls."
    )


def _size(nbytes: int) -> str:
    for unit in ("B", "KB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} MB"


def _time(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.1f} s"


def _mib(amount: float) -> str:
    return f"{amount:,.0f} MiB" if amount >= 10 else f"{amount:.1f} MiB"


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


# --- plots ----------------------------------------------------------------------------------------


def all_reduce_plot() -> Chart:
    """Time of an all-reduce over its size."""
    times = _all_reduce_times()
    names = {"gloo": "Gloo", "mpi": "Open MPI", "paceline": "Paceline", "core": "Paceline's core"}
    sizes = list(times)
    low = min(min(row[key] for key in names if key in row) for row in times.values())
    high = max(max(row[key] for key in names if key in row) for row in times.values())
    ticks = [(10.0**power, _time(10.0**power)) for power in range(-6, 1)]
    return Chart(
        "All-reduce between two ranks of one host, float32",
        Axis("message", sizes[0], sizes[-1], [(size, _size(size)) for size in sizes[::2]]),
        Axis("", low / 1.5, high * 30, [tick for tick in ticks if low / 1.5 < tick[0] < high * 30]),
        {
            shown: [(size, row[key]) for size, row in times.items()]
            for key, shown in names.items()
            if key in times[sizes[0]]
        },
    )


def steps_plot() -> BarChart:
    """Training steps against torch's class."""
    bars = {_MODELS[name]: step.stock / step.ours for name, step in _ddp_steps().items()}
    return BarChart("A training step: times as fast as torch's class at its best setting", bars, 1)


PLOTS: dict[str, Callable[[], Chart | BarChart]] = {
    "all-reduce.svg": all_reduce_plot,
    "training-steps.svg": steps_plot,
}


# --- reading and writing --------------------------------------------------------------------------


def pages() -> list[pathlib.Path]:
    """README.md and every page of the manual that has figures."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text())]


def names_in(text: str) -> list[str]:
    """The tables that a page has."""
    return [match["name"] for match in _BLOCK.finditer(text)]


def updated(text: str) -> str:
    """The page with its tables made anew; one that was not measured yet stays what it is."""

    def made(match: re.Match[str]) -> str:
        try:
            return f"{match['begin']}\n{TABLES[match['name']]()}\n{match['end']}"
        except FileNotFoundError:
            return match[0]

    return _BLOCK.sub(made, text)


def missing() -> list[str]:
    """What was not measured yet."""
    return [name for name in MEASUREMENTS if not _file(name).exists()]


def _file(name: str) -> pathlib.Path:
    return RESULTS / f"{name}.json"


def measure(name: str) -> None:
    """Run the benchmark and keep what it writes."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    words = shlex.split(MEASUREMENTS[name])[1:]
    command = [sys.executable, "-m", "paceline", *words, "--json", str(_file(name))]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure, and write tables and plots.")
    parser.add_argument(
        "--measure",
        nargs="*",
        choices=MEASUREMENTS,
        metavar="NAME",
        help="measure these again, or all of them; leave the machine alone meanwhile",
    )
    options = parser.parse_args()
    if options.measure is not None:
        for name in options.measure or MEASUREMENTS:
            measure(name)
    for page in pages():
        page.write_text(updated(page.read_text()))
    for name, plot in PLOTS.items():
        with contextlib.suppress(FileNotFoundError):
            (IMAGES / name).write_text(plot().svg())
    if missing():
        sys.stderr.write(f"not measured yet: {', '.join(missing())}\n")


if __name__ == "__main__":
    main()

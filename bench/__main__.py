"""``python -m bench COMMAND``: measure, print a table, write it to bench/results/.

Run it from the root of a checkout, on a machine with an NVIDIA card and PyTorch. The exit status is
0 if everything ran, 1 if a result was wrong or a kernel of this package did not run, 2 if nothing
can be measured here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from . import jax_overhead, plots, startup
from .peers import PEERS
from .report import RESULTS, Report, environment
from .timing import CardMonitor
from .workloads import ITEM_BYTES

# Of a sweep.
LIMIT_SECONDS = 90
# Of the tables where there is no terminal to fit them into.
_FILE_WIDTH = 200
_HELP = {
    "forward": "KL of square problems at every head dim, full and causal",
    "backward": "gradients in both settings, separate kernels and fused",
    "small-q": "few queries on many keys, with and without split keys",
    "tune": "how far the plan's tiles and splits are from the best candidates",
    "overhead": "what a call costs the host",
    "overhead-jax": "what a call from JAX costs the host, without PyTorch",
    "memory": "peak device memory beside the formula, and where each peer runs out of it",
    "accuracy": "every output against float64, beside the textbook formula and the peers",
    "ablation": "split keys, fused kernels, Hopper's kernels, fixed order: each with and without",
    "lengths": "forward and backward over the length of the context, to 512K tokens",
    "peers": "every peer, at a length where all of them fit into the card",
    "features": "masks, lengths, given log-sum-exps, softcaps, float32: errors and times",
    "startup": "time to the first result of a process, kernels compiled and cached",
    "plot": "pictures of the results of lengths, memory and accuracy; needs no card",
}
_BOTH_MASKS = ("forward", "backward", "tune", "lengths", "peers", "ablation", "memory")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the kernels of streamkl_cupy beside their peers on this card.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _HELP.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        command.add_argument("--quick", action="store_true", help="small sizes: does it all run?")
        command.add_argument(
            "--out", type=Path, default=RESULTS, metavar="DIR", help="where the results go"
        )
        command.add_argument("--commit", help="the commit, for a tree without a git directory")
        if name in ("overhead-jax", "features", "startup", "plot"):
            continue
        command.add_argument(
            "--peers", type=_peers, metavar="A,B", help=f"none, or names of {', '.join(PEERS)}"
        )
        if name == "accuracy":
            continue
        if name == "tune":
            command.add_argument("direction", choices=("forward", "backward"))
            command.add_argument(
                "--deterministic",
                action="store_true",
                help="of a shape of your own: a fixed order of sums",
            )
            command.add_argument(
                "--limit",
                type=_count,
                default=LIMIT_SECONDS,
                metavar="SECONDS",
                help="for all shapes together (default: %(default)s)",
            )
        command.add_argument("--bh", type=_count, help="batch times heads")
        command.add_argument("--n", type=_count, help="length of queries and keys")
        command.add_argument("--nq", type=_count, help="length of the queries")
        command.add_argument("--nk", type=_count, help="length of the keys")
        command.add_argument("--d", type=_count, help="head dim of both sides")
        command.add_argument("--d1", type=_count, help="head dim of side 1")
        command.add_argument("--d2", type=_count, help="head dim of side 2")
        command.add_argument("--dtype", choices=tuple(ITEM_BYTES))
        command.add_argument("--setting", type=int, choices=(1, 2), help="1: dQ2 dK2, 2: dQ1 dK1")
        both = name in _BOTH_MASKS
        command.add_argument(
            "--causal",
            choices=("full", "causal", "both") if both else ("full", "causal"),
            default="both" if both else "full",
            help="masks (default: %(default)s)",
        )
        command.add_argument("--rounds", type=_count, help="interleaved rounds to time")
        command.add_argument(
            "--flush-l2", action="store_true", help="overwrite the L2 cache before each call"
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    missing = _missing(options.command)
    if missing is not None:
        Console(stderr=True).print(f"python -m bench: nothing can be measured here: {missing}.")
        return 2
    if options.command == "plot":
        say = partial(console.print, highlight=False, soft_wrap=True)
        return 0 if plots.run(options.out, quick=options.quick, say=say) else 1
    start = time.perf_counter()
    with CardMonitor() as monitor, _progress(console) as progress:
        task = progress.add_task(options.command, total=None)
        report = _run(options, lambda text: progress.update(task, description=text))
    report = finish(report, options, monitor, time.perf_counter() - start)
    console.print(report.table())
    for note in report.notes:
        console.print(f"* {note}", highlight=False)
    path = report.write(options.out)
    console.print(f"{report.settings['seconds']:.0f} s, written to {path}", highlight=False)
    return 1 if report.failed else 0


def _progress(console: Console) -> Progress:
    """A bar with what is going on and for how long; how much is left nobody knows."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def finish(
    report: Report, options: argparse.Namespace, monitor: CardMonitor, seconds: float
) -> Report:
    """The report with the machine, the options and the state of the card."""
    chosen = {key: value for key, value in vars(options).items() if value not in (None, False)}
    settings: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in chosen.items()
        if key not in ("out", "commit")
    }
    settings |= {"seconds": round(seconds, 1), "card_while_busy": monitor.summary()}
    notes = list(report.notes)
    state = settings["card_while_busy"]
    if state is not None:
        notes.append(
            f"Card while busy (medians): {state['sm_clock_mhz']:.0f} MHz, "
            f"{state['power_w']:.0f} W, {state['temperature_c']:.0f} C."
        )
    return replace(
        report,
        name=report.name + ("_quick" if options.quick else ""),
        notes=notes,
        environment=environment(commit=options.commit),
        settings=settings,
    )


def _run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    if options.command == "startup":
        return startup.run(warm_processes=1 if options.quick else 5)
    if options.command == "overhead-jax":
        return jax_overhead.run(quick=options.quick, say=say)
    # Load PyTorch, which the others do without.
    if options.command == "features":
        from . import features

        return features.run(quick=options.quick, say=say)
    from .commands import COMMANDS

    return COMMANDS[options.command](options, say)


def _missing(command: str) -> str | None:
    """Why nothing can be measured here; None if it can."""
    if command == "startup":
        return _missing_for_startup()
    if command == "overhead-jax":
        return jax_overhead.missing()
    if command == "plot":
        return None if importlib.util.find_spec("matplotlib") else "matplotlib is not installed"
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch finds no NVIDIA card"


def _missing_for_startup() -> str | None:
    try:
        from cupy.cuda import runtime
    except ImportError:
        return "CuPy is not installed"
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no NVIDIA card ({error})"
    return None


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return value


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        if name not in PEERS:
            expected = ", ".join(PEERS)
            raise argparse.ArgumentTypeError(f"expected names out of {expected}, got {name!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())

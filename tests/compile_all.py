"""Compile the specialisations of every kernel without a card, and check what ptxas says of each.

    python -m tests.compile_all --arch sm_80 --arch sm_90a --jobs 8     # all that a plan can return
    python -m tests.compile_all --declared                              # what the tests compile

It prints what is wrong with a kernel as soon as it is known, and ends with 1 if anything was, with
2 if NVRTC is not installed. The cubins stay in the cache, so what has been compiled before is only
checked.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from streamkl_cupy import catalogue, jit

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")

REGISTERS_PER_SM = 65536
MOST_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Task:
    """One specialisation for one architecture; `sources` only to compile something else."""

    kernel: str
    template: jit.Template
    arch: str
    sources: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.arch} {jit.render(self.kernel, self.template)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    usage: jit.ResourceUsage | None
    problems: tuple[str, ...]


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, in a few words; None if it can."""
    try:
        jit.compiler_identity()
        import cuda.core  # noqa: F401
    except ImportError:
        return "NVRTC or cuda.core is not installed; the extras cu12 and cu13 install them"
    return None


def tasks(arch: str, only_declared: bool) -> list[Task]:
    """The specialisations for an architecture: those of the tests, or all."""
    found = catalogue.declared(arch) if only_declared else catalogue.specialisations(arch)
    return [Task(kernel, template, arch) for kernel, template in found]


def compile_tasks(todo: Sequence[Task], num_jobs: int) -> Iterator[Outcome]:
    """Compile in processes of their own; outcomes come in the order in which they are ready."""
    # A child of a fork would inherit whatever locks the threads of this process hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        futures = [pool.submit(compile_task, task) for task in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def compile_task(task: Task) -> Outcome:
    """Compile one specialisation, or find it, and check it."""
    usage, problems = None, []
    try:
        built = jit.build(task.kernel, task.template, task.arch, sources=task.sources)
        usage = jit.resource_usage(built)
        problems = check(usage, max_threads(built.path.read_bytes(), built.symbol), built.log)
    except (jit.CompileError, ValueError) as error:
        problems = [str(error)]
    return Outcome(task, usage, tuple(problems))


def check(usage: jit.ResourceUsage, num_threads: int | None, log: str) -> list[str]:
    """What is wrong with a kernel of so many threads a block; nothing, it is hoped."""
    problems = []
    if usage.spill_bytes:
        problems.append(f"{usage.spill_bytes} bytes of spills")
    if usage.stack_bytes:
        problems.append(f"{usage.stack_bytes} bytes of stack frame")
    if num_threads is None:
        problems.append("no __launch_bounds__, so no budget of registers")
    elif usage.registers > register_budget(num_threads):
        problems.append(
            f"{usage.registers} registers, {register_budget(num_threads)} are there for "
            f"{num_threads} threads"
        )
    # ptxas says so when it cannot keep wgmma products in flight, which costs most of the speed.
    problems += [line for line in log.splitlines() if "Potential Performance Loss" in line]
    return problems


def register_budget(num_threads: int) -> int:
    """Registers a thread with one block of so many threads on a multiprocessor."""
    return min(MOST_REGISTERS, REGISTERS_PER_SM // num_threads // 8 * 8)


def max_threads(cubin: bytes, symbol: str) -> int | None:
    """The launch bounds of an entry, from the ELF section ``.nv.info.<symbol>`` of its cubin."""
    for kind, words in jit.cubin_attributes(cubin, f".nv.info.{symbol}"):
        if kind == 5:  # EIATTR_MAX_THREADS: the three extents of a block
            return math.prod(words)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compile_all", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=ARCHITECTURES,
        help="architecture, may be given again (default: all of them)",
    )
    parser.add_argument("--declared", action="store_true", help="only what the tests compile")
    parser.add_argument("--kernel", help="only the kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    console = Console()
    if missing := missing_compiler():
        console.print(missing, markup=False, highlight=False)
        return 2
    todo = [
        task
        for arch in options.arch or ARCHITECTURES
        for task in tasks(arch, options.declared)
        if options.kernel is None or options.kernel in task.kernel
    ]
    if not todo:
        parser.error(f"--kernel: expected a part of a kernel's name, got {options.kernel!r}")
    num_wrong = 0
    with Progress(
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as progress:
        bar = progress.add_task("", total=len(todo))
        for outcome in compile_tasks(todo, options.jobs):
            progress.update(
                bar, advance=1, description=f"{outcome.task.arch} {outcome.task.kernel}"
            )
            num_wrong += bool(outcome.problems)
            for problem in outcome.problems:
                progress.print(f"{outcome.task.name}: {problem}", markup=False, highlight=False)
    console.print(
        f"{len(todo)} kernels, {num_wrong} of them with a problem; "
        f"cubins in {jit.cache_info().directory}",
        highlight=False,
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

"""``python -m bench tune``: the package's own sweep over a plan's candidates, on the bench's cases.

Every candidate is held against float64 before it is timed, like everything in the bench.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from streamkl_cupy import launch, plan, timing, tune

from . import ours
from .case import Case
from .cases import DETERMINISTIC, Spec
from .report import Column, Report, Row
from .runner import Say, is_right, poison
from .timing import event_stopwatch

COLUMNS = (
    Column("case", "problem"),
    Column("contender", "kernels and tiles"),
    Column("mark", ""),
    Column("status", "status"),
    Column("median_ms", "ms", ".3f"),
    Column("min_ms", "fastest", ".3f"),
    Column("spread", "spread", ".1%"),
    Column("behind", "times the best", ".3f"),
    Column("detail", "reason"),
)


class CaseSubject:
    """A case whose forward or gradients are tuned; float64 says what is right."""

    def __init__(self, case: Case, task: tune.Task, facts: plan.DeviceFacts) -> None:
        self._case = case
        self._task = task
        self._facts = facts
        if task.wrt:
            self.call = ours.backward_call(case, "auto", task.deterministic)
        else:
            self.call = ours.forward_call(case)

    def planned(self) -> tune.Plan:
        """Plan without computing."""
        return self._task.planned(self._facts)

    def check(self) -> str:
        """Compute into memory that was poisoned; what is wrong, empty if nothing."""
        poison([(x.shape, x.dtype) for x in self.call()])
        outputs = self.call()
        case = self._case
        if self._task.wrt:
            errors, tolerances = case.check_backward(outputs), case.tolerances_backward
        else:
            errors, tolerances = case.check_forward(outputs), case.tolerances_forward
        return "" if is_right(errors, tolerances) else f"errors {errors}"


def run(direction: str, specs: Sequence[Spec], *, rounds: int, seconds: float, say: Say) -> Report:
    """Sweep the cases; a table of the best and of the plan's own for each.

    Parameters
    ----------
    direction
        ``"forward"`` or ``"backward"``.
    specs
        The cases.
    rounds
        Rounds that decide.
    seconds
        How long all may take; each case has its share of what is left.
    say
        Told what is going on.
    """
    deadline = time.monotonic() + seconds
    facts = replace(launch.device_facts(torch.cuda.current_device()), tuned=())
    tasks = {spec.label: task_of(spec, direction) for spec in specs}
    candidates = {label: task.candidates(facts) for label, task in tasks.items()}
    refused = tune.compile_candidates(
        candidates.values(),
        facts.arch,
        seconds=tune.COMPILE_SHARE * seconds,
        say=lambda text: say(f"tune: {text}"),
    )
    stopwatch = event_stopwatch()
    rows: list[Row] = []
    notes = [
        f"{len(refused)} kernels do not compile, spill registers or found no time. All others were "
        "checked against float64 before they were timed; the fastest and the plan's own took "
        f"turns in {rounds} rounds, each turn of {timing.ROUND_MS:.0f} ms after "
        f"{timing.PAUSE_MS:.0f} ms of rest.",
    ]
    for index, spec in enumerate(specs):
        task = tasks[spec.label]
        swept = tune.sweep(
            candidates[spec.label],
            CaseSubject(Case(spec.workload), task, facts),
            stopwatch,
            refused=refused,
            rounds=rounds,
            seconds=tune.share_of(deadline, len(specs) - index),
            say=lambda text, label=spec.label: say(f"{label}: {text}"),
        )
        rows += rows_of(spec.label, swept)
        notes.append(note_of(spec.label, swept))
        torch.cuda.empty_cache()
    return Report(
        name=f"tune_{direction}",
        title=f"The plan's choices beside their candidates, {direction}",
        columns=COLUMNS,
        rows=rows,
        notes=notes,
    )


def task_of(spec: Spec, direction: str) -> tune.Task:
    """What the tuner is asked for a case."""
    described = ours.problem_of(spec.workload)
    if direction == "forward":
        return tune.Task(described)
    return tune.Task(described, ours.gradients_of(spec.workload), spec.ours == (DETERMINISTIC,))


def rows_of(label: str, swept: tune.Swept) -> list[Row]:
    """What was timed and what went wrong; those that were only slow are counted in the note."""
    rows: list[Row] = []
    for tried in swept.tried:
        if tried.status in ("slow", "untried"):
            continue
        row: dict[str, Any] = {
            "case": label,
            "contender": tried.text,
            "mark": "plan" if tried == swept.own else "best" if tried == swept.best else "",
            # What does not compile or run is no failure: it is not chosen.
            "status": "skipped" if tried.status == "refused" else tried.status,
            "detail": tried.detail,
            "ours": True,
        }
        if tried.timing is not None:
            assert swept.best.timing is not None
            row |= {
                "median_ms": tried.timing.median_ms,
                "min_ms": tried.timing.min_ms,
                "spread": tried.timing.spread,
                "behind": swept.best.timing.times_as_fast(tried.timing),
            }
        rows.append(row)
    return rows


def note_of(label: str, swept: tune.Swept) -> str:
    """How far the plan is from the best, in a sentence."""
    num_slow = sum(one.status == "slow" for one in swept.tried)
    num_untried = sum(one.status == "untried" for one in swept.tried)
    others = f"{num_slow} slower candidates are not shown."
    if num_untried:
        others += f" {num_untried} were not reached in time."
    if swept.best == swept.own:
        return f"{label}: the plan's choice is the best. {others}"
    verdict = "within the noise" if swept.choice == plan.NO_CHOICE else "beyond the noise"
    return f"{label}: the plan's choice takes {swept.gain:.3f} times the best, {verdict}. {others}"

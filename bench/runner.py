"""Runs one case: every contender is checked, then those that were right are timed together."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from streamkl_cupy import timing
from streamkl_cupy.timing import Stopwatch, Timing, measure

from . import bars
from .bars import Bar
from .contender import Contender, Entry, Errors, Outputs, SkipError
from .report import Row

Say = Callable[[str], None]
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


def run_case(
    label: str,
    entries: Sequence[Entry],
    stopwatch: Stopwatch,
    *,
    rounds: int,
    yardstick: str | None = None,
    to_reach: Sequence[Bar] = (),
    round_ms: float = timing.ROUND_MS,
    budget_ms: float = math.inf,
    pause: Callable[[], None] = timing.rest,
    say: Say = lambda text: None,
) -> list[Row]:
    """Check and time the entries of one case.

    Parameters
    ----------
    label
        The case, for the rows.
    entries
        Who takes part, in the order of the table.
    stopwatch
        What times them.
    rounds, round_ms, budget_ms, pause
        As `measure` takes them.
    yardstick
        The entry that the ``ratio`` of each rate of the same unit is relative to.
    to_reach
        Bars, each for one of the entries.
    say
        Told what is going on, for a progress bar.

    Returns
    -------
    list of dict
        A row an entry. ``status`` is ``ok``, ``wrong``, ``failed`` or ``skipped``; only a row that
        is ``ok`` has times and a rate.
    """
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for entry in entries:
        say(f"{label}: checking {entry.name}")
        row, contender = admit(entry)
        rows[entry.name] = {"case": label, **row}
        if contender is not None:
            contenders[entry.name] = contender
    timings = measure(
        {name: contender.call for name, contender in contenders.items()},
        stopwatch,
        rounds=rounds,
        round_ms=round_ms,
        budget_ms=budget_ms,
        pause=pause,
        on_step=lambda name: say(f"{label}: timing {name}"),
    )
    for name, each in timings.items():
        rows[name].update(_figures(contenders[name], each))
    timed = {name: (contenders[name].work, each) for name, each in timings.items()}
    for name, row in rows.items():
        if yardstick in timed and name in timed and row["unit"] == rows[yardstick]["unit"]:
            row["ratio"] = bars.reached(Bar(name, (yardstick,), yardstick), timed)
    for bar in to_reach:
        bars.put(rows[bar.entry], bars.judged(bar.title, bar.least, bars.reached(bar, timed)))
    return list(rows.values())


def run_brief(
    label: str,
    entries: Sequence[Entry],
    stopwatch: Stopwatch,
    shapes: Shapes,
    *,
    calls: int,
    say: Say = lambda text: None,
) -> list[Row]:
    """Check and time entries whose calls take seconds: no round, no rehearsal.

    Parameters
    ----------
    label, entries, stopwatch, say
        As in `run_case`.
    shapes
        Of their outputs, which are poisoned before the first call.
    calls
        How often each is called; every call is timed, and the outputs of the last are checked.

    Returns
    -------
    list of dict
        A row an entry, as those of `run_case`.
    """
    rows = []
    for entry in entries:
        say(f"{label}: checking and timing {entry.name}")
        times: list[float] = []

        def watched(contender: Contender, times: list[float] = times) -> Outputs:
            outputs: list[Outputs] = []
            poison(shapes)
            for _ in range(calls):
                times.append(stopwatch(lambda: outputs.append(contender.call()), 1))
                del outputs[:-1]
            return outputs[-1]

        row, contender = admit(entry, watched)
        if contender is not None:
            row.update(_figures(contender, Timing(tuple(times), 1)))
        rows.append({"case": label, **row})
    return rows


def after_poison(contender: Contender) -> Outputs:
    """Outputs of a second call, into memory that was poisoned after the first.

    An output that is not written does then not pass on what an earlier kernel left there.
    """
    shapes = [(x.shape, x.dtype) for x in contender.call()]
    poison(shapes)
    return contender.call()


def admit(
    entry: Entry, outputs_of: Callable[[Contender], Outputs] = after_poison
) -> tuple[Row, Contender | None]:
    """The first part of a row, and the contender if its result is right.

    Parameters
    ----------
    entry
        Who is to take part.
    outputs_of
        Calls a contender and returns the outputs that are checked.
    """
    row: Row = {"contender": entry.name, "entry": entry.name, "ours": entry.ours}
    try:
        contender = entry.make()
        row["contender"] = contender.name
        errors = contender.check(outputs_of(contender))
    except SkipError as error:
        return row | {"status": "skipped", "detail": str(error)}, None
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row | {"status": "skipped", "detail": "out of memory"}, None
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return row | {"status": "failed", "detail": text[:200]}, None
    row |= {"detail": contender.detail(), "errors": plain(errors), "error": _worst(errors)}
    if not is_right(errors, contender.tolerances):
        return row | {"status": "wrong"}, None
    return row | {"status": "ok"}, contender


def is_right(errors: Errors, tolerances: Errors) -> bool:
    """Whether something was compared and every error is below its tolerance; NaN is not."""
    return bool(errors) and all(error < tolerances[name] for name, error in errors.items())


def poison(shapes: Shapes) -> None:
    """Fill with NaN the memory that the next outputs of these shapes are likely to get."""
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Kept until all are filled, or each would take the place of the one before.
    filled = [
        torch.full(tuple(shape), math.nan, dtype=dtype, device="cuda")
        for _ in range(2)
        for shape, dtype in shapes
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ]
    del filled


def outputs_bytes(outputs: Outputs) -> int:
    """Bytes of all outputs together."""
    return sum(x.numel() * x.element_size() for x in outputs)


def _figures(contender: Contender, each: Timing) -> dict[str, Any]:
    return {
        "median_ms": each.median_ms,
        "min_ms": each.min_ms,
        "max_ms": max(each.rounds_ms),
        "spread": each.spread,
        "rounds": len(each.rounds_ms),
        "calls_per_round": each.calls_per_round,
        "rate": contender.work.rate(each.median_ms),
        "unit": contender.work.unit,
    }


def _worst(errors: Errors) -> float | None:
    """The largest error; None if one is not a number at all."""
    values = list(errors.values())
    return max(values) if values and all(map(math.isfinite, values)) else None


def plain(errors: Errors) -> dict[str, float | str]:
    """The errors with words for what JSON has no number for."""
    return {k: v if math.isfinite(v) else str(v) for k, v in errors.items()}

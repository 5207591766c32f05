"""What a figure must reach, and whether it did. Pure Python.

A bar is a ratio of two figures of one case: the median, over the rounds of one measurement, of the
ratio in each round (``streamkl_cupy/timing.py`` says why).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamkl_cupy.timing import Timing

from .contender import Work

# What is not slower by more than this is as fast.
NOISE = 0.02

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """How fast one entry of a case must be beside others.

    Attributes
    ----------
    entry
        Whose figure it is, by the name of its entry.
    against
        Entries; the fastest of them counts, or with `is_sum` the time of all together.
    title
        What they are called where the bar is shown.
    least
        Least ratio of the rates; None where it is only reported.
    is_sum
        Whether the others' times are added.
    """

    entry: str
    against: tuple[str, ...]
    title: str
    least: float | None = None
    is_sum: bool = False


Timed = Mapping[str, tuple[Work, Timing]]


def reached(bar: Bar, timed: Timed) -> float | None:
    """The ratio that an entry reached; None if it or none of the others was timed.

    Parameters
    ----------
    bar
        Whose figure, and beside what.
    timed
        The work and the rounds of all entries that were right, of one measurement.
    """
    others = [timed[name] for name in bar.against if name in timed]
    if bar.entry not in timed or not others:
        return None
    work, ours = timed[bar.entry]
    if bar.is_sum:
        if len(others) < len(bar.against):
            return None
        rounds = zip(*(other.rounds_ms for _, other in others), strict=True)
        total = Timing(tuple(map(sum, rounds)), 1)
        return ours.times_as_fast(total)
    return min(
        work.amount / other_work.amount * ours.times_as_fast(other) for other_work, other in others
    )


def judged(title: str, least: float | None, ratio: float | None) -> dict[str, Any]:
    """A bar and what it came to, for a row: ``met`` is None where nothing had to be met."""
    met = None if least is None or ratio is None else ratio >= least
    return {"against": title, "least": least, "reached": ratio, "met": met}


def put(row: Row, bar: Mapping[str, Any]) -> None:
    """Add a bar to a row, and to the text that the table shows."""
    row.setdefault("bars", []).append(dict(bar))
    row["bars_text"] = "; ".join(map(text, row["bars"]))


def text(bar: Mapping[str, Any]) -> str:
    """A bar in words.

    Examples
    --------
    >>> text(judged("cuDNN", 0.95, 0.9712))
    '0.971 of cuDNN (bar 0.95)'
    >>> text(judged("cuDNN", 0.95, 0.9))
    '0.900 of cuDNN (bar 0.95: MISSED)'
    >>> text(judged("cuDNN", 0.95, None))
    '- of cuDNN (bar 0.95: not measured)'
    """
    ratio = "-" if bar["reached"] is None else f"{bar['reached']:.3f}"
    words = f"{ratio} of {bar['against']}"
    if bar["least"] is None:
        return words
    verdict = {True: "", False: ": MISSED", None: ": not measured"}[bar["met"]]
    return f"{words} (bar {bar['least']:g}{verdict})"


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """The point at a place, or else the line there through the two points nearest to it.

    Parameters
    ----------
    points
        Mean head dim and rate of square problems.
    at
        Mean head dim of the problem.

    Returns
    -------
    float or None
        None if there is no point there, and fewer than two elsewhere.

    Examples
    --------
    >>> interpolated([(64, 400.0), (128, 600.0), (256, 650.0)], 80)
    450.0
    """
    if at in (there := dict(points)):
        return there[at]
    nearest = sorted(points, key=lambda point: abs(point[0] - at))[:2]
    if len(nearest) < 2:
        return None
    slope = statistics.linear_regression(*zip(*nearest, strict=True)).slope
    return nearest[0][1] + slope * (at - nearest[0][0])

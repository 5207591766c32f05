"""How long calls keep a device busy, measured against each other. Pure Python.

A card near its power limit has two speeds: a kernel that starts on a cool card runs 10 to 30 %
faster than the same kernel after a fraction of a second of load, and what has run just before
decides which of the two is seen. So that this falls on all alike,

* a turn is a stretch of time (about ``ROUND_MS``), not a number of calls: everybody heats the card
  for as long as everybody else;
* before each turn the card rests for ``PAUSE_MS``, whoever had the turn before;
* in every round everybody has one turn, in an order in which, over the rounds, everybody stands at
  each place and follows each of the others equally often (`order`);
* calls are compared within a round: the ratio of two of them is the median over the rounds of the
  ratio in each, so that what changes from round to round falls out.

Figures of one measurement may be compared; figures of two may not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ROUND_MS = 20.0
PAUSE_MS = 10.0
ROUNDS = 8
# More launches than the queue of the device holds would make the host wait.
MAX_CALLS = 250
# Fewer rounds have no median worth the name.
LEAST_ROUNDS = 3

Call = Callable[[], object]


class Stopwatch(Protocol):
    """Times ``count`` calls in a row; milliseconds of all of them together."""

    def __call__(self, call: Call, count: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds a call, one figure a round.

    Attributes
    ----------
    rounds_ms
        Mean over the calls of each round.
    calls_per_round
        How many calls a round holds.
    """

    rounds_ms: tuple[float, ...]
    calls_per_round: int

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds_ms)

    @property
    def min_ms(self) -> float:
        """The fastest round: what a cool card does."""
        return min(self.rounds_ms)

    @property
    def spread(self) -> float:
        """(slowest round - fastest round) / median: what is smaller than this is noise."""
        return (max(self.rounds_ms) - min(self.rounds_ms)) / self.median_ms

    def times_as_fast(self, other: Timing) -> float:
        """Median over the rounds of the other's time over ours; both of one measurement.

        Examples
        --------
        >>> Timing((1.0, 2.0, 1.0), 1).times_as_fast(Timing((2.0, 4.0, 3.0), 1))
        2.0
        """
        pairs = zip(self.rounds_ms, other.rounds_ms, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


def order(count: int, round_index: int) -> list[int]:
    """Who has which turn of a round: a row of a Williams design.

    Over ``count`` rounds everybody stands once at each place. Each follows each other once in that
    time if ``count`` is even, twice in twice that time if it is odd.

    Examples
    --------
    >>> [order(4, index) for index in range(4)]
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    row = [(step + round_index) % count for step in zigzag]
    return row[::-1] if count % 2 and round_index // count % 2 else row


def rest() -> None:
    """The pause before a turn."""
    time.sleep(PAUSE_MS * 1e-3)


def measure(
    calls: Mapping[str, Call],
    stopwatch: Stopwatch,
    *,
    rounds: int = ROUNDS,
    round_ms: float = ROUND_MS,
    budget_ms: float = math.inf,
    pause: Callable[[], None] = rest,
    on_step: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time calls against each other in interleaved rounds.

    Parameters
    ----------
    calls
        By name. Each has run before, so that nothing is compiled or tuned any more.
    stopwatch
        What times them.
    rounds
        Rounds to time; the median is over these. One more, before them, does not count.
    round_ms
        A turn lasts at least about this long.
    budget_ms
        Calls that last long are given fewer rounds, to stay within this, but at least three.
    pause
        Called before each turn.
    on_step
        Told the name whenever a call has been sized or has had its turn.

    Returns
    -------
    dict
        A `Timing` a name.
    """
    counts = {}
    for name, call in calls.items():
        counts[name] = _calls_per_round(call, stopwatch, round_ms)
        on_step(name)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}

    def one_round(index: int) -> float:
        total = 0.0
        for turn in order(len(names), index):
            name = names[turn]
            pause()
            elapsed = stopwatch(calls[name], counts[name])
            times[name].append(elapsed / counts[name])
            total += elapsed
            on_step(name)
        return total

    rehearsal_ms = one_round(0)
    if rounds * rehearsal_ms > budget_ms:
        rounds = min(rounds, max(LEAST_ROUNDS, int(budget_ms / rehearsal_ms)))
    for each in times.values():
        each.clear()
    for index in range(rounds):
        one_round(index)
    return {name: Timing(tuple(times[name]), counts[name]) for name in names}


def _calls_per_round(call: Call, stopwatch: Stopwatch, round_ms: float) -> int:
    """How many calls last about ``round_ms``."""
    once_ms = max(stopwatch(call, 1), 1e-3)
    if once_ms >= round_ms:
        return 1
    few = max(1, min(20, int(round_ms / once_ms)))  # a lone call overstates: the host lags behind
    each_ms = max(stopwatch(call, few) / few, 1e-4)
    return max(1, min(MAX_CALLS, math.ceil(round_ms / each_ms)))


class Clock(Protocol):
    """What a device's own clock is asked, through whichever library owns the stream."""

    def record(self) -> Any:
        """An event at this place of the current stream."""

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two events that have passed."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def hold(self, milliseconds: float) -> None:
        """Keep the current stream busy for about so long before what follows."""


class EventStopwatch:
    """Device time by events on the current stream, without the gaps of a slow host.

    Where the host needs about as long to launch the calls as the device to run them, the device is
    held back first, until all launches are in its queue; what a launch costs the host is another
    question.

    Parameters
    ----------
    clock
        The device's.
    before
        Called before each call, outside of what is timed: to overwrite a cache, for instance.
    """

    def __init__(self, clock: Clock, before: Call | None = None) -> None:
        self._clock = clock
        self._before = before

    def __call__(self, call: Call, count: int) -> float:
        elapsed_ms, host_ms = self._run(call, count, 0.0)
        if host_ms > 0.6 * elapsed_ms:
            elapsed_ms, _ = self._run(call, count, 1.3 * host_ms + 0.1)
        return elapsed_ms

    def _run(self, call: Call, count: int, hold_ms: float) -> tuple[float, float]:
        clock = self._clock
        if hold_ms:
            clock.hold(hold_ms)
        spans = []
        begin = time.perf_counter()
        if self._before is None:
            start = clock.record()
            for _ in range(count):
                call()
            spans.append((start, clock.record()))
        else:
            for _ in range(count):
                self._before()
                start = clock.record()
                call()
                spans.append((start, clock.record()))
        host_ms = (time.perf_counter() - begin) * 1e3
        clock.synchronize()
        return sum(clock.elapsed_ms(start, stop) for start, stop in spans), host_ms

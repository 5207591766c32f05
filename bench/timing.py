"""How long a call keeps the card busy: interleaved rounds, medians, and the state of the card.

All contenders of a case take turns: every round times each of them once, for about 20 ms, in an
order that moves on by one each round. So a card that warms up or slows down does so for all of
them, and figures of one case may be compared; figures of different runs may not.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ROUND_MS = 20.0
ROUNDS = 9
WARM_UP_MS = 60.0
# More launches than the queue of the device holds would make the host wait.
MAX_CALLS = 250

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
    def spread(self) -> float:
        """(slowest round - fastest round) / median: what is smaller than this is noise."""
        return (max(self.rounds_ms) - min(self.rounds_ms)) / self.median_ms


def measure(
    calls: Mapping[str, Call],
    stopwatch: Stopwatch,
    *,
    rounds: int = ROUNDS,
    round_ms: float = ROUND_MS,
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
        Rounds to time; the median is over these.
    round_ms
        A round of a call lasts at least about this long.
    on_step
        Told the name whenever a call has been sized or has finished a round.

    Returns
    -------
    dict
        A `Timing` a name.
    """
    counts = {}
    for name, call in calls.items():
        counts[name] = _calls_per_round(call, stopwatch, round_ms)
        on_step(name)
    for name, call in calls.items():  # everything is as warm as it will be from here on
        each_ms = stopwatch(call, counts[name]) / counts[name]
        extra = min(MAX_CALLS, int(WARM_UP_MS / each_ms)) - counts[name]
        if extra > 0:
            stopwatch(call, extra)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names) if names else 0
        for name in names[first:] + names[:first]:
            times[name].append(stopwatch(calls[name], counts[name]) / counts[name])
            on_step(name)
    return {name: Timing(tuple(times[name]), counts[name]) for name in names}


def _calls_per_round(call: Call, stopwatch: Stopwatch, round_ms: float) -> int:
    """How many calls last about ``round_ms``."""
    once_ms = max(stopwatch(call, 1), 1e-3)
    few = max(1, min(20, int(round_ms / once_ms)))  # a lone call overstates: the host lags behind
    each_ms = max(stopwatch(call, few) / few, 1e-4)
    return max(1, min(MAX_CALLS, math.ceil(round_ms / each_ms)))


class EventStopwatch:
    """Device time by CUDA events on the current stream, without the gaps of a slow host.

    Where the host needs about as long to launch the calls as the device to run them, the device is
    held back first, until all launches are in its queue; what a launch costs the host is another
    question, and ``python -m bench overhead`` answers it.

    Parameters
    ----------
    flush_l2
        Overwrite the L2 cache before each call, outside of what is timed.
    """

    def __init__(self, *, flush_l2: bool = False) -> None:
        import torch

        self._cuda = torch.cuda
        self._flush: Any = None
        if flush_l2:
            size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(max(2 * size, 1 << 26), dtype=torch.int8, device="cuda")

    def __call__(self, call: Call, count: int) -> float:
        elapsed_ms, host_ms = self._run(call, count, 0.0)
        if host_ms > 0.6 * elapsed_ms:
            elapsed_ms, _ = self._run(call, count, 1.3 * host_ms + 0.1)
        return elapsed_ms

    def _run(self, call: Call, count: int, hold_ms: float) -> tuple[float, float]:
        if hold_ms:
            self._cuda._sleep(int(hold_ms * 2e6))  # cycles; no card clocks above 2 GHz by much
        spans = []
        begin = time.perf_counter()
        if self._flush is None:
            start, stop = self._event(), self._event()
            start.record()
            for _ in range(count):
                call()
            stop.record()
            spans.append((start, stop))
        else:
            for _ in range(count):
                self._flush.zero_()
                start, stop = self._event(), self._event()
                start.record()
                call()
                stop.record()
                spans.append((start, stop))
        host_ms = (time.perf_counter() - begin) * 1e3
        self._cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in spans), host_ms

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)


class CardMonitor:
    """Notes clocks, power and temperature of the card while it is open, through nvidia-smi.

    Examples
    --------
    >>> with CardMonitor() as monitor:
    ...     pass
    >>> summary = monitor.summary()         # None where there is no nvidia-smi
    """

    FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu")

    def __init__(self, device_index: int = 0, period_ms: int = 200) -> None:
        self._command = [
            "nvidia-smi",
            f"--id={device_index}",
            f"--query-gpu={','.join(self.FIELDS)}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={period_ms}",
        ]
        self._process: subprocess.Popen[str] | None = None
        self._text = ""

    def __enter__(self) -> CardMonitor:
        try:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._text = self._process.communicate()[0]

    def summary(self) -> dict[str, float] | None:
        """Medians over the samples in which the card was busy; None without such samples."""
        return summarise_samples(self._text)


def summarise_samples(text: str) -> dict[str, float] | None:
    """Medians of ``clocks.sm, power.draw, temperature.gpu, utilization.gpu`` lines.

    Parameters
    ----------
    text
        Lines of numbers as nvidia-smi prints them; lines that are not four numbers are passed over.

    Returns
    -------
    dict or None
        ``sm_clock_mhz``, ``power_w``, ``temperature_c`` and ``samples`` over the lines with a
        utilisation of at least 50 %; None if there is none.
    """
    busy = []
    for line in text.splitlines():
        try:
            clock, power, temperature, load = map(float, line.split(","))
        except ValueError:
            continue
        if load >= 50:
            busy.append((clock, power, temperature))
    if not busy:
        return None
    clock, power, temperature = (statistics.median(column) for column in zip(*busy, strict=True))
    return {
        "sm_clock_mhz": clock,
        "power_w": power,
        "temperature_c": temperature,
        "samples": float(len(busy)),
    }

"""The clock of PyTorch's device, and the state of the card while it is measured.

How calls are timed against each other, and why that way, says ``streamkl_cupy/timing.py``, which
the package's own tuner uses, too.
"""

from __future__ import annotations

import statistics
import subprocess
from typing import Any

from streamkl_cupy.timing import EventStopwatch


class TorchClock:
    """Events and the current stream of PyTorch."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda

    def record(self) -> Any:
        """An event at this place of the current stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two events that have passed."""
        return float(start.elapsed_time(stop))

    def synchronize(self) -> None:
        """Wait for the device."""
        self._cuda.synchronize()

    def hold(self, milliseconds: float) -> None:
        """Keep the current stream busy for about so long."""
        self._cuda._sleep(int(milliseconds * 2e6))  # cycles; no card clocks above 2 GHz by much


def event_stopwatch(*, flush_l2: bool = False) -> EventStopwatch:
    """A stopwatch of PyTorch's device.

    Parameters
    ----------
    flush_l2
        Overwrite the L2 cache before each call, outside of what is timed.
    """
    if not flush_l2:
        return EventStopwatch(TorchClock())
    import torch

    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(max(2 * size, 1 << 26), dtype=torch.int8, device="cuda")
    return EventStopwatch(TorchClock(), before=flush.zero_)


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

"""What takes part in a measurement: a call, what it counts for, how its result is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Outputs = tuple[Any, ...]
Errors = dict[str, float]


class SkipError(Exception):
    """A contender cannot take part; the message says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that one call counts for.

    Attributes
    ----------
    amount
        Operations or bytes.
    unit
        ``"TFLOP/s"`` or ``"TB/s"``: of the rate.
    """

    amount: float
    unit: str

    def rate(self, milliseconds: float) -> float:
        """Amount over time, in `unit`.

        Examples
        --------
        >>> Work(3e12, "TFLOP/s").rate(10.0)
        300.0
        """
        return self.amount / (milliseconds * 1e-3) / 1e12


@dataclass(frozen=True, slots=True)
class Contender:
    """One entrant of a case.

    Attributes
    ----------
    name
        Row of the table. For the kernels of this package the name of the kernel.
    call
        What is timed; returns its outputs.
    check
        Errors of the outputs by name, against float64.
    tolerances
        The largest error that counts as right, for each name that `check` returns.
    work
        What a call counts for.
    detail
        Evaluated after the first call: the plan, the tiles that a tuning chose.
    ours
        Whether it belongs to this package, so that a failure is a failure of the run.
    """

    name: str
    call: Callable[[], Outputs]
    check: Callable[[Outputs], Errors]
    tolerances: Errors
    work: Work
    detail: Callable[[], str] = lambda: ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in the table and how to make its contender; ``make`` may raise `SkipError`."""

    name: str
    make: Callable[[], Contender]
    ours: bool = False

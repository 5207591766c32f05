"""Figures that the authors of StreamKL published for their own H200 (arXiv 2606.20005).

They were measured by others, on another machine, with their kernels under Triton 3.4. They stand in
a table of their own under "as published" and enter no comparison, bar or picture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .workloads import SMALL_Q, SQUARE, Workload


@dataclass(frozen=True, slots=True)
class Published:
    """One figure of the paper.

    Attributes
    ----------
    direction
        ``"forward"`` or ``"backward"``.
    workload
        The problem; the paper's batch is batch times heads.
    milliseconds
        As printed there.
    unit
        Of the rate that follows from it.
    """

    direction: str
    workload: Workload
    milliseconds: float
    unit: str = "TFLOP/s"

    @property
    def label(self) -> str:
        """For instance ``backward, Setting 1, BH = 32, N = 64K, causal``."""
        shape = self.workload
        setting = f", Setting {shape.setting}" if self.direction == "backward" else ""
        if shape.num_queries == shape.num_keys:
            lengths = f"N = {shape.num_keys // 1024}K, {'causal' if shape.causal else 'full'}"
        else:
            lengths = f"N_Q = {shape.num_queries}, N_K = {shape.num_keys // 1024}K"
        return f"{self.direction}{setting}, BH = {shape.heads}, {lengths}"

    @property
    def rate(self) -> float:
        """Operations or bytes, counted as the bench counts them, over the published time."""
        shape, is_forward = self.workload, self.direction == "forward"
        if self.unit == "TB/s":
            amount: float = shape.forward_bytes if is_forward else shape.backward_bytes
        else:
            amount = shape.forward_flops if is_forward else shape.backward_flops
        return amount / self.milliseconds / 1e9


def _square(length: int, *, causal: bool, setting: int = 1) -> Workload:
    lengths = {"num_queries": length, "num_keys": length}
    return replace(SQUARE, **lengths, causal=causal, setting=setting)


FIGURES = (
    Published("forward", _square(16384, causal=False), 13.0),
    Published("forward", _square(16384, causal=True), 7.7),
    Published("forward", _square(65536, causal=False), 231.0),
    Published("forward", _square(65536, causal=True), 122.0),
    Published("backward", _square(65536, causal=False), 511.0),
    Published("backward", _square(65536, causal=True), 260.0),
    Published("backward", _square(65536, causal=False, setting=2), 521.0),
    Published("backward", _square(65536, causal=True, setting=2), 278.0),
    Published("forward", SMALL_Q, 0.51, "TB/s"),
    Published("backward", SMALL_Q, 1.46, "TB/s"),
)

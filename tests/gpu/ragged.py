"""What the tests of padded batches and of packed sequences share: what is there is compared with
the same problems one by one, all else is poison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS
from tests.compare import assert_accurate
from tests.gpu.card import Expected, Library, matrix_unit_floor, run, upload, upload_all

# The kernels of each generation, as STREAMKL_FORCE names them; the plan's own where there are none.
GENERATIONS = {"own": (), "portable": ("forward_sm80", "backward_fused_sm80")}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 20)},
    "chunk": {"causal": True, "window": (100, None), "q_offset": 30},
}


class Part(NamedTuple):
    """Queries and keys that belong together."""

    batch: int
    rows: slice
    keys: slice

    def of(self, name: str) -> tuple[Any, ...]:
        """Where its rows of an array lie: an input, its gradient, or a value a query."""
        rows = self.keys if name.removeprefix("d") in ("k1", "k2") else self.rows
        return slice(self.batch, self.batch + 1), slice(None), rows


class ExpectedParts:
    """The reference and the textbook formula of each part, and what must be in between."""

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        parts: Sequence[Part],
        mask: Mapping[str, Any],
        wrt: Sequence[str] = INPUTS,
        *,
        has_offset: bool = False,
        of: Callable[..., Expected] = Expected,
    ) -> None:
        rows = inputs["q1"].shape[:-1]
        self.has_offset = has_offset
        self.values = {name: np.zeros(rows) for name in ("kl", "mass1")}
        self.values |= {name: np.full(rows, -np.inf) for name in ("lse1", "lse2")}
        self.values |= {"d" + name: np.zeros(inputs[name].shape) for name in wrt}
        self.baselines = {name: x.copy() for name, x in self.values.items()}
        self.outside = {name: np.ones(x.shape, bool) for name, x in self.values.items()}
        for part in parts:
            cut = {name: x[part.of(name)] for name, x in inputs.items()}
            expected = of(cut, mask, wrt)
            for name, value in expected.values.items():
                self.values[name][part.of(name)] = value
                self.baselines[name][part.of(name)] = expected.baselines[name]
                self.outside[name][part.of(name)] = False

    def check(self, ours: Mapping[str, np.ndarray]) -> None:
        for name, value in ours.items():
            outside = self.outside[name]
            rest = value[outside].astype(np.float32)
            assert (rest == self.values[name][outside].astype(np.float32)).all(), name
            exact, baseline = self.values[name], self.baselines[name]
            floor = matrix_unit_floor(name, baseline, exact) if self.has_offset else None
            assert_accurate(name, value, exact, baseline, floor)


def poison(
    inputs: Mapping[str, np.ndarray], parts: Sequence[Part], value: float
) -> dict[str, np.ndarray]:
    """A copy with the value in all that is in no part."""
    poisoned = {}
    for name, x in inputs.items():
        poisoned[name] = np.full_like(x, value)
        for part in parts:
            poisoned[name][part.of(name)] = x[part.of(name)]
    return poisoned


def to_packed(name: str, x: np.ndarray) -> np.ndarray:
    """Of one batch entry: heads behind the length, but where there is one value a query."""
    return x[0] if x.ndim == 3 else np.ascontiguousarray(x[0].swapaxes(0, 1))


def from_packed(x: np.ndarray) -> np.ndarray:
    return x[None] if x.ndim == 2 else x.swapaxes(0, 1)[None]


def upload_ragged(
    library: Library, inputs: Mapping[str, np.ndarray], lengths: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is ``(B, H, N, ...)``, packed if the lengths say so, and the lengths."""
    if "cu_seqlens_q" in lengths:
        inputs = {name: to_packed(name, x) for name, x in inputs.items()}
    on_card = {n: upload(library, np.array(x, np.int32)) for n, x in lengths.items()}
    return upload_all(library, inputs), on_card


def unpacked(
    results: Mapping[str, np.ndarray], lengths: Mapping[str, Sequence[int]]
) -> dict[str, np.ndarray]:
    """Results as ``(B, H, N, ...)``, be they packed or not."""
    is_packed = "cu_seqlens_q" in lengths
    return {name: from_packed(x) if is_packed else x for name, x in results.items()}


def run_ragged(
    library: Library,
    inputs: Mapping[str, np.ndarray],
    mask: Mapping[str, Any],
    lengths: Mapping[str, Sequence[int]],
    force: tuple[str, ...] = (),
    **choices: Any,
) -> dict[str, np.ndarray]:
    """Forward and backward; inputs and results are ``(B, H, N, ...)``, packed or not."""
    arrays, on_card = upload_ragged(library, inputs, lengths)
    kernels = dict(zip(("forward_kernel", "backward_kernel"), force, strict=False))
    with plan.override(**kernels):
        results = run(library, arrays, {**mask, **on_card}, into=True, **choices)
    return unpacked(results, lengths)

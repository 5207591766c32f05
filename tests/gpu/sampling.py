"""Holding sampled rows of a long problem against the accuracy rule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.compare import (
    assert_accurate,
    sample_rows,
    sampled_forward,
    sampled_key_gradients,
    sampled_query_gradients,
)

ROWS = ("kl", "lse1", "lse2")


class Samples:
    """The reference and the textbook formula on some query rows and key rows of one problem.

    Parameters
    ----------
    inputs
        ``q1 k1 q2 k2 dkl`` as NumPy arrays of rank 2 or 3, all of them.
    ours
        ``kl lse1 lse2`` of every query row, to be confirmed: a key's gradient needs all of them,
        and the reference would take long for it.
    rng
        Draws the rows.
    causal
        As in ``attention_kl``.
    num_rows, num_keys
        How many query rows and key rows.
    """

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        ours: Mapping[str, np.ndarray],
        rng: np.random.Generator,
        *,
        causal: bool,
        num_rows: int = 48,
        num_keys: int = 64,
    ) -> None:
        qk = [inputs[name] for name in INPUTS]
        problem = (inputs["dkl"], *qk)
        rows = sample_rows(rng, num_rows, inputs["q1"].shape[-2])
        keys = sample_rows(rng, num_keys, inputs["k1"].shape[-2])
        state = reference.ReferenceState(*(ours[name].astype(np.float64) for name in ROWS))
        self._positions = dict.fromkeys(("dq1", "dq2"), rows) | dict.fromkeys(("dk1", "dk2"), keys)
        self._rows = rows
        self._values: list[dict[str, np.ndarray]] = []
        for baseline in (False, True):
            how = {"causal": causal, "baseline": baseline}
            values = dict(zip(ROWS, sampled_forward(*qk, rows, **how), strict=True))
            queries = sampled_query_gradients(*problem, rows, wrt=("q1", "q2"), **how)
            values |= zip(("dq1", "dq2"), queries, strict=True)
            gradients = sampled_key_gradients(*problem, state, keys, wrt=("k1", "k2"), **how)
            values |= zip(("dk1", "dk2"), gradients, strict=True)
            self._values.append(values)

    def check(self, ours: Mapping[str, np.ndarray]) -> None:
        """Fail unless every output in `ours` keeps the accuracy rule on the sampled rows."""
        exact, textbook = self._values
        for name, values in ours.items():
            if name in ROWS:
                some = values[..., self._rows]
            else:
                some = values[..., self._positions[name], :]
            assert_accurate(name, some, exact[name], textbook[name])

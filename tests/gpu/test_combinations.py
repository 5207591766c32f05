"""Softcaps, lengths and float32 together: packed and padded sequences against each alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from streamkl_cupy.audit import error
from tests.gpu.card import Cupy, random_inputs, run, upload_all
from tests.gpu.ragged import run_ragged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ENDS = (0, 70, 71, 71, 200)
SOFTCAPS = {"softcap1": 2.0, "softcap2": 5.0}
# Other tiles, hence sums in another order, and gradients rounded to the dtype.
TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("softcaps", [{}, SOFTCAPS], ids=["plain", "softcap"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (40, 10)}], ids=str)
def test_packed(
    dtype: str,
    softcaps: dict[str, float],
    mask: dict[str, Any],
    cupy_library: Cupy,
    rng: np.random.Generator,
) -> None:
    options = mask | softcaps
    inputs = random_inputs(rng, dtype, num_queries=ENDS[-1], num_keys=ENDS[-1], head_dim1=128)
    lengths = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    ours = run_ragged(cupy_library, inputs, options, lengths)
    for first, end in itertools.pairwise(ENDS):
        if first == end:
            continue
        alone = {name: np.ascontiguousarray(x[:, :, first:end]) for name, x in inputs.items()}
        expected = run(cupy_library, upload_all(cupy_library, alone), options)
        part = {name: x[:, :, first:end] for name, x in ours.items()}
        assert_agree(part, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_padded(dtype: str, cupy_library: Cupy, rng: np.random.Generator) -> None:
    options = {"causal": True, **SOFTCAPS}
    inputs = random_inputs(rng, dtype, num_queries=150, num_keys=180, head_dim1=64)
    lengths = {"kv_starts": (20,), "kv_lens": (90,), "q_lens": (110,)}
    ours = run_ragged(cupy_library, inputs, options, lengths)
    rows = {"q": slice(0, 110), "k": slice(20, 110)}
    alone = {
        name: np.ascontiguousarray(x[:, :, rows["k" if name[0] == "k" else "q"]])
        for name, x in inputs.items()
    }
    expected = run(cupy_library, upload_all(cupy_library, alone), options)
    part = {name: x[:, :, rows["k" if name in ("dk1", "dk2") else "q"]] for name, x in ours.items()}
    assert_agree(part, expected, dtype)


def assert_agree(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], dtype: str) -> None:
    for name, values in expected.items():
        exact = values.astype(np.float64)
        off = error(ours[name].astype(np.float64), exact)
        # One row alone has a kl of 0.
        assert off <= (TOLERANCES[dtype] if name.startswith("d") else 1e-5), (name, off)

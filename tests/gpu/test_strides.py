"""Views go in as they are: expanded, sliced, transposed, packed, and with odd strides.

What lies between the elements of a view is NaN on the card, so whoever reads it is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    Expected,
    Library,
    forward_plan,
    random_inputs,
    run,
    upload,
    upload_all,
)
from tests.gpu.usage import Usage, padded

HEAD_DIM = 64
SHAPE = {"batch": 2, "heads": 4, "num_queries": 70, "num_keys": 90}

View = Callable[[np.ndarray], np.ndarray]


def within(*margins: tuple[int, int], step: tuple[int, ...] = (1, 1, 1, 1)) -> View:
    """A view of a larger array, with margins before and after along each axis, and steps."""

    def make(x: np.ndarray) -> np.ndarray:
        padding = margins or ((0, 0),) * 4
        lengths = zip(x.shape, padding, step, strict=True)
        base = np.empty([sum(margin) + n * by for n, margin, by in lengths], x.dtype)
        window = zip(x.shape, padding, step, strict=True)
        view = base[tuple(slice(m[0], m[0] + n * by, by) for n, m, by in window)]
        view[...] = x
        return view

    return make


def packed(x: np.ndarray) -> np.ndarray:
    """One of three in a projection ``(B, N, 3, H, D)``."""
    batch, heads, length, head_dim = x.shape
    base = np.empty((batch, length, 3, heads, head_dim), x.dtype)
    view = base[:, :, 1].swapaxes(1, 2)
    view[...] = x
    return view


def transposed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def batch_inside(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)


def expanded(*axes: int) -> View:
    """The first element along some axes, repeated with stride 0."""

    def make(x: np.ndarray) -> np.ndarray:
        first = x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
        return np.broadcast_to(np.ascontiguousarray(first), x.shape)

    return make


def overlapping(x: np.ndarray) -> np.ndarray:
    """Rows that share half of their elements with the next."""
    batch, heads, length, head_dim = x.shape
    step = head_dim // 2
    base = np.ascontiguousarray(x.reshape(batch, heads, -1)[..., : (length + 1) * step])
    strides = (*base.strides[:2], step * x.itemsize, x.itemsize)
    return np.lib.stride_tricks.as_strided(base, x.shape, strides)


NONE = (0, 0)
# The view, bytes that its address is off by, and whether the fast path takes it.
VIEWS: dict[str, tuple[View, int, bool]] = {
    "heads_sliced": (within(step=(1, 2, 1, 1)), 0, True),
    "rows_sliced": (within(step=(1, 1, 3, 1)), 0, True),
    "rows_from_5": (within(NONE, NONE, (5, 4), NONE), 0, True),
    "columns_from_8": (within(NONE, NONE, NONE, (8, 8)), 16, True),
    "columns_from_3": (within(NONE, NONE, NONE, (3, 5)), 6, False),
    "odd_rows": (within(NONE, NONE, NONE, (0, 1)), 0, False),
    "even_rows": (within(NONE, NONE, NONE, (0, 4)), 0, False),
    "transposed": (transposed, 0, True),
    "batch_inside": (batch_inside, 0, True),
    "packed": (packed, 0, True),
    "heads_expanded": (expanded(1), 0, True),
    "batch_expanded": (expanded(0), 0, True),
    "rows_expanded": (expanded(2), 0, True),
    "all_expanded": (expanded(0, 1, 2), 0, True),
    "overlapping": (overlapping, 0, True),
}

QUERIES, KEYS = ("q1", "q2"), ("k1", "k2")
# Over keys that are all the same the gradients are zero, and nothing to compare.
VIEWED = [(view, QUERIES) for view in VIEWS]
VIEWED += [
    (view, names)
    for view in VIEWS
    if view not in ("rows_expanded", "all_expanded")
    for names in (KEYS, INPUTS)
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize(("view", "names"), VIEWED, ids=lambda x: x if x in VIEWS else "_".join(x))
def test_a_view(
    view: str,
    names: tuple[str, ...],
    strategy: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    make, offset, is_aligned = VIEWS[view]
    inputs = random_inputs(rng, head_dim1=HEAD_DIM, **SHAPE)
    arrays = upload_all(cupy_library, inputs)
    for name in names:
        inputs[name] = make(inputs[name])
        arrays[name] = upload(cupy_library, inputs[name], offset)
    assert ("_guarded" not in forward_plan(arrays, {}).name) == is_aligned
    options = {"causal": True}
    results = run(cupy_library, arrays, options, strategy=strategy, into=True)
    Expected(inputs, options).check(results)


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_copied(view: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    make, offset, _ = VIEWS[view]
    inputs = random_inputs(rng, head_dim1=HEAD_DIM, **SHAPE)
    arrays = {name: upload(cupy_library, make(inputs[name]), offset) for name in INPUTS}
    rows = 2 * 4 * 70
    with Usage() as usage:
        state = skl.attention_kl(**arrays, return_state=True)
    assert usage.peak == 5 * padded(4 * rows)
    dkl = upload(cupy_library, inputs["dkl"])
    with Usage() as usage:
        gradients = skl.attention_kl_backward(dkl, **arrays, state=state, strategy="separate")
    assert usage.peak == padded(16 * rows) + sum(padded(2 * x.size) for x in gradients)


@pytest.mark.parametrize("view", ["heads_sliced", "odd_rows", "packed", "heads_expanded"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_view_of_torch(
    view: str, layout: str, rng: np.random.Generator, torch_library: Library
) -> None:
    make, offset, _ = VIEWS[view]
    inputs = random_inputs(rng, head_dim1=HEAD_DIM, **SHAPE)
    for name in INPUTS:
        inputs[name] = make(inputs[name])
    if layout == "bnhd":
        inputs = {name: array.swapaxes(1, 2) for name, array in inputs.items()}
    options = {"layout": layout}
    arrays = {name: upload(torch_library, x, offset) for name, x in inputs.items()}
    Expected(inputs, options).check(run(torch_library, arrays, options, into=True))


def test_torch_views_of_one_projection(
    torch: Any, torch_library: Library, rng: np.random.Generator
) -> None:
    # As a model makes them: nothing here is contiguous.
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    shape = (2, 70, 4, 4 * HEAD_DIM)
    projection = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    parts = projection.transpose(1, 2).split(HEAD_DIM, dim=-1)
    arrays = dict(zip(INPUTS, parts, strict=True))
    arrays["dkl"] = torch.ones((), device="cuda").expand(2, 4, 70)
    inputs = {name: torch_library.get(array) for name, array in arrays.items()}
    options = {"causal": True}
    assert "_guarded" not in forward_plan(arrays, options).name
    Expected(inputs, options).check(run(torch_library, arrays, options))


def test_a_negative_stride(rng: np.random.Generator, cupy_library: Cupy) -> None:
    arrays = upload_all(cupy_library, random_inputs(rng, **SHAPE))
    arrays["k1"] = arrays["k1"][:, :, ::-1]
    with pytest.raises(ValueError, match="k1: expected strides from 0 up"):
        skl.attention_kl(*(arrays[name] for name in INPUTS))

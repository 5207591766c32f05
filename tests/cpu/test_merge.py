"""States over parts of the keys become the state over all of them: the reference and the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.cases import draw
from tests.cpu.test_api_cpu import Jax, Numpy, Torch, put_all, random_inputs


def split_keys(
    arrays: dict[str, np.ndarray], ends: tuple[int, ...] | np.ndarray
) -> list[dict[str, np.ndarray]]:
    """The inputs of each part: all queries, the keys between two ends."""
    edges = [0, *ends, arrays["k1"].shape[-2]]
    return [
        arrays | {name: arrays[name][..., first:stop, :] for name in ("k1", "k2")}
        for first, stop in itertools.pairwise(edges)
    ]


def qk(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [arrays[name] for name in INPUTS]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_keys=st.integers(1, 60),
    num_parts=st.integers(1, 9),
    noise=st.sampled_from((0.0, 1e-3, 1.0)),
    offset=st.sampled_from((0.0, 1000.0)),
)
def test_any_split_in_any_order_is_the_whole(
    seed: int, num_keys: int, num_parts: int, noise: float, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    arrays = draw(rng, num_queries=5, num_keys=num_keys, head_dim1=8)
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    arrays["q2"] = arrays["q1"]
    # At a noise of 1e-3 kl is about 1e-6.
    arrays["k2"] = arrays["k1"] + noise * arrays["k2"]
    for name in INPUTS:
        extra = np.full((*arrays[name].shape[:-1], 1), offset if name[0] == "q" else 1.0)
        arrays[name] = np.concatenate([arrays[name], extra], axis=-1)
    options = {"scale1": 1.0, "scale2": 1.0}
    whole = reference.attention_kl(*qk(arrays), **options, return_state=True)
    # Equal ends make parts without keys.
    ends = np.sort(rng.integers(num_keys + 1, size=num_parts - 1))
    states = [
        reference.attention_kl(*qk(part), **options, return_state=True)
        for part in split_keys(arrays, ends)
    ]
    rng.shuffle(states)
    cut = int(rng.integers(num_parts))
    merged = [reference.merge_states(*states)]
    if cut:
        halves = (reference.merge_states(*half) for half in (states[:cut], states[cut:]))
        merged.append(reference.merge_states(*halves))
    for state in merged:
        np.testing.assert_allclose(state.kl, whole.kl, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state.lse1, whole.lse1, rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(state.lse2, whole.lse2, rtol=1e-14, atol=1e-14)
        if noise == 0:
            assert (state.kl == 0).all()


def test_a_part_that_the_teacher_does_not_reach(rng: np.random.Generator) -> None:
    # All of P1 on the first keys, P2 everywhere: the far part counts in lse2 alone.
    arrays = draw(rng, num_queries=3, num_keys=8, head_dim1=4)
    near, far = split_keys(arrays, (5,))
    first, second = (reference.attention_kl(*qk(part), return_state=True) for part in (near, far))
    nothing = np.full_like(second.lse1, -np.inf)
    merged = reference.merge_states(first, second._replace(lse1=nothing))
    lse2 = np.logaddexp(first.lse2, second.lse2)
    np.testing.assert_allclose(merged.kl, first.kl + lse2 - first.lse2, rtol=1e-13)
    np.testing.assert_array_equal(merged.lse1, first.lse1)


def test_what_is_not_finite_stays_in_its_row() -> None:
    kl, lse = np.array([0.5, 0.25, 0.0]), np.array([1.0, 2.0, 3.0])
    for bad in (np.nan, np.inf):
        broken = np.array([1.0, bad, 3.0])
        for state in (
            reference.ReferenceState(kl, broken, lse),
            reference.ReferenceState(kl, lse, broken),
        ):
            merged = reference.merge_states(state, reference.ReferenceState(kl, lse, lse))
            assert (np.isfinite(merged.kl) == [True, False, True]).all()


LIBRARIES = pytest.mark.parametrize("make", [Numpy, Torch, Jax])


@LIBRARIES
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradients_of_a_part_are_its_own(make: Any, layout: str, rng: np.random.Generator) -> None:
    """The keys of a part, with the state of the whole, get their slice of the whole's gradients."""
    library = make()
    inputs = random_inputs(rng, "float32", layout=layout)
    dkl = rng.standard_normal(inputs["q1"].shape[:-1]).astype(np.float32)
    options = {"scale1": 0.7, "scale2": -1.3, "layout": layout}
    state = reference.attention_kl(**inputs, **options, return_state=True)
    exact = reference.attention_kl_backward(dkl, **inputs, state=state, wrt=INPUTS, **options)
    axis = 2 if layout == "bhnd" else 1

    def part(first: int, stop: int) -> dict[str, Any]:
        keys = {n: np.take(inputs[n], range(first, stop), axis) for n in ("k1", "k2")}
        return put_all(library, inputs | keys)

    parts = [part(0, 3), part(3, 3), part(3, 7)]
    states = [skl.attention_kl(**x, **options, return_state=True) for x in parts]
    merged = skl.merge_states(*states)
    assert library.dtype(merged.kl) == library.kl_dtype
    np.testing.assert_allclose(library.get(merged.kl), state.kl, rtol=1e-5)
    np.testing.assert_allclose(library.get(merged.lse1), state.lse1, rtol=1e-6)
    found = [
        skl.attention_kl_backward(library.put(dkl), **x, state=merged, wrt=INPUTS, **options)
        for x in parts
    ]
    for i, name in enumerate(INPUTS):
        pieces = [library.get(gradients[i]).astype(np.float64) for gradients in found]
        got = np.concatenate(pieces, axis) if name[0] == "k" else sum(pieces)
        np.testing.assert_allclose(got, exact[i], atol=1e-5, err_msg=name)


@LIBRARIES
@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (3, None), "q_offset": -2}],
    ids=str,
)
def test_a_mask_runs_through_the_parts(
    make: Any, mask: dict[str, Any], rng: np.random.Generator
) -> None:
    """A part's offset is that of the whole less its first key; the window is the same."""
    library = make()
    inputs = random_inputs(rng, "float32")
    dkl = rng.standard_normal(inputs["q1"].shape[:-1]).astype(np.float32)
    exact = reference.attention_kl(**inputs, **mask, return_state=True)
    offset = mask.get("q_offset", inputs["k1"].shape[-2] - inputs["q1"].shape[-2])
    ends = (2, 3, 3)
    parts = [put_all(library, part) for part in split_keys(inputs, ends)]
    options = [mask | {"q_offset": offset - first} for first in (0, *ends)]
    states = [
        skl.attention_kl(**part, **own, return_state=True)
        for part, own in zip(parts, options, strict=True)
    ]
    merged = skl.merge_states(*states)
    for name in ("kl", "lse1", "lse2"):
        got = library.get(getattr(merged, name))
        np.testing.assert_allclose(got, getattr(exact, name), rtol=1e-5, atol=1e-6, err_msg=name)
    found = [
        skl.attention_kl_backward(library.put(dkl), **part, state=merged, wrt=INPUTS, **own)
        for part, own in zip(parts, options, strict=True)
    ]
    whole = reference.attention_kl_backward(dkl, **inputs, state=exact, wrt=INPUTS, **mask)
    for i, name in enumerate(INPUTS):
        pieces = [library.get(gradients[i]).astype(np.float64) for gradients in found]
        got = np.concatenate(pieces, 2) if name[0] == "k" else sum(pieces)
        np.testing.assert_allclose(got, whole[i], atol=1e-5, err_msg=name)


@LIBRARIES
def test_one_state_comes_out_as_it_is(make: Any, rng: np.random.Generator) -> None:
    library = make()
    arrays = put_all(library, random_inputs(rng, "float32"))
    state = skl.attention_kl(**arrays, return_state=True)
    merged = skl.merge_states(state)
    for name in ("kl", "lse1", "lse2"):
        got, same = library.get(getattr(merged, name)), library.get(getattr(state, name))
        np.testing.assert_array_equal(got, same)
        assert not np.shares_memory(got, same)


def test_out(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    states = [skl.attention_kl(**part, return_state=True) for part in split_keys(inputs, (2, 4))]
    rows = inputs["q1"].shape[:-1]
    out = skl.KLState(*(np.full(rows, np.nan) for _ in range(4)))
    assert skl.merge_states(*states, out=out) is out
    merged = skl.merge_states(*states)
    for name in ("kl", "lse1", "lse2"):
        np.testing.assert_array_equal(getattr(out, name), getattr(merged, name))
    assert (out.lse1_low == 0).all()


def test_low_parts_count() -> None:
    # Half of all mass is a difference of log-sum-exps of 2e-4, which float32 cannot hold at 1e5.
    high = np.full(3, 1e5, np.float32)
    low, zeros = np.full(3, 2e-4, np.float32), np.zeros(3, np.float32)
    shifted = skl.KLState(zeros, high, high, low, None)
    merged = skl.merge_states(shifted, skl.KLState(zeros, high, high))
    weight = 1 / (1 + np.exp(-2e-4))
    expected = weight * np.log(2 * weight) + (1 - weight) * np.log(2 * (1 - weight))
    # A step of float64 at 1e5 is 1.5e-11.
    np.testing.assert_allclose(merged.kl, expected, atol=1.5e-11)
    assert (merged.kl > 0).all()


def test_tensors_that_require_grad_are_refused() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.zeros(3)
    state = skl.KLState.from_lse(rows.clone().requires_grad_(), rows, rows)
    with pytest.raises(TypeError, match=r"states\[0\]\.kl: .*requires grad"):
        skl.merge_states(state)

"""Log-sum-exps that are given: the reference against finite differences, and the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.cases import draw
from tests.cpu.test_api_cpu import Jax, Numpy, Torch, put_all, random_inputs

GIVEN = (("lse1",), ("lse2",), ("lse1", "lse2"))
# One sequence has more queries than keys and one has none; a query and a key are in none.
ENDS = {"cu_seqlens_q": [1, 3, 3, 5], "cu_seqlens_k": [0, 1, 3, 5]}
SHAPE = {"batch": 2, "heads": 2, "num_queries": 5, "num_keys": 6, "head_dim1": 4}


def small(rng: np.random.Generator, **changes: Any) -> dict[str, np.ndarray]:
    return {n: x.astype(np.float64) for n, x in draw(rng, **SHAPE | changes).items()}


def outside(
    rng: np.random.Generator, arrays: dict[str, np.ndarray], given: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Log-sum-exps of more keys than there are: P1 and P2 add up to less than 1."""
    shape = arrays["q1"].shape[:-1]
    return {name: 2.0 + 0.5 * rng.random(shape) for name in given}


def qk(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [arrays[name] for name in INPUTS]


def given_state(arrays: dict[str, np.ndarray], **options: Any) -> reference.GivenState:
    state = reference.attention_kl(*qk(arrays), **options, return_state=True)
    assert isinstance(state, reference.GivenState)
    return state


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ({}, lambda i: 0, lambda i: 6),
        ({"causal": True}, lambda i: 0, lambda i: i + 2),
        ({"window": (2, 1)}, lambda i: max(0, i - 1), lambda i: min(6, i + 3)),
        # Query 0 sees none.
        ({"window": (1, 0), "q_offset": -1}, lambda i: max(0, i - 2), lambda i: i),
    ],
    ids=["full", "causal", "window", "offset"],
)
def test_the_definition(
    given: tuple[str, ...],
    options: dict[str, Any],
    begin: Callable[[int], int],
    end: Callable[[int], int],
    rng: np.random.Generator,
) -> None:
    arrays = small(rng, batch=1, heads=1)
    lse = outside(rng, arrays, given)
    state = given_state(arrays, **options, scale1=0.7, scale2=-0.4, **lse)
    assert state.given == given
    for i in range(5):
        seen = slice(begin(i), end(i))
        if seen.start == seen.stop:
            assert (state.kl[0, 0, i], state.mass1[0, 0, i]) == (0, 0)
            continue
        s1 = 0.7 * arrays["k1"][0, 0, seen] @ arrays["q1"][0, 0, i]
        s2 = -0.4 * arrays["k2"][0, 0, seen] @ arrays["q2"][0, 0, i]
        own = {"lse1": np.log(np.exp(s1).sum()), "lse2": np.log(np.exp(s2).sum())}
        used = own | {name: values[0, 0, i] for name, values in lse.items()}
        p1, p2 = np.exp(s1 - used["lse1"]), np.exp(s2 - used["lse2"])
        at = 0, 0, i
        np.testing.assert_allclose(state.kl[at], (p1 * np.log(p1 / p2)).sum(), rtol=1e-12)
        np.testing.assert_allclose(state.mass1[at], p1.sum(), rtol=1e-13)
        for name in ("lse1", "lse2"):
            np.testing.assert_allclose(getattr(state, name)[at], used[name], rtol=1e-13)


@pytest.mark.parametrize(
    ("given", "name"), [(given, name) for given in GIVEN for name in (*INPUTS, *given)], ids=str
)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"num_queries": 9, "num_keys": 5}, {"causal": True}),
        ({"num_queries": 9, "num_keys": 5}, {"window": (2, 1), "q_offset": -2}),
        ({"heads": 4, "key_heads1": 1, "key_heads2": 4}, {"scale1": -0.7, "scale2": 0.3}),
        ({}, {"causal": True, "kv_starts": [1, 0], "kv_lens": [4, 3], "q_lens": [5, 2]}),
        ({"heads": 4, "key_heads2": 2}, {"causal": True, **ENDS}),
        ({}, {"softcap1": 1.5, "softcap2": 0.8, "scale2": -0.4}),
        ({}, {"window": (2, 1), "softcap2": 0.8, **ENDS}),
    ],
)
def test_gradient_is_the_slope_of_the_value(
    given: tuple[str, ...],
    name: str,
    shape: dict[str, int],
    options: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    arrays = small(rng, **shape)
    lse = outside(rng, arrays, given)
    if "cu_seqlens_q" in options:
        lse = {n: x[0] for n, x in lse.items()}
        arrays = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in arrays.items()}
    state = given_state(arrays, **lse, **options)
    if name == "lse1":
        gradient = -arrays["dkl"] * (state.kl + state.mass1)
    elif name == "lse2":
        gradient = arrays["dkl"] * state.mass1
    else:
        (gradient,) = reference.attention_kl_backward(
            arrays["dkl"], *qk(arrays), state, wrt=(name,), **options
        )
    every = arrays | lse

    def value(step: np.ndarray) -> float:
        moved = every | {name: every[name] + step}
        kl = reference.attention_kl(*qk(moved), **{n: moved[n] for n in given}, **options)
        return float((arrays["dkl"] * kl).sum())

    size = 1e-3
    for index in np.ndindex(every[name].shape):
        step = np.zeros_like(every[name])
        step[index] = size
        slope = (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) / (
            12 * size
        )
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_rows_own_change_nothing(given: tuple[str, ...], rng: np.random.Generator) -> None:
    arrays = small(rng)
    plain = reference.attention_kl(*qk(arrays), return_state=True)
    state = given_state(arrays, **{name: getattr(plain, name) for name in given})
    np.testing.assert_array_equal(state.kl, plain.kl)
    assert (state.mass1 == 1).all()


def test_shares_of_all_keys_add_up(rng: np.random.Generator) -> None:
    """With the log-sum-exps of all keys, values and gradients of the parts make the whole."""
    arrays = small(rng)
    whole = reference.attention_kl(*qk(arrays), return_state=True)
    exact = reference.attention_kl_backward(arrays["dkl"], *qk(arrays), whole, wrt=("k2",))
    kl, mass, dk2 = 0.0, 0.0, []
    for first, stop in itertools.pairwise((0, 2, 3, 6)):
        part = arrays | {n: arrays[n][:, :, first:stop] for n in ("k1", "k2")}
        state = given_state(part, lse1=whole.lse1, lse2=whole.lse2)
        kl, mass = kl + state.kl, mass + state.mass1
        # The part's lse2 is a constant, and its own gradient what that leaves out.
        (explicit,) = reference.attention_kl_backward(arrays["dkl"], *qk(part), state, wrt=("k2",))
        dk2.append(explicit)
    np.testing.assert_allclose(kl, whole.kl, rtol=1e-12)
    np.testing.assert_allclose(mass, 1, rtol=1e-14)
    # ds2 = P2 - P1, of which -P1 is explicit and P2 comes by way of lse2, whose gradient is 1.
    s2 = 0.5 * arrays["q2"] @ arrays["k2"].swapaxes(2, 3)
    p2 = np.exp(s2 - whole.lse2[..., None]) * arrays["dkl"][..., None]
    by_lse2 = 0.5 * p2.swapaxes(2, 3) @ arrays["q2"]
    np.testing.assert_allclose(np.concatenate(dk2, 2) + by_lse2, exact[0], atol=1e-12)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_rows_without_keys_and_broken_rows(
    given: tuple[str, ...], rng: np.random.Generator
) -> None:
    arrays = small(rng, num_queries=8, num_keys=5)
    arrays["q2"][0, 0, 6, 1] = np.nan
    arrays["q1"][1, 1, 7, 1] = np.inf
    lse = outside(rng, arrays, given)
    state = given_state(arrays, causal=True, **lse)
    assert (state.kl[:, :, :3] == 0).all()
    assert (state.mass1[:, :, :3] == 0).all()
    assert (state.lse1[:, :, :3] == -np.inf).all()
    assert (state.lse2[:, :, :3] == -np.inf).all()
    plain = reference.attention_kl(*qk(arrays), causal=True, return_state=True)
    broken = np.isnan(state.kl)
    np.testing.assert_array_equal(broken, np.isnan(plain.kl))
    assert broken.sum() == 2
    # And so do the gradients, in the rows of plain ones.
    for name in INPUTS:
        mine, theirs = (
            reference.attention_kl_backward(
                arrays["dkl"], *qk(arrays), of, wrt=(name,), causal=True
            )[0]
            for of in (state, plain)
        )
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs), err_msg=name)


def test_equal_sides_with_equal_log_sum_exps_have_exactly_no_divergence(
    rng: np.random.Generator,
) -> None:
    arrays = small(rng)
    arrays |= {"q2": arrays["q1"], "k2": arrays["k1"]}
    (lse,) = outside(rng, arrays, ("lse1",)).values()
    state = given_state(arrays, lse1=lse, lse2=lse)
    assert (state.kl == 0).all()
    assert (state.mass1 != 1).all()


@pytest.mark.parametrize("make", [Numpy, Torch, Jax])
@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_every_library(
    make: Any,
    given: tuple[str, ...],
    layout: str,
    mask: dict[str, Any],
    rng: np.random.Generator,
) -> None:
    library = make()
    inputs = random_inputs(rng, "float32", layout=layout)
    rows = inputs["q1"].shape[:-1]
    lse = {name: rng.standard_normal(rows).astype(np.float32) + 2 for name in given}
    dkl = rng.standard_normal(rows).astype(np.float32)
    options = {**mask, "scale1": 0.7, "layout": layout}
    exact = given_state(inputs, **lse, **options)
    arrays, outer = put_all(library, inputs), put_all(library, lse)
    kl = library.get(skl.attention_kl(**arrays, **outer, **options))
    np.testing.assert_allclose(kl, exact.kl, rtol=1e-6)
    state = skl.attention_kl(**arrays, **outer, **options, return_state=True)
    assert state.given == given
    for name in ("kl", "lse1", "lse2", "mass1"):
        values = library.get(getattr(state, name))
        np.testing.assert_allclose(values, getattr(exact, name), rtol=1e-6)
    gradients = skl.attention_kl_backward(
        library.put(dkl), **arrays, state=state, wrt=INPUTS, **options
    )
    expected = reference.attention_kl_backward(dkl, **inputs, state=exact, wrt=INPUTS, **options)
    for got, gradient in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(library.get(got), gradient, rtol=1e-5, atol=1e-6)


def test_out(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    rows = inputs["q1"].shape[:-1]
    lse = {"lse2": rng.random(rows) + 2}
    out = skl.KLState(
        *(np.full(rows, np.nan) for _ in range(5)), mass1=np.full(rows, np.nan), given=("lse2",)
    )
    assert skl.attention_kl(**inputs, **lse, return_state=True, out=out) is out
    state = skl.attention_kl(**inputs, **lse, return_state=True)
    for name in ("kl", "lse1", "lse2", "mass1"):
        np.testing.assert_array_equal(getattr(out, name), getattr(state, name))
    assert (out.lse2_low == 0).all()


def test_a_given_tensor_that_requires_grad_points_to_the_other_door() -> None:
    torch = pytest.importorskip("torch")
    q, k = torch.ones(2, 8), torch.eye(3, 8)
    with pytest.raises(TypeError, match=r"lse1: .*call streamkl_cupy.torch"):
        skl.attention_kl(q, k, q, k, lse1=torch.ones(2, requires_grad=True))

"""`streamkl_cupy.jax` on the CPU: values, gradients, transformations and errors.

The road to a card is taken too, on a card that is only pretended: memory of the host stands for
that of the card, and the launches compute with the reference through the addresses they get.
"""

# ruff: noqa: E402 - what is imported below needs JAX

from __future__ import annotations

import ctypes
import doctest
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import ml_dtypes
from jax import numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

import streamkl_cupy.jax as door
from streamkl_cupy import api, interop, plan, reference
from streamkl_cupy.jax import attention_kl
from streamkl_cupy.problem import INPUTS, Problem, Strides, check_gpu, gradient_strides
from tests.cases import draw
from tests.compare import assert_all_accurate

ROOT = Path(__file__).resolve().parents[2]
SUBSETS = [names for n in range(1, 5) for names in itertools.combinations(INPUTS, n)]
FACTS = plan.device_facts("sm_90a")
CPU = jax.local_devices(backend="cpu")[0]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(CPU):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def problem_in(rng: np.random.Generator, dtype: Any, **shape: Any) -> list[Any]:
    """``q1 k1 q2 k2`` as JAX arrays."""
    arrays = draw(rng, **({"num_queries": 5, "num_keys": 7, "head_dim1": 8} | shape))
    return [jnp.asarray(arrays[name], dtype) for name in INPUTS]


def kl_of(inputs: list[Any], **options: Any) -> np.ndarray:
    kl = reference.attention_kl(*map(np.asarray, inputs), **options)
    assert isinstance(kl, np.ndarray)
    return kl


def backward_of(function: Callable[..., Any], *inputs: Any) -> list[tuple[str, ...]]:
    """``wrt`` of each backward in the jaxpr of the gradient of a function."""
    found: list[tuple[str, ...]] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "streamkl_backward":
                found.append(equation.params["wrt"])
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    walk(value.jaxpr)

    walk(jax.make_jaxpr(function)(*inputs).jaxpr)
    return found


# -------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (2, 1), "q_offset": -2}], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_output_keeps_the_accuracy_rule(
    dtype: str, mask: dict[str, Any], layout: str, rng: np.random.Generator
) -> None:
    shape = {"batch": 2, "heads": 4, "key_heads1": 2, "key_heads2": 1, "head_dim2": 16}
    host = draw(rng, num_queries=9, num_keys=6, head_dim1=8, **shape)
    if layout == "bnhd":
        host = {name: x.swapaxes(1, 2) for name, x in host.items()}
    options = {**mask, "layout": layout, "scale1": 0.5}
    inputs = [jnp.asarray(host[name], dtype) for name in INPUTS]

    def weighted(*inputs: Any) -> Any:
        kl, lse1, lse2 = attention_kl(*inputs, **options, return_lse=True)
        return (kl * host["dkl"]).sum(), (kl, lse1, lse2)

    (_, rows), gradients = jax.value_and_grad(weighted, argnums=(0, 1, 2, 3), has_aux=True)(*inputs)
    assert all(x.dtype == jnp.float32 for x in rows)
    assert [x.dtype for x in gradients] == [dtype] * 4
    results = dict(zip(("kl", "lse1", "lse2"), rows, strict=True))
    results |= {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    taken = {name: np.asarray(x) for name, x in zip(INPUTS, inputs, strict=True)}
    ours = {name: np.asarray(x) for name, x in results.items()}
    assert_all_accurate(ours, taken | {"dkl": host["dkl"]}, options)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks(rank: int, rng: np.random.Generator) -> None:
    inputs = [x.reshape(x.shape[4 - rank :]) for x in problem_in(rng, "float32", heads=1)]
    kl = attention_kl(*inputs, layout="bnhd" if rank < 4 else "bhnd")
    assert kl.shape == inputs[0].shape[:-1]
    np.testing.assert_allclose(kl, kl_of(inputs), rtol=1e-5)


def test_numpy_arrays_go_in(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32")
    kl = attention_kl(*map(np.asarray, inputs))
    assert isinstance(kl, jax.Array)
    assert np.array_equal(kl, attention_kl(*inputs))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    batch, heads, num_queries, num_keys = shape
    q = jnp.ones((batch, heads, num_queries, 8))
    k = jnp.ones((batch, heads, num_keys, 8))
    for reduction in ("sum", "mean", "batchmean"):
        kl, gradients = jax.value_and_grad(
            lambda *inputs, r=reduction: attention_kl(*inputs, reduction=r), (0, 1, 2, 3)
        )(q, k, q, k)
        assert kl == 0
        assert all((gradient == 0).all() for gradient in gradients)


def test_float64_stays_float64(x64: None, rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float64")
    kl, lse1, _ = attention_kl(*inputs, return_lse=True)
    assert kl.dtype == lse1.dtype == np.float64
    assert np.array_equal(kl, kl_of(inputs))
    assert attention_kl(*(x.astype("float32") for x in inputs)).dtype == np.float32


# -------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "scale1": -0.7}, {"softcap1": 1.5, "softcap2": 0.8}],
    ids=["full", "causal", "softcap"],
)
@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
def test_gradients_against_finite_differences(
    reduction: str, options: dict[str, Any], x64: None, rng: np.random.Generator
) -> None:
    inputs = problem_in(rng, "float64", batch=2, heads=2, key_heads2=1)
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, 1, 5)))

    def loss(*arguments: Any) -> Any:
        *inputs, weights = arguments
        return attention_kl(*inputs, reduction=reduction, row_weights=weights, **options)

    arguments = [*inputs, weights]
    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*arguments)
    step = 1e-5
    for position, gradient in enumerate(gradients):
        direction = jnp.asarray(rng.normal(size=arguments[position].shape))
        sides = []
        for sign in (1, -1):
            moved = arguments[position] + sign * step * direction
            sides.append(loss(*arguments[:position], moved, *arguments[position + 1 :]))
        measured = float(sides[0] - sides[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(measured, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_entropies(
    mask: dict[str, Any], layout: str, return_lse: bool, x64: None, rng: np.random.Generator
) -> None:
    inputs = problem_in(rng, "float64", batch=2, heads=2)
    if layout == "bnhd":
        inputs = [x.swapaxes(1, 2) for x in inputs]
    options = {**mask, "layout": layout}
    exact = reference.attention_kl(*map(np.asarray, inputs), **options, return_entropy=True)
    names = ("lse1", "lse2") * return_lse + ("entropy", "cross_entropy")

    def loss(*x: Any) -> Any:
        kl, *rows = attention_kl(*x, **options, return_lse=return_lse, return_entropy=True)
        # Nothing comes back through the others.
        return kl.sum() + sum(row.sum() for row in rows), rows

    gradients, rows = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*inputs)
    for name, row in zip(names, rows, strict=True):
        np.testing.assert_array_equal(row, getattr(exact, name))
    plain = jax.grad(lambda *x: attention_kl(*x, **options).sum(), (0, 1, 2, 3))(*inputs)
    for one, other in zip(gradients, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(
        ValueError, match=r"^return_entropy: expected False with given log-sum-exps"
    ):
        attention_kl(*inputs, lse2=rows[0], return_entropy=True)


GIVEN = (("lse1",), ("lse2",), ("lse1", "lse2"))


def draw_lse(
    rng: np.random.Generator, inputs: list[Any], given: tuple[str, ...], dtype: str
) -> list[Any]:
    return [jnp.asarray(rng.uniform(2, 3, inputs[0].shape[:-1]), dtype) for _ in given]


@pytest.mark.parametrize("given", GIVEN, ids="_".join)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_given_log_sum_exps(
    given: tuple[str, ...],
    layout: str,
    mask: dict[str, Any],
    x64: None,
    rng: np.random.Generator,
) -> None:
    inputs = problem_in(rng, "float64", batch=2, heads=2, key_heads2=1)
    if layout == "bnhd":
        inputs = [x.swapaxes(1, 2) for x in inputs]
    lse = draw_lse(rng, inputs, given, "float64")
    options = {**mask, "layout": layout}
    exact = reference.attention_kl(
        *map(np.asarray, inputs), **dict(zip(given, lse, strict=True)), **options, return_state=True
    )
    named = dict(zip(given, lse, strict=True))
    for ours, theirs in zip(
        attention_kl(*inputs, **named, **options, return_lse=True), exact, strict=False
    ):
        np.testing.assert_array_equal(ours, theirs)

    def loss(*arguments: Any) -> Any:
        outer = dict(zip(given, arguments[4:], strict=True))
        return attention_kl(*arguments[:4], **outer, **options, reduction="sum")

    arguments = [*inputs, *lse]
    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(len(arguments)))))(*arguments)
    step = 1e-5
    for position, gradient in enumerate(gradients):
        direction = jnp.asarray(rng.normal(size=arguments[position].shape))
        sides = []
        for sign in (1, -1):
            moved = arguments[position] + sign * step * direction
            sides.append(loss(*arguments[:position], moved, *arguments[position + 1 :]))
        measured = float(sides[0] - sides[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(measured, rel=1e-6, abs=1e-9)


def test_given_ones_that_are_stopped_cost_nothing(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32")
    (lse1,) = draw_lse(rng, inputs, ("lse1",), "bfloat16")

    def loss(q2: Any, lse1: Any) -> Any:
        return attention_kl(*inputs[:2], q2, inputs[3], lse1=lse1, reduction="sum")

    assert backward_of(jax.grad(loss), inputs[2], lse1) == [("q2",)]
    # Its own gradient comes of the rows alone.
    assert backward_of(jax.grad(loss, 1), inputs[2], lse1) == []
    gradient = jax.grad(loss, 1)(inputs[2], lse1)
    assert (gradient.dtype, gradient.shape) == (jnp.bfloat16, lse1.shape)
    with pytest.raises(NotImplementedError, match="has first derivatives only"):
        jax.grad(lambda x: jax.grad(loss, 1)(inputs[2], x).sum())(lse1)


@pytest.mark.parametrize("given", GIVEN, ids="_".join)
def test_given_ones_under_vmap(given: tuple[str, ...], rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32")
    lse = draw_lse(rng, [jnp.stack([inputs[0]] * 3)], given, "float32")

    def gradients(*x: Any) -> Any:
        return jax.grad(
            lambda *x: attention_kl(*x[:4], **dict(zip(given, x[4:], strict=True))).sum(),
            argnums=tuple(range(4 + len(given))),
        )(*x)

    axes = (None,) * 4 + (0,) * len(given)
    ours = jax.vmap(gradients, axes)(*inputs, *lse)
    for i in range(3):
        each = gradients(*inputs, *(x[i] for x in lse))
        for one, other in zip(ours, each, strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-6)


def test_given_ones_that_do_not_fit(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32")
    rows = inputs[0].shape[:-1]
    for lse, error, text in (
        (1.0, TypeError, r"^lse2: expected an array of JAX or NumPy, got builtins.float"),
        (jnp.zeros(rows[:-1]), ValueError, r"^lse2: expected the shape of kl"),
        (jnp.zeros(rows, "int32"), TypeError, r"^lse2: expected bfloat16, float16, float32"),
    ):
        with pytest.raises(error, match=text):
            attention_kl(*inputs, lse2=lse)


@pytest.mark.parametrize("wrt", SUBSETS, ids="_".join)
def test_only_the_gradients_wanted_are_computed(
    wrt: tuple[str, ...], rng: np.random.Generator
) -> None:
    inputs = problem_in(rng, "float32")
    positions = tuple(INPUTS.index(name) for name in wrt)

    def loss(*inputs: Any) -> Any:
        return attention_kl(*inputs, reduction="sum")

    everything = jax.grad(loss, (0, 1, 2, 3))(*inputs)
    some = jax.grad(loss, positions)
    assert backward_of(some, *inputs) == [wrt]
    assert backward_of(jax.jit(some), *inputs) == [wrt]
    for position, gradient in zip(positions, some(*inputs), strict=True):
        assert np.array_equal(gradient, everything[position])


def test_what_is_stopped_costs_nothing(rng: np.random.Generator) -> None:
    q1, k1, q2, k2 = problem_in(rng, "float32")

    def loss(weight: Any) -> Any:
        teacher = jax.lax.stop_gradient((weight * q1, weight * k1))
        return attention_kl(*teacher, weight * q2, k2, reduction="mean")

    assert backward_of(jax.grad(loss), jnp.float32(2)) == [("q2",)]


def test_no_gradient_no_backward(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32")

    def constant(x: Any) -> Any:
        return attention_kl(*inputs, reduction="sum") + x

    assert jax.grad(constant)(1.0) == 1
    assert backward_of(jax.grad(constant), 1.0) == []

    # Of what depends on an input through a log-sum-exp alone there is none either.
    def through_lse(k2: Any) -> Any:
        return attention_kl(*inputs[:3], k2, return_lse=True)[2].sum()

    assert (jax.grad(through_lse)(inputs[3]) == 0).all()


def test_a_zero_coefficient_gives_zeros(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "bfloat16")
    gradients = jax.grad(lambda *x: 0.0 * attention_kl(*x, reduction="mean"), (0, 1, 2, 3))(*inputs)
    assert all((gradient == 0).all() for gradient in gradients)


def test_rematerialisation_and_loops(rng: np.random.Generator) -> None:
    q1, k1, q2, k2 = problem_in(rng, "float32")

    def loss(k2: Any) -> Any:
        return attention_kl(q1, k1, q2, k2, reduction="sum")

    def looped(k2: Any) -> Any:
        def body(total: Any, scale: Any) -> tuple[Any, None]:
            return total + jax.checkpoint(loss)(scale * k2), None

        return jax.lax.scan(body, 0.0, jnp.array([1.0, 2.0]))[0]

    expected = jax.grad(loss)(k2) + 2 * jax.grad(loss)(2 * k2)
    np.testing.assert_allclose(jax.jit(jax.grad(looped))(k2), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: jax.hessian(f)(x),
        lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
        lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    ],
    ids=["hessian", "grad_of_grad", "jvp_of_grad"],
)
def test_second_derivatives_are_refused(derivative: Any, rng: np.random.Generator) -> None:
    *others, k2 = problem_in(rng, "float32")
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        derivative(lambda k2: attention_kl(*others, k2, reduction="sum"), k2)


def test_forward_mode_is_refused(rng: np.random.Generator) -> None:
    *others, k2 = problem_in(rng, "float32")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda k2: attention_kl(*others, k2), (k2,), (k2,))


# -------------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    ("mask", "first", "stop"),
    [
        ({}, 0, 5),
        ({"causal": True}, 2, 5),
        ({"window": (0, None), "q_offset": 1}, 0, 2),
        ({"window": (1, 0), "q_offset": -1}, 1, 5),
    ],
    ids=str,
)
def test_reductions(
    mask: dict[str, Any], first: int, stop: int, layout: str, rng: np.random.Generator
) -> None:
    # Of the five queries those from first on and before stop see a key.
    inputs = problem_in(rng, "float32", batch=3, heads=2, num_keys=3)
    if layout == "bnhd":
        inputs = [x.swapaxes(1, 2) for x in inputs]
    options = {**mask, "layout": layout}
    kl = np.asarray(attention_kl(*inputs, **options))
    seen = np.zeros(kl.shape, bool)
    rows = seen.swapaxes(1, 2) if layout == "bnhd" else seen
    rows[:, :, first:stop] = True
    weights = rng.uniform(0, 2, kl.shape).astype(np.float32)
    expected = {
        "none": (kl, kl * weights),
        "sum": (kl.sum(), (kl * weights).sum()),
        "mean": (kl[seen].mean(), (kl * weights).sum() / weights[seen].sum()),
        "batchmean": (kl.sum() / 3, (kl * weights).sum() / 3),
    }
    for reduction, (plain, weighted) in expected.items():
        got = attention_kl(*inputs, **options, reduction=reduction)
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)
        got = attention_kl(*inputs, **options, reduction=reduction, row_weights=weights)
        np.testing.assert_allclose(got, weighted, rtol=1e-5, atol=1e-6)


def test_batchmean_of_lower_ranks(rng: np.random.Generator) -> None:
    inputs = [x[0] for x in problem_in(rng, "float32", heads=3)]
    kl = kl_of(inputs)
    np.testing.assert_allclose(
        attention_kl(*inputs, reduction="batchmean"), kl.sum() / 3, rtol=1e-5
    )
    got = attention_kl(*(x[1] for x in inputs), reduction="batchmean")
    np.testing.assert_allclose(got, kl[1].sum(), rtol=1e-5)


def test_weights_of_bools_and_of_nothing(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32", batch=2)
    mask = np.array([[[1, 1, 0, 0, 0]], [[1, 1, 1, 1, 0]]], bool)
    kl = kl_of(inputs)
    expected = kl[np.broadcast_to(mask, kl.shape)].mean()
    got = attention_kl(*inputs, reduction="mean", row_weights=mask)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    nothing = np.zeros((), np.float32)
    assert attention_kl(*inputs, reduction="mean", row_weights=nothing) == 0


# -------------------------------------------------------------------------------------------------
# Ragged batches

LENGTHS_OF: dict[str, dict[str, list[int]]] = {
    "right": {"kv_lens": [7, 3], "q_lens": [5, 0]},
    "left": {"kv_starts": [2, 7]},
    "packed": {"cu_seqlens_q": [0, 2, 2, 4], "cu_seqlens_k": [1, 4, 6, 7]},
}


def ragged(
    name: str, rng: np.random.Generator, dtype: Any = "float32"
) -> tuple[list[Any], dict[str, Any]]:
    inputs = problem_in(rng, dtype, batch=2, heads=4, key_heads1=2)
    if name == "packed":
        inputs = [x[0].swapaxes(0, 1) for x in inputs]
    return inputs, {n: jnp.asarray(x, jnp.int32) for n, x in LENGTHS_OF[name].items()}


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (1, 1), "q_offset": 1}], ids=str)
@pytest.mark.parametrize("name", LENGTHS_OF)
def test_ragged_values_and_gradients(
    name: str, mask: dict[str, Any], rng: np.random.Generator, x64: None
) -> None:
    inputs, lengths = ragged(name, rng, "float64")
    kl, lse1, _, entropy, cross_entropy = attention_kl(
        *inputs, **mask, **lengths, return_lse=True, return_entropy=True
    )
    exact = reference.attention_kl(*inputs, **mask, **lengths, return_entropy=True)
    for ours, expected in (
        (kl, exact.kl),
        (lse1, exact.lse1),
        (entropy, exact.entropy),
        (cross_entropy, exact.cross_entropy),
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-12)
    dkl = jnp.asarray(rng.standard_normal(kl.shape))
    gradients = jax.grad(lambda *x: (attention_kl(*x, **mask, **lengths) * dkl).sum(), range(4))(
        *inputs
    )
    exact_gradients = reference.attention_kl_backward(
        dkl, *inputs, exact, wrt=INPUTS, **mask, **lengths
    )
    for ours, expected in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)
    lse = jnp.asarray(rng.standard_normal(kl.shape))
    own = attention_kl(*inputs, lse1=lse, **mask, **lengths)
    given = reference.attention_kl(*inputs, lse1=lse, **mask, **lengths)
    np.testing.assert_allclose(own, given, rtol=1e-10)
    of_lse = jax.grad(lambda lse: attention_kl(*inputs, lse1=lse, **mask, **lengths).sum())(lse)
    step = 1e-6
    rows = [
        reference.attention_kl(*inputs, lse1=lse + sign * step, **mask, **lengths)
        for sign in (1, -1)
    ]
    np.testing.assert_allclose(of_lse, (rows[0] - rows[1]) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LENGTHS_OF)
def test_ragged_reductions(name: str, weighted: bool, rng: np.random.Generator) -> None:
    inputs, lengths = ragged(name, rng)
    kl, lse1, _ = attention_kl(*inputs, **lengths, return_lse=True)
    weights = jnp.asarray(rng.random(kl.shape), kl.dtype) if weighted else None
    of_rows = jnp.ones_like(kl) if weights is None else weights
    seen = jnp.isfinite(lse1)
    assert 0 < seen.sum() < seen.size
    total = (kl * of_rows).sum()
    expected = {
        "sum": total,
        "mean": total / (of_rows * seen).sum(),
        "batchmean": total / (3 if name == "packed" else 2),
    }
    for reduction, value in expected.items():
        ours = attention_kl(*inputs, **lengths, reduction=reduction, row_weights=weights)
        np.testing.assert_allclose(ours, value, rtol=1e-5)
    if name == "right":
        nothing = jnp.zeros(2, jnp.int32)
        assert attention_kl(*inputs, kv_lens=nothing, reduction="mean") == 0


def test_what_comes_back_to_padding_does_not_matter(rng: np.random.Generator) -> None:
    inputs, lengths = ragged("right", rng)
    lse = draw_lse(rng, inputs, ("lse1", "lse2"), "float32")

    def function(*x: Any) -> Any:
        return attention_kl(*x[:4], lse1=x[4], lse2=x[5], **lengths, return_lse=True)[:2]

    _, back, lse1 = jax.vjp(function, *inputs, *lse, has_aux=True)
    is_padding = np.asarray(lse1 == -np.inf)
    assert 0 < is_padding.sum() < is_padding.size
    dkl = rng.standard_normal(is_padding.shape).astype(np.float32)
    expected = back(jnp.asarray(np.where(is_padding, 0, dkl)))
    ours = back(jnp.asarray(np.where(is_padding, np.nan, dkl)))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for of_lse in ours[4:]:
        np.testing.assert_array_equal(np.asarray(of_lse) == 0, is_padding)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_ends_that_decrease_are_refused(name: str, rng: np.random.Generator) -> None:
    inputs, lengths = ragged("packed", rng)
    wrong = lengths | {name: jnp.asarray([0, 5, 3, 5], jnp.int32)}
    # XLA words the error around it.
    with pytest.raises(Exception, match=rf"{name}: expected ends that never decrease.*3 after 5"):
        np.asarray(attention_kl(*inputs, **wrong))


def test_ragged_under_vmap(rng: np.random.Generator) -> None:
    inputs, lengths = ragged("right", rng)
    several = [jnp.stack([x, 2 * x]) for x in inputs]
    lens = jnp.stack([lengths["kv_lens"], jnp.asarray([1, 7], jnp.int32)])

    def loss(q1: Any, k1: Any, q2: Any, k2: Any, lens: Any) -> Any:
        return attention_kl(q1, k1, q2, k2, kv_lens=lens, reduction="mean")

    mapped = jax.vmap(jax.grad(loss, (0, 3)))(*several, lens)
    for idx in range(2):
        alone = jax.grad(loss, (0, 3))(*(x[idx] for x in several), lens[idx])
        for ours, exact in zip(mapped, alone, strict=True):
            np.testing.assert_allclose(ours[idx], exact, rtol=1e-5, atol=1e-6)
    packed, ends = ragged("packed", rng)
    with pytest.raises(NotImplementedError, match="got packed sequences; call it once for each"):
        jax.vmap(lambda x: attention_kl(x, *packed[1:], **ends))(jnp.stack([packed[0]] * 2))


def test_lengths_that_do_not_fit(rng: np.random.Generator) -> None:
    inputs, lengths = ragged("right", rng)
    with pytest.raises(TypeError, match=r"^kv_lens: expected an array of JAX or NumPy"):
        attention_kl(*inputs, kv_lens=[7, 3])
    with pytest.raises(TypeError, match=r"^kv_lens: expected int32, got float32"):
        attention_kl(*inputs, kv_lens=lengths["kv_lens"].astype("float32"))
    with pytest.raises(ValueError, match=r"^q_lens: expected one length a batch entry"):
        attention_kl(*inputs, q_lens=jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected an array together with"):
        attention_kl(*inputs, cu_seqlens_q=lengths["kv_lens"])
    with pytest.raises(TypeError, match="max_seqlen_q: expected a value that is known when traced"):
        jax.jit(lambda n: attention_kl(*inputs, max_seqlen_q=n))(3)


@pytest.mark.parametrize("name", LENGTHS_OF)
def test_ragged_on_a_card(name: str, card: Card, rng: np.random.Generator) -> None:
    inputs, lengths = ragged(name, rng, "bfloat16")
    arrays = [np.asarray(x) for x in inputs]
    on_host = {n: np.asarray(x) for n, x in lengths.items()}
    state = reference.attention_kl(*arrays, causal=True, **on_host, return_state=True)
    weights = rng.standard_normal(state.kl.shape).astype(np.float32)

    def weighted(*x: Any) -> Any:
        kl = attention_kl(*x, causal=True, **lengths)
        return (kl * weights).sum(), kl

    (_, kl), gradients = jax.value_and_grad(weighted, (0, 1, 2, 3), has_aux=True)(*inputs)
    np.testing.assert_allclose(kl, state.kl, rtol=1e-6)
    assert isinstance(state, reference.ReferenceState)
    expected = reference.attention_kl_backward(
        weights, *arrays, state, wrt=INPUTS, causal=True, **on_host
    )
    for ours, exact in zip(gradients, expected, strict=True):
        size = np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=size * 2.0**-7)
    suffix = "_packed" if name == "packed" else "_padded"
    assert all(chosen.name.endswith(suffix) for chosen in card.launched)


# -------------------------------------------------------------------------------------------------
# Transformations


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, 0, None), (1, 2, None, 3), (None,) * 4])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_vmap(rank: int, axes: tuple[Any, ...], rng: np.random.Generator) -> None:
    if all(axis is None for axis in axes):
        axes = (*axes[:3], 0)
    heads = {"heads": 4, "key_heads1": 2, "key_heads2": 1} if rank > 2 else {"heads": 1}
    batch = {"batch": 2} if rank == 4 else {}
    problems = [problem_in(rng, "float32", **heads, **batch) for _ in range(3)]
    problems = [[x.reshape(x.shape[4 - rank :]) for x in inputs] for inputs in problems]
    axes = tuple(None if axis is None else min(axis, rank) for axis in axes)
    mapped = [
        problems[0][i] if axis is None else jnp.stack([x[i] for x in problems], axis)
        for i, axis in enumerate(axes)
    ]

    def loss(*inputs: Any) -> tuple[Any, Any]:
        kl, lse1, _ = attention_kl(*inputs, causal=True, return_lse=True)
        return (kl * jnp.cos(kl)).sum(), (kl, lse1)

    one = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
    together = jax.jit(jax.vmap(one, in_axes=axes))(*mapped)
    for index in range(3):
        alone = one(*(problems[0 if a is None else index][i] for i, a in enumerate(axes)))
        for ours, theirs in zip(
            jax.tree.leaves(jax.tree.map(lambda x, i=index: x[i], together)),
            jax.tree.leaves(alone),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_vmap_twice_and_gradient_of_vmap(rng: np.random.Generator) -> None:
    q1, k1, q2, k2 = problem_in(rng, "float32", batch=2, heads=3)

    def of_one(q1: Any, k1: Any, q2: Any, k2: Any) -> Any:
        return attention_kl(q1, k1, q2, k2)

    twice = jax.vmap(jax.vmap(of_one))
    np.testing.assert_allclose(twice(q1, k1, q2, k2), attention_kl(q1, k1, q2, k2), rtol=1e-6)
    # A key that all share sums up what each gives it.
    shared = jax.vmap(jax.vmap(of_one, (0, 0, 0, None)), (0, 0, 0, None))
    repeated = jnp.broadcast_to(k2[0, 0], k2.shape)
    ours = jax.grad(lambda k: shared(q1, k1, q2, k).sum())(k2[0, 0])
    theirs = jax.grad(lambda k: attention_kl(q1, k1, q2, k).sum())(repeated).sum((0, 1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [3, 4])
def test_vmap_over_nothing(rank: int, rng: np.random.Generator) -> None:
    inputs = [x[None][:0, ..., :, :] for x in problem_in(rng, "float32", batch=2, heads=3)]
    inputs = [x[:, 0] if rank == 3 else x for x in inputs]
    kl = jax.vmap(attention_kl)(*inputs)
    assert kl.shape == (0, *inputs[0].shape[1:-1])
    gradient = jax.grad(lambda *x: attention_kl(*x, reduction="mean"), argnums=3)
    assert jax.vmap(gradient)(*inputs).shape == inputs[3].shape


def test_without_jit(rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "float32", batch=2)

    def loss(*inputs: Any) -> Any:
        return attention_kl(*inputs, reduction="mean")

    calls = (loss, jax.grad(loss, 3), jax.vmap(loss), jax.vmap(jax.grad(loss, 3)))
    for call in calls:
        expected = call(*inputs)
        with jax.disable_jit():
            np.testing.assert_allclose(call(*inputs), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments(rng: np.random.Generator) -> None:
    q1, k1, q2, k2 = problem_in(rng, "float32")

    def step(q2: Any, k2: Any) -> tuple[Any, Any]:
        def loss(*student: Any) -> Any:
            return attention_kl(q1, k1, *student, reduction="sum")

        return jax.tree.map(lambda x, g: x - 0.1 * g, (q2, k2), jax.grad(loss, (0, 1))(q2, k2))

    expected = step(q2, k2)
    given = [jnp.array(x, copy=True) for x in (q2, k2)]
    ours = jax.jit(step, donate_argnums=(0, 1))(*given)
    assert all(x.is_deleted() for x in given)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_shapes_alone_run_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise Called

    monkeypatch.setattr(door, "buffer_callback", reached)
    inputs = problem_in(rng, "bfloat16", batch=2, heads=3, num_queries=11)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]

    def gradient(*inputs: Any) -> Any:
        return jax.value_and_grad(lambda *x: attention_kl(*x, reduction="sum"), 2)(*inputs)

    kl, dq2 = jax.eval_shape(gradient, *shapes)
    assert (kl.shape, kl.dtype) == ((), np.float32)
    assert (dq2.shape, dq2.dtype) == (shapes[2].shape, jnp.bfloat16)
    (rows,) = jax.make_jaxpr(attention_kl)(*inputs).out_avals
    assert (rows.shape, rows.dtype) == ((2, 3, 11), np.float32)


def test_jit_compiles_once(rng: np.random.Generator) -> None:
    traces = 0

    def loss(*inputs: Any) -> Any:
        nonlocal traces
        traces += 1
        return attention_kl(*inputs, reduction="mean")

    step = jax.jit(jax.value_and_grad(loss, (2, 3)))
    for _ in range(3):
        step(*problem_in(rng, "float32"))
    assert traces == 1
    # Arrays with values take the same road.
    inputs = problem_in(rng, "float32")
    assert step(*inputs)[0] == attention_kl(*inputs, reduction="mean")


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
import functools
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from streamkl_cupy.jax import attention_kl

mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
shapes = [(4, 4, 5, 8), (4, 2, 7, 8), (4, 4, 5, 16), (4, 1, 7, 16)]
inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
shared = inputs[3][:1]
kl_of = functools.partial(attention_kl, causal=True)
expected = kl_of(*inputs)

def check(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

for check_vma in (True, False):
    sharded = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    check(jax.jit(sharded(kl_of, in_specs=P("b"), out_specs=P("b")))(*inputs), expected)

    def of_all(*x):
        return jax.lax.psum(kl_of(*x, reduction="sum"), "b")
    def of_each(q1, k1, q2, k2):
        return kl_of(q1, k1, q2, jnp.broadcast_to(k2, (q1.shape[0], *k2.shape[1:])))

    summed = sharded(of_all, in_specs=P("b"), out_specs=P())
    ours = jax.jit(jax.grad(lambda *x: summed(*x), (0, 1, 2, 3)))(*inputs)
    theirs = jax.grad(lambda *x: kl_of(*x, reduction="sum"), (0, 1, 2, 3))(*inputs)
    jax.tree.map(check, ours, theirs)

    # An array that every device has gets the sum of all gradients.
    each = sharded(of_each, in_specs=(P("b"), P("b"), P("b"), P()), out_specs=P("b"))
    ours = jax.jit(jax.grad(lambda k2: each(*inputs[:3], k2).sum()))(shared)
    theirs = jax.grad(lambda k2: of_each(*inputs[:3], k2).sum())(shared)
    check(ours, theirs)

    # Some inputs vary over the mesh and others do not.
    mixed = sharded(
        lambda q1: kl_of(q1, *(x[:1] for x in inputs[1:])), in_specs=P("b"), out_specs=P("b")
    )
    repeated = [jnp.repeat(x[:1], 4, axis=0) for x in inputs[1:]]
    check(mixed(inputs[0]), kl_of(inputs[0], *repeated))

# What jit alone shards is right, too.
placed = [jax.device_put(x, NamedSharding(mesh, P("b"))) for x in inputs]
check(jax.jit(kl_of)(*placed), expected)
print("sharded as whole")
"""


def test_shard_map_over_a_batch_axis() -> None:
    assert run_python(SHARDED) == "sharded as whole\n"


def run_python(script: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------
# Errors


def test_the_examples_in_the_docstrings() -> None:
    failed, attempted = doctest.testmod(door)
    assert attempted > 0
    assert failed == 0


class Called(Exception):
    """A callback has been reached."""


WRONG: dict[str, tuple[Callable[[list[Any]], Any], type[Exception], str]] = {
    "dtype": (
        lambda x: attention_kl(x[0].astype(int), *x[1:]),
        TypeError,
        "q1: expected bfloat16, float16, float32 or float64",
    ),
    "mixed": (
        lambda x: attention_kl(*x[:3], x[3].astype("bfloat16")),
        TypeError,
        "k2: expected the dtype of q1, float32, got bfloat16",
    ),
    "length": (
        lambda x: attention_kl(*x[:3], x[3][..., :-1, :]),
        ValueError,
        "k2: expected the length of k1, 7, got 6",
    ),
    "rank": (lambda x: attention_kl(x[0][0], *x[1:]), ValueError, "k1: expected 3 axes like q1"),
    "layout": (lambda x: attention_kl(*x, layout="nbhd"), ValueError, "layout: expected"),
    "causal": (lambda x: attention_kl(*x, causal=1), TypeError, "causal: expected True or False"),
    "traced_scale": (
        lambda x: jax.jit(lambda scale: attention_kl(*x, scale2=scale))(0.5),
        TypeError,
        "scale2: expected a value that is known when traced, got a tracer; name it in static_argn",
    ),
    "window": (
        lambda x: attention_kl(*x, window=7),
        TypeError,
        "window: expected a tuple of two whole numbers",
    ),
    "traced_q_offset": (
        lambda x: jax.jit(lambda offset: attention_kl(*x, q_offset=offset))(3),
        TypeError,
        r"q_offset: expected a value .* got a tracer; name it in static_argnames of jax.jit\.",
    ),
    "traced_causal": (
        lambda x: jax.jit(lambda causal: attention_kl(*x, causal=causal))(True),
        TypeError,
        r"causal: expected a value .* got a tracer; name it in static_argnames of jax.jit\.(\n|$)",
    ),
    "scale": (
        lambda x: attention_kl(*x, scale1=[0.5]),
        TypeError,
        "scale1: expected a real number",
    ),
    "reduction": (
        lambda x: attention_kl(*x, reduction="max"),
        ValueError,
        'reduction: expected "none", "sum", "mean" or "batchmean", got \'max\'',
    ),
    "deterministic": (
        lambda x: attention_kl(*x, deterministic=None),
        TypeError,
        "deterministic: expected True or False",
    ),
    "return_lse": (lambda x: attention_kl(*x, return_lse="yes"), TypeError, "return_lse: expected"),
    "complex_weights": (
        lambda x: attention_kl(*x, row_weights=1j * jnp.ones(5)),
        TypeError,
        "row_weights: expected real weights, got complex64; pass its real part",
    ),
    "list_of_weights": (
        lambda x: attention_kl(*x, row_weights=[1.0] * 5),
        TypeError,
        r"row_weights: expected an array of JAX or NumPy, got builtins\.list",
    ),
    "weights": (
        lambda x: attention_kl(*x, row_weights=np.ones(4)),
        ValueError,
        r"row_weights: expected a shape that broadcasts to that of kl, \(1, 2, 5\), got \(4,\)",
    ),
}


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_when_it_is_traced(
    name: str, is_jitted: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise Called

    monkeypatch.setattr(door, "buffer_callback", reached)
    call, error, text = WRONG[name]
    inputs = problem_in(rng, "float32")
    with pytest.raises(error, match=text):
        jax.jit(lambda *x: call(list(x)))(*inputs) if is_jitted else call(inputs)


def test_a_list(rng: np.random.Generator) -> None:
    q1, *others = problem_in(rng, "float32")
    with pytest.raises(
        TypeError, match=r"q1: expected an array of JAX or NumPy, got builtins\.lis"
    ):
        attention_kl(q1.tolist(), *others)


def test_a_tensor_of_torch() -> None:
    torch = pytest.importorskip("torch")
    q = torch.ones(3, 8)
    with pytest.raises(
        TypeError, match=r"q1: expected an array of JAX or NumPy, got torch\.Tensor"
    ):
        attention_kl(q, q, q, q)


def test_without_jax_the_import_says_what_to_install() -> None:
    script = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "jax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import streamkl_cupy
try:
    import streamkl_cupy.jax
except ImportError as error:
    print(error)
"""
    printed = run_python(script)
    assert printed.startswith("streamkl_cupy.jax needs JAX 0.10 or newer, which cannot be imported")
    assert "install jax (for the CPU), or jax[cuda13]" in printed


def test_an_old_jax_is_refused() -> None:
    script = """
import jax
jax.__version_info__ = (0, 9, 2)
jax.__version__ = "0.9.2"
try:
    import streamkl_cupy.jax
except ImportError as error:
    print(error)
"""
    assert "needs JAX 0.10 or newer, got 0.9.2; install" in run_python(script)


# -------------------------------------------------------------------------------------------------
# A card that is only pretended


class Prepared:
    """What `api.Prepared` is, for a card that is only pretended."""

    def __init__(
        self, card: Card, index: int, chosen: Any, launch: Callable[[dict[str, int]], None]
    ) -> None:
        self.workspace_bytes = chosen.workspace_bytes
        self.is_loaded = False
        self._card, self._index, self._chosen, self._launch = card, index, chosen, launch
        card.prepared.append(self)

    def bind(self, places: dict[str, tuple[int, int]]) -> Prepared:
        self.is_loaded = True
        self._places = places
        return self

    def launch(self, addresses: list[int], stream: int) -> None:
        assert (self._index, stream) == (self._card.current, Card.STREAM)
        given = {name: addresses[i] + beyond for name, (i, beyond) in self._places.items()}
        workspace = given.pop("workspace", 0)
        pointers = api.NULL_POINTERS | given
        assert pointers.keys() == api.NULL_POINTERS.keys()
        assert bool(workspace) == bool(self.workspace_bytes)
        assert workspace % plan.WORKSPACE_ALIGNMENT == 0
        if workspace:
            ctypes.memset(workspace, 0xFF, self.workspace_bytes)
        self._card.launched.append(self._chosen)
        self._launch(pointers)


class Buffer:
    """A buffer of XLA's on a card."""

    def __init__(self, buffer: Any) -> None:
        self.__cuda_array_interface__ = np.asarray(buffer).__array_interface__


class Card:
    """Stands for two cards, the second of which is the current one."""

    STREAM = 0xBEEF

    def __init__(self) -> None:
        self.current = 1
        runtime = types.SimpleNamespace(getDevice=lambda: self.current)
        self.cuda = types.SimpleNamespace(runtime=runtime)
        self.prepared: list[Prepared] = []
        self.launched: list[Any] = []

    def forward(
        self,
        problem: Problem,
        index: int,
        force: str | None,
        override: object,
        given: Any,
        has_entropy: bool,
    ) -> Prepared:
        check_gpu(problem)
        assert set(given) <= {None, problem.row}
        names = tuple(f"lse{side}" for side, of in enumerate(given, 1) if of is not None)
        chosen = plan.forward(problem, FACTS, given=names, has_entropy=has_entropy)

        def launch(pointers: dict[str, int]) -> None:
            outer = {name: self.rows(problem, pointers[f"given{name[3]}"]) for name in names}
            assert problem.mask != "packed" or not outer
            inputs = self.inputs(problem, pointers)
            wanted = "return_entropy" if has_entropy else "return_state"
            state: Any = reference.attention_kl(**inputs, **outer, **{wanted: True})
            rows = {n: x for n, x in state._asdict().items() if n != "given"}
            rows |= {"lse1_low": np.full_like(state.kl, 0.25)}
            rows |= {"lse2_low": np.full_like(state.kl, -0.25)}
            for name, values in rows.items():
                if pointers[name]:
                    self.rows(problem, pointers[name])[...] = values

        return Prepared(self, index, chosen, launch)

    def backward(
        self,
        problem: Problem,
        index: int,
        force: str | None,
        override: object,
        wrt: tuple[str, ...],
        strategy: str,
        deterministic: bool,
        dkl: Strides,
        given: tuple[str, ...],
    ) -> Prepared:
        check_gpu(problem)
        assert dkl == problem.row
        chosen = plan.backward(
            problem,
            FACTS,
            wrt,
            strategy=strategy,
            deterministic=deterministic,
            force=force,
            given=given,
        )

        def launch(pointers: dict[str, int]) -> None:
            names = ("dkl", "kl", "lse1", "lse2", "lse1_low", "lse2_low")
            rows = {name: self.rows(problem, pointers[name]) for name in names}
            assert (rows["lse1_low"] == 0.25).all()
            assert (rows["lse2_low"] == -0.25).all()
            assert wrt == tuple(name for name in INPUTS if pointers["d" + name])
            inputs = self.inputs(problem, pointers)
            state: Any = reference.ReferenceState(rows["kl"], rows["lse1"], rows["lse2"])
            if given:
                mass1 = self.rows(problem, pointers["mass1"])
                state = reference.GivenState(*state, mass1, given)
            upstream = rows["dkl"]
            if problem.mask == "packed":
                upstream, state = upstream[0], reference.ReferenceState(*(x[0] for x in state))
            gradients = reference.attention_kl_backward(upstream, **inputs, state=state, wrt=wrt)
            for name, gradient in zip(wrt, gradients, strict=True):
                if problem.mask == "packed":
                    gradient = gradient.swapaxes(0, 1)[None]
                strides, dtype = gradient_strides(problem, name), inputs[name].dtype
                self.view(pointers["d" + name], gradient.shape, strides, dtype)[...] = gradient

        return Prepared(self, index, chosen, launch)

    def callback(self, start: Callable[..., None], results: Any, **options: Any) -> Any:
        assert options == {"command_buffer_compatible": True}
        context = types.SimpleNamespace(stream=self.STREAM)

        def on_the_host(_: Any, results: Any, *arrays: Any) -> None:
            start(context, [*map(Buffer, results)], *map(Buffer, arrays))

        return buffer_callback(on_the_host, results)

    def inputs(self, problem: Problem, pointers: dict[str, int]) -> dict[str, Any]:
        lengths = {"q": problem.num_queries, "k": problem.num_keys}
        heads = {
            "q1": problem.num_heads,
            "k1": problem.num_key_heads1,
            "q2": problem.num_heads,
            "k2": problem.num_key_heads2,
        }
        dims = {"1": problem.head_dim1, "2": problem.head_dim2}
        dtype = np.dtype(getattr(ml_dtypes, problem.dtype, problem.dtype))
        arrays = {}
        for name in INPUTS:
            shape = (problem.batch, heads[name], lengths[name[0]], dims[name[1]])
            arrays[name] = self.view(pointers[name], shape, getattr(problem, name), dtype)
        lengths_on_card = {}
        if problem.ragged is not None:
            is_packed = problem.ragged.is_packed
            count = problem.ragged.num_sequences + 1 if is_packed else problem.batch
            for name in problem.ragged.names:
                memory = (ctypes.c_int32 * count).from_address(pointers[name])
                lengths_on_card[name] = np.frombuffer(memory, np.int32)
            if is_packed:
                arrays = {name: x[0].swapaxes(0, 1) for name, x in arrays.items()}
        options = {n: getattr(problem, n) for n in ("causal", "window", "q_offset")}
        return arrays | options | lengths_on_card

    def rows(self, problem: Problem, pointer: int) -> np.ndarray:
        shape = (problem.batch, problem.num_heads, problem.num_queries, 1)
        return self.view(pointer, shape, problem.row, np.dtype(np.float32))[..., 0]

    @staticmethod
    def view(
        pointer: int, shape: tuple[int, ...], strides: Strides, dtype: np.dtype[Any]
    ) -> np.ndarray:
        steps = (strides.batch, strides.head, strides.row, 1)
        count = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        flat = np.frombuffer(memory, dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in steps])


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    monkeypatch.setattr(interop, "cupy", lambda: card)
    monkeypatch.setattr(api, "prepare_forward", card.forward)
    monkeypatch.setattr(api, "prepare_backward", card.backward)
    monkeypatch.setattr(door, "buffer_callback", card.callback)
    monkeypatch.setattr(door, "_cards", lambda: [0, 1])
    rules = (
        (door._forward_p, door._forward_on_cuda, door._forward_on_cpu),
        (door._backward_p, door._backward_on_cuda, door._backward_on_cpu),
    )

    def lower(position: int) -> None:
        jax.clear_caches()
        for primitive, *functions in rules:
            rule = mlir.lower_fun(functions[position], multiple_results=True)
            mlir.register_lowering(primitive, rule, platform="cpu")

    lower(0)
    yield card
    lower(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_queries", [3, 80], ids=["splits", "plain"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_on_a_card(
    layout: str, num_queries: int, dtype: str, card: Card, rng: np.random.Generator
) -> None:
    shape = {"batch": 2, "heads": 4, "key_heads1": 2, "num_queries": num_queries}
    host = draw(rng, num_keys=2000 if num_queries == 3 else 90, **shape)
    if layout == "bnhd":
        host = {name: x.swapaxes(1, 2) for name, x in host.items()}
    inputs = [jnp.asarray(host[name], dtype) for name in INPUTS]
    options = {"causal": True, "layout": layout}

    def weighted(*inputs: Any) -> Any:
        kl = attention_kl(*inputs, **options)
        return (kl * host["dkl"]).sum(), kl

    (_, kl), gradients = jax.value_and_grad(weighted, (0, 1, 2, 3), has_aux=True)(*inputs)
    ours = {"kl": kl} | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    taken = {name: np.asarray(x) for name, x in zip(INPUTS, inputs, strict=True)}
    assert_all_accurate(
        {name: np.asarray(x) for name, x in ours.items()}, taken | {"dkl": host["dkl"]}, options
    )
    forward, backward = card.launched
    assert (forward.num_splits > 1) == (num_queries == 3)
    assert len(backward.sides) == 2
    # Each on both cards, loaded before anything has run.
    assert len(card.prepared) == 4
    assert all(prepared.is_loaded for prepared in card.prepared)


def test_kl_alone_keeps_nothing(card: Card, rng: np.random.Generator) -> None:
    inputs = problem_in(rng, "bfloat16", num_queries=80)
    np.testing.assert_allclose(attention_kl(*inputs), kl_of(inputs), rtol=1e-4)
    jax.grad(lambda k2: attention_kl(*inputs[:3], k2, reduction="sum"))(inputs[3])
    alone, forward, backward = card.launched
    assert alone == forward
    assert [side.side for side in backward.sides] == [2]
    assert backward.sides[0].dq is None


@pytest.mark.parametrize("lengths", [(0, 7), (5, 0)], ids=str)
def test_nothing_to_compute_on_a_card(lengths: tuple[int, int], card: Card) -> None:
    q, k = (jnp.ones((1, 2, length, 8), "bfloat16") for length in lengths)
    gradients = jax.grad(lambda *x: attention_kl(*x, reduction="mean"), (0, 1, 2, 3))(q, k, q, k)
    assert all((gradient == 0).all() for gradient in gradients)
    # XLA makes no call whose results have no elements.
    *forward, backward = card.launched
    assert len(forward) == (lengths[0] > 0)
    assert (backward.workspace_bytes > 0) == (lengths[0] > 0)


def test_a_process_of_one_card_does_not_ask_which(
    card: Card, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.current = 0
    monkeypatch.setattr(door, "_cards", lambda: [0])
    monkeypatch.setattr(card.cuda.runtime, "getDevice", lambda: pytest.fail("asked"))
    inputs = problem_in(rng, "bfloat16", num_queries=80)
    np.testing.assert_allclose(attention_kl(*inputs), kl_of(inputs), rtol=1e-4)
    assert len(card.launched) == 1


def test_only_a_card_refuses_it(card: Card, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="q1 and k1: expected a head dimension that is a multiple"):
        attention_kl(*problem_in(rng, "bfloat16", head_dim1=12))
    with pytest.raises(ValueError, match=r"scale2: expected a magnitude below 2\.3e38"):
        attention_kl(*problem_in(rng, "bfloat16"), scale2=1e39)
    assert card.launched == []


@pytest.mark.parametrize("given", GIVEN, ids="_".join)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_given_on_a_card(
    given: tuple[str, ...], layout: str, card: Card, rng: np.random.Generator
) -> None:
    host = draw(rng, batch=2, heads=4, num_queries=80, num_keys=90)
    if layout == "bnhd":
        host = {name: x.swapaxes(1, 2) for name, x in host.items()}
    inputs = [jnp.asarray(host[name], "bfloat16") for name in INPUTS]
    lse = draw_lse(rng, inputs, given, "float32")

    def weighted(*x: Any) -> Any:
        outer = dict(zip(given, x[4:], strict=True))
        kl = attention_kl(*x[:4], **outer, causal=True, layout=layout)
        return (kl * host["dkl"]).sum(), kl

    everything = tuple(range(4 + len(given)))
    (_, kl), gradients = jax.value_and_grad(weighted, everything, has_aux=True)(*inputs, *lse)
    arrays = {name: np.asarray(x) for name, x in zip(INPUTS, inputs, strict=True)}
    outer = {name: np.asarray(x) for name, x in zip(given, lse, strict=True)}
    options = {"causal": True, "layout": layout}
    state = reference.attention_kl(**arrays, **outer, **options, return_state=True)
    assert isinstance(state, reference.GivenState)
    np.testing.assert_allclose(kl, state.kl, rtol=1e-6)
    expected = reference.attention_kl_backward(
        host["dkl"], **arrays, state=state, wrt=INPUTS, **options
    )
    expected += tuple(
        host["dkl"] * (state.mass1 if name == "lse2" else -(state.kl + state.mass1))
        for name in given
    )
    for ours, exact in zip(gradients, expected, strict=True):
        size = np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=size * 2.0**-7)
    assert all("_given_" in chosen.name for chosen in card.launched)
    with pytest.raises(TypeError, match="expected float32, got bfloat16; cast it to float32"):
        weighted(*inputs, *(x.astype("bfloat16") for x in lse))


def test_entropies_on_a_card(card: Card, rng: np.random.Generator) -> None:
    host = draw(rng, batch=2, heads=4, num_queries=80, num_keys=90)
    inputs = [jnp.asarray(host[name], "bfloat16") for name in INPUTS]
    arrays = {name: np.asarray(x) for name, x in zip(INPUTS, inputs, strict=True)}
    exact = reference.attention_kl(**arrays, return_entropy=True)
    results = attention_kl(*inputs, return_lse=True, return_entropy=True)
    for ours, theirs in zip(results, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    (gradient,) = jax.grad(lambda *x: attention_kl(*x, return_entropy=True)[0].sum(), (3,))(*inputs)
    assert gradient.dtype == jnp.bfloat16
    assert [chosen.has_entropy for chosen in card.launched[:2]] == [True, True]

"""A float32 logit out of bfloat16 parts: a model of the matrix units says how accurate it is.

The model cuts as they do (cuda_src/README.md, "Accuracy") and follows `compute_scores_of_parts`
step by step. It decided on the parts and the steps; the card is held to outputs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

Array = np.ndarray

# Significant bits that the matrix units keep of the largest of what they sum.
KEPT_BITS = 26
# Pairs of parts, the smallest products first, and last the one that is summed apart.
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1))


def single(x: Array) -> Array:
    """Rounded to float32, as float64."""
    return x.astype(np.float32).astype(np.float64)


def parts_of(x: Array) -> list[Array]:
    """Three bfloat16 whose sum is a float32, exactly."""
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.astype(ml_dtypes.bfloat16).astype(np.float32))
        rest = rest - parts[-1]
    return [part.astype(np.float64) for part in parts]


def matrix_units(summed: Array, a: Array, b: Array) -> Array:
    """summed + a b^T as one instruction: aligned to the largest, cut, summed and cut to float32."""
    terms = np.concatenate([a[:, None] * b[None], summed[..., None]], axis=-1)
    exponent = np.frexp(np.abs(terms).max(-1, keepdims=True))[1]
    unit = np.ldexp(1.0, exponent - KEPT_BITS)
    mantissa, exponent = np.frexp((np.trunc(terms / unit) * unit).sum(-1))
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def logits(q: Array, k: Array, step: int = 16, keeps_rest: bool = True) -> Array:
    parts_q, parts_k = parts_of(q), parts_of(k)
    s, rest = np.zeros((2, len(q), len(k)))
    for first in range(0, q.shape[1], step):
        cols = slice(first, first + step)
        for i, j in PRODUCTS:
            rest = matrix_units(rest, parts_q[i][:, cols], parts_k[j][:, cols])
        of_step = np.zeros_like(s)
        for inner in range(first, first + step, 16):
            cols = slice(inner, inner + 16)
            of_step = matrix_units(of_step, parts_q[0][:, cols], parts_k[0][:, cols])
        before, s = s, single(s + of_step)
        if keeps_rest:
            rest = single(rest + single(of_step - single(s - before)))
    return single(s + rest)


def errors(q: Array, k: Array, **choices: int | bool) -> tuple[float, float]:
    """Root mean squares of the model's error and of that of the exact product rounded once."""
    exact = q.astype(np.float64) @ k.astype(np.float64).T
    ours, rounded = logits(q, k, **choices) - exact, single(exact) - exact
    return float(np.sqrt((ours**2).mean())), float(np.sqrt((rounded**2).mean()))


def draw(rng: np.random.Generator, head_dim: int) -> tuple[Array, Array]:
    q, k = (rng.standard_normal((n, head_dim), np.float32) for n in (40, 50))
    return q, k


def test_three_parts_hold_a_float(rng: np.random.Generator) -> None:
    x = rng.standard_normal(10_000, np.float32) * np.float32(10) ** rng.integers(-20, 20, 10_000)
    x = x.astype(np.float32)
    assert (sum(parts_of(x)) == x).all()


@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_a_logit_is_as_good_as_float32(head_dim: int, rng: np.random.Generator) -> None:
    ours, rounded = errors(*draw(rng, head_dim))
    assert ours <= 2 * rounded


@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("place", [0, -1])
def test_an_offset_leaves_four_times(head_dim: int, place: int, rng: np.random.Generator) -> None:
    q, k = draw(rng, head_dim)
    q[:, place], k[:, place] = 80, 1000 / (80 * head_dim**-0.5)
    ours, rounded = errors(q, k)
    assert ours <= 4 * rounded


def test_longer_sums_in_the_matrix_units_are_no_choice(rng: np.random.Generator) -> None:
    q, k = draw(rng, 256)
    ours, rounded = errors(q, k, step=256, keeps_rest=False)
    assert ours > 4 * rounded

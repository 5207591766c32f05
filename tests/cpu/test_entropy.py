"""Entropy of P1 and its cross-entropy with P2, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special

import streamkl_cupy as skl
from streamkl_cupy import reference
from tests.cases import draw
from tests.cpu.test_api_cpu import Jax, Numpy, Torch, put_all, random_inputs


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ({}, lambda i: 0, lambda i: 6),
        ({"causal": True}, lambda i: 0, lambda i: max(0, i - 1)),
        ({"window": (2, 1)}, lambda i: max(0, i - 4), lambda i: min(6, i)),
        ({"window": (1, 0), "q_offset": 1}, lambda i: min(6, i), lambda i: min(6, i + 2)),
    ],
    ids=["full", "causal", "window", "offset"],
)
def test_the_definition(
    options: dict[str, Any],
    begin: Callable[[int], int],
    end: Callable[[int], int],
    rng: np.random.Generator,
) -> None:
    arrays = draw(rng, heads=1, num_queries=8, num_keys=6, head_dim1=4)
    del arrays["dkl"]
    state = reference.attention_kl(
        **arrays, scale1=2.0, scale2=-0.3, **options, return_entropy=True
    )
    plain = reference.attention_kl(**arrays, scale1=2.0, scale2=-0.3, **options)
    np.testing.assert_array_equal(state.kl, plain)
    for i in range(8):
        seen = slice(begin(i), end(i))
        if seen.start == seen.stop:
            assert (state.entropy[0, 0, i], state.cross_entropy[0, 0, i]) == (0, 0)
            continue
        log_p1, log_p2 = (
            scipy.special.log_softmax(
                scale * arrays[k][0, 0, seen].astype(float) @ arrays[q][0, 0, i].astype(float)
            )
            for q, k, scale in (("q1", "k1", 2.0), ("q2", "k2", -0.3))
        )
        p1 = np.exp(log_p1)
        np.testing.assert_allclose(state.entropy[0, 0, i], -(p1 * log_p1).sum(), atol=1e-14)
        np.testing.assert_allclose(state.cross_entropy[0, 0, i], -(p1 * log_p2).sum(), atol=1e-13)


def test_an_offset_moves_nothing(rng: np.random.Generator) -> None:
    arrays = draw(rng, num_queries=5, num_keys=6, head_dim1=4)
    del arrays["dkl"]
    wide = dict(arrays)
    for name, extra in (("q1", 100.0), ("k1", 10.0), ("q2", 0.0), ("k2", 0.0)):
        column = np.full((*arrays[name].shape[:-1], 1), extra, np.float32)
        wide[name] = np.concatenate([arrays[name], column], -1)
    scales = {"scale1": 0.5, "scale2": 0.5}
    still = reference.attention_kl(**arrays, **scales, return_entropy=True)
    moved = reference.attention_kl(**wide, **scales, return_entropy=True)
    np.testing.assert_allclose(moved.entropy, still.entropy, atol=1e-12)


@pytest.mark.parametrize("make", [Numpy, Torch, Jax])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_every_library(make: Any, mask: dict[str, Any], rng: np.random.Generator) -> None:
    library = make()
    inputs = random_inputs(rng, "float32")
    expected = reference.attention_kl(**inputs, **mask, return_entropy=True)
    arrays = put_all(library, inputs)
    state = skl.attention_kl(**arrays, **mask, return_entropy=True)
    for name in ("kl", "lse1", "lse2", "entropy", "cross_entropy"):
        values = library.get(getattr(state, name))
        np.testing.assert_allclose(values, getattr(expected, name), rtol=1e-6, err_msg=name)
    # A state like any other.
    dkl = library.put(np.ones(inputs["q1"].shape[:-1], np.float32))
    plain = skl.attention_kl(**arrays, **mask, return_state=True)
    assert plain.entropy is None
    for ours, theirs in zip(
        *(skl.attention_kl_backward(dkl, **arrays, state=s, **mask) for s in (state, plain)),
        strict=True,
    ):
        np.testing.assert_array_equal(library.get(ours), library.get(theirs))
    with pytest.raises(ValueError, match="without entropies") as caught:
        skl.merge_states(plain, state)
    assert str(caught.value) == (
        "states[1]: expected a state without entropies, got one with entropy and cross_entropy; "
        "leave out return_entropy to merge kl alone, or take the entropies from one call over all "
        "keys."
    )

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


def ragged_parts(
    inputs: dict[str, np.ndarray], lengths: dict[str, np.ndarray], ends: tuple[int, ...]
) -> list[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Of each part of the keys of a ragged batch: its first key in an entry, inputs and lengths."""
    parts = []
    if "kv_lens" in lengths:
        edges = (0, *ends, inputs["k1"].shape[2])
        for first, stop in itertools.pairwise(edges):
            keys = {n: inputs[n][:, :, first:stop] for n in ("k1", "k2")}
            count = np.clip(lengths["kv_lens"] - first, 0, stop - first).astype(np.int32)
            parts.append((first, inputs | keys, lengths | {"kv_lens": count}))
        return parts
    sequences = list(itertools.pairwise(lengths["cu_seqlens_k"].tolist()))
    for first, stop in itertools.pairwise((0, *ends, 10**6)):
        places = [range(min(i + first, j), min(i + stop, j)) for i, j in sequences]
        keys = {n: inputs[n][[j for place in places for j in place]] for n in ("k1", "k2")}
        counts = np.cumsum([0, *map(len, places)], dtype=np.int32)
        parts.append((first, inputs | keys, lengths | {"cu_seqlens_k": counts}))
    return parts


# Of queries and keys: differences of 3 in each entry, and others.
ALIKE = (((6, 4, 2), (9, 7, 5)), 3)
UNLIKE = (((6, 5, 6), (10, 7, 3)), None)


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize(
    ("mask", "case"),
    [({}, ALIKE), ({}, UNLIKE), ({"causal": True}, ALIKE), ({"window": (3, 1)}, ALIKE)],
    ids=["no mask, alike", "no mask", "causal, alike", "window, alike"],
)
def test_parts_of_padded_and_packed_batches(
    mask: dict[str, Any], case: Any, kind: str, rng: np.random.Generator
) -> None:
    """Without a mask they are the whole, and under one where all entries have one offset."""
    (queries, keys), offset = case
    if kind == "padded":
        inputs = random_inputs(rng, batch=3, lengths=(6, 10))
        lengths = {"q_lens": np.int32(queries), "kv_lens": np.int32(keys)}
    else:
        inputs = random_inputs(rng, batch=1, lengths=(sum(queries), sum(keys)))
        inputs = {n: x[0].swapaxes(0, 1) for n, x in inputs.items()}
        counts = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
        lengths = {n: np.cumsum([0, *x], dtype=np.int32) for n, x in counts.items()}
    whole = skl.attention_kl(**inputs, **lengths, **mask, return_state=True)
    parts = [
        (part, counts | mask | ({"q_offset": offset - first} if mask else {}))
        for first, part, counts in ragged_parts(inputs, lengths, (2, 4))
    ]
    merged = skl.merge_states(*(skl.attention_kl(**x, **o, return_state=True) for x, o in parts))
    for name in ("kl", "lse1", "lse2"):
        got, exact = getattr(merged, name), getattr(whole, name)
        np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-12, err_msg=name)
    dkl = rng.standard_normal(whole.kl.shape)
    exact = skl.attention_kl_backward(dkl, **inputs, state=whole, wrt=("q2",), **lengths, **mask)
    shares = [
        skl.attention_kl_backward(dkl, **x, state=merged, wrt=("q2",), **own) for x, own in parts
    ]
    np.testing.assert_allclose(sum(share[0] for share in shares), exact[0], atol=1e-12)


@pytest.mark.parametrize("names", [("lse1", "lse2"), ("lse1",), ("lse2",)], ids=str)
def test_what_to_do_with_given_log_sum_exps(
    names: tuple[str, ...], rng: np.random.Generator
) -> None:
    """What the error says holds: kl and mass1 add up where both are given, and only there."""
    inputs = random_inputs(rng)
    whole = skl.attention_kl(**inputs, return_state=True)
    lse = {"lse1": whole.lse1, "lse2": whole.lse2}
    parts = split_keys(inputs, (2, 4))

    def states(given: tuple[str, ...]) -> list[skl.KLState]:
        own = {name: lse[name] for name in given}
        return [skl.attention_kl(**part, **own, return_state=True) for part in parts]

    has_both = len(names) == 2
    with pytest.raises(ValueError, match=r"^states\[0\]: ") as caught:
        skl.merge_states(*states(names))
    assert str(caught.value) == (
        "states[0]: expected a state with log-sum-exps of its own, got one with given "
        + (
            "lse1 and lse2; add up kl and mass1 of parts that share what is given."
            if has_both
            else f"{names[0]}; compute the parts again with both lse1 and lse2 of the whole given, "
            "then add up kl and mass1."
        )
    )
    direct = sum(state.kl for state in states(names))
    assert np.allclose(direct, whole.kl, rtol=1e-12, atol=1e-12) == has_both
    again = states(("lse1", "lse2"))
    np.testing.assert_allclose(sum(state.kl for state in again), whole.kl, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sum(state.mass1 for state in again), 1, rtol=1e-12)


BACKWARD = "attention_kl_backward with the merged state for the gradients of each part."


def test_tensors_that_require_grad_are_refused() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.zeros(3)
    state = skl.KLState.from_lse(rows.clone().requires_grad_(), rows, rows)
    with pytest.raises(TypeError) as caught:
        skl.merge_states(state)
    assert str(caught.value) == (
        "states[0].kl: expected a torch tensor outside autograd, got one that requires grad; pass "
        f"value.detach(), and call {BACKWARD}"
    )


def test_transforms_of_torch_are_refused() -> None:
    torch = pytest.importorskip("torch")

    def merged(rows: Any) -> Any:
        return skl.merge_states(skl.KLState(rows, rows, rows)).kl

    with pytest.raises(TypeError) as caught:
        torch.func.vmap(merged)(torch.zeros(2, 3))
    assert str(caught.value) == (
        "states[0].kl: expected a torch tensor with memory of its own, got one without (inside "
        f"torch.func?); call merge_states outside of torch.func and torch.compile, and {BACKWARD}"
    )


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_tracers_are_refused(transform: str) -> None:
    jax = pytest.importorskip("jax")

    def merged(rows: Any) -> Any:
        return skl.merge_states(skl.KLState(rows, rows, rows)).kl.sum()

    with pytest.raises(TypeError) as caught:
        getattr(jax, transform)(merged)(jax.numpy.zeros((2, 3)))
    text = str(caught.value)
    assert text.startswith("states[0].kl: expected a JAX array with values, got a tracer (")
    assert text.endswith(f"; call merge_states outside of jit, grad and vmap, and {BACKWARD}")

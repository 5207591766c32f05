"""States over parts of the keys, merged: the values of the whole, and each part's own gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS
from tests.cases import DTYPES
from tests.compare import error
from tests.gpu.card import Cupy, Expected, Library, Output, random_inputs, same_bits, upload_all

ROWS = ("kl", "lse1", "lse2")


def split_keys(inputs: dict[str, np.ndarray], ends: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    edges = itertools.pairwise((0, *ends, inputs["k1"].shape[2]))
    return [inputs | {n: inputs[n][:, :, i:j] for n in ("k1", "k2")} for i, j in edges]


def merged_state(
    library: Library, parts: list[dict[str, Any]], options: dict[str, Any], order: Any = None
) -> skl.KLState:
    states = [
        skl.attention_kl(*(part[name] for name in INPUTS), **options, return_state=True)
        for part in parts
    ]
    return skl.merge_states(*(states[i] for i in (order or range(len(states)))))


def rows_of(library: Library, state: skl.KLState) -> dict[str, np.ndarray]:
    return {name: library.get(getattr(state, name)) for name in ROWS}


@pytest.mark.parametrize("kernel", [None, "forward_sm80"], ids=["planned", "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_whole_and_each_parts_gradients(
    dtype: str, kernel: str | None, library: Library, rng: np.random.Generator
) -> None:
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=2, num_queries=150, num_keys=700, head_dim2=32
    )
    options = {"scale1": 0.2}
    expected = Expected(inputs, options)
    # A part of one key, and one of none.
    parts = [upload_all(library, part) for part in split_keys(inputs, (300, 300, 301))]
    portable = None if kernel is None else "backward_dq_sm80"
    with plan.override(forward_kernel=kernel, backward_kernel=portable):
        state = merged_state(library, parts, options, (2, 0, 3, 1))
        expected.check(rows_of(library, state))
        gradients = [
            skl.attention_kl_backward(
                part["dkl"], *(part[n] for n in INPUTS), state, wrt=INPUTS, **options
            )
            for part in parts
        ]
    for i, name in enumerate(INPUTS):
        pieces = [library.get(of_part[i]) for of_part in gradients]
        if name[0] == "k":
            expected.check({"d" + name: np.concatenate(pieces, axis=2)})
            continue
        # Each part has rounded its share.
        total = np.sum([piece.astype(np.float32) for piece in pieces], axis=0)
        exact = expected.values["d" + name]
        allowed = 4 * error(expected.baselines["d" + name], exact) + 1e-5
        assert error(total, exact) <= allowed, name


@pytest.mark.parametrize("kernel", [None, "forward_sm80"], ids=["planned", "portable"])
@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window": (200, 50)}, {"causal": True, "window": (150, None)}],
    ids=str,
)
def test_a_mask_runs_through_the_parts(
    mask: dict[str, Any], kernel: str | None, cupy_library: Cupy, rng: np.random.Generator
) -> None:
    """A part's offset is that of the whole less its first key; the window is the same."""
    inputs = random_inputs(rng, heads=4, key_heads1=2, num_queries=500, num_keys=700)
    expected, ends = Expected(inputs, mask), (300, 301)
    parts = [upload_all(cupy_library, part) for part in split_keys(inputs, ends)]
    options = [mask | {"q_offset": 200 - first} for first in (0, *ends)]
    portable = None if kernel is None else "backward_dq_sm80"
    with plan.override(forward_kernel=kernel, backward_kernel=portable):
        states = [
            skl.attention_kl(*(part[n] for n in INPUTS), **own, return_state=True)
            for part, own in zip(parts, options, strict=True)
        ]
        state = skl.merge_states(*states)
        expected.check(rows_of(cupy_library, state))
        gradients = [
            skl.attention_kl_backward(
                part["dkl"], *(part[n] for n in INPUTS), state, wrt=("k1", "k2"), **own
            )
            for part, own in zip(parts, options, strict=True)
        ]
    for i, name in enumerate(("dk1", "dk2")):
        pieces = [cupy_library.get(of_part[i]) for of_part in gradients]
        expected.check({name: np.concatenate(pieces, axis=2)})


def test_a_small_kl_under_large_logits(cupy_library: Cupy, rng: np.random.Generator) -> None:
    """kl is about 1e-6 and every logit about 1000, as accurate as by one call."""
    inputs = random_inputs(rng, "float16", num_queries=130, num_keys=900)
    for name in ("1", "2"):
        inputs["q" + name][..., -1] = 250
        inputs["k" + name][..., -1] = 32
    inputs["q2"] = inputs["q1"]
    noise = 2e-3 * rng.standard_normal(inputs["k1"].shape)
    inputs["k2"] = (inputs["k1"].astype(np.float64) * (1 + noise)).astype(DTYPES["float16"])
    inputs["k2"][..., -1] = 32
    options = {"scale1": 0.125, "scale2": 0.125}
    expected = Expected(inputs, options, (), has_offset=True)
    assert 1e-7 < expected.values["kl"].mean() < 1e-4
    assert expected.values["lse1"].min() > 1000
    parts = [upload_all(cupy_library, part) for part in split_keys(inputs, (128, 500, 800))]
    expected.check(rows_of(cupy_library, merged_state(cupy_library, parts, options)))


def test_many_states_and_outputs(library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=70, num_keys=230)
    parts = split_keys(inputs, tuple(range(10, 230, 10)))
    states = [
        skl.attention_kl(*(upload_all(library, part)[n] for n in INPUTS), return_state=True)
        for part in parts
    ]
    expected = Expected(inputs, {}, ())
    outputs = [Output.make(library, inputs["q1"].shape[:-1], "float32") for _ in range(5)]
    out = skl.KLState(*(output.array for output in outputs))
    assert skl.merge_states(*states, out=out) is out
    results = [output.read() for output in outputs]
    expected.check(dict(zip(ROWS, results[:3], strict=True)))
    assert (np.abs(results[3]) <= np.spacing(np.abs(results[1]))).all()
    again = skl.merge_states(*states)
    for name, result in zip(("kl", "lse1", "lse2", "lse1_low", "lse2_low"), results, strict=True):
        assert same_bits(library.get(getattr(again, name)), result), name


def test_rows_without_keys_and_broken_rows(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=70, num_keys=60)
    inputs["q2"][0, 0, 5, 3] = np.nan
    options = {"causal": True}  # the first ten rows see no key
    expected = Expected(inputs, options, ())
    arrays = upload_all(cupy_library, inputs)
    whole = skl.attention_kl(*(arrays[n] for n in INPUTS), **options, return_state=True)
    none = [arrays[n][:, :, :0] if n[0] == "k" else arrays[n] for n in INPUTS]
    empty = skl.attention_kl(*none, return_state=True)
    merged = rows_of(cupy_library, skl.merge_states(empty, whole, empty))
    expected.check(merged)
    assert (merged["kl"][:, :, :10] == 0).all()
    assert (merged["lse1"][:, :, :10] == -np.inf).all()


def test_equal_sides_give_exactly_zero(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=70, num_keys=300)
    inputs |= {"q2": inputs["q1"], "k2": inputs["k1"]}
    parts = [upload_all(cupy_library, part) for part in split_keys(inputs, (100, 200))]
    state = merged_state(cupy_library, parts, {})
    assert (cupy_library.get(state.kl) == 0).all()

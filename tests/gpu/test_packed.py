"""Packed sequences: where they begin is on the device, and what lies between them is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    Expected,
    backward_plan,
    forward_plan,
    random_inputs,
    run,
    upload,
    upload_all,
)
from tests.gpu.ragged import (
    GENERATIONS,
    MASKS,
    ExpectedParts,
    Part,
    from_packed,
    poison,
    run_ragged,
    to_packed,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Where sequences begin, for queries and keys, and the lengths of the arrays.
Ends = tuple[tuple[int, ...], tuple[int, ...], int, int]
ENDS: dict[str, Ends] = {
    "mixed": ((0, 130, 131, 390, 520), (0, 200, 201, 230, 600), 520, 600),
    "equal": ((0, 64, 128, 192, 256), (0, 64, 128, 192, 256), 256, 256),
    "ones": (tuple(range(71)), tuple(range(0, 211, 3)), 70, 210),
    "empty": ((0, 0, 100, 100, 250, 250), (0, 77, 77, 300, 301, 301), 250, 301),
    "gaps": ((5, 90, 150, 333), (40, 60, 61, 400), 400, 470),
    "one": ((0, 300), (0, 333), 300, 333),
    "few": ((0, 3, 20, 21), (0, 500, 900, 1500), 21, 1500),
    "none": ((0,), (0,), 70, 90),
}


def parts_of(ends: Ends) -> list[Part]:
    starts = zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False)
    return [Part(0, slice(q, q_end), slice(k, k_end)) for q, q_end, k, k_end in starts]


def lengths_of(ends: Ends) -> dict[str, tuple[int, ...]]:
    return {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}


def packed_inputs(
    rng: np.random.Generator, ends: Ends, dtype: str = "bfloat16", **shape: Any
) -> dict[str, np.ndarray]:
    return random_inputs(rng, dtype, num_queries=ends[2], num_keys=ends[3], **shape)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sequences(
    dtype: str, name: str, mask: str, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    ends, options = ENDS[name], MASKS[mask]
    inputs = packed_inputs(rng, ends, dtype, heads=4, key_heads1=2, key_heads2=1)
    parts = parts_of(ends)
    expected, poisoned = ExpectedParts(inputs, parts, options), poison(inputs, parts, np.nan)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        expected.check(
            run_ragged(cupy_library, poisoned, options, lengths_of(ends), force, strategy=strategy)
        )


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dims", [(32, 64), (64, 192), (96, 96), (128, 128), (256, 256)], ids=str)
def test_head_dims(
    dims: tuple[int, int], generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    ends, options = ENDS["mixed"], {"causal": True}
    inputs = packed_inputs(rng, ends, heads=2, head_dim1=dims[0], head_dim2=dims[1])
    expected = ExpectedParts(inputs, parts_of(ends), options)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        expected.check(
            run_ragged(cupy_library, inputs, options, lengths_of(ends), force, strategy=strategy)
        )


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_a_broken_sequence_stays_alone(
    strategy: str,
    generation: str,
    value: float,
    broken: int,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    ends = ENDS["mixed"]
    inputs, parts = packed_inputs(rng, ends, heads=2), parts_of(ends)
    for name in INPUTS:
        inputs[name] = np.abs(inputs[name]).astype(inputs[name].dtype)
    others = [part for idx, part in enumerate(parts) if idx != broken]
    poisoned = poison(inputs, others, value)
    force = GENERATIONS[generation]
    results = run_ragged(
        cupy_library, poisoned, {"causal": True}, lengths_of(ends), force, strategy=strategy
    )
    expected = ExpectedParts(inputs, others, {"causal": True})
    for name, got in results.items():
        # What is broken may be anything.
        got[parts[broken].of(name)] = expected.values[name][parts[broken].of(name)]
    expected.check(results)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize("heads", [{"heads": 2}, {"heads": 8, "key_heads1": 1, "key_heads2": 1}])
@pytest.mark.parametrize("name", ["mixed", "few", "ones"])
def test_splits(
    name: str,
    heads: dict[str, int],
    num_splits: int,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    ends = ENDS[name]
    inputs, parts = packed_inputs(rng, ends, **heads), parts_of(ends)
    with plan.override(num_splits=num_splits):
        results = run_ragged(cupy_library, inputs, {"causal": True}, lengths_of(ends), wrt=())
    ExpectedParts(inputs, parts, {"causal": True}, ()).check(results)


@pytest.mark.parametrize("most", [(1, 1), (16, 500), (10**6, 10**6)])
def test_the_longest_is_for_the_plan_alone(
    most: tuple[int, int], rng: np.random.Generator, cupy_library: Cupy
) -> None:
    ends = ENDS["mixed"]
    inputs = packed_inputs(rng, ends)
    options = {"causal": True, "max_seqlen_q": most[0], "max_seqlen_k": most[1]}
    results = run_ragged(cupy_library, inputs, options, lengths_of(ends))
    ExpectedParts(inputs, parts_of(ends), {"causal": True}).check(results)


@pytest.mark.parametrize("offset", [2, 8])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_guarded_loads(
    strategy: str, offset: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    ends = ENDS["mixed"]
    inputs = packed_inputs(rng, ends, heads=2)
    packed = {name: to_packed(name, x) for name, x in inputs.items()}
    arrays = {n: upload(cupy_library, x, offset * (n in INPUTS)) for n, x in packed.items()}
    on_card = upload_all(
        cupy_library, {n: np.array(x, np.int32) for n, x in lengths_of(ends).items()}
    )
    assert "_guarded" in backward_plan(arrays, on_card, INPUTS).name
    qk = [arrays[name] for name in INPUTS]
    state = skl.attention_kl(*qk, **on_card, return_state=True)
    gradients = skl.attention_kl_backward(
        arrays["dkl"], *qk, state, wrt=INPUTS, strategy=strategy, **on_card
    )
    results = {name: getattr(state, name) for name in ("kl", "lse1", "lse2")}
    results |= zip(("d" + name for name in INPUTS), gradients, strict=True)
    ours = {name: from_packed(cupy_library.get(x)) for name, x in results.items()}
    ExpectedParts(inputs, parts_of(ends), {}).check(ours)


def test_the_same_bits_every_time(rng: np.random.Generator, cupy_library: Cupy) -> None:
    ends = ENDS["gaps"]
    inputs = packed_inputs(rng, ends, heads=4)
    lengths = lengths_of(ends)
    runs = [
        run_ragged(cupy_library, inputs, {"causal": True}, lengths, deterministic=True)
        for _ in range(20)
    ]
    for name in runs[0]:
        assert len({results[name].tobytes() for results in runs}) == 1, name


def test_decoding_is_split(rng: np.random.Generator, cupy_library: Cupy) -> None:
    ends: Ends = ((0, 1, 2, 3), (0, 9000, 9500, 20000), 3, 20000)
    inputs = packed_inputs(rng, ends, heads=2)
    arrays = upload_all(cupy_library, {n: to_packed(n, x) for n, x in inputs.items()})
    options = {**lengths_of(ends), "max_seqlen_q": 1, "max_seqlen_k": 10500}
    chosen = forward_plan(arrays, options)
    assert chosen.num_splits > 1
    assert chosen.kernels[0].kernel == "key_table"
    options = {"max_seqlen_q": 1, "max_seqlen_k": 10500}
    results = run_ragged(cupy_library, inputs, options, lengths_of(ends), wrt=())
    ExpectedParts(inputs, parts_of(ends), {}, ()).check(results)


@pytest.mark.parametrize("wrt", [("q2",), ("k1",), ("q1", "q2"), ("k1", "k2"), ("q1", "k2")])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_subsets(
    wrt: tuple[str, ...], generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    ends, options = ENDS["gaps"], {"causal": True}
    inputs, parts = packed_inputs(rng, ends, heads=4, key_heads1=2), parts_of(ends)
    force, lengths = GENERATIONS[generation], lengths_of(ends)
    poisoned = poison(inputs, parts, np.nan)
    expected = ExpectedParts(inputs, parts, options, wrt)
    for strategy in ("fused", "separate"):
        results = run_ragged(
            cupy_library, poisoned, options, lengths, force, strategy=strategy, wrt=wrt
        )
        expected.check(results)


@pytest.mark.parametrize("length", [1, 3, 70])
def test_many_sequences(length: int, rng: np.random.Generator, cupy_library: Cupy) -> None:
    num_sequences = 12_000 // length
    shape = {"heads": 2, "num_queries": length, "num_keys": length, "head_dim1": 32}
    batch = random_inputs(rng, batch=num_sequences, **shape)
    # One behind the other: (B, H, N, ...) becomes (1, H, B N, ...).
    whole = {
        name: np.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, 2, -1, *x.shape[3:])
        for name, x in batch.items()
    }
    ends = tuple(range(0, num_sequences * length + 1, length))
    options = {"causal": True, "max_seqlen_q": length, "max_seqlen_k": length}
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    results = run_ragged(cupy_library, whole, options, lengths)
    ours = {
        name: x.reshape(2, num_sequences, length, *x.shape[3:]).swapaxes(0, 1)
        for name, x in results.items()
    }
    Expected(batch, {"causal": True}).check(ours)


def test_keys_expanded_over_heads(rng: np.random.Generator, cupy_library: Cupy) -> None:
    ends = ENDS["mixed"]
    inputs = packed_inputs(rng, ends, heads=4, key_heads1=1, key_heads2=1)
    packed = {name: to_packed(name, x) for name, x in inputs.items()}
    shared = {n: packed[n] for n in ("k1", "k2")}
    expanded = {n: np.broadcast_to(x, (len(x), 4, x.shape[2])) for n, x in shared.items()}
    arrays = upload_all(cupy_library, packed | expanded)
    lengths = {n: np.array(x, np.int32) for n, x in lengths_of(ends).items()}
    results = run(
        cupy_library, arrays, upload_all(cupy_library, lengths) | {"causal": True}, wrt=("q1", "q2")
    )
    ours = {name: from_packed(x) for name, x in results.items()}
    ExpectedParts(inputs, parts_of(ends), {"causal": True}, ("q1", "q2")).check(ours)

"""Past the limits of 32-bit positions and of a grid's sides; sampled, and freed afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.compare import error, sample_rows
from tests.gpu.card import POISON, Cupy, Expected, random_inputs, run, upload_all
from tests.gpu.sampling import Samples

pytestmark = pytest.mark.slow

# Numbers of magnitude 0.5 to 2 with random signs, as bits of bfloat16, from a hash of the position.
RANDOM_BITS = """
    unsigned long long x = seed + 0x9E3779B97F4A7C15ull * (unsigned long long)(i + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    bits = (unsigned short)((x & 0x80FF) | 0x3F00);
"""
HEAD_DIM = 128


@pytest.fixture(autouse=True)
def freed_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def random_bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Draw on the card, where alone there is room for it."""
    fill = cupy.ElementwiseKernel("uint64 seed", "uint16 bits", RANDOM_BITS, "random_bits")
    bits = cupy.empty(shape, np.uint16)
    fill(np.uint64(rng.integers(2**63)), bits)
    return bits.view(ml_dtypes.bfloat16)


def nan_like(array: Any) -> Any:
    """Allocate an array of the same kind, full of NaN."""
    result = cupy.empty_like(array)
    result.data.memset(POISON, result.nbytes)
    return result


def to_host(array: Any) -> np.ndarray:
    """Copy a bfloat16 array."""
    return cupy.asnumpy(array.view(np.uint16)).view(ml_dtypes.bfloat16)


def rows_to_host(array: Any, rows: np.ndarray) -> np.ndarray:
    """Copy some rows of the second last axis, one by one: nothing here indexes in 32 bits."""
    return np.stack([to_host(array[..., int(row), :]) for row in rows], axis=-2)


def double(array: Any) -> Any:
    """Convert a bfloat16 array to float64, on the card."""
    bits = array.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def largest_bits_outside(gradient: Any, rows: np.ndarray) -> int:
    """The largest magnitude, as bits, outside some rows of the second last axis; spoils those.

    It is looked at piece by piece; a copy of the whole would not be frugal.
    """
    bits = gradient.view(np.uint16)
    for row in rows:
        bits[..., int(row), :] = 0
    flat = bits.reshape(-1)
    pieces = range(0, flat.size, 1 << 28)
    return max(int((flat[at : at + (1 << 28)] & np.uint16(0x7FFF)).max()) for at in pieces)


def test_more_than_2_31_elements_of_queries(rng: np.random.Generator) -> None:
    heads, num_keys = 4, 70
    num_queries = 2**31 // (heads * HEAD_DIM) + 5
    q1, q2 = (random_bfloat16(rng, (heads, num_queries, HEAD_DIM)) for _ in range(2))
    k1, k2 = (random_bfloat16(rng, (heads, num_keys, HEAD_DIM)) for _ in range(2))
    assert q1.size > 2**31
    # Rows that the upstream gradient leaves out do not count, so the reference needs few rows.
    rows = np.unique([*sample_rows(rng, 50, num_queries), num_queries - 2])
    dkl = np.zeros((heads, num_queries), np.float32)
    dkl[:, rows] = rng.standard_normal((heads, len(rows)))
    sampled = {"q1": rows_to_host(q1, rows), "q2": rows_to_host(q2, rows)}
    sampled |= {"k1": to_host(k1), "k2": to_host(k2), "dkl": dkl[:, rows]}
    expected = Expected(sampled, {})

    upstream = cupy.asarray(dkl)
    state = skl.attention_kl(q1, k1, q2, k2, return_state=True)
    parts = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    for array in parts.values():
        assert bool(cupy.isfinite(array).all())
    expected.check({name: cupy.asnumpy(array)[:, rows] for name, array in parts.items()})

    for strategy in ("fused", "separate"):
        for side, q, k in (("1", q1, k1), ("2", q2, k2)):
            dq, dk = nan_like(q), nan_like(k)
            skl.attention_kl_backward(
                upstream,
                *(q1, k1, q2, k2),
                state,
                wrt=(f"q{side}", f"k{side}"),
                strategy=strategy,
                out=(dq, dk),
            )
            expected.check({f"dq{side}": rows_to_host(dq, rows), f"dk{side}": to_host(dk)})
            assert largest_bits_outside(dq, rows) == 0
            del dq, dk


def test_more_than_2_31_elements_of_keys(rng: np.random.Generator) -> None:
    num_queries, num_keys = 2, 2**31 // HEAD_DIM + 77
    scale = HEAD_DIM**-0.5
    q1, q2 = (random_bfloat16(rng, (num_queries, HEAD_DIM)) for _ in range(2))
    k1, k2 = (random_bfloat16(rng, (num_keys, HEAD_DIM)) for _ in range(2))
    assert k1.size > 2**31
    dkl = rng.standard_normal(num_queries).astype(np.float32)

    # The reference by another library's float64 products, piece by piece.
    pieces = [slice(at, at + (1 << 20)) for at in range(0, num_keys, 1 << 20)]
    logits = {
        side: np.concatenate([cupy.asnumpy(double(q) @ double(k[at]).T) for at in pieces], axis=1)
        * scale
        for side, q, k in (("1", q1, k1), ("2", q2, k2))
    }
    lse, p = {}, {}
    for side, values in logits.items():
        top = values.max(axis=1, keepdims=True)
        lse[side] = (top + np.log(np.exp(values - top).sum(axis=1, keepdims=True)))[:, 0]
        p[side] = np.exp(values - lse[side][:, None])
    delta = (p["1"] * (logits["1"] - logits["2"])).sum(axis=1)
    kl = delta + lse["2"] - lse["1"]
    ds = {
        "1": p["1"] * (logits["1"] - logits["2"] - delta[:, None]) * dkl[:, None] * scale,
        "2": (p["2"] - p["1"]) * dkl[:, None] * scale,
    }
    del p

    state = skl.attention_kl(q1, k1, q2, k2, return_state=True)
    assert error(cupy.asnumpy(state.kl), kl) < 1e-5
    assert error(cupy.asnumpy(state.lse1), lse["1"]) < 1e-6
    assert error(cupy.asnumpy(state.lse2), lse["2"]) < 1e-6

    # The last rows lie past 2**31, and a position cut to 32 bits would give those before it.
    keys = np.unique([*sample_rows(rng, 100, num_keys), *range(num_keys - 80, num_keys)])
    upstream = cupy.asarray(dkl)
    for side, q, k in (("1", q1, k1), ("2", q2, k2)):
        slopes = cupy.asarray(ds[side])
        exact_dq = sum(cupy.asnumpy(slopes[:, at] @ double(k[at])) for at in pieces)
        exact_dk = ds[side][:, keys].T @ to_host(q).astype(np.float64)
        for strategy in ("fused", "separate"):
            dq, dk = nan_like(q), nan_like(k)
            skl.attention_kl_backward(
                upstream,
                *(q1, k1, q2, k2),
                state,
                wrt=(f"q{side}", f"k{side}"),
                strategy=strategy,
                out=(dq, dk),
            )
            # Numbers of the 8 bits of bfloat16; and tensor cores cut off what they add, which shows
            # in a sum over so many keys. A wrong position would be an error of about 1.
            assert error(rows_to_host(dk, keys), exact_dk) < 1e-2
            assert error(to_host(dq), exact_dq) < 5e-2
            del dq, dk


@pytest.mark.parametrize("num_queries", [5, 17])
@pytest.mark.parametrize("is_batch", [True, False], ids=["batch", "heads"])
def test_70000_heads(
    is_batch: bool, num_queries: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # A grid's second and third side end at 65535.
    count, num_keys, head_dim = 70_000, 23, 64
    lead = (count, 1) if is_batch else (1, count)
    lengths = {"q1": num_queries, "k1": num_keys, "q2": num_queries, "k2": num_keys}
    arrays = {n: random_bfloat16(rng, (*lead, length, head_dim)) for n, length in lengths.items()}
    dkl = rng.standard_normal((*lead, num_queries)).astype(np.float32)
    arrays["dkl"] = cupy.asarray(dkl)
    some = np.unique([*sample_rows(rng, 40, count), *range(65530, 65540)])
    at = (some,) if is_batch else (slice(None), some)
    sampled = {name: to_host(arrays[name])[at] for name in INPUTS} | {"dkl": dkl[at]}
    options = {"causal": True}
    expected = Expected(sampled, options)
    for strategy in ("fused", "separate"):
        results = run(cupy_library, arrays, options, strategy=strategy, into=True)
        expected.check({name: values[at] for name, values in results.items()})
        for name, values in results.items():
            if name.startswith("d"):
                values = values.view(np.uint16) & 0x7FFF
                assert values.max() < 0x7F80, f"{name} is not finite everywhere"
            else:
                assert np.isfinite(values).all(), name


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1 << 19, 257), (1 << 16, 64)])
def test_many_queries_of_one_head(
    num_queries: int, num_keys: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, heads=1, num_queries=num_queries, num_keys=num_keys)
    inputs = {name: array[0, 0] for name, array in inputs.items()}
    # Every row twice.
    half = num_queries // 2
    for name in ("q1", "q2"):
        inputs[name][half:] = inputs[name][:half]
    arrays = upload_all(cupy_library, inputs)
    fused, separate = (
        run(cupy_library, arrays, {}, strategy=strategy, into=True)
        for strategy in ("fused", "separate")
    )
    samples = Samples(inputs, fused, rng, causal=False)
    samples.check(fused)
    samples.check(separate)
    for name in ("kl", "lse1", "lse2"):
        assert (fused[name][:half] == fused[name][half:]).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_long_sequence(causal: bool, rng: np.random.Generator, cupy_library: Cupy) -> None:
    # The first three queries see no key if causal.
    num_queries, num_keys = 40_000, 39_997
    inputs = random_inputs(
        rng, heads=1, num_queries=num_queries, num_keys=num_keys, head_dim1=HEAD_DIM
    )
    inputs = {name: array[0, 0] for name, array in inputs.items()}
    arrays = upload_all(cupy_library, inputs)
    fused, separate = (
        run(cupy_library, arrays, {"causal": causal}, strategy=strategy, into=True)
        for strategy in ("fused", "separate")
    )
    samples = Samples(inputs, fused, rng, causal=causal, num_rows=24, num_keys=10)
    samples.check(fused)
    samples.check(separate)

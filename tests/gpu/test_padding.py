"""Padded batches: lengths on the device, and padding full of NaN or Inf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkl_cupy import plan
from streamkl_cupy.problem import INPUTS, PADDING
from tests.gpu.card import Cupy, random_inputs, run, upload_all
from tests.gpu.ragged import GENERATIONS, MASKS, ExpectedParts, Part, poison, run_ragged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "right": {"kv_lens": (300, 1, 0, 170), "q_lens": (200, 65, 17, 0)},
    "left": {"kv_starts": (0, 299, 300, 77), "kv_lens": (300, 1, 5, 223)},
    "middle": {
        "kv_starts": (10, 64, 128, 299),
        "kv_lens": (90, 64, 130, 900),
        "q_lens": (7, 64, 200, 129),
    },
    "queries": {"q_lens": (1, 199, 64, 0)},
}


def parts_of(
    lengths: dict[str, tuple[int, ...]], batch: int, num_queries: int, num_keys: int
) -> list[Part]:
    """The keys and the queries of each batch entry that are there."""
    parts = []
    for entry in range(batch):
        first, most, rows = (
            lengths[name][entry] if name in lengths else whole
            for name, whole in zip(PADDING, (0, num_keys, num_queries), strict=True)
        )
        parts.append(Part(entry, slice(0, rows), slice(first, min(num_keys, first + most))))
    return parts


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_padding(
    dtype: str, name: str, mask: str, generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, dtype, batch=4, num_queries=200, num_keys=300, key_heads2=1)
    lengths, options = LENGTHS[name], MASKS[mask]
    parts = parts_of(lengths, 4, 200, 300)
    expected = ExpectedParts(inputs, parts, options)
    poisoned = poison(inputs, parts, np.nan)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        expected.check(
            run_ragged(cupy_library, poisoned, options, lengths, force, strategy=strategy)
        )


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("strategy", ["fused", "separate"])
def test_what_padding_holds(
    strategy: str, generation: str, value: float, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, batch=4, num_queries=200, num_keys=300, head_dim1=128)
    for name in INPUTS:
        # All of one sign, so that no logit with an Inf tells of it by being NaN or positive.
        inputs[name] = np.abs(inputs[name]) * (-1 if name[0] == "q" and value > 0 else 1)
        inputs[name] = inputs[name].astype(inputs["k1"].dtype)
    lengths = LENGTHS["middle"]
    parts = parts_of(lengths, 4, 200, 300)
    poisoned = poison(inputs, parts, value)
    force = GENERATIONS[generation]
    results = run_ragged(cupy_library, poisoned, {}, lengths, force, strategy=strategy)
    ExpectedParts(inputs, parts, {}).check(results)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dims", [(32, 64), (64, 192), (96, 96), (256, 128), (256, 256)], ids=str)
def test_head_dims(
    dims: tuple[int, int], generation: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    sizes = {"head_dim1": dims[0], "head_dim2": dims[1], "num_queries": 200, "num_keys": 300}
    inputs = random_inputs(rng, batch=4, heads=2, **sizes)
    lengths, options = LENGTHS["middle"], {"causal": True}
    parts = parts_of(lengths, 4, 200, 300)
    expected, poisoned = ExpectedParts(inputs, parts, options), poison(inputs, parts, np.nan)
    for strategy in ("fused", "separate"):
        force = GENERATIONS[generation]
        expected.check(
            run_ragged(cupy_library, poisoned, options, lengths, force, strategy=strategy)
        )


@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize("heads", [{"heads": 2}, {"heads": 8, "key_heads1": 1, "key_heads2": 1}])
@pytest.mark.parametrize("num_queries", [3, 50, 200])
def test_splits(
    num_queries: int,
    heads: dict[str, int],
    num_splits: int,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    inputs = random_inputs(rng, batch=2, **heads, num_queries=num_queries, num_keys=1500)
    lengths = {"kv_starts": (100, 7), "kv_lens": (1300, 600), "q_lens": (num_queries - 1, 2)}
    parts, options = parts_of(lengths, 2, num_queries, 1500), {"causal": True}
    with plan.override(num_splits=num_splits):
        results = run_ragged(cupy_library, poison(inputs, parts, np.nan), options, lengths, wrt=())
    ExpectedParts(inputs, parts, options, ()).check(results)


def test_lengths_are_read_at_each_call(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, batch=2, num_queries=100, num_keys=100)
    arrays = upload_all(cupy_library, inputs)
    lens = cupy_library.put(np.array([100, 40], np.int32))
    for now in ((100, 40), (3, 99)):
        lens[...] = cupy_library.put(np.array(now, np.int32))
        results = run(cupy_library, arrays, {"kv_lens": lens}, wrt=())
        parts = parts_of({"kv_lens": now}, 2, 100, 100)
        ExpectedParts(inputs, parts, {}, ()).check(results)


def test_whole_lengths_are_no_padding(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = random_inputs(rng, batch=2, heads=2, num_queries=300, num_keys=400)
    for mask in MASKS.values():
        choices: dict[str, Any] = {"deterministic": True}
        whole = run_ragged(cupy_library, inputs, mask, {"kv_lens": (400, 400)}, **choices)
        plain = run_ragged(cupy_library, inputs, mask, {}, **choices)
        for name, values in plain.items():
            ours = whole[name].astype(np.float32)
            np.testing.assert_allclose(ours, values.astype(np.float32), rtol=2e-2, atol=1e-4)

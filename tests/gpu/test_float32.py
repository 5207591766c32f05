"""float32 inputs: four times the error of the float32 formula, whose products are in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan, reference, tiling
from streamkl_cupy.audit import error, nonfinite_rows
from streamkl_cupy.problem import INPUTS
from tests.cases import Case, draw, select
from tests.gpu.card import (
    Cupy,
    Expected,
    backward_plan,
    forward_plan,
    run,
    same_bits,
    seen_keys,
    upload_all,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FACTOR = 4
# Half a step of float32, which an output may be off by however close the formula came.
FLOOR = 2.0**-24
# Inputs rounded to 11 bits: relative to the larger of a logit and the sum that it comes from.
TF32 = 2.0**-11

Arrays = dict[str, np.ndarray]


def exact(inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Arrays:
    """Every output in float64."""
    qk = [inputs[name] for name in INPUTS]
    state = reference.attention_kl(*qk, **options, return_state=True)
    gradients = reference.attention_kl_backward(inputs["dkl"], *qk, state, wrt=INPUTS, **options)
    return state._asdict() | {f"d{n}": x for n, x in zip(INPUTS, gradients, strict=True)}


def formula(inputs: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Arrays:
    """Every output as log_softmax in float32 gives it; products of matrices are summed in float64.

    Layout bhnd at rank 4, equal numbers of heads.
    """
    single, double = np.float32, np.float64
    num_queries, num_keys = inputs["q1"].shape[-2], inputs["k1"].shape[-2]
    seen = seen_keys(num_queries, num_keys, options)
    log_p, found = {}, {}
    for side in "12":
        q, k = inputs["q" + side].astype(double), inputs["k" + side].astype(double)
        scale = single(options.get("scale" + side, q.shape[-1] ** -0.5))
        logits = np.where(seen, (q @ k.swapaxes(-1, -2)).astype(single) * scale, -np.inf)
        most = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - most).sum(-1, keepdims=True, dtype=single))
        log_p[side] = logits - most - log_sum
        found["lse" + side] = (most + log_sum)[..., 0]
    with np.errstate(invalid="ignore"):
        difference = np.where(seen, log_p["1"] - log_p["2"], single(0))
    p1, p2 = np.exp(log_p["1"]), np.exp(log_p["2"])
    found["kl"] = (p1 * difference).sum(-1, dtype=single)
    upstream = inputs["dkl"][..., None]
    dlogits = {"1": upstream * (p1 * (difference - found["kl"][..., None]))}
    dlogits["2"] = upstream * (p2 - p1)
    for side, ds in dlogits.items():
        q, k = inputs["q" + side].astype(double), inputs["k" + side].astype(double)
        scale = single(options.get("scale" + side, q.shape[-1] ** -0.5))
        found["dq" + side] = (ds.astype(double) @ k).astype(single) * scale
        found["dk" + side] = (ds.astype(double).swapaxes(-1, -2) @ q).astype(single) * scale
    return found


def check(
    ours: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    options: Mapping[str, Any],
    floors: Mapping[str, float] | None = None,
) -> None:
    ref, baseline = exact(inputs, options), formula(inputs, options)
    for name, values in ours.items():
        assert values.dtype == np.float32
        assert values.shape == ref[name].shape
        own = error(values.astype(np.float64), ref[name])
        allowed = FACTOR * error(baseline[name].astype(np.float64), ref[name])
        allowed += (floors or {}).get(name, FLOOR)
        assert own <= allowed, f"{name}: error {own:.2e}, allowed {allowed:.2e}"


SHAPES = [
    {"head_dim1": d, "num_queries": 131, "num_keys": 150} for d in (8, 24, 40, 96, 192, 256)
] + [
    {"head_dim1": 64, "num_queries": 1000, "num_keys": 1000, "heads": 1},
    {"head_dim1": 128, "num_queries": 257, "num_keys": 255},
    {"head_dim1": 192, "head_dim2": 64, "num_queries": 129, "num_keys": 127},
    {"head_dim1": 32, "head_dim2": 256, "num_queries": 40, "num_keys": 700},
    {"head_dim1": 96, "head_dim2": 128, "num_queries": 1, "num_keys": 3000},
    {"head_dim1": 8, "head_dim2": 128, "num_queries": 17, "num_keys": 2},
    # So long that the sums of gradients are stored in parts.
    {"head_dim1": 64, "num_queries": 64, "num_keys": 4000, "heads": 1},
    {"head_dim1": 256, "head_dim2": 40, "num_queries": 3000, "num_keys": 80, "heads": 1},
]


def name_of(shape: Mapping[str, int]) -> str:
    return "_".join(str(length) for length in shape.values())


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_shapes(shape: dict[str, int], rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, **shape)
    check(run(cupy_library, upload_all(cupy_library, inputs), {}, into=True), inputs, {})


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "left": {"window": (40, None)},
    "both": {"window": (100, 70), "scale2": -0.3},
    "causal_window": {"causal": True, "window": (63, 0)},
    "chunk": {"causal": True, "window": (130, 0), "q_offset": 120},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=150, num_keys=300, head_dim1=64, head_dim2=128)
    arrays = upload_all(cupy_library, inputs)
    check(run(cupy_library, arrays, MASKS[mask], into=True), inputs, MASKS[mask])


@pytest.mark.parametrize("size", [10.0, 100.0, 1000.0])
def test_big_logits(size: float, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=150, num_keys=200, head_dim1=128)
    for name in ("q1", "q2"):
        inputs[name] *= np.float32(size)
    # Where P1 is one key alone, what float32 leaves of the gradients of side 1 is noise.
    floors = Expected(inputs, {}, is_saturated=True).floors if size == 1000 else {}
    check(run(cupy_library, upload_all(cupy_library, inputs), {}), inputs, {}, floors)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sides", ["1", "2", "12"])
@pytest.mark.parametrize("place", [0, -1])
def test_an_offset(
    place: int, sides: str, head_dim: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = draw(rng, num_queries=130, num_keys=140, head_dim1=head_dim)
    for side in sides:
        inputs["q" + side][..., place] = 80
        inputs["k" + side][..., place] = 1000 / (80 * head_dim**-0.5)
    check(run(cupy_library, upload_all(cupy_library, inputs), {}), inputs, {})


def test_a_small_divergence(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=200, num_keys=300, head_dim1=128)
    inputs["q2"], inputs["k2"] = inputs["q1"] * np.float32(1.0015), inputs["k1"].copy()
    assert 3e-7 < exact(inputs, {})["kl"].mean() < 3e-6
    check(run(cupy_library, upload_all(cupy_library, inputs), {}), inputs, {})


def test_equal_sides_are_exactly_zero(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=100, num_keys=120)
    inputs["q2"], inputs["k2"] = inputs["q1"].copy(), inputs["k1"].copy()
    ours = run(cupy_library, upload_all(cupy_library, inputs), {})
    for name in ("kl", "dq1", "dk1", "dq2", "dk2"):
        assert (ours[name] == 0).all(), name


@pytest.mark.parametrize(
    "case", select("no_keys", "zero_sizes", "nonfinite", "layout", "grouped", "upstream"), ids=str
)
def test_cases(case: Case, rng: np.random.Generator, cupy_library: Cupy) -> None:
    # In any layout and with any heads: held to the reference itself.
    inputs = case.inputs(rng, "float32")
    ours = run(cupy_library, upload_all(cupy_library, inputs), case.options, into=True)
    with np.errstate(all="ignore"):
        ref = exact(inputs, case.options)
    for name, values in ours.items():
        bad = nonfinite_rows(name, ref[name])
        assert (nonfinite_rows(name, values) == bad).all(), name
        assert error(values[~bad].astype(np.float64), ref[name][~bad]) < 3e-6, name


@pytest.mark.parametrize(
    "names", [n for c in (1, 2, 3, 4) for n in itertools.combinations(INPUTS, c)]
)
def test_subsets(names: tuple[str, ...], rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=70, num_keys=90, head_dim1=64, head_dim2=32)
    arrays = upload_all(cupy_library, inputs)
    ours = run(cupy_library, arrays, {"causal": True}, wrt=names, into=True)
    assert set(ours) == {"kl", "lse1", "lse2", *("d" + name for name in names)}
    check(ours, inputs, {"causal": True})


@pytest.mark.parametrize("num_queries", [1, 40, 150])
def test_splits_and_views_off_16_bytes(
    num_queries: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = draw(rng, num_queries=num_queries, num_keys=1500, head_dim1=64)
    arrays = upload_all(cupy_library, inputs)
    whole = run(cupy_library, arrays, {})
    with plan.override(num_splits=4):
        assert forward_plan(arrays, {}).num_splits == 4
        check(run(cupy_library, arrays, {}, wrt=(), into=True), inputs, {})
    wide = {n: np.zeros((*x.shape[:-1], x.shape[-1] + 1), np.float32) for n, x in inputs.items()}
    for name in INPUTS:
        wide[name][..., 1:] = inputs[name]
        arrays[name] = upload_all(cupy_library, {name: wide[name]})[name][..., 1:]
    assert "guarded" in forward_plan(arrays, {}).name
    views = run(cupy_library, arrays, {})
    for name in whole:
        assert error(views[name].astype(np.float64), whole[name].astype(np.float64)) < 1e-6


@pytest.mark.parametrize("head_dim", [136, 200, 256])
def test_tiles_of_cards_with_less_shared_memory(
    head_dim: int, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    # One warp, whose rows have more columns of 16 bytes than it has threads.
    inputs = draw(rng, num_queries=50, num_keys=70, head_dim1=head_dim)
    arrays = upload_all(cupy_library, inputs)
    tiles = dict.fromkeys(plan.PORTABLE_PAIR, tiling.BackwardTile(1, 1, 16, 16, 2))
    forward_tile = tiling.ForwardTile(1, 1, 1, 16, 16, 2, False)
    with plan.override(forward_tile=forward_tile, backward_tiles=tiles):
        assert forward_plan(arrays, {}).kernels[0].block == 32
        chosen = backward_plan(arrays, {}, INPUTS)
        assert {k.block for k in chosen.kernels if k.kernel in plan.PORTABLE_PAIR} == {32}
        check(run(cupy_library, arrays, {}, into=True), inputs, {})


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_two_runs_agree_bit_for_bit(
    precision: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = draw(rng, num_queries=700, num_keys=900, head_dim1=64, heads=4, key_heads1=2)
    arrays = upload_all(cupy_library, inputs)
    options = {"precision": precision}
    first = run(cupy_library, arrays, options)
    for deterministic in (False, True, False):
        again = run(cupy_library, arrays, options, deterministic=deterministic)
        assert all(same_bits(first[name], again[name]) for name in first)


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_tf32(head_dim: int, rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng, num_queries=150, num_keys=200, head_dim1=head_dim)
    arrays = upload_all(cupy_library, inputs)
    options = {"causal": True}
    ref = exact(inputs, options)
    ours = run(cupy_library, arrays, {**options, "precision": "tf32"}, into=True)
    better = run(cupy_library, arrays, options)
    for name in ours:
        own = error(ours[name].astype(np.float64), ref[name])
        # Both inputs of a product are off by at most half of TF32 each, P and the gradients of the
        # logits by TF32 times logits of about 1, twice.
        assert own < 4 * TF32, f"{name}: error {own:.2e}"
        assert own > 10 * error(better[name].astype(np.float64), ref[name]), name


def test_states_entropies_and_given_normalisers(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = draw(rng, num_queries=60, num_keys=400, head_dim1=64)
    arrays = upload_all(cupy_library, inputs)
    qk = [arrays[name] for name in INPUTS]
    hosts = [inputs[name] for name in INPUTS]
    get = cupy_library.get
    ref = reference.attention_kl(*hosts, return_entropy=True)
    entropies = skl.attention_kl(*qk, return_entropy=True)
    for name in ("entropy", "cross_entropy"):
        assert error(get(getattr(entropies, name)), getattr(ref, name)) < 1e-6
    parts = [
        skl.attention_kl(qk[0], qk[1][..., part, :], qk[2], qk[3][..., part, :], return_state=True)
        for part in (slice(0, 130), slice(130, 400))
    ]
    merged = skl.merge_states(*parts)
    assert error(get(merged.kl), ref.kl) < 1e-6
    given = skl.attention_kl(*qk, lse1=merged.lse1, lse2=merged.lse2, return_state=True)
    assert error(get(given.kl), ref.kl) < 1e-6
    (dq2,) = skl.attention_kl_backward(arrays["dkl"], *qk, given, wrt=("q2",))
    exact_given = reference.attention_kl(*hosts, lse1=ref.lse1, lse2=ref.lse2, return_state=True)
    (ref_dq2,) = reference.attention_kl_backward(inputs["dkl"], *hosts, exact_given, wrt=("q2",))
    assert error(get(dq2), ref_dq2) < 3e-6


def test_only_the_portable_kernels_run(rng: np.random.Generator, cupy_library: Cupy) -> None:
    arrays = upload_all(cupy_library, draw(rng, num_queries=500, num_keys=500))
    names = {kernel.kernel for kernel in forward_plan(arrays, {}).kernels}
    names |= {kernel.kernel for kernel in backward_plan(arrays, {}, INPUTS).kernels}
    assert not any(name.endswith("sm90") for name in names)
    state = skl.attention_kl(*(arrays[name] for name in INPUTS), return_state=True)
    with pytest.raises(ValueError, match="strategy: expected"):
        skl.attention_kl_backward(**arrays, state=state, wrt=("q2", "k2"), strategy="fused")


def test_precision_is_for_float32_alone(rng: np.random.Generator, cupy_library: Cupy) -> None:
    inputs = draw(rng)
    half = upload_all(cupy_library, {n: inputs[n].astype(np.float16) for n in INPUTS})
    for precision in ("float32", "tf32"):
        with pytest.raises(ValueError, match="precision: expected None with float16 inputs"):
            skl.attention_kl(**half, precision=precision)
    mixed = half | upload_all(cupy_library, {"k2": inputs["k2"]})
    with pytest.raises(TypeError, match="k2: expected the dtype of q1, float16, got float32"):
        skl.attention_kl(**mixed)


def test_torch_follows_precision_and_no_flag(torch: Any, rng: np.random.Generator) -> None:
    from streamkl_cupy import torch as door

    inputs = draw(rng, num_queries=100, num_keys=120)
    leaves = [torch.from_numpy(inputs[name]).cuda().requires_grad_() for name in INPUTS]
    found = []
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        for flag, precision in ((False, None), (True, None), (False, "tf32"), (True, "float32")):
            torch.backends.cuda.matmul.allow_tf32 = flag
            loss = door.attention_kl(*leaves, reduction="sum", precision=precision)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    plain, flagged, fast, asked = found
    for a, b, c, d in zip(plain, flagged, fast, asked, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, d)
        assert not torch.equal(a, c)
        assert torch.allclose(a, c, rtol=0.1, atol=4 * TF32)

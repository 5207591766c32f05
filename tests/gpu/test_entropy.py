"""Entropy of P1 and its cross-entropy with P2, on the card against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan, reference
from streamkl_cupy.problem import INPUTS
from tests.compare import assert_accurate
from tests.gpu.card import (
    Expected,
    Library,
    Output,
    Torch,
    random_inputs,
    same_bits,
    seen_keys,
    upload_all,
)

ROWS = ("kl", "lse1", "lse2", "entropy", "cross_entropy")


def textbook(inputs: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, np.ndarray]:
    """The entropies in float32, from the matrices of logits."""
    heads = inputs["q1"].shape[1]
    wide = {n: np.nan_to_num(inputs[n].astype(np.float32), posinf=0, neginf=0) for n in INPUTS}
    num_queries, num_keys = wide["q1"].shape[2], wide["k1"].shape[2]
    seen = seen_keys(num_queries, num_keys, options)
    log_p = {}
    with np.errstate(all="ignore"):
        for t in "12":
            keys = np.repeat(wide["k" + t], heads // wide["k" + t].shape[1], 1)
            scale = np.float32(options.get("scale" + t, keys.shape[-1] ** -0.5))
            s = scale * (wide["q" + t] @ keys.swapaxes(2, 3))
            s = np.where(seen, s, np.float32(-np.inf))
            top = s.max(-1, keepdims=True)
            log_p[t] = s - (top + np.log(np.exp(s - top).sum(-1, keepdims=True)))
        p1 = np.where(seen, np.exp(log_p["1"]), np.float32(0))
        return {
            name: -(p1 * np.where(seen, log_p[t], np.float32(0))).sum(-1)
            for name, t in (("entropy", "1"), ("cross_entropy", "2"))
        }


def check(
    library: Library, inputs: dict[str, np.ndarray], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Entropies keep the accuracy rule, and the rest is what it is without them."""
    arrays = upload_all(library, inputs)
    qk = [arrays[name] for name in INPUTS]
    outputs = {n: Output.make(library, inputs["dkl"].shape, "float32") for n in ROWS}
    out = skl.KLState(**{name: output.array for name, output in outputs.items()})
    assert skl.attention_kl(*qk, **options, return_entropy=True, out=out) is out
    ours = {name: output.read() for name, output in outputs.items()}
    exact = reference.attention_kl(*(inputs[n] for n in INPUTS), **options, return_entropy=True)
    for name, baseline in textbook(inputs, options).items():
        assert_accurate(name, ours[name], getattr(exact, name), baseline)
    both = ours["entropy"] + ours["kl"]
    np.testing.assert_array_equal(ours["cross_entropy"], both)
    plain = skl.attention_kl(*qk, **options, return_state=True)
    for name in ("kl", "lse1", "lse2"):
        value = library.get(getattr(plain, name))
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
    allocated = skl.attention_kl(*qk, **options, return_entropy=True)
    assert same_bits(library.get(allocated.entropy), ours["entropy"])
    return ours


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ["forward_sm90", "forward_sm80"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 32), (128, 128), (256, 256)], ids=str)
def test_entropies(
    dims: tuple[int, int],
    causal: bool,
    kernel: str,
    dtype: str,
    library: Library,
    rng: np.random.Generator,
) -> None:
    # More queries than keys, so that under a causal mask some see none and one sees one.
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=2, num_queries=280, num_keys=250, head_dim1=dims[0],
        head_dim2=dims[1],
    )  # fmt: skip
    with plan.override(forward_kernel=kernel):
        ours = check(library, inputs, {"causal": causal, "scale1": 0.3})
    if causal:
        assert (ours["entropy"][:, :, :31] == 0).all()
        assert (ours["cross_entropy"][:, :, :31] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ["forward_sm90", "forward_sm80"])
@pytest.mark.parametrize(
    "mask", [{"window": (70, 20)}, {"causal": True, "window": (60, None), "q_offset": -30}], ids=str
)
@pytest.mark.parametrize("dims", [(64, 64), (64, 32), (128, 128), (192, 64), (256, 256)], ids=str)
def test_windows(
    dims: tuple[int, int],
    mask: dict[str, Any],
    kernel: str,
    dtype: str,
    library: Library,
    rng: np.random.Generator,
) -> None:
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=2, num_queries=280, num_keys=250, head_dim1=dims[0],
        head_dim2=dims[1],
    )  # fmt: skip
    with plan.override(forward_kernel=kernel):
        ours = check(library, inputs, mask)
    if "q_offset" in mask:
        assert (ours["entropy"][:, :, :30] == 0).all()
        assert (ours["cross_entropy"][:, :, :30] == 0).all()


@pytest.mark.parametrize("num_queries", [1, 9, 90])
def test_split_keys(num_queries: int, library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, heads=4, key_heads1=1, key_heads2=1, num_queries=num_queries,
                           num_keys=6000)  # fmt: skip
    with plan.override(num_splits=5):
        for mask in ({}, {"window": (3500, 100), "q_offset": 4000}):
            check(library, inputs, mask)


def test_what_is_not_finite_stays_in_its_row(library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=130, num_keys=120)
    inputs["q1"][0, 0, 40, 1] = np.nan
    inputs["k1"][0, 1, 100, 1] = np.inf
    check(library, inputs, {"causal": True})


def test_a_peaked_teacher(library: Library, rng: np.random.Generator) -> None:
    """Logits spread over 50, most of P1 on one key: an entropy near 0."""
    inputs = random_inputs(rng, num_queries=130, num_keys=500)
    inputs["q1"] = (inputs["q1"].astype(np.float32) * 16).astype(inputs["q1"].dtype)
    ours = check(library, inputs, {})
    assert np.median(ours["entropy"]) < 0.5


def test_torch_and_jax(torch_library: Torch, jax: Any, rng: np.random.Generator) -> None:
    from streamkl_cupy import jax as of_jax
    from streamkl_cupy import torch as of_torch

    inputs = random_inputs(rng, num_queries=130, num_keys=150)
    qk = [inputs[name] for name in INPUTS]
    exact = reference.attention_kl(*qk, causal=True, return_entropy=True)
    tensors = upload_all(torch_library, inputs)
    leaf = tensors["k2"].requires_grad_()
    options = {"causal": True, "return_lse": True, "return_entropy": True}
    results = of_torch.attention_kl(*(tensors[name] for name in INPUTS), **options)
    (results[0] * tensors["dkl"]).sum().backward()
    arrays = jax.device_put(qk, jax.devices("gpu")[0])

    def weighted(k2: Any) -> Any:
        rows = of_jax.attention_kl(*arrays[:3], k2, **options)
        return (rows[0] * inputs["dkl"]).sum(), rows

    gradient, rows = jax.jit(jax.grad(weighted, has_aux=True))(arrays[3])
    expected = Expected(inputs, {"causal": True}, ("k2",))
    for dk2, found in (
        (torch_library.get(leaf.grad), [torch_library.get(x.detach()) for x in results]),
        (np.asarray(gradient), [np.asarray(x) for x in rows]),
    ):
        for name, ours in zip(ROWS, found, strict=True):
            np.testing.assert_allclose(ours, getattr(exact, name), rtol=1e-5, atol=4e-6)
        expected.check({"dk2": dk2})

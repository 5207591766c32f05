"""Log-sum-exps that are given, on the card against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import plan, reference
from streamkl_cupy.problem import INPUTS
from tests.compare import error, round_mantissa
from tests.gpu.card import (
    Cupy,
    Expected,
    Library,
    Output,
    Torch,
    contiguous,
    random_inputs,
    seen_keys,
    upload,
    upload_all,
)

GIVEN = (("lse1",), ("lse2",), ("lse1", "lse2"))
ROWS = ("kl", "lse1", "lse2", "mass1")


def outside(
    rng: np.random.Generator,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    given: tuple[str, ...],
    above: float,
) -> dict[str, np.ndarray]:
    """Log-sum-exps that lie above the rows' own by `above` and up to 1 more."""
    own = reference.attention_kl(*(inputs[n] for n in INPUTS), **options, return_state=True)
    found = {}
    for name in given:
        values = getattr(own, name) + above + rng.random(own.kl.shape)
        found[name] = np.where(np.isfinite(values), values, 3.0).astype(np.float32)
    return found


class ExpectedGiven(Expected):
    """As `Expected`: the textbook formula in float32 from the matrices of logits."""

    def __init__(
        self,
        inputs: dict[str, np.ndarray],
        options: dict[str, Any],
        lse: dict[str, np.ndarray],
        wrt: tuple[str, ...] = INPUTS,
        *,
        has_offset: bool = False,
    ) -> None:
        qk = [inputs[name] for name in INPUTS]
        state = reference.attention_kl(*qk, **options, **lse, return_state=True)
        assert isinstance(state, reference.GivenState)
        self.values = {name: getattr(state, name) for name in ROWS}
        self.floors = {}
        exact = reference.attention_kl_backward(inputs["dkl"], *qk, state, wrt=wrt, **options)
        self.values |= zip(["d" + name for name in wrt], exact, strict=True)
        self.baselines = textbook(inputs, options, lse, wrt)
        if has_offset:
            self._allow_matrix_units()


def textbook(
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    lse: dict[str, np.ndarray],
    wrt: tuple[str, ...],
) -> dict[str, np.ndarray]:
    heads, dtype = inputs["q1"].shape[1], inputs["q1"].dtype
    # Only what is finite in the reference is compared.
    wide = {n: np.nan_to_num(inputs[n].astype(np.float32), posinf=0, neginf=0) for n in INPUTS}
    keys = {n: np.repeat(wide[n], heads // wide[n].shape[1], 1) for n in ("k1", "k2")}
    num_queries, num_keys = wide["q1"].shape[2], wide["k1"].shape[2]
    seen = seen_keys(num_queries, num_keys, options)
    s, log_p, scale = {}, {}, {}
    with np.errstate(all="ignore"):
        for t in "12":
            scale[t] = np.float32(options.get("scale" + t, wide["q" + t].shape[-1] ** -0.5))
            s[t] = scale[t] * (wide["q" + t] @ keys["k" + t].swapaxes(2, 3))
            s[t] = np.where(seen, s[t], np.float32(-np.inf))
            top = s[t].max(-1, keepdims=True)
            own = top + np.log(np.exp(s[t] - top).sum(-1, keepdims=True))
            used = lse["lse" + t][..., None] if "lse" + t in lse else own
            log_p[t] = np.where(seen, s[t] - used, np.float32(-np.inf))
            lse = lse | {"used" + t: np.where(seen.any(-1), used[..., 0], -np.inf)}
        p1, p2 = np.exp(log_p["1"]), np.exp(log_p["2"])
        r = np.where(seen, log_p["1"] - log_p["2"], np.float32(0))
        kl, mass1 = (p1 * r).sum(-1), p1.sum(-1)
        ds = {
            "1": p1 * (r + 1) if "lse1" in lse else p1 * (r - kl[..., None]),
            "2": -p1 if "lse2" in lse else mass1[..., None] * p2 - p1,
        }
    results = {"kl": kl, "lse1": lse["used1"], "lse2": lse["used2"], "mass1": mass1}
    for name in wrt:
        t = name[1]
        weighted = round_mantissa(ds[t] * inputs["dkl"][..., None], dtype.name)
        if name[0] == "q":
            gradient = scale[t] * (weighted @ keys["k" + t])
        else:
            gradient = scale[t] * (weighted.swapaxes(2, 3) @ wide["q" + t])
            shape = inputs[name].shape
            gradient = gradient.reshape(*shape[:2], -1, *shape[2:]).sum(2)
        results["d" + name] = gradient.astype(dtype)
    return results


def run(
    library: Library,
    inputs: dict[str, np.ndarray],
    options: dict[str, Any],
    lse: dict[str, np.ndarray],
    **choices: Any,
) -> dict[str, np.ndarray]:
    """All results, kl alone and the gradients out of the state written to poisoned outputs."""
    arrays, outer = upload_all(library, inputs), upload_all(library, lse)
    qk, rows, dtype = [arrays[n] for n in INPUTS], inputs["dkl"].shape, inputs["q1"].dtype.name
    outputs = {n: Output.make(library, rows, "float32") for n in (*ROWS, "lse1_low", "lse2_low")}
    out = skl.KLState(**{n: x.array for n, x in outputs.items()}, given=tuple(lse))
    assert skl.attention_kl(*qk, **options, **outer, return_state=True, out=out) is out
    alone = library.get(skl.attention_kl(*qk, **options, **outer))
    gradients = [Output.make(library, inputs[n].shape, dtype) for n in INPUTS]
    skl.attention_kl_backward(
        arrays["dkl"],
        *qk,
        out,
        wrt=INPUTS,
        out=[gradient.array for gradient in gradients],
        **options,
        **choices,
    )
    results = {name: outputs[name].read() for name in ROWS}
    np.testing.assert_array_equal(alone, results["kl"])
    return results | {"d" + n: x.read() for n, x in zip(INPUTS, gradients, strict=True)}


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_values_and_gradients(
    given: tuple[str, ...],
    dtype: str,
    generation: str,
    causal: bool,
    library: Library,
    rng: np.random.Generator,
) -> None:
    # More queries than keys, so that under a causal mask some see none.
    inputs = random_inputs(
        rng, dtype, heads=4, key_heads1=2, num_queries=210, num_keys=190, head_dim2=32
    )
    options = {"causal": causal, "scale1": 0.2}
    lse = outside(rng, inputs, options, given, 0.5)
    expected = ExpectedGiven(inputs, options, lse)
    with plan.override(
        forward_kernel=f"forward_{generation}",
        backward_kernel="backward_dq_sm80" if generation == "sm80" else None,
    ):
        for strategy in ("fused", "separate"):
            expected.check(run(library, inputs, options, lse, strategy=strategy))


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
@pytest.mark.parametrize(
    "mask", [{"window": (70, 20)}, {"causal": True, "window": (60, None), "q_offset": 5}], ids=str
)
def test_windows(
    given: tuple[str, ...],
    generation: str,
    mask: dict[str, Any],
    library: Library,
    rng: np.random.Generator,
) -> None:
    # Under the first mask the first queries lie before what they see, under the second the last
    # ones behind it.
    inputs = random_inputs(rng, heads=4, key_heads1=2, num_queries=280, num_keys=200)
    lse = outside(rng, inputs, mask, given, 0.5)
    expected = ExpectedGiven(inputs, mask, lse)
    assert (expected.values["mass1"] == 0).any()  # some see no key
    with plan.override(
        forward_kernel=f"forward_{generation}",
        backward_kernel="backward_dq_sm80" if generation == "sm80" else None,
    ):
        for strategy in ("fused", "separate"):
            expected.check(run(library, inputs, mask, lse, strategy=strategy))


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("above", [-2.0, 12.0], ids=["fewer", "many"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_far_from_the_rows_own(
    given: tuple[str, ...],
    above: float,
    dtype: str,
    cupy_library: Cupy,
    rng: np.random.Generator,
) -> None:
    """P1 adds up to about 5 where fewer keys are covered, and to 1e-5 where very many are."""
    inputs = random_inputs(rng, dtype, num_queries=130, num_keys=150)
    lse = outside(rng, inputs, {}, given, above)
    expected = ExpectedGiven(inputs, {}, lse)
    for strategy in ("fused", "separate"):
        expected.check(run(cupy_library, inputs, {}, lse, strategy=strategy))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_split_keys_and_few_queries(
    given: tuple[str, ...], library: Library, rng: np.random.Generator
) -> None:
    inputs = random_inputs(rng, num_queries=3, num_keys=5000)
    lse = outside(rng, inputs, {}, given, 0.5)
    with plan.override(num_splits=7):
        for mask in ({}, {"window": (3500, 100), "q_offset": 4000}):
            ExpectedGiven(inputs, mask, lse).check(run(library, inputs, mask, lse))


def test_large_logits(cupy_library: Cupy, rng: np.random.Generator) -> None:
    """Beside a given log-sum-exp what all logits are off by does not cancel.

    The matrix units cut what lies more than two bits below float32 in each step of 16 products, at
    products of 8000 up to 2^-13 four times, which the scale makes 6e-5.
    """
    inputs = random_inputs(rng, "float16", num_queries=130, num_keys=150)
    for t in "12":
        inputs["q" + t][..., -1] = 250
        inputs["k" + t][..., -1] = 32
    for given in GIVEN:
        lse = outside(rng, inputs, {}, given, 0.5)
        expected = ExpectedGiven(inputs, {}, lse, has_offset=True)
        assert expected.values["lse1"].min() > 900
        cut = 0.125 * 4 * 2.0**-13
        expected.floors |= {"mass1": cut, "kl": 4 * cut}
        ours = run(cupy_library, inputs, {}, lse)
        rows = {name: ours[name] for name in ROWS}
        expected.check(rows)


def test_strides_and_layout(library: Library, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=70, num_keys=70)
    lse = outside(rng, inputs, {}, ("lse1", "lse2"), 0.5)
    lse["lse2"] = np.broadcast_to(np.float32(5.5), lse["lse2"].shape)
    expected = ExpectedGiven(inputs, {}, lse, ("q2",))
    swapped = upload_all(
        library, {n: np.ascontiguousarray(inputs[n].swapaxes(1, 2)) for n in INPUTS}
    )
    # (B, N, H) as a view of (B, H, N), and strides of 0.
    outer = {n: upload(library, x.swapaxes(1, 2)) for n, x in lse.items()}
    assert outer["lse1"].shape == (1, 70, 2)
    assert contiguous(outer["lse1"].shape) != (140, 1, 70)
    kl = skl.attention_kl(*(swapped[n] for n in INPUTS), layout="bnhd", **outer)
    expected.check({"kl": library.get(kl).swapaxes(1, 2)})


def test_what_is_not_finite_stays_in_its_row(cupy_library: Cupy, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, num_queries=130, num_keys=120)
    inputs["q2"][0, 0, 40, 1] = np.nan
    inputs["q1"][0, 1, 50, 1] = np.inf
    inputs["k1"][0, 0, 100, 1] = np.nan  # which under the mask the first queries do not see
    for given in GIVEN:
        lse = outside(rng, inputs, {}, given, 0.5)
        expected = ExpectedGiven(inputs, {"causal": True}, lse)
        for strategy in ("fused", "separate"):
            expected.check(run(cupy_library, inputs, {"causal": True}, lse, strategy=strategy))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_torch(given: tuple[str, ...], torch_library: Torch, rng: np.random.Generator) -> None:
    from streamkl_cupy.torch import attention_kl

    inputs = random_inputs(rng, num_queries=130, num_keys=150)
    lse = outside(rng, inputs, {}, given, 0.5)
    expected = ExpectedGiven(inputs, {"causal": True}, lse)
    arrays, outer = upload_all(torch_library, inputs), upload_all(torch_library, lse)
    leaves = {n: x.requires_grad_() for n, x in (arrays | outer).items() if n != "dkl"}
    kl = attention_kl(*(leaves[n] for n in INPUTS), **{n: leaves[n] for n in given}, causal=True)
    (kl * arrays["dkl"]).sum().backward()
    ours = {"kl": torch_library.get(kl.detach())}
    ours |= {"d" + n: torch_library.get(leaves[n].grad) for n in INPUTS}
    expected.check(ours)
    check_own_gradients({n: torch_library.get(leaves[n].grad) for n in given}, inputs, expected)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_jax(given: tuple[str, ...], jax: Any, rng: np.random.Generator) -> None:
    from streamkl_cupy.jax import attention_kl

    inputs = random_inputs(rng, num_queries=130, num_keys=150)
    lse = outside(rng, inputs, {}, given, 0.5)
    expected = ExpectedGiven(inputs, {"causal": True}, lse)

    def weighted(dkl: Any, *x: Any) -> Any:
        outer = dict(zip(given, x[4:], strict=True))
        kl = attention_kl(*x[:4], **outer, causal=True)
        return (kl * dkl).sum(), kl

    device = jax.devices("gpu")[0]
    host = [inputs["dkl"], *(inputs[n] for n in INPUTS), *lse.values()]
    positions = tuple(range(1, 5 + len(given)))
    step = jax.jit(jax.value_and_grad(weighted, positions, has_aux=True))
    (_, kl), gradients = step(*jax.device_put(host, device))
    ours = {"kl": np.asarray(kl)}
    ours |= {"d" + n: np.asarray(x) for n, x in zip(INPUTS, gradients[:4], strict=True)}
    expected.check(ours)
    own = {n: np.asarray(x) for n, x in zip(given, gradients[4:], strict=True)}
    check_own_gradients(own, inputs, expected)


def check_own_gradients(
    ours: dict[str, np.ndarray], inputs: dict[str, np.ndarray], expected: ExpectedGiven
) -> None:
    kl, mass1 = expected.values["kl"], expected.values["mass1"]
    for name, gradient in ours.items():
        exact = inputs["dkl"] * (mass1 if name == "lse2" else -(kl + mass1))
        assert error(gradient, exact) <= 4e-6, name

"""The measure of accuracy: it must see an error, and its textbook baseline must be the textbook."""

from __future__ import annotations

import doctest
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkl_cupy import api, audit, reference

PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_heads": 4, "num_key_heads1": 2, "num_key_heads2": 1},
    "unequal head dims": {"head_dim1": 8, "head_dim2": 24},
    "more queries than keys": {"num_queries": 40, "num_keys": 17},
    "bnhd": {"layout": "bnhd", "batch": 2, "num_key_heads2": 1},
}


def problem(**changes: Any) -> dict[str, np.ndarray]:
    return audit.random_problem(
        **{
            "num_heads": 2,
            "num_queries": 19,
            "num_keys": 33,
            "head_dim1": 16,
            "dtype": "float32",
            **changes,
        }
    )


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(audit).failed == 0


class TestError:
    def test_is_relative_in_the_two_norm(self) -> None:
        assert audit.error([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)

    def test_is_the_root_mean_square_where_the_reference_is_zero(self) -> None:
        assert audit.error([0.0, 0.25], [0.0, 0.0]) == pytest.approx(0.25 / math.sqrt(2))
        assert audit.error([], []) == 0.0

    def test_leaves_out_what_is_not_finite_in_the_reference(self) -> None:
        assert audit.error([-np.inf, 5.5], [-np.inf, 5.0]) == pytest.approx(0.1)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_is_infinite_where_only_the_result_is_not_finite(self, bad: float) -> None:
        assert audit.error([1.0, bad], [1.0, 2.0]) == math.inf

    def test_takes_bfloat16(self) -> None:
        x = np.array([1.0, 1.0078125], ml_dtypes.bfloat16)
        assert audit.error(x, [1.0, 1.0078125]) == 0.0

    def test_refuses_arrays_that_would_broadcast(self) -> None:
        with pytest.raises(ValueError, match=r"x: expected the shape of ref, \(2,\), got \(1,\)"):
            audit.error([1.0], [1.0, 2.0])


@pytest.mark.parametrize("name", ["kl", "lse1", "lse2"])
def test_the_limit_of_the_forward(name: str) -> None:
    assert audit.limit(name, 3e-7) == pytest.approx(1.6e-6)


@pytest.mark.parametrize("name", ["dq1", "dk1", "dq2", "dk2"])
def test_the_limit_of_a_gradient(name: str) -> None:
    assert audit.limit(name, 3e-3) == pytest.approx(6.01e-3)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@given(st.floats(0.25, 100, width=32), st.booleans(), st.integers(-60, 30))
def test_rounding_keeps_the_mantissa_of_the_dtype_at_any_exponent(
    dtype: Any, value: float, negative: bool, exponent: int
) -> None:
    # In this range the dtype itself rounds the same way; scaling by a power of two changes nothing.
    x = np.float32(-value if negative else value)
    expected = np.ldexp(x.astype(dtype).astype(np.float32), exponent)
    got = audit._round_mantissa(np.ldexp(x, exponent)[None], np.dtype(dtype))
    assert got[0] == expected


def test_rounding_leaves_nan_and_inf_alone() -> None:
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(audit._round_mantissa(x, np.dtype(np.float16)), x)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_baseline_is_the_reference_to_float32(name: str, causal: bool) -> None:
    arrays = problem(**PROBLEMS[name])
    dkl, inputs = arrays.pop("dkl"), arrays
    options = {
        "causal": causal,
        "layout": PROBLEMS[name].get("layout", "bhnd"),
        "scale1": -0.7,
        "scale2": 0.3,
    }
    state = reference.attention_kl(**inputs, **options, return_state=True)
    for got, ref in zip(audit.baseline_forward(**inputs, **options), state, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(ref))
        assert audit.error(got, ref) < 1e-6
    wrt = audit.INPUTS
    expected = reference.attention_kl_backward(dkl, **inputs, state=state, wrt=wrt, **options)
    got_gradients = audit.baseline_backward(dkl, **inputs, wrt=wrt, **options)
    for gradient, ref, name_ in zip(got_gradients, expected, wrt, strict=True):
        assert gradient.dtype == inputs[name_].dtype
        assert audit.error(gradient, ref) < 1e-6


@pytest.mark.parametrize("ndim", [2, 3])
def test_the_baseline_takes_lower_ranks(ndim: int) -> None:
    arrays = {name: x[(0,) * (4 - ndim)] for name, x in problem().items()}
    dkl, inputs = arrays.pop("dkl"), arrays
    state = reference.attention_kl(**inputs, return_state=True)
    assert audit.error(audit.baseline_forward(**inputs)[0], state.kl) < 1e-6
    (dk1,) = audit.baseline_backward(dkl, **inputs, wrt=("k1",))
    (expected,) = reference.attention_kl_backward(dkl, **inputs, state=state, wrt=("k1",))
    assert audit.error(dk1, expected) < 1e-6


def test_the_baseline_is_torchs_log_softmax() -> None:
    torch = pytest.importorskip("torch")
    arrays = problem(num_queries=64, num_keys=64)
    q1, k1, q2, k2, dkl = (torch.from_numpy(arrays[n]) for n in (*audit.INPUTS, "dkl"))
    q2.requires_grad_()
    logp1, logp2 = (
        torch.log_softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) for q, k in ((q1, k1), (q2, k2))
    )
    kl = (logp1.exp() * (logp1 - logp2)).sum(dim=-1)
    kl.backward(dkl)
    inputs = {name: arrays[name] for name in audit.INPUTS}
    assert audit.error(audit.baseline_forward(**inputs)[0], kl.detach()) < 5e-7
    (dq2,) = audit.baseline_backward(arrays["dkl"], **inputs, wrt=("q2",))
    assert audit.error(dq2, q2.grad) < 5e-7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_baselines_gradients_carry_the_rounding_of_the_dtype(dtype: str) -> None:
    arrays = problem(dtype=dtype, num_queries=64, num_keys=64)
    dkl, inputs = arrays.pop("dkl"), arrays
    state = reference.attention_kl(**inputs, return_state=True)
    (exact,) = reference.attention_kl_backward(dkl, **inputs, state=state, wrt=("q2",))
    (dq2,) = audit.baseline_backward(dkl, **inputs, wrt=("q2",))
    unit = float(ml_dtypes.finfo(audit.DTYPES[dtype]).eps) / 2
    assert dq2.dtype == audit.DTYPES[dtype]
    assert 0.3 * unit < audit.error(dq2, exact) < 2 * unit


def test_a_masked_nan_does_not_reach_the_baseline() -> None:
    arrays = problem(num_queries=8, num_keys=8)
    dkl, inputs = arrays.pop("dkl"), arrays
    inputs["k2"][:, :, 5] = np.nan
    kl = audit.baseline_forward(**inputs, causal=True)[0]
    np.testing.assert_array_equal(np.isnan(kl[0, 0]), np.arange(8) >= 5)
    dq2, dq1 = audit.baseline_backward(dkl, **inputs, wrt=("q2", "q1"), causal=True)
    for gradient in (dq1, dq2):
        assert np.isfinite(gradient[:, :, :5]).all()
        assert np.isnan(gradient[:, :, 5:]).all()


@pytest.mark.parametrize("sizes", [{"num_queries": 0}, {"num_keys": 0}, {"batch": 0}])
def test_the_baseline_of_nothing(sizes: dict[str, int]) -> None:
    arrays = problem(**sizes)
    dkl, inputs = arrays.pop("dkl"), arrays
    kl, lse1, _ = audit.baseline_forward(**inputs)
    assert kl.shape == dkl.shape
    assert not kl.any()
    assert (lse1 == -np.inf).all()
    for name, gradient in zip(
        audit.INPUTS, audit.baseline_backward(dkl, **inputs, wrt=audit.INPUTS), strict=True
    ):
        assert gradient.shape == inputs[name].shape
        assert not gradient.any()


class TestMeasure:
    def test_the_package_holds_its_own_rule(self) -> None:
        report = audit.measure(**problem(dtype="bfloat16"), causal=True)
        assert report.passes
        assert [line.name for line in report.lines] == [
            *("kl", "lse1", "lse2"),
            *("dq1", "dk1", "dq2", "dk2"),
        ]
        assert all(line.baseline > 0 for line in report.lines)

    def test_the_size_is_that_of_the_reference_where_it_is_finite(self) -> None:
        arrays = problem(num_queries=40, num_keys=17)
        lines = {line.name: line for line in audit.measure(**arrays, causal=True).lines}
        dkl = arrays.pop("dkl")
        state = reference.attention_kl(**arrays, causal=True, return_state=True)
        seeing = np.isfinite(state.lse1)
        assert not seeing.all()
        for name, x in (("kl", state.kl), ("lse1", state.lse1[seeing])):
            assert lines[name].size == pytest.approx(math.sqrt(np.mean(np.square(x))))
        arrays["q2"], arrays["k2"] = arrays["q1"], arrays["k1"]
        equal = audit.measure(**arrays, dkl=dkl).lines[0]
        assert (equal.size, equal.error) == (0.0, 0.0)

    @pytest.mark.parametrize("wrong", ["dq1", "dk1", "dq2", "dk2"])
    def test_sees_a_wrong_gradient(self, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
        right = api.attention_kl_backward

        def spoiled(*args: Any, wrt: tuple[str, ...], **options: Any) -> tuple[Any, ...]:
            gradients = right(*args, wrt=wrt, **options)
            return tuple(
                g * np.float32(1.03).astype(g.dtype) if "d" + name == wrong else g
                for name, g in zip(wrt, gradients, strict=True)
            )

        monkeypatch.setattr(api, "attention_kl_backward", spoiled)
        report = audit.measure(**problem(dtype="bfloat16"))
        assert [line.name for line in report.lines if not line.passes] == [wrong]

    def test_sees_a_kl_that_is_off_by_a_millionth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil_kl(monkeypatch, lambda kl: kl * (1 + 1e-5))
        report = audit.measure(**problem())
        assert [line.name for line in report.lines if not line.passes] == ["kl"]

    def test_sees_a_nan_in_another_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def move(kl: np.ndarray) -> np.ndarray:
            return np.roll(kl, 1, axis=-1)

        self.spoil_kl(monkeypatch, move)
        arrays = problem()
        arrays["q1"][0, 0, 3] = np.nan
        line = audit.measure(**arrays).lines[0]
        assert not line.same_nonfinite
        assert not line.passes

    def test_accepts_the_nans_of_the_reference(self) -> None:
        arrays = problem()
        arrays["q1"][0, 0, 3] = np.nan
        arrays["k2"][0, 1, 2, 0] = np.inf
        assert audit.measure(**arrays).passes

    @staticmethod
    def spoil_kl(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
        right = api.attention_kl

        def spoiled(*args: Any, **options: Any) -> Any:
            state = right(*args, **options)
            return type(state)(change(np.asarray(state.kl)), state.lse1, state.lse2)

        monkeypatch.setattr(api, "attention_kl", spoiled)


def test_random_problems_have_the_shapes_asked_for() -> None:
    arrays = audit.random_problem(
        batch=2,
        num_heads=6,
        num_key_heads1=3,
        num_key_heads2=2,
        num_queries=5,
        num_keys=7,
        head_dim1=8,
        head_dim2=16,
        layout="bnhd",
        dtype="float16",
    )
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == {
        "q1": (2, 5, 6, 8),
        "k1": (2, 7, 3, 8),
        "q2": (2, 5, 6, 16),
        "k2": (2, 7, 2, 16),
        "dkl": (2, 5, 6),
    }
    assert {str(arrays[name].dtype) for name in audit.INPUTS} == {"float16"}


def test_the_logit_scale_is_the_spread_of_the_logits() -> None:
    arrays = problem(logit_scale=20.0, num_queries=100, num_keys=100)
    logits = arrays["q1"] @ arrays["k1"].swapaxes(-1, -2) * 16**-0.5
    assert logits.std() == pytest.approx(20, rel=0.1)

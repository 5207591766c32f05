"""The accuracy rule: what it lets pass, what it must not, and that its baseline is honest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import scipy.special

from streamkl_cupy import reference
from tests import compare
from tests.cases import CASES, DTYPES, INPUTS, draw, select

HEADS = {"heads": 4, "key_heads1": 1, "key_heads2": 2}


def qk(arrays):
    return [arrays[name] for name in INPUTS]


def narrow(arrays, dtype):
    return {n: x.astype(DTYPES[dtype]) if n in INPUTS else x for n, x in arrays.items()}


# error


def test_error_is_relative_to_the_norm_of_the_reference():
    ref = np.array([3.0, 0.0, 4.0])
    assert compare.error(np.array([3.0, 0.5, 4.0]), ref) == pytest.approx(0.1)
    assert compare.error(ref, ref) == 0


def test_error_is_the_root_mean_square_where_the_reference_is_zero():
    assert compare.error(np.array([3.0, 4.0]), np.zeros(2)) == pytest.approx(5 / np.sqrt(2))
    assert compare.error(np.zeros((0, 3)), np.zeros((0, 3))) == 0


def test_error_of_a_nan_is_not_small():
    assert not compare.error(np.array([np.nan, 1.0]), np.ones(2)) < 1e9


# assert_accurate


def outputs():
    ref = np.linspace(1.0, 2.0, 12).reshape(3, 4)
    return ref, ref * (1 + 1e-4)


def test_twice_the_baseline_passes_and_more_does_not():
    ref, baseline = outputs()
    compare.assert_accurate("dq1", ref * (1 + 2e-4), ref, baseline, 1e-5)
    with pytest.raises(AssertionError, match=r"dq1: error 2\.2"):
        compare.assert_accurate("dq1", ref * (1 + 2.2e-4), ref, baseline, 1e-5)


@pytest.mark.parametrize(("name", "floor"), [("kl", 1e-6), ("lse2", 1e-6), ("dk1", 1e-5)])
def test_floor(name, floor):
    ref, _ = outputs()
    compare.assert_accurate(name, ref * (1 + 0.9 * floor), ref, ref)
    with pytest.raises(AssertionError, match=f"{name}: error"):
        compare.assert_accurate(name, ref * (1 + 1.1 * floor), ref, ref)
    compare.assert_accurate(name, ref * (1 + 1.1 * floor), ref, ref, floor=2 * floor)


def test_one_wrong_element_is_named():
    ref, baseline = outputs()
    ours = ref.copy()
    ours[2, 1] += 1
    with pytest.raises(AssertionError, match=r"farthest off at \(2, 1\)"):
        compare.assert_accurate("kl", ours, ref, baseline)


def test_a_wrong_shape_is_refused():
    ref, baseline = outputs()
    with pytest.raises(AssertionError, match="kl: shape"):
        compare.assert_accurate("kl", ref.T, ref, baseline)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_has_to_be_where_the_reference_is(value):
    ref, baseline = outputs()
    ours = ref.copy()
    ours[1, 2] = value
    with pytest.raises(AssertionError, match=r"kl: 1 rows .* the first is \(1, 2\)"):
        compare.assert_accurate("kl", ours, ref, baseline)
    with pytest.raises(AssertionError, match=r"kl: 1 rows .* the first is \(1, 2\)"):
        compare.assert_accurate("kl", ref, ours, baseline)
    ref[1, 2] = np.nan
    compare.assert_accurate("kl", ours, ref, baseline)


def test_gradients_are_non_finite_by_rows():
    ref, baseline = outputs()
    ours = ref.copy()
    ours[1] = np.nan
    ref[1, 2] = np.inf
    compare.assert_accurate("dq2", ours, ref, baseline)
    with pytest.raises(AssertionError, match="lse1: 3 rows"):
        compare.assert_accurate("lse1", ours, ref, baseline)


def test_rows_without_keys_need_minus_infinity():
    ref, baseline = outputs()
    ref[0] = -np.inf
    compare.assert_accurate("lse1", ref, ref, baseline)
    with pytest.raises(AssertionError, match="lse1: not -inf"):
        compare.assert_accurate("lse1", np.where(ref < 0, np.nan, ref), ref, baseline)


def test_a_broken_baseline_excuses_nothing():
    ref, baseline = outputs()
    baseline[0, 0] = np.nan
    with pytest.raises(AssertionError, match="the baseline is not finite"):
        compare.assert_accurate("kl", ref, ref, baseline)


# The baseline


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_baseline_is_float32_and_no_better(dtype, rng):
    # On logits of a few hundred a float32 formula loses what float64 keeps.
    arrays = narrow(draw(rng, num_keys=300), dtype)
    for name in ("q1", "q2"):
        arrays[name] = (arrays[name].astype(np.float32) * 100).astype(DTYPES[dtype])
    ref = reference.attention_kl(*qk(arrays), return_state=True)
    for x, r in zip(compare.baseline_forward(*qk(arrays)), ref, strict=True):
        assert x.dtype == np.float32
        assert x.shape == r.shape
        assert 1e-8 < compare.error(x, r) < 1e-5


def test_baseline_is_the_textbook_formula(rng):
    arrays = draw(rng, num_queries=50, num_keys=60)
    q1, k1, q2, k2 = qk(arrays)
    scale = np.float32(0.125)
    log_p1 = scipy.special.log_softmax(q1 @ k1.swapaxes(-1, -2) * scale, axis=-1)
    log_p2 = scipy.special.log_softmax(q2 @ k2.swapaxes(-1, -2) * scale, axis=-1)
    p1, p2 = np.exp(log_p1), np.exp(log_p2)
    kl = (p1 * (log_p1 - log_p2)).sum(axis=-1)
    assert kl.dtype == np.float32
    g = arrays["dkl"][..., None]
    ds1, ds2 = g * p1 * (log_p1 - log_p2 - kl[..., None]), g * (p2 - p1)
    expected = {
        "q1": scale * ds1 @ k1,
        "k1": scale * ds1.swapaxes(-1, -2) @ q1,
        "q2": scale * ds2 @ k2,
        "k2": scale * ds2.swapaxes(-1, -2) @ q2,
    }
    np.testing.assert_allclose(compare.baseline_forward(*qk(arrays))[0], kl, rtol=1e-4, atol=1e-6)
    got = compare.baseline_backward(arrays["dkl"], *qk(arrays), wrt=INPUTS)
    for name, x in zip(INPUTS, got, strict=True):
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_baseline_gradients_carry_the_rounding_of_the_dtype(dtype, bits, rng):
    arrays = narrow(draw(rng, num_keys=200), dtype)
    # What the rounding of the logit gradients alone leaves, and of the result on top of it.
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    state = reference.attention_kl(*qk(arrays), return_state=True)
    ref = reference.attention_kl_backward(arrays["dkl"], *qk(arrays), state, wrt=INPUTS)
    rounded = compare.baseline_backward(arrays["dkl"], *qk(arrays), wrt=INPUTS)
    exact = compare.baseline_backward(arrays["dkl"], *qk(wide), wrt=INPUTS)
    for name, r, x, y in zip(INPUTS, ref, rounded, exact, strict=True):
        assert x.dtype == DTYPES[dtype], name
        # Of one rounding to nearest the root mean square is 2^-bits / sqrt(3) at the most.
        assert 0.3 * 2.0**-bits < compare.error(x, r) < 2.0**-bits, name
        assert y.dtype == np.float32
        assert compare.error(y, r) < 1e-5, name


def test_baseline_gradients_do_not_underflow_in_float16(rng):
    arrays = narrow(draw(rng, num_keys=200), "float16")
    small = arrays["dkl"] * np.float32(2.0**-14)
    q, g = qk(arrays), arrays["dkl"]
    whole = compare.baseline_backward(g, *q, wrt=("q2",))[0].astype(np.float64)
    (tiny,) = compare.baseline_backward(small, *q, wrt=("q2",))
    # Only the result is rounded to float16's subnormals (steps of 2^-24), nothing before it.
    assert np.abs(tiny.astype(np.float64) - whole * 2.0**-14).max() <= 2.0**-24


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_round_mantissa_agrees_with_the_cast(dtype, rng):
    x = rng.standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(
        compare.round_mantissa(x, dtype), x.astype(DTYPES[dtype]).astype(np.float32)
    )
    # A power of two below anything that float16 can hold changes nothing.
    small = np.float32(2.0**-100)
    np.testing.assert_array_equal(
        compare.round_mantissa(x * small, dtype), compare.round_mantissa(x, dtype) * small
    )
    np.testing.assert_array_equal(compare.round_mantissa(x, "float32"), x)


# assert_all_accurate over the cases


def computed(arrays, options, dtype=np.float32):
    """An implementation to judge: the reference, rounded to `dtype` and the dtype of the inputs."""
    state = reference.attention_kl(*qk(arrays), **options, return_state=True)
    gradients = reference.attention_kl_backward(
        arrays["dkl"], *qk(arrays), state, wrt=INPUTS, **options
    )
    with np.errstate(all="ignore"):
        ours = {name: x.astype(dtype) for name, x in state._asdict().items()}
        for name, x in zip(INPUTS, gradients, strict=True):
            ours["d" + name] = x.astype(arrays[name].dtype)
    return ours


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.group not in ("few_keys", "lengths")], ids=str
)
def test_a_rounded_reference_is_accurate_on_every_case(case, dtype, rng):
    arrays = case.inputs(rng, dtype)
    compare.assert_all_accurate(computed(arrays, case.options), arrays, case.options)


@pytest.mark.parametrize("name", ["kl", "lse1", "lse2", "dq1", "dk1", "dq2", "dk2"])
@pytest.mark.parametrize("case", select("grouped", "layout"), ids=str)
def test_any_output_that_is_off_is_found(name, case, rng):
    arrays = case.inputs(rng, "bfloat16")
    ours = computed(arrays, case.options)
    ours[name] = (ours[name].astype(np.float32) * 1.02).astype(ours[name].dtype)
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        compare.assert_all_accurate(ours, arrays, case.options)


@pytest.mark.parametrize("options", [{"causal": True}, {"scale1": 0.2}, {"scale2": 0.2}])
def test_wrong_options_are_found(options, rng):
    arrays = narrow(draw(rng), "bfloat16")
    ours = computed(arrays, {})
    with pytest.raises(AssertionError):
        compare.assert_all_accurate(ours, arrays, options)


# Samples


def test_sample_rows(rng):
    rows = compare.sample_rows(rng, 8, 100_000)
    assert len(set(rows.tolist())) == 8
    assert rows[0] == 0
    assert rows[-1] == 99_999
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(compare.sample_rows(rng, 8, 5), np.arange(5))
    np.testing.assert_array_equal(compare.sample_rows(rng, 8, 8), np.arange(8))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("lengths", [(60, 60), (40, 60), (60, 40)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
def test_samples_are_rows_of_the_whole(baseline, causal, lengths, rank, rng):
    shape = HEADS if rank == 3 else {"heads": 1}
    drawn = draw(rng, num_queries=lengths[0], num_keys=lengths[1], **shape)
    arrays = narrow({n: x[(0,) * (4 - rank)] for n, x in drawn.items()}, "bfloat16")
    options = {"causal": causal, "scale1": 0.2, "scale2": -0.1}
    state = reference.attention_kl(*qk(arrays), **options, return_state=True)
    if baseline:
        forward = compare.baseline_forward(*qk(arrays), **options)
        gradients = compare.baseline_backward(arrays["dkl"], *qk(arrays), wrt=INPUTS, **options)
        # One float32 sum more or less may move a logit gradient to the next bfloat16 number.
        rtol, gradient_tolerance = 1e-5, 2e-3
    else:
        forward = state
        gradients = reference.attention_kl_backward(
            arrays["dkl"], *qk(arrays), state, wrt=INPUTS, **options
        )
        rtol, gradient_tolerance = 1e-12, 1e-12
    dq1, dk1, dq2, dk2 = gradients
    rows = compare.sample_rows(rng, 9, lengths[0])
    keys = compare.sample_rows(rng, 7, lengths[1])
    options["baseline"] = baseline

    for whole, some in zip(
        forward, compare.sampled_forward(*qk(arrays), rows, **options), strict=True
    ):
        np.testing.assert_allclose(some, whole[..., rows], rtol=rtol, atol=rtol)
    problem = arrays["dkl"], *qk(arrays)
    got = compare.sampled_query_gradients(*problem, rows, wrt=("q2", "q1"), **options)
    for some, whole in zip(got, (dq2, dq1), strict=True):
        assert some.dtype == whole.dtype
        assert some.shape == whole[..., rows, :].shape
        assert compare.error(some, whole[..., rows, :]) < gradient_tolerance
    got = compare.sampled_key_gradients(*problem, state, keys, wrt=("k1", "k2"), **options)
    for some, whole in zip(got, (dk1, dk2), strict=True):
        assert some.dtype == whole.dtype
        assert some.shape == whole[..., keys, :].shape
        assert compare.error(some, whole[..., keys, :]) < gradient_tolerance


def test_dtypes_of_the_cases_are_those_of_ml_dtypes(rng):
    arrays = select("layout")[0].inputs(rng, "bfloat16")
    assert {arrays[name].dtype for name in INPUTS} == {np.dtype(ml_dtypes.bfloat16)}
    assert arrays["dkl"].dtype == np.float32

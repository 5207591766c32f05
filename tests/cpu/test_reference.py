"""The float64 reference: closed forms, identities, finite differences and independent writings."""

from __future__ import annotations

import doctest
import inspect
import itertools
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import mpmath
import numpy as np
import pytest
import scipy.special

from streamkl_cupy import api, reference
from tests.cases import CASES, INPUTS, draw, select

SAMPLE = Path(reference.__file__).parent / "data" / "minilm_attention_qk.npz"
# The cases that a loop in Python over their query rows gets through quickly.
SMALL = [
    case
    for case in CASES
    if case.group not in ("few_keys", "head_dims", "zero_sizes") and "000" not in case.name
]


def qk(arrays):
    return [arrays[name] for name in INPUTS]


def forward(arrays, **options):
    return reference.attention_kl(*qk(arrays), **options, return_state=True)


def backward(arrays, state, wrt=INPUTS, **options):
    return reference.attention_kl_backward(arrays["dkl"], *qk(arrays), state, wrt=wrt, **options)


# Closed forms


def from_logits(s1, s2):
    """Inputs of one query with exactly these logits, and scale 1."""
    one = np.ones((1, 1))
    s1, s2 = (np.asarray(s, np.float64)[:, None] for s in (s1, s2))
    return {"q1": one, "k1": s1, "q2": one, "k2": s2, "dkl": np.ones(1)}


def test_two_keys():
    # P1 = (1/2, 1/2) and P2 = (1/4, 3/4).
    state = forward(from_logits([5, 5], [0, np.log(3)]))
    assert state.kl[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-14)
    assert state.lse1[0] == pytest.approx(5 + np.log(2), rel=1e-15)
    assert state.lse2[0] == pytest.approx(np.log(4), rel=1e-15)


def test_direction():
    # KL(P || uniform) = log n - entropy(P), and the other way round it is another number.
    p = np.array([0.7, 0.2, 0.1])
    logits, flat = np.log(p), np.zeros(3)
    entropy = -(p * logits).sum()
    one_way = forward(from_logits(logits, flat)).kl[0]
    other_way = forward(from_logits(flat, logits)).kl[0]
    assert one_way == pytest.approx(np.log(3) - entropy, rel=1e-14)
    assert other_way == pytest.approx(-np.log(3) - logits.mean(), rel=1e-14)


def test_gradients_of_two_keys():
    arrays = from_logits([0, 0], [0, np.log(3)])
    dq1, dk1, dq2, dk2 = backward(arrays, forward(arrays))
    half_log3 = 0.5 * np.log(3)
    np.testing.assert_allclose(dk2[:, 0], [0.25 - 0.5, 0.75 - 0.5], rtol=1e-14)
    # ds1 = P1 (log P1/P2 - kl), and log P1/P2 = (log 2, log 2/3).
    np.testing.assert_allclose(dk1[:, 0], [0.5 * half_log3, -0.5 * half_log3], rtol=1e-14)
    np.testing.assert_allclose(dq2[0, 0], 0.25 * np.log(3), rtol=1e-14)
    np.testing.assert_allclose(dq1[0, 0], 0, atol=1e-15)


def test_one_key_leaves_no_choice(rng):
    arrays = draw(rng, num_keys=1)
    state = forward(arrays)
    assert (state.kl == 0).all()
    for gradient in backward(arrays, state):
        assert (gradient == 0).all()


def test_default_scale_is_the_inverse_root_of_each_head_dim(rng):
    arrays = draw(rng, head_dim1=16, head_dim2=25)
    given = forward(arrays, scale1=0.25, scale2=0.2)
    np.testing.assert_array_equal(forward(arrays).kl, given.kl)
    assert not np.allclose(forward(arrays, scale1=0.2, scale2=0.25).kl, given.kl)


@pytest.mark.parametrize("case", [c for c in CASES if "duplicates_sides" in c.name], ids=str)
def test_equal_sides_have_exactly_no_divergence(case, rng):
    arrays = case.inputs(rng, "bfloat16")
    state = forward(arrays, **case.options)
    assert (state.kl == 0).all()
    for gradient in backward(arrays, state, **case.options):
        assert (gradient == 0).all()


@pytest.mark.parametrize("side", ["1", "2"])
def test_an_offset_of_all_logits_moves_nothing_but_its_lse(side, rng):
    arrays = draw(rng, heads=1)
    moved = dict(arrays)
    for name in ("q" + side, "k" + side):
        extra = np.full((*arrays[name].shape[:-1], 1), 80 if name[0] == "q" else 100, np.float32)
        moved[name] = np.concatenate([arrays[name], extra], axis=-1)
    scales = {"scale1": 0.125, "scale2": 0.125}
    still, shifted = forward(arrays, **scales), forward(moved, **scales)
    np.testing.assert_allclose(shifted.kl, still.kl, rtol=0, atol=1e-11)
    lse = {"1": (still.lse1, shifted.lse1), "2": (still.lse2, shifted.lse2)}
    np.testing.assert_allclose(lse[side][1] - lse[side][0], 1000, rtol=1e-14)
    for name, a, b in zip(
        INPUTS, backward(arrays, still, **scales), backward(moved, shifted, **scales), strict=True
    ):
        np.testing.assert_allclose(b[..., :64], a, rtol=0, atol=1e-11, err_msg=name)


# Shapes and sizes


@pytest.mark.parametrize("case", select("zero_sizes", "no_keys", "layout"), ids=str)
def test_shapes(case, rng):
    arrays = case.inputs(rng, "float16")
    state = forward(arrays, **case.options)
    for values in state:
        assert values.shape == arrays["q1"].shape[:-1]
        assert values.dtype == np.float64
    for name, gradient in zip(INPUTS, backward(arrays, state, **case.options), strict=True):
        assert gradient.shape == arrays[name].shape
        assert gradient.dtype == np.float64
        assert gradient.flags.c_contiguous


@pytest.mark.parametrize("case", select("no_keys", "zero_sizes"), ids=str)
def test_rows_without_keys(case, rng):
    arrays = case.inputs(rng, "float16")
    state = forward(arrays, **case.options)
    num_queries, num_keys = arrays["q1"].shape[2], arrays["k1"].shape[2]
    empty = num_queries - num_keys if case.options["causal"] else num_queries * (num_keys == 0)
    assert (state.kl[..., :empty] == 0).all()
    assert (state.lse1[..., :empty] == -np.inf).all()
    assert (state.lse2[..., :empty] == -np.inf).all()
    assert np.isfinite(state.lse1[..., max(empty, 0) :]).all()
    dq1, _, dq2, _ = backward(arrays, state, **case.options)
    assert (dq1[..., :empty, :] == 0).all()
    assert (dq2[..., :empty, :] == 0).all()


def test_causal_is_aligned_to_the_bottom_right(rng):
    arrays = draw(rng, num_queries=3, num_keys=5, heads=1)
    causal = forward(arrays, causal=True)
    for i in range(3):
        part = {"q": slice(i, i + 1), "k": slice(0, i + 3)}
        row = {name: arrays[name][:, :, part[name[0]]] for name in INPUTS}
        for whole, alone in zip(causal, forward(row), strict=True):
            np.testing.assert_allclose(whole[..., i], alone[..., 0], rtol=1e-13, atol=1e-13)


def test_ranks_and_layouts_agree(rng):
    arrays = draw(rng, batch=2, heads=6, key_heads1=2, key_heads2=3, num_queries=9, num_keys=11)
    state = forward(arrays, causal=True)
    gradients = backward(arrays, state, causal=True)

    swapped = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    options = {"causal": True, "layout": "bnhd"}
    state_swapped = forward(swapped, **options)
    for a, b in zip(state, state_swapped, strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))
    for a, b in zip(gradients, backward(swapped, state_swapped, **options), strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))

    for layout in ("bhnd", "bnhd"):
        options = {"causal": True, "layout": layout}
        folded = {name: x[1] for name, x in arrays.items()}
        state_folded = forward(folded, **options)
        np.testing.assert_allclose(state_folded.kl, state.kl[1], rtol=1e-13)
        for a, b in zip(gradients, backward(folded, state_folded, **options), strict=True):
            np.testing.assert_allclose(b, a[1], rtol=1e-11, atol=1e-13)
        one = {n: x[1, 5 if n[0] in "qd" else -1] for n, x in arrays.items()}
        np.testing.assert_allclose(forward(one, **options).kl, state.kl[1, 5], rtol=1e-13)


def test_any_subset_of_gradients_in_any_order(rng):
    arrays = draw(rng, heads=4, key_heads1=2, num_queries=7, num_keys=5)
    state = forward(arrays)
    every = dict(zip(INPUTS, backward(arrays, state), strict=True))
    for size in range(1, 5):
        for wrt in itertools.permutations(INPUTS, size):
            got = backward(arrays, state, wrt=wrt)
            assert len(got) == size
            for name, gradient in zip(wrt, got, strict=True):
                np.testing.assert_array_equal(gradient, every[name])


def test_blocks_change_nothing(rng, monkeypatch):
    arrays = draw(rng, batch=2, heads=4, key_heads2=2, num_queries=37, num_keys=29)
    whole = forward(arrays, causal=True)
    gradients = backward(arrays, whole, causal=True)
    for elements in (1, 100, 29 * 5, 37 * 29 * 3):
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", elements)
        for a, b in zip(whole, forward(arrays, causal=True), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-13)
        for a, b in zip(gradients, backward(arrays, whole, causal=True), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-13)


def test_inputs_stay_as_they_are(rng):
    arrays = draw(rng)
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    before = {name: x.copy() for name, x in arrays.items()}
    state = forward(arrays, causal=True)
    saved = [x.copy() for x in state]
    backward(arrays, state, causal=True)
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, before[name])
    for x, y in zip(state, saved, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_float_dtype_is_taken_at_its_value(dtype, rng):
    arrays = select("layout")[0].inputs(rng, dtype)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    options = select("layout")[0].options
    np.testing.assert_array_equal(forward(arrays, **options).kl, forward(wide, **options).kl)


# Finite differences

# One sequence has more queries than keys and one has none; a query and a key are in none.
ENDS = {"cu_seqlens_q": [1, 3, 3, 5], "cu_seqlens_k": [0, 1, 3, 5]}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({}, {"causal": True}),
        ({"num_queries": 9, "num_keys": 5}, {"causal": True}),
        ({"heads": 4, "key_heads1": 2, "key_heads2": 1}, {"causal": True}),
        ({"heads": 4, "key_heads1": 1, "key_heads2": 4}, {"scale1": -0.7, "scale2": 0.3}),
        ({"head_dim1": 3, "head_dim2": 6}, {"scale2": 0.0}),
        ({}, {"window": (2, 1)}),
        ({}, {"causal": True, "kv_starts": [1, 0], "kv_lens": [4, 3], "q_lens": [5, 2]}),
        ({"num_queries": 9, "num_keys": 5}, {"causal": True, "window": (2, None), "q_offset": -2}),
        ({}, {"softcap1": 1.5, "softcap2": 0.8, "scale2": -0.4}),
        ({"heads": 4, "key_heads1": 1, "key_heads2": 2}, {"causal": True, "softcap1": 0.5}),
        ({"num_queries": 9}, {"window": (3, 0), "softcap2": 4.0}),
        ({"heads": 4, "key_heads1": 2, "key_heads2": 1}, {"causal": True, **ENDS}),
        ({}, {"window": (2, 0), "q_offset": 1, "softcap1": 1.5, "scale2": -0.4, **ENDS}),
    ],
)
def test_gradient_is_the_slope_of_the_value(name, shape, options, rng):
    shape = {"batch": 2, "heads": 2, "num_queries": 5, "num_keys": 6, "head_dim1": 4} | shape
    arrays = {n: x.astype(np.float64) for n, x in draw(rng, **shape).items()}
    if "cu_seqlens_q" in options:
        arrays = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in arrays.items()}
    (gradient,) = backward(arrays, forward(arrays, **options), wrt=(name,), **options)

    def value(step):
        moved = {**arrays, name: arrays[name] + step}
        return (arrays["dkl"] * forward(moved, **options).kl).sum()

    size = 1e-3
    for index in np.ndindex(arrays[name].shape):
        step = np.zeros_like(arrays[name])
        step[index] = size
        # Fourth order, so that both the formula and the rounding stay below 1e-10.
        slope = 8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))
        assert gradient[index] == pytest.approx(slope / (12 * size), rel=1e-7, abs=1e-8)


# Bounded logits


def test_a_bound_is_the_tanh_of_the_logits(rng):
    arrays = {n: x.astype(np.float64) for n, x in draw(rng, head_dim1=4, num_queries=5).items()}
    scales, bounds = (0.9, -0.4), (1.5, 0.7)
    s1, s2 = (
        bound * np.tanh(scale * arrays["q" + t] @ arrays["k" + t].swapaxes(2, 3) / bound)
        for t, scale, bound in zip("12", scales, bounds, strict=True)
    )
    log_p1, log_p2 = scipy.special.log_softmax(s1, -1), scipy.special.log_softmax(s2, -1)
    kl = (np.exp(log_p1) * (log_p1 - log_p2)).sum(-1)
    options = {"scale1": 0.9, "scale2": -0.4, "softcap1": 1.5, "softcap2": 0.7}
    state = forward(arrays, **options)
    np.testing.assert_allclose(state.kl, kl, atol=1e-13)
    np.testing.assert_allclose(state.lse1, scipy.special.logsumexp(s1, -1), rtol=1e-14)
    np.testing.assert_allclose(state.lse2, scipy.special.logsumexp(s2, -1), rtol=1e-14)


def test_no_bound_and_one_out_of_reach(rng):
    arrays = draw(rng, head_dim1=4)
    plain = forward(arrays)
    for none in (0, 0.0, None):
        for ours, theirs in zip(forward(arrays, softcap1=none, softcap2=none), plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    far = forward(arrays, softcap1=1e9, softcap2=1e9)
    for ours, theirs in zip(far, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def test_gradients_at_the_bound(rng):
    """Exactly zero far out, where 1 - tanh^2 is below all numbers, and exact before."""
    for factor in (1e4, 40):
        arrays = {n: x.astype(np.float64) for n, x in draw(rng, head_dim1=4).items()}
        for n in ("q1", "q2"):
            arrays[n] = np.abs(arrays[n]) * factor + factor
        for n in ("k1", "k2"):
            arrays[n] = np.abs(arrays[n]) + 1
        bounds = {"softcap1": 3.0, "softcap2": 9.0}
        gradients = backward(arrays, forward(arrays, **bounds), **bounds)
        assert all((gradient == 0).all() == (factor == 1e4) for gradient in gradients)
        assert all(np.isfinite(gradient).all() for gradient in gradients)
    s = arrays["q2"] @ arrays["k2"].swapaxes(2, 3) / 2
    bounds = {"softcap2": 15.0}
    state = forward(arrays, **bounds)
    (gradient,) = backward(arrays, state, wrt=("q2",), **bounds)
    p1, p2 = (
        np.exp(x - lse[..., None])
        for x, lse in (
            (arrays["q1"] @ arrays["k1"].swapaxes(2, 3) / 2, state.lse1),
            (15 * np.tanh(s / 15), state.lse2),
        )
    )
    ds = (p2 - p1) / np.cosh(s / 15) ** 2 * arrays["dkl"][..., None]
    np.testing.assert_allclose(gradient, ds @ arrays["k2"] / 2, rtol=1e-6, atol=1e-30)


def test_an_infinite_logit_has_no_place_under_a_bound(rng):
    arrays = draw(rng, head_dim1=4, num_queries=6, num_keys=6)
    arrays["k1"][0, 0, 3, 0] = np.inf
    state = forward(arrays, causal=True, softcap1=1.0)
    np.testing.assert_array_equal(np.isnan(state.kl[0, 0]), np.arange(6) >= 3)
    assert np.isfinite(state.kl[0, 1]).all()


@pytest.mark.parametrize("bound", [-1.0, np.inf, np.nan])
def test_wrong_bounds_are_refused(bound, rng):
    with pytest.raises(ValueError, match="softcap2: expected a finite number above 0"):
        forward(draw(rng), softcap2=bound)


# Independent writings


@dataclass
class Online:
    """The five running numbers of StreamKL, Algorithm 1, of one query row."""

    m1: float = -np.inf
    l1: float = 0.0
    m2: float = -np.inf
    l2: float = 0.0
    acc: float = 0.0

    def see(self, s1, s2):
        """Take in one key."""
        self.merge(Online(s1, 1.0, s2, 1.0, 0.0))

    def merge(self, other):
        """Take in another part of the keys (eq. 11): sums and `acc` relative to the maxima."""
        if other.l1 == 0:
            return
        if self.l1 == 0:
            self.__dict__.update(other.__dict__)
            return
        m1, m2 = max(self.m1, other.m1), max(self.m2, other.m2)
        l1 = l2 = acc = 0.0
        for part in (self, other):
            a1, a2 = np.exp(part.m1 - m1), np.exp(part.m2 - m2)
            # sum e1 ((s1 - m1) - (s2 - m2)), moved to the new maxima
            acc += a1 * (part.acc + part.l1 * ((part.m1 - m1) - (part.m2 - m2)))
            l1 += a1 * part.l1
            l2 += a2 * part.l2
        self.m1, self.l1, self.m2, self.l2, self.acc = m1, l1, m2, l2, acc

    def finish(self):
        if self.l1 == 0:
            return 0.0, -np.inf, -np.inf
        kl = self.acc / self.l1 + np.log(self.l2) - np.log(self.l1)
        return kl, self.m1 + np.log(self.l1), self.m2 + np.log(self.l2)


def merge_finished(parts):
    """The chain rule of KL over finished states of disjoint key sets."""
    parts = [part for part in parts if part[1] > -np.inf]
    if not parts:
        return 0.0, -np.inf, -np.inf
    kls, lses1, lses2 = (np.array(x) for x in zip(*parts, strict=True))
    lse1, lse2 = scipy.special.logsumexp(lses1), scipy.special.logsumexp(lses2)
    log_w1, log_w2 = lses1 - lse1, lses2 - lse2
    return (np.exp(log_w1) * (kls + log_w1 - log_w2)).sum(), lse1, lse2


@pytest.mark.parametrize("merge", ["raw", "finished"])
@pytest.mark.parametrize("spread", [1, 50, 3000])
def test_online_formula_with_merged_splits(merge, spread, rng):
    s1, s2 = rng.standard_normal((2, 6, 45)) * spread
    # Splits of very different sizes, two of them empty.
    cuts = [0, 0, 1, 17, 18, 44, 45, 45]
    for row in range(6):
        arrays = from_logits(s1[row], s2[row])
        expected = [x[0] for x in forward(arrays)]
        splits = []
        for start, stop in itertools.pairwise(cuts):
            split = Online()
            for j in range(start, stop):
                split.see(s1[row, j], s2[row, j])
            splits.append(split)
        if merge == "raw":
            total = Online()
            for split in splits:
                total.merge(split)
            got = total.finish()
        else:
            got = merge_finished([split.finish() for split in splits])
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


PADDED = {
    "kv_lens": {"kv_lens": [9, 0, 4]},
    "left": {"kv_starts": [0, 3, 11], "kv_lens": [11, 5, 0]},
    "starts_alone": {"kv_starts": [2, 0, 10]},
    "queries": {"q_lens": [7, 0, 3]},
    "all": {"kv_starts": [1, 0, 6], "kv_lens": [8, 11, 2], "q_lens": [5, 7, 4]},
    "out_of_range": {"kv_starts": [-5, 8, 99], "kv_lens": [99, 99, -1], "q_lens": [-1, 99, 3]},
}


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (2, 1)}, {"window": (3, 0), "q_offset": 1}], ids=str
)
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_what_is_cut_off(name, mask, layout, rng):
    shape = {"batch": 3, "heads": 4, "key_heads1": 2, "key_heads2": 1}
    arrays = draw(rng, num_queries=7, num_keys=11, head_dim1=4, head_dim2=6, **shape)
    arrays = {n: x.astype(np.float64) for n, x in arrays.items()}
    options = {**mask, "layout": layout}
    lengths = PADDED[name]
    whole = {"kv_starts": [0] * 3, "kv_lens": [11] * 3, "q_lens": [7] * 3} | lengths
    expected = {"d" + n: np.zeros(arrays[n].shape) for n in INPUTS}
    expected |= {"kl": np.zeros((3, 4, 7)), "lse1": np.full((3, 4, 7), -np.inf)}
    for b in range(3):
        first = min(11, max(0, whole["kv_starts"][b]))
        keys = slice(first, first + min(11 - first, max(0, whole["kv_lens"][b])))
        rows = slice(0, min(7, max(0, whole["q_lens"][b])))
        cut = {n: x[b : b + 1, :, keys if n[0] == "k" else rows] for n, x in arrays.items()}
        state = forward(cut, **mask)
        expected["kl"][b : b + 1, :, rows], expected["lse1"][b : b + 1, :, rows] = state[:2]
        for n, gradient in zip(INPUTS, backward(cut, state, **mask), strict=True):
            expected["d" + n][b : b + 1, :, keys if n[0] == "k" else rows] = gradient
        # What lies outside may hold anything.
        for n, x in arrays.items():
            outside = np.ones(x.shape[2], bool)
            outside[keys if n[0] == "k" else rows] = False
            x[b, :, outside] = np.nan
    swap = (lambda x: x.swapaxes(1, 2)) if layout == "bnhd" else (lambda x: x)
    arrays = {n: swap(x) for n, x in arrays.items()}
    state = forward(arrays, **options, **lengths)
    gradients = backward(arrays, state, **options, **lengths)
    got = {"kl": state.kl, "lse1": state.lse1}
    got |= {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    for n, value in got.items():
        np.testing.assert_allclose(swap(value), expected[n], rtol=1e-12, atol=1e-12, err_msg=n)


PACKED = {
    "mixed": ([0, 3, 4, 9], [0, 5, 11, 12]),
    "empty": ([0, 0, 4, 4, 9], [0, 3, 3, 7, 12]),
    "gaps": ([2, 5, 8], [1, 4, 9]),
    "none": ([0], [0]),
}


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (2, 1)}, {"window": (3, 0), "q_offset": 1}], ids=str
)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_apart(name, mask, rng):
    shape = {"batch": 1, "heads": 4, "key_heads1": 2, "key_heads2": 1}
    arrays = draw(rng, num_queries=9, num_keys=12, head_dim1=4, head_dim2=6, **shape)
    arrays = {n: x.astype(np.float64) for n, x in arrays.items()}
    queries, keys = PACKED[name]
    expected = {"d" + n: np.zeros(arrays[n].shape) for n in INPUTS}
    expected |= {"kl": np.zeros((1, 4, 9)), "lse1": np.full((1, 4, 9), -np.inf)}
    poisoned = {n: np.full_like(x, np.nan) for n, x in arrays.items()}
    for q, q_end, k, k_end in zip(queries, queries[1:], keys, keys[1:], strict=False):
        rows, seen = slice(q, q_end), slice(k, k_end)
        cut = {n: x[:, :, seen if n[0] == "k" else rows] for n, x in arrays.items()}
        for n, x in cut.items():
            poisoned[n][:, :, seen if n[0] == "k" else rows] = x
        state = forward(cut, **mask)
        expected["kl"][:, :, rows], expected["lse1"][:, :, rows] = state[:2]
        for n, gradient in zip(INPUTS, backward(cut, state, **mask), strict=True):
            expected["d" + n][:, :, seen if n[0] == "k" else rows] = gradient
    packed = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in poisoned.items()}
    lengths = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    state = forward(packed, **mask, **lengths)
    gradients = backward(packed, state, **mask, **lengths)
    got = {"kl": state.kl[None], "lse1": state.lse1[None]}
    got |= {"d" + n: x.swapaxes(0, 1)[None] for n, x in zip(INPUTS, gradients, strict=True)}
    for n, value in got.items():
        np.testing.assert_allclose(value, expected[n], rtol=1e-12, atol=1e-12, err_msg=n)


def test_ends_of_queries_and_keys_go_together(rng):
    arrays = draw(rng, num_queries=3, num_keys=3)
    with pytest.raises(ValueError, match="expected both or neither"):
        forward(arrays, cu_seqlens_q=[0, 3])
    with pytest.raises(ValueError, match="expected rank 3 with cu_seqlens"):
        forward(arrays, cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 3])
    with pytest.raises(ValueError, match="expected None with kv_starts"):
        forward(arrays, cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 3], q_lens=[3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_seqlens_q": [0, 5, 3, 8]}, r"cu_seqlens_q: .* length, 8, got 3 after 5 \(index 2\)"),
        ({"cu_seqlens_k": [0, 5, 3, 8]}, r"cu_seqlens_k: .* length, 9, got 3 after 5 \(index 2\)"),
        ({"cu_seqlens_q": [-1, 3, 5, 8]}, r"cu_seqlens_q: .*got -1 \(index 0\)"),
        ({"cu_seqlens_k": [0, 3, -2, 8]}, r"cu_seqlens_k: .*got -2 \(index 2\)"),
        ({"cu_seqlens_q": [0, 3, 5, 9]}, r"cu_seqlens_q: .*got 9 \(index 3\)"),
        ({"cu_seqlens_k": [0, 3, 5, 10]}, r"cu_seqlens_k: .*got 10 \(index 3\)"),
        (
            {"cu_seqlens_k": [0, 3, 9]},
            r"cu_seqlens_k: .*the same for both, shape \(4,\), got \(3,\)",
        ),
        (
            {"cu_seqlens_q": [0, 3, 8]},
            r"cu_seqlens_k: .*the same for both, shape \(3,\), got \(4,\)",
        ),
        ({"cu_seqlens_q": [[0, 3, 5, 8]]}, r"cu_seqlens_q: .*shape \(4,\), got \(1, 4\)"),
        ({"cu_seqlens_q": [], "cu_seqlens_k": []}, r"cu_seqlens_q: .*shape \(1,\), got \(0,\)"),
    ],
)
def test_ends_that_are_none_are_refused(changes, words, rng):
    arrays = draw(rng, num_queries=8, num_keys=9, head_dim1=4)
    arrays = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in arrays.items()}
    ends = {"cu_seqlens_q": [0, 3, 5, 8], "cu_seqlens_k": [0, 3, 3, 9]}
    state = forward(arrays, **ends)
    for call in (forward, lambda *x, **options: backward(*x, state, **options)):
        with pytest.raises(ValueError, match="^" + words + ".*; pass "):
            call(arrays, **ends | changes)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_lens": [3]}, ValueError, r"kv_lens: .* entry, shape \(2,\), got \(1,\); pass"),
        ({"q_lens": [1, 2, 3, 4]}, ValueError, r"q_lens: .* entry, shape \(2,\), got \(4,\); pass"),
        ({"kv_starts": 1}, ValueError, r"kv_starts: .* entry, shape \(2,\), got \(\); pass"),
        ({"kv_lens": [1.5, 2.0]}, TypeError, "kv_lens: expected whole numbers, got float64; pass"),
        ({"window": (1, 2, 3)}, ValueError, r"window: expected two whole .* got \(1, 2, 3\); pass"),
        ({"window": (1, -2)}, ValueError, r"window: expected two whole .* got \(1, -2\); pass"),
        (
            {"window": (1.7, 0.2)},
            TypeError,
            r"window: expected two whole .* got \(1.7, 0.2\); pass",
        ),
        ({"window": 3}, TypeError, "window: expected two whole numbers .* got 3; pass"),
        ({"window": (True, 1)}, TypeError, r"window: expected two whole .* got \(True, 1\); pass"),
        ({"q_offset": 1.5}, TypeError, "q_offset: expected a whole number, got 1.5; pass"),
    ],
)
@pytest.mark.parametrize("num_queries", [4, 0])
def test_lengths_and_masks_that_do_not_fit_are_refused(options, error, words, num_queries, rng):
    arrays = draw(rng, batch=2, num_queries=num_queries, num_keys=5, head_dim1=4)
    state = forward(arrays)
    for call in (forward, lambda *x, **options: backward(*x, state, **options)):
        with pytest.raises(error, match="^" + words):
            call(arrays, **options)


def test_lengths_of_lower_ranks_are_one_batch_entry(rng):
    arrays = draw(rng, batch=1, heads=4, num_queries=4, num_keys=5, head_dim1=4)
    expected = forward(arrays, kv_lens=[3]).kl[0]
    folded = {n: x[0] for n, x in arrays.items()}
    np.testing.assert_array_equal(forward(folded, kv_lens=[3]).kl, expected)
    with pytest.raises(ValueError, match=r"kv_lens: .* entry, shape \(1,\), got \(4,\)"):
        forward(folded, kv_lens=[3] * 4)


def test_takes_what_the_package_takes(rng):
    for ours, theirs, more in (
        (reference.attention_kl, api.attention_kl, {"out"}),
        (
            reference.attention_kl_backward,
            api.attention_kl_backward,
            {"strategy", "deterministic", "out"},
        ),
    ):
        names, wanted = (list(inspect.signature(f).parameters) for f in (ours, theirs))
        assert names == [name for name in wanted if name not in more]
    arrays = draw(rng, num_queries=5, num_keys=5, head_dim1=4)
    arrays = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in arrays.items()}
    ends = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 4, 5]}
    hints = {"max_seqlen_q": 3, "max_seqlen_k": 9, "precision": "tf32"}
    state = forward(arrays, **ends)
    np.testing.assert_array_equal(forward(arrays, **ends, **hints).kl, state.kl)
    for one, other in zip(
        backward(arrays, state, **ends, **hints), backward(arrays, state, **ends), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def direct(
    arrays, *, causal=False, window=None, q_offset=None, scale1=None, scale2=None, layout="bhnd"
):
    """Everything row by row over exactly the keys that count, by the textbook formula."""

    def canonical(x, rows_only):
        x = x.astype(np.float64)
        x = x[(None,) * (4 - rows_only - x.ndim)]
        swap = layout == "bnhd" and arrays["q1"].ndim == 4
        return x.swapaxes(1, 2) if swap else x

    a = {name: canonical(x, name == "dkl") for name, x in arrays.items()}
    batch, heads, num_queries, d1 = a["q1"].shape
    num_keys = a["k1"].shape[2]
    scale1 = d1**-0.5 if scale1 is None else scale1
    scale2 = a["q2"].shape[3] ** -0.5 if scale2 is None else scale2
    out = {"d" + name: np.zeros(a[name].shape) for name in INPUTS}
    out["kl"] = np.zeros((batch, heads, num_queries))
    out["lse1"], out["lse2"] = np.full((2, batch, heads, num_queries), -np.inf)
    for b, h, i in np.ndindex(batch, heads, num_queries):
        place = i + (num_keys - num_queries if q_offset is None else q_offset)
        left, right = (None if x == -1 else x for x in window or (None, None))
        right = 0 if causal else right
        begin = 0 if left is None else max(0, place - left)
        end = num_keys if right is None else min(num_keys, place + right + 1)
        if end <= begin:
            continue
        h1, h2 = h * a["k1"].shape[1] // heads, h * a["k2"].shape[1] // heads
        k1, k2 = a["k1"][b, h1, begin:end], a["k2"][b, h2, begin:end]
        q1, q2, g = a["q1"][b, h, i], a["q2"][b, h, i], a["dkl"][b, h, i]
        s1, s2 = scale1 * (k1 @ q1), scale2 * (k2 @ q2)
        with np.errstate(all="ignore"):
            x1, x2 = s1 - s1.max(), s2 - s2.max()
            log_sum1, log_sum2 = np.log(np.exp(x1).sum()), np.log(np.exp(x2).sum())
            lse1, lse2 = s1.max() + log_sum1, s2.max() + log_sum2
            log_p1, log_p2 = x1 - log_sum1, x2 - log_sum2
            kl = (np.exp(log_p1) * (log_p1 - log_p2)).sum()
            ds1 = g * np.exp(log_p1) * (log_p1 - log_p2 - kl)
            ds2 = g * (np.exp(log_p2) - np.exp(log_p1))
            out["kl"][b, h, i], out["lse1"][b, h, i], out["lse2"][b, h, i] = kl, lse1, lse2
            out["dq1"][b, h, i] = scale1 * (ds1[:, None] * k1).sum(axis=0)
            out["dq2"][b, h, i] = scale2 * (ds2[:, None] * k2).sum(axis=0)
            out["dk1"][b, h1, begin:end] += scale1 * ds1[:, None] * q1
            out["dk2"][b, h2, begin:end] += scale2 * ds2[:, None] * q2
    result = {}
    for name, x in out.items():
        x = x.swapaxes(1, 2) if layout == "bnhd" and arrays["q1"].ndim == 4 else x
        result[name] = x[(0,) * (4 - arrays["q1"].ndim)]
    return result


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_a_direct_writing(case, rng):
    # With NaN and Inf among the cases: they must reach what depends on them and nothing else.
    arrays = case.inputs(rng, "bfloat16")
    expected = direct(arrays, **case.options)
    state = forward(arrays, **case.options)
    assert not (state.kl < -1e-13).any()
    assert case.group == "nonfinite" or np.isfinite(state.kl).all()
    gradients = backward(arrays, state, **case.options)
    got = state._asdict() | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    lse = expected["lse1"][np.isfinite(expected["lse1"])]
    logits = np.abs(lse).max(initial=0)
    for name, value in got.items():
        finite = np.isfinite(expected[name])
        assert (np.isfinite(value) == finite).all(), name
        value, wanted = value[finite], expected[name][finite]
        # Big logits are rounded to a part of themselves, and their differences with them.
        atol = 1e-11 * (1 + np.abs(wanted).max(initial=0)) + 1e-13 * logits
        np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=atol, err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_a_nan_reaches_exactly_what_sees_it(name, causal, rng):
    arrays = draw(rng, num_queries=20, num_keys=20)
    arrays[name][0, 0, 12, 3] = np.nan
    state = forward(arrays, causal=causal)
    dq1, dk1, dq2, dk2 = backward(arrays, state, causal=causal)

    i = np.arange(20)
    if name[0] == "q":
        rows = i == 12
        keys = i <= 12 if causal else i >= 0
    else:
        # Every query that sees the key, and then every key that one of these sees.
        rows = i >= 12 if causal else i >= 0
        keys = i >= 0
    np.testing.assert_array_equal(np.isnan(state.kl[0, 0]), rows)
    np.testing.assert_array_equal(np.isnan(dq1[0, 0]).any(axis=-1), rows)
    np.testing.assert_array_equal(np.isnan(dq2[0, 0]).any(axis=-1), rows)
    np.testing.assert_array_equal(np.isnan(dk1[0, 0]).any(axis=-1), keys)
    np.testing.assert_array_equal(np.isnan(dk2[0, 0]).any(axis=-1), keys)
    for values in (*state, dq1, dk1, dq2, dk2):
        assert np.isfinite(values[0, 1]).all()
    other = state.lse2 if name[1] == "1" else state.lse1
    assert np.isfinite(other).all()


# Values in 50 digits


@pytest.mark.parametrize(
    ("s1", "s2"),
    [
        ([0.1, -0.2, 0.3], [1.5, 0.25, -2.0]),
        ([0.0, 1e-8, 0.0], [0.0, 0.0, 1e-8]),
        ([0.0, -200.0, 3.0], [-150.0, 0.0, -300.0]),
        ([1e4, 1e4 + 1, 9990.0], [-1e4, 0.5 - 1e4, -9999.0]),
        ([800.0, 0.0, -800.0], [-800.0, 0.0, 800.0]),
    ],
)
def test_against_fifty_digits(s1, s2):
    arrays = from_logits(s1, s2)
    state = forward(arrays)
    _, dk1, _, dk2 = backward(arrays, state)
    with mpmath.workdps(50):
        x1, x2 = [mpmath.mpf(x) for x in s1], [mpmath.mpf(x) for x in s2]
        z1, z2 = (mpmath.fsum(map(mpmath.exp, x)) for x in (x1, x2))
        p1, p2 = [mpmath.exp(x) / z1 for x in x1], [mpmath.exp(x) / z2 for x in x2]
        logs = [mpmath.log(a / b) for a, b in zip(p1, p2, strict=True)]
        kl = mpmath.fsum(a * b for a, b in zip(p1, logs, strict=True))
        ds1 = [a * (b - kl) for a, b in zip(p1, logs, strict=True)]
        ds2 = [b - a for a, b in zip(p1, p2, strict=True)]
        lse1, lse2 = mpmath.log(z1), mpmath.log(z2)
    size = max(abs(x) for x in s1 + s2)
    eps = np.finfo(np.float64).eps
    np.testing.assert_allclose(state.kl[0], float(kl), rtol=4 * eps, atol=4 * eps)
    np.testing.assert_allclose(state.lse1[0], float(lse1), rtol=4 * eps)
    np.testing.assert_allclose(state.lse2[0], float(lse2), rtol=4 * eps)
    # A rounding of the logits or the lse is a relative rounding of each probability.
    atol = 4 * eps * (1 + size) * (1 + float(kl))
    np.testing.assert_allclose(dk1[:, 0], [float(x) for x in ds1], rtol=1e-14, atol=atol)
    np.testing.assert_allclose(dk2[:, 0], [float(x) for x in ds2], rtol=1e-14, atol=atol)


# The real sample, memory, errors


def test_real_sample():
    with np.load(SAMPLE) as sample:
        start, stop = sample["cu_seqlens"][-2:]
        names = ("q_teacher", "k_teacher", "q_student", "k_student")
        inputs = [sample[name][:, start:stop] for name in names]
    kl = reference.attention_kl(*inputs)
    assert kl.shape == (12, 323)
    assert kl.mean() == pytest.approx(2.279408821, abs=5e-10)
    assert kl.max() == pytest.approx(10.476518994, abs=5e-10)


def test_memory_stays_far_below_the_logits(rng):
    # One head of 16K x 16K: each matrix of logits would be 2 GiB.
    arrays = draw(rng, heads=1, num_queries=16384, num_keys=16384, head_dim1=4)
    tracemalloc.start()
    try:
        state = forward(arrays)
        forward_peak = tracemalloc.get_traced_memory()[1]
        backward(arrays, state, wrt=("q1", "k1"), causal=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forward_peak < 64 << 20
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"q2": (3, 4)}, {}, "q2: expected rank 2, 3 or 4, the same for all four inputs"),
        ({"k2": (1, 2, 5, 9)}, {}, "k2: expected the head dimension of q2, 8, got 9"),
        ({"k1": (1, 3, 5, 8)}, {}, "k1: expected a number of heads that divides the 2 of q1"),
        ({"k2": (1, 0, 5, 8)}, {}, "k2: expected a number of heads that divides the 2 of q1"),
        ({"k2": (1, 2, 6, 8)}, {}, "k2: expected the length of k1, 5, got 6"),
        ({"k1": (2, 2, 5, 8)}, {}, "k1: expected the batch of q1, 1, got 2"),
        ({"q2": (1, 2, 4, 8)}, {}, r"q2: expected the batch, heads and length of q1, \(1, 2, 3\)"),
        ({"q1": (1, 2, 3, 0), "k1": (1, 2, 5, 0)}, {}, "q1: expected a head dimension of at least"),
        ({}, {"layout": "bdhn"}, "layout: expected one of .*'bhnd', 'bnhd'.*, got 'bdhn'"),
    ],
)
def test_wrong_shapes_are_refused(change, options, words):
    shapes = {"q1": (1, 2, 3, 8), "k1": (1, 2, 5, 8), "q2": (1, 2, 3, 8), "k2": (1, 2, 5, 8)}
    arrays = {name: np.zeros(shape) for name, shape in (shapes | change).items()}
    with pytest.raises(ValueError, match=words):
        reference.attention_kl(**arrays, **options)


@pytest.mark.parametrize("wrt", [(), ("q3",), ("q1", "q1"), "q1"])
def test_wrong_wrt_is_refused(wrt, rng):
    arrays = draw(rng, num_queries=2, num_keys=2)
    with pytest.raises(ValueError, match="wrt: expected a non-empty selection"):
        backward(arrays, forward(arrays), wrt=wrt)


def test_wrong_upstream_gradient_is_refused(rng):
    arrays = draw(rng, num_queries=2, num_keys=2)
    state = forward(arrays)
    arrays["dkl"] = arrays["dkl"][..., :1]
    with pytest.raises(ValueError, match=r"dkl: expected .*\(1, 2, 2\), got \(1, 2, 1\)"):
        backward(arrays, state)
    packed = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in draw(rng).items()}
    ends = {"cu_seqlens_q": [0, 70], "cu_seqlens_k": [0, 70]}
    state = forward(packed, **ends)
    packed["dkl"] = packed["dkl"].T
    words = r"dkl: .* kl, \(H, N_Q\) for packed sequences, \(2, 70\), got \(70, 2\)"
    with pytest.raises(ValueError, match=words):
        backward(packed, state, **ends)


def test_examples_of_the_docstrings():
    failed, attempted = doctest.testmod(reference)
    assert attempted > 0
    assert failed == 0


def test_imports_nothing_of_the_package():
    # Loaded as a file of its own, so that not even the package's __init__ runs.
    code = (
        "import importlib.util, sys;"
        f"spec = importlib.util.spec_from_file_location('alone', {reference.__file__!r});"
        "module = importlib.util.module_from_spec(spec); sys.modules['alone'] = module;"
        "spec.loader.exec_module(module);"
        "assert module.attention_kl([[1.0]], [[1.0]], [[1.0]], [[1.0]]) == 0;"
        "loaded = [n for n in sys.modules if n.split('.')[0] in "
        "('streamkl_cupy', 'cupy', 'torch', 'jax')];"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

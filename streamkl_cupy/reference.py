"""The mathematics of the package in float64 NumPy: all else is held against this.

For a query row with the set J of keys that it may see::

    s_t,j = scale_t * <q_t, k_t,j>        lse_t = log sum_{j in J} exp(s_t,j)
    P_t,j = exp(s_t,j - lse_t)            KL(P1 || P2) = sum_{j in J} P1_j (log P1_j - log P2_j)

With a softcap c_t the logit is ``c_t * tanh(s_t,j / c_t)`` instead (Gemma 2, arXiv 2408.00118).

A pair (query, key) outside J contributes exactly nothing, whatever its query or key holds. Pairs
inside J follow IEEE arithmetic, so a NaN or an infinity makes non-finite what depends on it: a row
that sees a NaN or +Inf logit, or only -Inf logits, has NaN for ``kl``, for the ``lse`` of that
side, and for what its gradients reach. An infinite logit has no place under a bound: with a softcap
it counts as NaN.

Logits are materialised for a block of query rows at a time, so the memory is linear in the
lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "EntropyState",
    "GivenState",
    "ReferenceState",
    "attention_kl",
    "attention_kl_backward",
    "merge_states",
]

_Float64 = NDArray[np.float64]
_Bool = NDArray[np.bool_]
_Index = NDArray[np.intp]

_NAMES = ("q1", "k1", "q2", "k2")
_LAYOUTS = ("bhnd", "bnhd")
_CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")

# Logits of one block: 4 MiB in float64, so that the handful of temporaries stays near the cache.
_BLOCK_ELEMENTS = 1 << 19


class ReferenceState(NamedTuple):
    """What the backward needs: float64 arrays with one value a query row."""

    kl: _Float64
    lse1: _Float64
    lse2: _Float64


class GivenState(NamedTuple):
    """`ReferenceState` of a call whose log-sum-exps were given, ``given`` saying which.

    ``lse1`` and ``lse2`` are those that were used, and ``mass1`` is the sum of P1 over the keys.
    """

    kl: _Float64
    lse1: _Float64
    lse2: _Float64
    mass1: _Float64
    given: tuple[str, ...]


class EntropyState(NamedTuple):
    """`ReferenceState` with the entropy of P1 and its cross-entropy with P2, in nats."""

    kl: _Float64
    lse1: _Float64
    lse2: _Float64
    entropy: _Float64
    cross_entropy: _Float64


class _State(Protocol):
    """Anything that carries the row statistics, such as `ReferenceState`."""

    @property
    def kl(self) -> Any: ...
    @property
    def lse1(self) -> Any: ...
    @property
    def lse2(self) -> Any: ...


@overload
def attention_kl(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: ArrayLike | None = ...,
    kv_lens: ArrayLike | None = ...,
    q_lens: ArrayLike | None = ...,
    cu_seqlens_q: ArrayLike | None = ...,
    cu_seqlens_k: ArrayLike | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    lse1: ArrayLike | None = ...,
    lse2: ArrayLike | None = ...,
    return_state: Literal[False] = ...,
) -> _Float64: ...
@overload
def attention_kl(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: ArrayLike | None = ...,
    kv_lens: ArrayLike | None = ...,
    q_lens: ArrayLike | None = ...,
    cu_seqlens_q: ArrayLike | None = ...,
    cu_seqlens_k: ArrayLike | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    lse1: None = ...,
    lse2: None = ...,
    return_state: Literal[True],
) -> ReferenceState: ...
@overload
def attention_kl(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: ArrayLike | None = ...,
    kv_lens: ArrayLike | None = ...,
    q_lens: ArrayLike | None = ...,
    cu_seqlens_q: ArrayLike | None = ...,
    cu_seqlens_k: ArrayLike | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    lse1: ArrayLike | None = ...,
    lse2: ArrayLike | None = ...,
    return_state: Literal[True],
) -> ReferenceState | GivenState: ...
@overload
def attention_kl(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    *,
    causal: bool = ...,
    window: tuple[int | None, int | None] | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: ArrayLike | None = ...,
    kv_lens: ArrayLike | None = ...,
    q_lens: ArrayLike | None = ...,
    cu_seqlens_q: ArrayLike | None = ...,
    cu_seqlens_k: ArrayLike | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    return_entropy: Literal[True],
) -> EntropyState: ...
def attention_kl(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
    kv_starts: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str | None = None,
    lse1: ArrayLike | None = None,
    lse2: ArrayLike | None = None,
    return_state: bool = False,
    return_entropy: bool = False,
) -> _Float64 | ReferenceState | GivenState | EntropyState:
    """KL divergence of two attention distributions, one value a query row, in nats.

    Parameters
    ----------
    q1, k1
        Queries ``(B, H, N_Q, D1)`` and keys ``(B, HK1, N_K, D1)`` of P1, the first argument of KL
        (usually the teacher). ``HK1`` divides ``H``: query head ``h`` uses key head
        ``h // (H // HK1)``. Any float dtype.
    q2, k2
        The same of P2 (usually the student): ``(B, H, N_Q, D2)`` and ``(B, HK2, N_K, D2)``.
    causal
        Whether query i sees key j only if ``j <= i + offset``, where the offset is ``N_K - N_Q``
        unless given: aligned to the bottom right.
    window
        ``(left, right)``: query i sees key j only if ``-left <= j - (i + offset) <= right``. -1 or
        None sets no limit.
    q_offset
        The offset, any whole number.
    scale1, scale2
        Factors of the logits; ``D_t ** -0.5`` by default. Any finite value.
    softcap1, softcap2
        Bounds of the logits: c > 0 makes ``c * tanh(s / c)`` of a scaled logit s. 0 or None sets
        none.
    layout
        ``"bhnd"`` as above, or ``"bnhd"`` with heads and length swapped. Ranks 3 ``(BH, N, D)``
        and 2 ``(N, D)`` read the same in both.
    kv_starts, kv_lens, q_lens
        Of a padded batch, each of shape ``(B,)``: the first key of an entry, how many keys it has
        from there on, and how many queries. By default 0 and the whole lengths. The offset is
        counted from the first key, and by default by the lengths of the entry. At ranks 3 and 2
        ``B`` is 1: one length for all heads. What is out of range is cut to what there is.
    cu_seqlens_q, cu_seqlens_k
        Of packed sequences, each of shape ``(B + 1,)``: where they begin, and where the last one
        ends, numbers that never decrease, from 0 up to at most the length. The inputs are
        ``(N_Q, H, D1)``, ``(N_K, HK1, D1)`` and so on then, what is returned for each query
        ``(H, N_Q)``. The offset is that within each sequence.
    max_seqlen_q, max_seqlen_k, precision
        For the plan of a card alone: without effect here.
    lse1, lse2
        Log-sum-exps to divide by instead of those over the keys of the call, of the shape of
        ``kl``. Finite wherever a row sees a key, or else what is returned for the row is not
        defined.
    return_state
        Return the log-sum-exps too, as the backward needs them.
    return_entropy
        Return an `EntropyState`: the entropies too, of distributions that add up to 1.

    Returns
    -------
    ndarray, ReferenceState, GivenState or EntropyState
        ``kl`` in float64, of the shape of ``q1`` without its last axis, of packed sequences
        ``(H, N_Q)``; with ``return_state`` a `ReferenceState` ``(kl, lse1, lse2)`` of such arrays,
        or a `GivenState` where one of the two is given. A row that sees no key has ``kl = 0`` and
        ``lse = -inf``, given or not, and ``mass1 = 0``.

    Raises
    ------
    TypeError
        When a window, an offset or a length is no whole number.
    ValueError
        When shapes or lengths do not fit together, or `layout` or `window` has no valid value.

    Notes
    -----
    ``KL = sum_j P1_j (s1_j - s2_j) + lse2 - lse1`` as in StreamKL (arXiv 2606.20005), the logits
    taken relative to their maxima, so that a common offset of one side costs no accuracy.

    With a given ``lse_t`` the masses ``p_t,j = exp(s_t,j - lse_t)`` need not add up to 1, and
    ``kl = sum_j p1_j (log p1_j - log p2_j) = sum_j p1_j (s1_j - s2_j) + (lse2 - lse1) mass1``.
    From the row's own values, with a prime: ``mass1 = exp(lse1' - lse1)`` and
    ``kl = mass1 (kl' + (lse1' - lse1) - (lse2' - lse2))``.

    Examples
    --------
    >>> import numpy as np
    >>> q, k1 = np.ones((1, 1)), np.zeros((2, 1))
    >>> k2 = np.log([[1.0], [3.0]])
    >>> kl = attention_kl(q, k1, q, k2)        # P1 = (1/2, 1/2), P2 = (1/4, 3/4)
    >>> bool(np.isclose(kl[0], 0.5 * np.log(4 / 3)))
    True
    """
    lengths = _Lengths(kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k)
    layout = lengths.layout(layout)
    side1, side2 = _sides(q1, k1, q2, k2, (scale1, scale2), (softcap1, softcap2), layout)
    lengths.check(side1)
    window, q_offset = _check_mask(window, q_offset)
    shape = _row_shape(q1, layout)
    given = {
        name: _as_float64(array)
        for name, array in (("lse1", lse1), ("lse2", lse2))
        if array is not None
    }
    _check_rows(given, shape, layout)
    if given and return_entropy:
        expected, remedy = "False with given log-sum-exps", f"leave out {' and '.join(given)}"
        raise ValueError(_message("return_entropy", expected, "True", remedy))
    entropies = _canonical_rows(entropy := np.zeros(shape), layout)
    state = ReferenceState(np.zeros(shape), np.full(shape, -np.inf), np.full(shape, -np.inf))
    kl, own1, own2 = (_canonical_rows(array, layout) for array in state)

    with np.errstate(all="ignore"):
        for batch, head, ranges in _head_groups(side1, side2, causal, window, q_offset, lengths):
            keys1, keys2 = side1.keys(batch, head), side2.keys(batch, head)
            for rows, seen, allowed in _row_blocks(*ranges):
                x1 = side1.logits(side1.queries(batch, head, rows), keys1[:, seen])
                x2 = side2.logits(side2.queries(batch, head, rows), keys2[:, seen])
                max1, max2 = _subtract_maximum(x1, allowed), _subtract_maximum(x2, allowed)

                weight1 = np.exp(x1)
                sum1, sum2 = weight1.sum(axis=-1), np.exp(x2).sum(axis=-1)
                if return_entropy:
                    mean1 = (weight1 * np.where(allowed, x1, 0.0)).sum(axis=-1) / sum1
                    block_entropy = np.log(sum1) - mean1
                    entropies[batch, head, rows] = np.where(
                        allowed.any(axis=-1), block_entropy, 0.0
                    )
                difference = np.subtract(x1, x2, out=x1)
                difference[:, ~allowed] = 0.0
                mean_difference = np.multiply(weight1, difference, out=weight1).sum(axis=-1) / sum1

                log_sum1, log_sum2 = np.log(sum1), np.log(sum2)
                block_kl = mean_difference + (log_sum2 - log_sum1)
                kl[batch, head, rows] = np.where(allowed.any(axis=-1), block_kl, 0.0)
                # Of a row without keys the sums are 0, and their logarithm the -inf that is due.
                own1[batch, head, rows] = max1 + log_sum1
                own2[batch, head, rows] = max2 + log_sum2

    if return_entropy:
        return EntropyState(*state, entropy, entropy + state.kl)
    result = _replace_lse(state, given) if given else state
    return result if return_state else result.kl


def attention_kl_backward(
    dkl: ArrayLike,
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    state: _State,
    *,
    wrt: Sequence[str] = ("q2", "k2"),
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
    kv_starts: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str | None = None,
) -> tuple[_Float64, ...]:
    """Gradients of ``sum(dkl * kl)`` with respect to any of the four inputs.

    Parameters
    ----------
    dkl
        Upstream gradient, of the shape of ``kl``.
    q1, k1, q2, k2, causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout
        As given to `attention_kl`.
    kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, precision
        As given to `attention_kl`.
    state
        Its result with ``return_state=True``, or any object with float arrays ``kl``, ``lse1`` and
        ``lse2``. An ``lse`` too high by x makes each probability too small by the factor
        ``exp(-x)``.
    wrt
        Names of the inputs whose gradients are wanted, each at most once.

    Returns
    -------
    tuple of ndarray
        In the order of `wrt`, in float64, each C-contiguous and of the shape of its input.

    Raises
    ------
    TypeError, ValueError
        As `attention_kl`, and when a name in `wrt` is unknown.

    Notes
    -----
    As in StreamKL (arXiv 2606.20005), with ``delta = kl - lse2 + lse1``::

        dKL/ds2_j = P2_j - P1_j               dKL/ds1_j = P1_j ((s1_j - s2_j) - delta)
        dq_t,i = scale_t * dkl_i * sum_j ds_t,ij k_t,j
        dk_t,j = scale_t * sum_i dkl_i ds_t,ij q_t,i

    where ``i`` runs over the queries of every head that shares the key head. With a softcap
    ``ds_t`` is also multiplied by ``1 - tanh(s / c_t)**2``. A given log-sum-exp
    is a constant: given lse1, ``ds1_j = p1_j (log p1_j - log p2_j + 1)`` and
    ``ds2_j = mass1 P2_j - p1_j``; given lse2, ``ds2_j = -p1_j``. Its own gradients are
    ``dKL/dlse1 = -(kl + mass1)`` and ``dKL/dlse2 = mass1``.

    Examples
    --------
    >>> import numpy as np
    >>> q, k1 = np.ones((1, 1)), np.zeros((2, 1))
    >>> k2 = np.log([[1.0], [3.0]])
    >>> state = attention_kl(q, k1, q, k2, return_state=True)
    >>> (dk2,) = attention_kl_backward(np.ones(1), q, k1, q, k2, state, wrt=("k2",))
    >>> bool(np.allclose(dk2, [[-0.25], [0.25]]))        # P2 - P1
    True
    """
    lengths = _Lengths(kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k)
    layout = lengths.layout(layout)
    side1, side2 = _sides(q1, k1, q2, k2, (scale1, scale2), (softcap1, softcap2), layout)
    lengths.check(side1)
    window, q_offset = _check_mask(window, q_offset)
    shape = _row_shape(q1, layout)
    _check_wrt(wrt)
    row_values = {"dkl": dkl, "kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    given = getattr(state, "given", ())
    # Where nothing is given P1 adds up to 1.
    row_values["mass1"] = getattr(state, "mass1", np.ones(shape))
    _check_rows(row_values, shape, layout)
    upstream, kl, lse1, lse2, mass1 = (
        _canonical_rows(_as_float64(values), layout) for values in row_values.values()
    )
    inputs = dict(zip(_NAMES, (q1, k1, q2, k2), strict=True))
    gradients = {name: np.zeros(np.shape(inputs[name])) for name in wrt}
    canonical = {name: _canonical(gradient, layout) for name, gradient in gradients.items()}
    sides = {"1": side1, "2": side2}
    trained = [t for t in sides if f"q{t}" in wrt or f"k{t}" in wrt]

    with np.errstate(all="ignore"):
        for batch, head, ranges in _head_groups(side1, side2, causal, window, q_offset, lengths):
            keys = {t: side.keys(batch, head) for t, side in sides.items()}
            dkeys = {t: np.zeros_like(keys[t]) for t in trained if f"k{t}" in wrt}
            for rows, seen, allowed in _row_blocks(*ranges):
                seen_keys = {t: keys[t][:, seen] for t in sides}
                queries = {t: side.queries(batch, head, rows) for t, side in sides.items()}
                logits = {t: side.logits(queries[t], seen_keys[t]) for t, side in sides.items()}
                block = batch, head, rows, None
                p1 = np.exp(logits["1"] - lse1[block])
                for t in trained:
                    if t == "1":
                        # p1 (log p1 - log p2 + 1); an own lse1 takes away the mean, kl + 1.
                        pull = 1.0 if "lse1" in given else -kl[block]
                        delta = lse1[block] - lse2[block] - pull
                        dlogits = p1 * ((logits["1"] - logits["2"]) - delta)
                    elif "lse2" in given:
                        # A row that is not finite on side 2 stays so.
                        dlogits = np.where(np.isnan(lse2[block]), np.nan, -p1)
                    else:
                        dlogits = mass1[block] * np.exp(logits["2"] - lse2[block]) - p1
                    dlogits *= upstream[block] * sides[t].scale
                    dlogits *= sides[t].slopes(queries[t], seen_keys[t])
                    dlogits[:, ~allowed] = 0.0
                    if f"q{t}" in wrt:
                        dqueries = _masked_product(dlogits, allowed, seen_keys[t])
                        canonical[f"q{t}"][batch, head, rows] = dqueries
                    if f"k{t}" in wrt:
                        dkeys[t][:, seen] += _masked_product(
                            dlogits.swapaxes(1, 2), allowed.T, queries[t]
                        )
            for t, totals in dkeys.items():
                # Heads of one group meet in one key head, so they are added one after another.
                for b, h, total in zip(batch, sides[t].key_head(head), totals, strict=True):
                    canonical[f"k{t}"][b, h] += total

    return tuple(gradients[name] for name in wrt)


def merge_states(*states: _State) -> ReferenceState:
    """The state over all keys, from those over disjoint parts of them.

    Parameters
    ----------
    *states
        At least one, each with float arrays ``kl``, ``lse1`` and ``lse2`` of the same shape. A row
        whose log-sum-exps are -inf has no keys in that part.

    Returns
    -------
    ReferenceState
        As `attention_kl` over all the keys would return it.

    Raises
    ------
    ValueError
        When there is none, or the shapes differ.

    Notes
    -----
    ``lse_t = log sum_a exp(lse_t,a)`` and, by the chain rule of KL, with the weights
    ``w_t,a = exp(lse_t,a - lse_t)`` of the parts::

        kl = sum_a w_1,a (kl_a + log w_1,a - log w_2,a)

    Examples
    --------
    >>> import numpy as np
    >>> one, k1, k2 = np.ones((1, 1)), np.zeros((2, 1)), np.log([[1.0], [3.0]])
    >>> parts = [
    ...     attention_kl(one, k1[j : j + 1], one, k2[j : j + 1], return_state=True) for j in (0, 1)
    ... ]
    >>> [float(part.kl[0]) for part in parts]
    [0.0, 0.0]
    >>> bool(np.isclose(merge_states(*parts).kl[0], 0.5 * np.log(4 / 3)))
    True
    """
    if not states:
        remedy = "pass those of the parts"
        raise ValueError(_message("states", "at least one state", "none", remedy))
    kl, lse1, lse2 = (
        [_as_float64(getattr(state, name)) for state in states] for name in ReferenceState._fields
    )
    shape = kl[0].shape
    for position, part in enumerate(zip(kl, lse1, lse2, strict=True)):
        for name, array in zip(ReferenceState._fields, part, strict=True):
            if array.shape != shape:
                argument = f"states[{position}].{name}"
                expected = f"the shape of states[0].kl, {shape}"
                remedy = "pass states of the same query rows"
                raise ValueError(_message(argument, expected, array.shape, remedy))
    with np.errstate(all="ignore"):
        whole1, whole2 = _log_sum(lse1), _log_sum(lse2)
        total = np.zeros(shape)
        for kl_a, lse1_a, lse2_a in zip(kl, lse1, lse2, strict=True):
            log_w1, log_w2 = lse1_a - whole1, lse2_a - whole2
            share = np.exp(log_w1) * (kl_a + (log_w1 - log_w2))
            # A part that P1 does not reach adds nothing: x log x goes to 0 with x.
            total += np.where(lse1_a == -np.inf, 0.0, share)
    return ReferenceState(total, whole1, whole2)


@dataclass(frozen=True, slots=True)
class _Side:
    """One distribution: queries ``(B, H, N_Q, D)``, keys ``(B, HK, N_K, D)``, the scale, and the
    bound of the logits or 0."""

    q: NDArray[Any]
    k: NDArray[Any]
    scale: float
    softcap: float

    def key_head(self, head: _Index) -> _Index:
        group = self.q.shape[1] // self.k.shape[1]
        key_head: _Index = head // group
        return key_head

    def queries(self, batch: _Index, head: _Index, rows: slice) -> _Float64:
        return _as_float64(self.q[batch, head, rows])

    def keys(self, batch: _Index, head: _Index) -> _Float64:
        return _as_float64(self.k[batch, self.key_head(head)])

    def logits(self, queries: _Float64, keys: _Float64) -> _Float64:
        product: _Float64 = queries @ keys.swapaxes(1, 2)
        product *= self.scale
        if self.softcap:
            capped = self.softcap * np.tanh(product / self.softcap)
            product = np.where(np.isfinite(product), capped, np.nan)
        return product

    def slopes(self, queries: _Float64, keys: _Float64) -> _Float64 | float:
        """What a logit moves by where the scaled product of query and key moves by 1."""
        if not self.softcap:
            return 1.0
        rate: _Float64 = np.exp(-2 * abs(queries @ keys.swapaxes(1, 2) * self.scale / self.softcap))
        # 1 - tanh^2, which keeps its digits far out, too.
        slopes: _Float64 = 4 * rate / (1 + rate) ** 2
        return slopes


def _log_sum(parts: Sequence[_Float64]) -> _Float64:
    """``log sum_a exp(parts[a])``; -inf where all are."""
    maximum = np.max(parts, axis=0)
    reference = np.where(maximum == -np.inf, 0.0, maximum)
    total: _Float64 = reference + np.log(np.sum([np.exp(x - reference) for x in parts], axis=0))
    return total


def _as_float64(array: ArrayLike) -> _Float64:
    return np.asarray(array).astype(np.float64, copy=False)


def _canonical(array: NDArray[Any], layout: str) -> NDArray[Any]:
    """View of rank 4 in the order batch, head, row, component."""
    if layout == "packed":
        return array.swapaxes(0, 1)[None]
    if array.ndim == 4:
        return array.swapaxes(1, 2) if layout == "bnhd" else array
    return array[(None,) * (4 - array.ndim)]


def _canonical_rows(array: _Float64, layout: str) -> _Float64:
    """View of rank 3 in the order batch, head, row."""
    rows_layout = "bhnd" if layout == "packed" else layout
    view: _Float64 = _canonical(array[..., None], rows_layout)[..., 0]
    return view


def _sides(
    q1: ArrayLike,
    k1: ArrayLike,
    q2: ArrayLike,
    k2: ArrayLike,
    scales: tuple[float | None, float | None],
    softcaps: tuple[float | None, float | None],
    layout: str,
) -> tuple[_Side, _Side]:
    """Check the shapes and put both distributions into the canonical order."""
    if layout not in (*_LAYOUTS, "packed"):
        expected = f"one of {_LAYOUTS}"
        raise ValueError(_message("layout", expected, repr(layout), "name the order of the axes"))
    arrays = dict(zip(_NAMES, map(np.asarray, (q1, k1, q2, k2)), strict=True))
    for name, array in arrays.items():
        if array.ndim not in (2, 3, 4) or array.ndim != arrays["q1"].ndim:
            expected = "rank 2, 3 or 4, the same for all four inputs"
            remedy = f"give it as many axes as q1, which has shape {arrays['q1'].shape}"
            raise ValueError(_message(name, expected, f"shape {array.shape}", remedy))
        if layout == "packed" and array.ndim != 3:
            remedy = "pass all sequences as (length, heads, head_dim)"
            got = f"shape {array.shape}"
            raise ValueError(_message(name, "rank 3 with cu_seqlens", got, remedy))
    view = {name: _canonical(array, layout) for name, array in arrays.items()}

    def wrong(name: str, expected: str, got: object, remedy: str) -> ValueError:
        shape = f"{got} (shape {arrays[name].shape}, layout {layout!r})"
        return ValueError(_message(name, expected, shape, remedy))

    def check(name: str, what: str, got: object, expected: object) -> None:
        if got != expected:
            remedy = "make the shapes of the four inputs agree"
            raise wrong(name, f"{what} {expected}", got, remedy)

    batch, heads, num_queries, _ = view["q1"].shape
    num_keys = view["k1"].shape[2]
    q_shape = (batch, heads, num_queries)
    check("q2", "the batch, heads and length of q1,", view["q2"].shape[:3], q_shape)
    check("k2", "the length of k1,", view["k2"].shape[2], num_keys)
    for query, key in (("q1", "k1"), ("q2", "k2")):
        check(key, "the batch of q1,", view[key].shape[0], batch)
        check(key, f"the head dimension of {query},", view[key].shape[3], view[query].shape[3])
        if view[query].shape[3] == 0:
            remedy = "give each head at least one component"
            raise wrong(query, "a head dimension of at least 1", 0, remedy)
        key_heads = view[key].shape[1]
        if heads != key_heads and (key_heads == 0 or heads % key_heads):
            expected = f"a number of heads that divides the {heads} of q1"
            raise wrong(key, expected, key_heads, "use a divisor")

    def side(t: int) -> _Side:
        queries, keys, scale, softcap = view[f"q{t}"], view[f"k{t}"], scales[t - 1], softcaps[t - 1]
        if softcap is not None and not 0 <= softcap < np.inf:
            expected = "a finite number above 0, or 0 or None for no bound"
            remedy = "pass the bound of the logits"
            raise ValueError(_message(f"softcap{t}", expected, repr(softcap), remedy))
        scale = queries.shape[3] ** -0.5 if scale is None else float(scale)
        return _Side(queries, keys, scale, float(softcap or 0))

    return side(1), side(2)


def _row_shape(q1: ArrayLike, layout: str) -> tuple[int, ...]:
    """The shape of kl: that of q1 without its last axis; of packed queries heads come first."""
    shape = np.shape(q1)[:-1]
    return (shape[1], shape[0]) if layout == "packed" else shape


def _check_rows(values: Mapping[str, Any], shape: tuple[int, ...], layout: str) -> None:
    what = "the shape of q1 without its last axis"
    if layout == "packed":
        what = "the shape of kl, (H, N_Q) for packed sequences"
    for name, array in values.items():
        if np.shape(array) != shape:
            remedy = "pass one value a query row"
            raise ValueError(_message(name, f"{what}, {shape}", np.shape(array), remedy))


def _check_wrt(wrt: Sequence[str]) -> None:
    names = list(wrt)
    if not names or len(set(names)) != len(names) or not set(names) <= set(_NAMES):
        expected = f"a non-empty selection of {_NAMES}, each at most once"
        remedy = "name the inputs whose gradients you want"
        raise ValueError(_message("wrt", expected, repr(wrt), remedy))


def _check_mask(
    window: tuple[int | None, int | None] | None, q_offset: int | None
) -> tuple[tuple[int | None, int | None], int | None]:
    """Check window and offset, and set None where the window has no limit."""
    expected = "two whole numbers from 0 up, or -1 or None for no limit"
    remedy = "pass how many keys a query sees on each side"
    sides: Any = (None, None) if window is None else window
    if not isinstance(sides, tuple | list) or not all(x is None or _is_int(x) for x in sides):
        raise TypeError(_message("window", expected, repr(window), remedy))
    if len(sides) != 2 or any(x is not None and x < -1 for x in sides):
        raise ValueError(_message("window", expected, repr(window), remedy))
    if q_offset is not None and not _is_int(q_offset):
        remedy = "pass the place of the first query among the keys"
        raise TypeError(_message("q_offset", "a whole number", repr(q_offset), remedy))
    left, right = (None if x is None or x == -1 else int(x) for x in sides)
    return (left, right), None if q_offset is None else int(q_offset)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _message(argument: str, expected: str, got: object, remedy: str) -> str:
    """Word an error as the package does."""
    return f"{argument}: expected {expected}, got {got}; {remedy}."


class _Entry(NamedTuple):
    """Neighbouring queries and keys that belong together."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class _Lengths:
    """What of a batch is there."""

    kv_starts: ArrayLike | None
    kv_lens: ArrayLike | None
    q_lens: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    cu_seqlens_k: ArrayLike | None

    def layout(self, layout: str) -> str:
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            expected = "both or neither of cu_seqlens_q and cu_seqlens_k"
            remedy = "pass where the sequences begin for queries and for keys"
            raise ValueError(_message("cu_seqlens", expected, "one", remedy))
        if self.cu_seqlens_q is None:
            return layout
        if self.is_padded:
            expected = "None with kv_starts, kv_lens or q_lens"
            remedy = "leave out the ones or the others"
            raise ValueError(_message("cu_seqlens_q", expected, "an array", remedy))
        return "packed"

    def check(self, side: _Side) -> None:
        """Refuse lengths that do not fit the inputs; those of padding may be out of range."""
        batch, _, num_queries, _ = side.q.shape
        shapes = dict.fromkeys(("kv_starts", "kv_lens", "q_lens"), (batch,))
        expected, remedy = "one length a batch entry", "pass it for the whole batch"
        if self.cu_seqlens_q is not None:
            shapes = dict.fromkeys(_CU_SEQLENS, (max(1, np.size(self.cu_seqlens_q)),))
            expected = "where each sequence begins and the last one ends, the same for both"
        for name, shape in shapes.items():
            if (given := getattr(self, name)) is None:
                continue
            values = np.asarray(given)
            if values.size and values.dtype.kind not in "iu":
                raise TypeError(_message(name, "whole numbers", values.dtype, "pass int32"))
            if values.shape != shape:
                raise ValueError(_message(name, f"{expected}, shape {shape}", values.shape, remedy))
            if name in _CU_SEQLENS:
                length = num_queries if name == "cu_seqlens_q" else side.k.shape[2]
                _check_ends(name, values.tolist(), length)

    @property
    def is_padded(self) -> bool:
        return any(x is not None for x in (self.kv_starts, self.kv_lens, self.q_lens))

    def entries(self, batch: int, num_queries: int, num_keys: int) -> list[_Entry]:
        """Those of a batch entry. A length that is out of range is cut to what there is."""
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            queries = itertools.pairwise(np.asarray(self.cu_seqlens_q).tolist())
            keys = itertools.pairwise(np.asarray(self.cu_seqlens_k).tolist())
            return [
                _Entry(q, q_end - q, k, k_end - k)
                for (q, q_end), (k, k_end) in zip(queries, keys, strict=True)
            ]

        def value(array: ArrayLike | None, most: int, otherwise: int) -> int:
            return otherwise if array is None else min(most, max(0, int(np.asarray(array)[batch])))

        first = value(self.kv_starts, num_keys, 0)
        rest = num_keys - first
        rows = value(self.q_lens, num_queries, num_queries)
        return [_Entry(0, rows, first, value(self.kv_lens, rest, rest))]


def _check_ends(name: str, ends: Sequence[int], length: int) -> None:
    expected = f"ends that never decrease, from 0 up to at most the length, {length}"
    remedy = "pass where each sequence begins and where the last one ends"
    before = 0
    for index, end in enumerate(ends):
        if not before <= end <= length:
            got = f"{end} after {before}" if 0 <= end < before else str(end)
            raise ValueError(_message(name, expected, f"{got} (index {index})", remedy))
        before = end


def _head_groups(
    side1: _Side,
    side2: _Side,
    causal: bool,
    window: tuple[int | None, int | None],
    q_offset: int | None,
    lengths: _Lengths,
) -> Iterator[tuple[_Index, _Index, tuple[_Index, _Index, int]]]:
    """Batch and head indices of the heads to work on together, many if small, else one, and which
    keys their queries see."""
    batch, heads, num_queries, head_dim1 = side1.q.shape
    num_keys = side1.k.shape[2]
    head_dim = max(head_dim1, side2.q.shape[3])
    elements = max(num_queries * num_keys, (num_queries + num_keys) * head_dim, 1)
    step = max(1, _BLOCK_ELEMENTS // elements)
    # Without padding all batch entries are alike.
    num_groups = batch if lengths.is_padded else min(batch, 1)
    per_group = heads if lengths.is_padded else batch * heads
    for group in range(num_groups):
        begins, ends = np.zeros(num_queries, np.intp), np.zeros(num_queries, np.intp)
        for entry in lengths.entries(group, num_queries, num_keys):
            rows = slice(entry.first_query, entry.first_query + entry.num_queries)
            begin, end = _key_ranges(entry.num_queries, entry.num_keys, causal, window, q_offset)
            begins[rows], ends[rows] = begin + entry.first_key, end + entry.first_key
            # Queries behind it, if they are in no other, see nothing.
            begins[rows.stop :] = ends[rows.stop :] = entry.first_key + entry.num_keys
        for start in range(group * per_group, (group + 1) * per_group, step):
            index = np.arange(start, min(start + step, (group + 1) * per_group))
            yield index // heads, index % heads, (begins, ends, num_keys)


def _key_ranges(
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: tuple[int | None, int | None],
    q_offset: int | None,
) -> tuple[_Index, _Index]:
    """The first key that each query sees and the one behind its last."""
    offset = num_keys - num_queries if q_offset is None else q_offset
    left, right = window
    begins, ends = np.zeros(num_queries, np.intp), np.full(num_queries, num_keys, np.intp)
    # Far from all keys one offset is like another, and sums stay in range.
    far = num_queries + num_keys
    places = np.arange(num_queries)
    if left is not None:
        begins = np.clip(places + max(-far, min(far, offset - left)), 0, num_keys)
    if causal or right is not None:
        last = offset if causal or right is None else offset + right
        ends = np.clip(places + 1 + max(-far, min(far, last)), 0, num_keys)
    return begins, ends


def _row_blocks(
    begins: _Index, ends: _Index, num_keys: int
) -> Iterator[tuple[slice, slice, _Bool]]:
    """Slices of query rows, each with the keys that any of them sees and the mask of these."""
    step = max(1, _BLOCK_ELEMENTS // max(num_keys, 1))
    for start in range(0, len(ends), step):
        rows = slice(start, min(start + step, len(ends)))
        # Neither end ever decreases.
        seen = slice(int(begins[rows][0]), int(ends[rows][-1]))
        if seen.start < seen.stop:
            keys = np.arange(seen.start, seen.stop)
            allowed = (keys >= begins[rows, None]) & (keys < ends[rows, None])
            yield rows, seen, allowed


def _subtract_maximum(logits: _Float64, allowed: _Bool) -> _Float64:
    """Make the logits relative to the maximum of their row, in place, and return the maxima."""
    logits[:, ~allowed] = -np.inf
    maximum: _Float64 = logits.max(axis=-1)
    maximum[:, ~allowed.any(axis=-1)] = 0.0
    logits -= maximum[..., None]
    return maximum


def _replace_lse(own: ReferenceState, given: Mapping[str, _Float64]) -> GivenState:
    """Divide by given log-sum-exps instead of the rows' own.

    A row that sees no key keeps its -inf, and one that is not finite its NaN.
    """
    with np.errstate(all="ignore"):
        lse1, lse2 = (
            np.where(np.isfinite(lse), given.get(name, lse), lse)
            for name, lse in (("lse1", own.lse1), ("lse2", own.lse2))
        )
        log_mass1 = own.lse1 - lse1
        mass1 = np.exp(log_mass1)
        kl = mass1 * (own.kl + (log_mass1 - (own.lse2 - lse2)))
    is_empty = own.lse1 == -np.inf
    kl[is_empty] = mass1[is_empty] = 0.0
    return GivenState(kl, lse1, lse2, mass1, tuple(given))


def _masked_product(weights: _Float64, allowed: _Bool, values: _Float64) -> _Float64:
    """``weights @ values`` over the allowed pairs: the others have weight 0, but 0 * NaN is NaN."""
    finite = np.all(np.isfinite(values), axis=-1)
    if finite.all():
        return weights @ values
    product = weights @ np.where(finite[..., None], values, 0.0)
    for group, index in zip(*np.nonzero(~finite), strict=True):
        seen = allowed[:, index]
        product[group, seen] += weights[group, seen, index, None] * values[group, index]
    return product

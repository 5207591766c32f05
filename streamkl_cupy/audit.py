"""How accurate is it? Errors against float64, beside those of the textbook float32 formula.

The accuracy rule of this package, for every output::

    error = norm(x - ref) / norm(ref)              # ref in float64; absolute where ref is 0
    error(ours) <= 2 * error(baseline) + floor     # floor 1e-6 for kl and lse, 1e-5 for gradients

The baseline is what one would write with ``log_softmax`` in float32 on the same inputs. Its logit
gradients are rounded to the mantissa of the input dtype before the products, because that is what
any kernel on the matrix units must do, and its gradients are rounded to the output dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from scipy import special

from streamkl_cupy import api, problem, reference
from streamkl_cupy.problem import Window, check_softcaps, check_window, lags_of

Array = NDArray[Any]

INPUTS = problem.INPUTS
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
FORWARD_FLOOR = 1e-6
GRADIENT_FLOOR = 1e-5

# Significant bits of the dtypes whose logit gradients are rounded before the products.
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
# Elements of one materialised block of logits: 16 MiB in float32, whatever the number of keys.
_BLOCK_ELEMENTS = 1 << 22


def error(x: Any, ref: Any) -> float:
    """Relative error of `x` in the 2-norm, against a float64 reference.

    Only the elements where `ref` is finite count (an empty row has ``lse = -inf``); compare where
    the two are non-finite with `nonfinite_rows`. A non-finite `x` where `ref` is finite gives
    ``inf``.

    Parameters
    ----------
    x, ref
        Arrays of one shape, of any float dtype.

    Returns
    -------
    float
        ``norm(x - ref) / norm(ref)``. Where ``norm(ref)`` is 0 there is nothing to be relative to,
        and it is the root mean square of ``x``, which like the ratio does not grow with the size.

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    0.1
    """
    got = np.asarray(x).astype(np.float64)
    expected = np.asarray(ref).astype(np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"x: expected the shape of ref, {expected.shape}, got {got.shape}")
    counts = np.isfinite(expected)
    expected, got = expected[counts], got[counts]
    if not np.isfinite(got).all():
        return math.inf
    size = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(got - expected))
    return difference / (size if size > 0 else math.sqrt(max(1, expected.size)))


def nonfinite_rows(name: str, x: Any) -> Array:
    """Where `x` holds NaN or Inf: per element for kl and lse, per query or key row for a gradient.

    Parameters
    ----------
    name
        The output: ``"kl" "lse1" "lse2"``, or ``"dq1"`` and so on.
    x
        The output itself; a gradient has the head dimension last.

    Returns
    -------
    numpy.ndarray
        Booleans, of the shape of `x` for kl and lse, and without the last axis for gradients.

    Examples
    --------
    >>> import numpy as np
    >>> nonfinite_rows("dq1", np.array([[1.0, 2.0], [np.nan, 0.0]])).tolist()
    [False, True]
    """
    bad: Array = ~np.isfinite(np.asarray(x).astype(np.float64))
    return np.any(bad, axis=-1) if name.startswith("d") else bad


def limit(name: str, baseline: float) -> float:
    """The largest error that the accuracy rule allows.

    Parameters
    ----------
    name
        The output: ``"kl" "lse1" "lse2"``, or ``"dq1"`` and so on.
    baseline
        The error of the textbook formula on the same inputs.

    Returns
    -------
    float
        ``2 * baseline + floor``.

    Examples
    --------
    >>> limit("kl", 1e-6)
    3e-06
    """
    return 2 * baseline + (GRADIENT_FLOOR if name.startswith("d") else FORWARD_FLOOR)


def baseline_forward(
    q1: Any,
    k1: Any,
    q2: Any,
    k2: Any,
    *,
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
) -> tuple[Array, Array, Array]:
    """KL and log-sum-exp by the textbook formula in float32.

    ``sum(exp(logp1) * (logp1 - logp2))`` with ``logp = log_softmax(scale * q @ k.T)``, one block of
    query rows after another (rows are independent, so blocks change no value).

    Parameters
    ----------
    q1, k1, q2, k2
        NumPy arrays as in `streamkl_cupy.attention_kl`, of any float dtype.
    causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout
        As in `streamkl_cupy.attention_kl`.

    Returns
    -------
    tuple of numpy.ndarray
        kl, lse1, lse2 in nats: float32, of the shape of `q1` without its last axis.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.eye(2, dtype=np.float32)
    >>> baseline_forward(q, q, q, q)[0].tolist()
    [0.0, 0.0]
    """
    mask = causal, window, q_offset
    softcaps = check_softcaps(softcap1, softcap2)
    textbook = _Textbook.of(q1, k1, q2, k2, mask, scale1, scale2, softcaps, layout)
    outputs = [np.empty(textbook.q1.shape[:3], np.float32) for _ in range(3)]
    with np.errstate(all="ignore"):
        for block in textbook.blocks():
            for output, value in zip(outputs, (block.kl, block.lse1, block.lse2), strict=True):
                output[block.batch, block.head, block.rows] = value
    kl, lse1, lse2 = (_restore(x[..., None], q1.ndim, layout)[..., 0] for x in outputs)
    return kl, lse1, lse2


def baseline_backward(
    dkl: Any,
    q1: Any,
    k1: Any,
    q2: Any,
    k2: Any,
    *,
    wrt: Sequence[str] = ("q2", "k2"),
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
) -> tuple[Array, ...]:
    """Gradients by the textbook formula in float32.

    ``ds2 = g (p2 - p1)`` and ``ds1 = g p1 (logp1 - logp2 - kl)``, with a softcap times
    ``1 - tanh(s / c)**2``, rounded to the mantissa of the
    input dtype, then ``dq = scale * ds @ k`` and ``dk = scale * ds.T @ q``.

    Parameters
    ----------
    dkl
        Upstream gradient, of the shape of `q1` without its last axis.
    q1, k1, q2, k2
        NumPy arrays as in `streamkl_cupy.attention_kl`, of any float dtype.
    wrt
        Names of the inputs whose gradients are wanted.
    causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout
        As in `streamkl_cupy.attention_kl`.

    Returns
    -------
    tuple of numpy.ndarray
        In the order of `wrt`, each of the dtype, shape and layout of its input.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.eye(2, dtype=np.float32)
    >>> dq2, dk2 = baseline_backward(np.ones(2), q, q, q, q)
    >>> float(abs(dq2).max()), float(abs(dk2).max())
    (0.0, 0.0)
    """
    mask = causal, window, q_offset
    softcaps = check_softcaps(softcap1, softcap2)
    textbook = _Textbook.of(q1, k1, q2, k2, mask, scale1, scale2, softcaps, layout)
    upstream = _canonical(np.asarray(dkl, np.float32)[..., None], layout)[..., 0]
    inputs = {name: getattr(textbook, name) for name in INPUTS}
    sums = {name: np.zeros(inputs[name].shape, np.float32) for name in wrt}
    dtype = np.asarray(q1).dtype
    with np.errstate(all="ignore"):
        for block in textbook.blocks():
            at_q = (block.batch, block.head, block.rows)
            for side, logit_gradient in (("1", block.ds1), ("2", block.ds2)):
                if not {"q" + side, "k" + side} & sums.keys():
                    continue
                q, k = inputs["q" + side], inputs["k" + side]
                at_k = (block.batch, block.head // (q.shape[1] // k.shape[1]), block.keys)
                ds = logit_gradient() * upstream[at_q][:, None]
                ds = np.where(block.allowed, _round_mantissa(ds, dtype), np.float32(0))
                if "q" + side in sums:
                    sums["q" + side][at_q] = _sum_allowed(ds, k[at_k], block.allowed)
                if "k" + side in sums:
                    sums["k" + side][at_k] += _sum_allowed(ds.T, q[at_q], block.allowed.T)
        scales = {"1": textbook.scale1, "2": textbook.scale2}
        return tuple(
            _restore((sums[name] * scales[name[1]]).astype(dtype), q1.ndim, layout) for name in wrt
        )


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict on one output.

    Attributes
    ----------
    name
        ``"kl" "lse1" "lse2" "dq1" "dk1" "dq2" "dk2"``.
    error, baseline
        Error of this package and of the textbook float32 formula, both against float64.
    limit
        The largest error allowed: ``2 * baseline + floor``.
    same_nonfinite
        Whether NaN and Inf stand exactly where the float64 reference has them.
    size
        Root mean square of the float64 reference: times `error` it is the absolute error, which is
        what counts where two sides are near each other and kl is next to nothing.
    """

    name: str
    error: float
    baseline: float
    limit: float
    same_nonfinite: bool
    size: float

    @property
    def passes(self) -> bool:
        return self.error <= self.limit and self.same_nonfinite


@dataclass(frozen=True, slots=True)
class Report:
    """What `measure` found: one `Line` an output, and the outputs themselves as NumPy arrays."""

    lines: tuple[Line, ...]
    outputs: dict[str, Array]

    @property
    def passes(self) -> bool:
        return all(line.passes for line in self.lines)


def measure(
    q1: Array,
    k1: Array,
    q2: Array,
    k2: Array,
    dkl: Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
    wrt: Sequence[str] = INPUTS,
    cupy: Any = None,
) -> Report:
    """Run the package on one problem and hold every output against float64.

    Parameters
    ----------
    q1, k1, q2, k2
        NumPy arrays as in `streamkl_cupy.attention_kl`.
    dkl
        Upstream gradient, of the shape of `q1` without its last axis.
    causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout, wrt
        As in `streamkl_cupy.attention_kl_backward`.
    cupy
        The module CuPy, to compute on its current device; None to compute on the CPU, where the
        package is the float64 reference itself, rounded to the dtype of the inputs.

    Returns
    -------
    Report
        Whether the accuracy rule holds, output by output.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.eye(4, dtype=np.float32)
    >>> measure(q, q, 2 * q, q, np.ones(4, np.float32)).passes
    True
    """
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "q_offset": q_offset,
        "scale1": scale1,
        "scale2": scale2,
        "softcap1": softcap1,
        "softcap2": softcap2,
        "layout": layout,
    }
    inputs = (q1, k1, q2, k2)
    put: Callable[[Array], Any] = np.asarray if cupy is None else cupy.asarray
    get: Callable[[Any], Array] = np.asarray if cupy is None else cupy.asnumpy

    p1, p2 = (put(q1), put(k1)), (put(q2), put(k2))
    state = api.attention_kl(*p1, *p2, **options, return_state=True)
    gradients = api.attention_kl_backward(put(dkl), *p1, *p2, state, wrt=wrt, **options)
    names = ("kl", "lse1", "lse2", *("d" + name for name in wrt))
    ours = [get(x) for x in (state.kl, state.lse1, state.lse2, *gradients)]

    exact = reference.attention_kl(*inputs, **options, return_state=True)
    expected = (
        *exact,
        *reference.attention_kl_backward(dkl, *inputs, exact, wrt=wrt, **options),
    )
    textbook = (
        *baseline_forward(*inputs, **options),
        *baseline_backward(dkl, *inputs, wrt=wrt, **options),
    )
    lines = []
    for name, x, ref, base in zip(names, ours, expected, textbook, strict=True):
        bad = nonfinite_rows(name, ref)
        same = bool(np.array_equal(nonfinite_rows(name, x), bad))
        our_error, base_error = error(x[~bad], ref[~bad]), error(base[~bad], ref[~bad])
        allowed, size = limit(name, base_error), _root_mean_square(ref)
        lines.append(Line(name, our_error, base_error, allowed, same, size))
    return Report(tuple(lines), dict(zip(names, ours, strict=True)))


def _root_mean_square(x: Array) -> float:
    """Of the finite elements."""
    finite = np.asarray(x, np.float64)[np.isfinite(x)]
    return float(np.linalg.norm(finite)) / math.sqrt(max(1, finite.size))


def random_problem(
    *,
    batch: int = 1,
    num_heads: int = 4,
    num_key_heads1: int | None = None,
    num_key_heads2: int | None = None,
    num_queries: int = 512,
    num_keys: int = 512,
    head_dim1: int = 128,
    head_dim2: int | None = None,
    dtype: str = "bfloat16",
    layout: str = "bhnd",
    logit_scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Array]:
    """Normally distributed inputs: q1, k1, q2, k2 in `dtype` and dkl in float32.

    Parameters
    ----------
    batch, num_heads, num_key_heads1, num_key_heads2, num_queries, num_keys, head_dim1, head_dim2
        The shapes; key heads default to `num_heads`, `head_dim2` to `head_dim1`.
    dtype
        A key of `DTYPES`.
    layout
        ``"bhnd"`` or ``"bnhd"``.
    logit_scale
        Standard deviation of the logits under the default scales.
    seed
        Of ``numpy.random.default_rng``.

    Returns
    -------
    dict of numpy.ndarray
        Keyed ``"q1" "k1" "q2" "k2" "dkl"``.

    Examples
    --------
    >>> random_problem(num_queries=3, num_keys=5, head_dim1=8)["k2"].shape
    (1, 4, 5, 8)
    """
    rng = np.random.default_rng(seed)
    dims = (head_dim1, head_dim1 if head_dim2 is None else head_dim2)
    key_heads = [num_heads if h is None else h for h in (num_key_heads1, num_key_heads2)]

    def draw(heads: int, length: int, *dim: int) -> Array:
        shape = (batch, length, heads) if layout == "bnhd" else (batch, heads, length)
        return rng.standard_normal((*shape, *dim), dtype=np.float32)

    arrays = {}
    for side, dim, heads in zip("12", dims, key_heads, strict=True):
        queries = draw(num_heads, num_queries, dim) * np.float32(logit_scale)
        arrays["q" + side] = queries.astype(DTYPES[dtype])
        arrays["k" + side] = draw(heads, num_keys, dim).astype(DTYPES[dtype])
    arrays["dkl"] = draw(num_heads, num_queries)
    return arrays


@dataclass(frozen=True, slots=True)
class _Block:
    """Some query rows of one head, with the keys that any of them may see."""

    batch: int
    head: int
    rows: slice
    keys: slice
    allowed: Array
    log_p1: Array
    log_p2: Array
    slope1: Array
    slope2: Array
    lse1: Array
    lse2: Array
    kl: Array

    def ds1(self) -> Array:
        gradient: Array = np.exp(self.log_p1) * (self.log_p1 - self.log_p2 - self.kl[:, None])
        return gradient * self.slope1

    def ds2(self) -> Array:
        gradient: Array = np.exp(self.log_p2) - np.exp(self.log_p1)
        return gradient * self.slope2


@dataclass(frozen=True, slots=True)
class _Textbook:
    """The inputs in float32 and in the order batch, head, row, dimension."""

    q1: Array
    k1: Array
    q2: Array
    k2: Array
    lags: tuple[int, int]
    scale1: np.float32
    scale2: np.float32
    softcap1: np.float32
    softcap2: np.float32

    @classmethod
    def of(
        cls,
        q1: Any,
        k1: Any,
        q2: Any,
        k2: Any,
        mask: tuple[bool, Window | None, int | None],
        scale1: float | None,
        scale2: float | None,
        softcaps: tuple[float, float],
        layout: str,
    ) -> _Textbook:
        a, b, c, d = (_canonical(np.asarray(x, np.float32), layout) for x in (q1, k1, q2, k2))
        scale1 = a.shape[-1] ** -0.5 if scale1 is None else scale1
        scale2 = c.shape[-1] ** -0.5 if scale2 is None else scale2
        causal, *where = mask
        lags = lags_of(a.shape[2], b.shape[2], causal, *check_window(*where))
        factors = (np.float32(x) for x in (scale1, scale2, *softcaps))
        return cls(a, b, c, d, lags, *factors)

    def blocks(self) -> Iterator[_Block]:
        num_batches, num_heads, num_queries, _ = self.q1.shape
        num_keys = self.k1.shape[2]
        step = max(1, _BLOCK_ELEMENTS // max(1, num_keys))
        for batch in range(num_batches):
            for head in range(num_heads):
                for start in range(0, num_queries, step):
                    yield self._block(batch, head, start, min(start + step, num_queries))

    def _block(self, batch: int, head: int, start: int, stop: int) -> _Block:
        num_heads, num_keys = self.q1.shape[1], self.k1.shape[2]
        begin_lag, end_lag = self.lags
        rows = np.arange(start, stop)
        begins, ends = (np.clip(rows + x, 0, num_keys) for x in (-begin_lag, 1 - end_lag))
        keys = slice(int(begins[0]), max(int(begins[0]), int(ends[-1])))
        places = np.arange(keys.start, keys.stop)
        allowed = (places >= begins[:, None]) & (places < ends[:, None])
        sides = []
        for q, k, scale, softcap in (
            (self.q1, self.k1, self.scale1, self.softcap1),
            (self.q2, self.k2, self.scale2, self.softcap2),
        ):
            key_head = head // (num_heads // k.shape[1])
            logits = q[batch, head, start:stop] @ k[batch, key_head, keys].T * scale
            slope = np.ones_like(logits)
            if softcap:
                # An infinite logit counts as NaN.
                bounded = np.tanh(logits / softcap) + np.float32(0) * logits
                logits, slope = softcap * bounded, 1 - bounded * bounded
            sides.append((*_log_softmax(logits, allowed), slope))
        (log_p1, lse1, slope1), (log_p2, lse2, slope2) = sides
        terms = np.exp(log_p1) * (log_p1 - log_p2)
        kl = np.where(allowed, terms, np.float32(0)).sum(axis=1)
        return _Block(
            batch,
            head,
            slice(start, stop),
            keys,
            allowed,
            log_p1,
            log_p2,
            slope1,
            slope2,
            lse1,
            lse2,
            kl,
        )


def _log_softmax(logits: Array, allowed: Array) -> tuple[Array, Array]:
    nothing = np.float32(-np.inf)
    masked = np.where(allowed, logits, nothing)
    if masked.shape[1] == 0:
        return masked, np.full(masked.shape[0], nothing)
    log_p = special.log_softmax(masked, axis=1)
    # The logarithm of the sum is what was taken from the largest logit. A row that sees no key
    # would give inf - inf; its log-sum-exp is -inf.
    lse = np.where(allowed.any(axis=1), masked.max(axis=1) - log_p.max(axis=1), nothing)
    return log_p, lse


def _sum_allowed(weights: Array, vectors: Array, allowed: Array) -> Array:
    """``weights @ vectors``, where a vector with NaN or Inf reaches only the rows that see it."""
    finite = np.isfinite(vectors).all(axis=1)
    if finite.all():
        return weights @ vectors
    total = weights[:, finite] @ vectors[finite]
    for idx in np.flatnonzero(~finite):
        sees = allowed[:, idx]
        total[sees] += weights[sees, idx, None] * vectors[idx]
    return total


def _round_mantissa(x: Array, dtype: Any) -> Array:
    """Round float32 to the significant bits of `dtype`, to nearest even, keeping the exponent."""
    if str(dtype) not in _SIGNIFICANT_BITS:
        return x
    dropped = 24 - _SIGNIFICANT_BITS[str(dtype)]
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1) + ((bits >> np.uint32(dropped)) & np.uint32(1))
    rounded = (bits + half) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _canonical(x: Array, layout: str) -> Array:
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.swapaxes(1, 2) if layout == "bnhd" else x


def _restore(x: Array, ndim: int, layout: str) -> Array:
    if ndim < 4:
        lower: Array = x[(0,) * (4 - ndim)]
        return lower
    return np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bnhd" else x

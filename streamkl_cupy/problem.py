"""Problem: what a call computes, without its data; and every check of the arguments of a call.

Pure Python: nothing here looks at memory, a card or an array library. An `Operand` describes one
array of the caller, `describe` turns four of them and the options into a `Problem`, and the
``check_*`` functions do the same for everything else a caller can pass. All messages have one
form: the argument, what was expected, what came, what to do.

The canonical order of the axes is batch, head, row, component, whatever the caller's layout and
rank.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import permutations
from typing import Any, TypeAlias

INPUTS = ("q1", "k1", "q2", "k2")
LAYOUTS = ("bhnd", "bnhd")
STRATEGIES = ("auto", "fused", "separate")
REDUCTIONS = ("none", "sum", "mean", "batchmean")
GPU_DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("float32", "tf32")
CPU_DTYPES = ("bfloat16", "float16", "float32", "float64")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# What the asynchronous copies of the kernels need of an address and of a stride.
ALIGNMENT_BYTES = 16
# 32-bit tile arithmetic rounds a length up to whole tiles.
MAX_LENGTH = 2**31 - 2**16
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
# The kernels multiply logits by scale * log2(e) in float32.
MAX_GPU_SCALE = 3.4028234e38 / math.log2(math.e)


# How many keys before and behind its own place a query sees; None for all of them.
Window: TypeAlias = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)

# The arrays of ints that say what of a batch is there. Padding: of each batch entry the first key,
# the number of keys and of queries. Packed sequences: where each begins, and where the last ends.
PADDING = ("kv_starts", "kv_lens", "q_lens")
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
LENGTHS = PADDING + CU_SEQLENS

# Every valid value of wrt.
_WRT = frozenset(names for count in range(1, 5) for names in permutations(INPUTS, count))


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lies: ``Device("cpu", 0)`` or ``Device("cuda", index)``."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return "the CPU" if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Operand:
    """Description of one array, without its data.

    Attributes
    ----------
    name
        The argument, as messages name it: ``"q1"``, ``"out.kl"``.
    shape, strides
        In the caller's order of axes; strides in elements, 0 for an expanded axis.
    dtype
        As NumPy and ml_dtypes spell it.
    device
        Where the array lies.
    pointer
        Address of the first element; 0 is allowed for an array without elements.
    readonly
        Whether the array cannot be written to.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    pointer: int
    readonly: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides of one tensor in the canonical order, in elements.

    That of an input along an axis of length 1 is 0: it is never used, and so never matters.
    """

    batch: int
    head: int
    row: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """That batch entries are of unequal lengths, which are known on the device alone.

    Attributes
    ----------
    names
        Which of `LENGTHS` come with the call: some of `PADDING`, or both of `CU_SEQLENS`.
    num_sequences, max_queries, max_keys
        Of packed sequences: how many, and no less than the most queries and keys that one has.
    """

    names: tuple[str, ...]
    num_sequences: int = 0
    max_queries: int = 0
    max_keys: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie one behind the other, instead of each in a batch entry."""
        return self.names == CU_SEQLENS


@dataclass(frozen=True, slots=True)
class Problem:
    """What one call computes, without its data: the key of every cache.

    Attributes
    ----------
    dtype
        Of the four inputs.
    batch, num_heads, num_key_heads1, num_key_heads2, num_queries, num_keys, head_dim1, head_dim2
        Sizes. ``num_heads`` counts the query heads; query head h uses key head ``h // group``.
    causal
        Whether a query sees no key behind its own place.
    scale1, scale2
        Factors of the logits.
    layout
        ``"bhnd"`` or ``"bnhd"``: the order in which outputs are contiguous. Ranks 2 and 3 have
        one order only, which is ``"bhnd"``; packed sequences have ``"packed"``, ``(N, H, D)`` and
        rows ``(H, N)``.
    q1, k1, q2, k2
        Strides of the inputs; the stride of the last axis is 1.
    row
        Strides of kl, lse1, lse2 and the low parts, which are C-contiguous.
    aligned
        Whether every address and every stride of the inputs, in bytes, is a multiple of 16.
    window
        How many keys before and behind its place a query sees.
    q_offset
        The place of query 0 among the keys; None for ``num_keys - num_queries``.
    softcap1, softcap2
        Bounds of the logits; 0 for none.
    ragged
        What is known of the lengths of a padded or packed batch; None where all of it is there.
    precision
        How float32 inputs are multiplied on a GPU, ``"float32"`` or ``"tf32"``; None for others.
    """

    dtype: str
    batch: int
    num_heads: int
    num_key_heads1: int
    num_key_heads2: int
    num_queries: int
    num_keys: int
    head_dim1: int
    head_dim2: int
    causal: bool
    scale1: float
    scale2: float
    layout: str
    q1: Strides
    k1: Strides
    q2: Strides
    k2: Strides
    row: Strides
    aligned: bool
    window: Window = NO_WINDOW
    q_offset: int | None = None
    softcap1: float = 0.0
    softcap2: float = 0.0
    ragged: Ragged | None = None
    precision: str | None = None
    # A problem is looked up at every call, and hashing so many fields takes longer than the rest.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._values()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash of a string differs from process to process, so it must not travel.
        return type(self), self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, item.name) for item in fields(self) if item.init)

    @property
    def arithmetic(self) -> str:
        """What the kernels multiply: the dtype, or ``"tf32"``."""
        return self.precision or self.dtype

    @property
    def num_rows(self) -> int:
        """Number of query rows in all: batch * num_heads * num_queries."""
        return self.batch * self.num_heads * self.num_queries

    @property
    def lags(self) -> tuple[int, int]:
        """Query i sees the keys from ``i - lags[0]`` through ``i - lags[1]``, as far as they
        exist; see `lags_of`."""
        return lags_of(self.num_queries, self.num_keys, self.causal, self.window, self.q_offset)

    @property
    def mask(self) -> str:
        """``"full"`` where every query sees every key, ``"causal"`` where it sees all up to a last
        one and the last query sees every key, ``"window"``, or ``"padded"`` or ``"packed"``."""
        if self.ragged is not None:
            return "packed" if self.ragged.is_packed else "padded"
        begin_lag, end_lag = self.lags
        if begin_lag < self.num_queries - 1:
            return "window"
        if end_lag <= 1 - self.num_keys:
            return "full"
        return "causal" if end_lag == self.num_queries - self.num_keys else "window"

    @property
    def kernel_mask(self) -> str:
        """The mask that kernels are compiled for, as ``key_range.cuh`` names it."""
        if self.ragged is not None:
            return "kRagged"
        return "kWindow" if self.mask == "window" else "kPlain"

    @property
    def has_softcap(self) -> bool:
        """Whether a side has a bound of its logits, which takes kernels of its own."""
        return self.softcap1 > 0 or self.softcap2 > 0

    @property
    def group1(self) -> int:
        """Query heads that share one key head of side 1."""
        return self.num_heads // self.num_key_heads1 if self.num_key_heads1 else 1

    @property
    def group2(self) -> int:
        """Query heads that share one key head of side 2."""
        return self.num_heads // self.num_key_heads2 if self.num_key_heads2 else 1


def message(argument: str, expected: str, got: str, remedy: str) -> str:
    """Word an error: every error of the package about an argument has this form.

    Parameters
    ----------
    argument
        Name of the argument.
    expected, got
        What should have come, and what came.
    remedy
        What to do.

    Returns
    -------
    str
        One line.

    Examples
    --------
    >>> message("scale1", "a finite number", "nan", "leave it out for the default")
    'scale1: expected a finite number, got nan; leave it out for the default.'
    """
    return f"{argument}: expected {expected}, got {got}; {remedy}."


def describe(
    q1: Operand,
    k1: Operand,
    q2: Operand,
    k2: Operand,
    *,
    causal: bool = False,
    window: Any = None,
    q_offset: Any = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
    precision: Any = None,
    ragged: Ragged | None = None,
) -> Problem:
    """Check the inputs of a call and describe what is to be computed.

    Parameters
    ----------
    q1, k1, q2, k2
        Shapes ``(B, H, N_Q, D1) (B, HK1, N_K, D1) (B, H, N_Q, D2) (B, HK2, N_K, D2)`` for layout
        ``"bhnd"``; ``"bnhd"`` swaps heads and length. Rank 3 is ``(BH, N, D)`` and rank 2
        ``(N, D)`` in both.
    causal
        Whether query i sees key j only if ``j <= i + offset``.
    window, q_offset
        As `check_window` takes them; the offset is ``N_K - N_Q`` unless given.
    scale1, scale2
        Factors of the logits; by default ``D ** -0.5`` of the side.
    softcap1, softcap2
        Bounds of the logits, as `check_softcaps` takes them.
    layout
        ``"bhnd"`` or ``"bnhd"``.
    precision
        As `check_precision` takes it.
    ragged
        Of a padded or packed batch. Packed sequences are ``(N_Q, H, D1) (N_K, HK1, D1)
        (N_Q, H, D2) (N_K, HK2, D2)``, with all of them along the lengths.

    Returns
    -------
    Problem
        The description, in the canonical order.

    Raises
    ------
    TypeError
        If a dtype is not supported on the device or differs from that of q1, or an option has the
        wrong type.
    ValueError
        If shapes do not fit together, a device differs, a stride is negative, the last stride is
        not 1, an address is not a multiple of the element size, or an option has no valid value.

    Examples
    --------
    >>> cpu = Device("cpu")
    >>> q = Operand("q", (4, 100, 64), (6400, 64, 1), "float32", cpu, 4096)
    >>> problem = describe(q, q, q, q)
    >>> problem.num_heads, problem.num_queries, problem.scale1, problem.row
    (4, 100, 0.125, Strides(batch=400, head=100, row=1))
    """
    causal, scale1, scale2, layout = check_options(causal, scale1, scale2, layout)
    window, q_offset = check_window(window, q_offset)
    softcap1, softcap2 = check_softcaps(softcap1, softcap2)
    operands = (q1, k1, q2, k2)
    for operand in operands:
        check_dtype(operand.name, operand.dtype, operand.device)
    for operand in operands[1:]:
        if operand.dtype != q1.dtype:
            raise TypeError(
                message(
                    operand.name,
                    f"the dtype of {q1.name}, {q1.dtype}",
                    operand.dtype,
                    "cast the four inputs to one dtype",
                )
            )
    precision = check_precision(precision, q1.dtype)
    for operand in operands[1:]:
        _check_device(operand, q1.name, q1.device)
    is_packed = ragged is not None and ragged.is_packed
    for operand in operands:
        _check_rank(operand, q1, is_packed)
        _check_strides(operand)
        if operand.size and len(operand.shape) and operand.shape[-1] > 1:
            _check_last_stride(operand)
        _check_alignment(operand, ITEM_BYTES[operand.dtype])

    if is_packed:
        layout = "packed"
    views = [_canonical(operand, layout) for operand in operands]
    (batch, num_heads, num_queries, head_dim1), *_ = shapes = [shape for shape, _ in views]
    _check_shapes(operands, shapes, layout)
    strides = [Strides(*stride[:3]) for _, stride in views]
    num_keys, head_dim2 = shapes[1][2], shapes[2][3]
    if len(q1.shape) < 4 and not is_packed:
        layout = "bhnd"
    return Problem(
        dtype=q1.dtype,
        batch=batch,
        num_heads=num_heads,
        num_key_heads1=shapes[1][1],
        num_key_heads2=shapes[3][1],
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim1=head_dim1,
        head_dim2=head_dim2,
        causal=causal,
        scale1=head_dim1**-0.5 if scale1 is None else scale1,
        scale2=head_dim2**-0.5 if scale2 is None else scale2,
        layout=layout,
        q1=strides[0],
        k1=strides[1],
        q2=strides[2],
        k2=strides[3],
        row=_contiguous(num_heads, num_queries, 1, "bhnd" if is_packed else layout),
        aligned=all(map(_is_aligned, operands, strides)),
        window=window,
        q_offset=q_offset,
        softcap1=softcap1,
        softcap2=softcap2,
        ragged=ragged,
        precision=precision,
    )


def gradient_strides(problem: Problem, name: str) -> Strides:
    """Strides of the gradient of an input: C-contiguous in the caller's layout.

    Parameters
    ----------
    problem
        The description of the call.
    name
        One of ``q1 k1 q2 k2``.

    Returns
    -------
    Strides
        In elements; that of the last axis is 1.

    Examples
    --------
    >>> q = Operand("q", (2, 100, 4, 64), (25600, 256, 64, 1), "float32", Device("cpu"), 4096)
    >>> gradient_strides(describe(q, q, q, q, layout="bnhd"), "k2")
    Strides(batch=25600, head=64, row=256)
    """
    head_dim = problem.head_dim1 if name.endswith("1") else problem.head_dim2
    if name.startswith("q"):
        num_heads, length = problem.num_heads, problem.num_queries
    else:
        length = problem.num_keys
        num_heads = problem.num_key_heads1 if name == "k1" else problem.num_key_heads2
    return _contiguous(num_heads, length, head_dim, problem.layout)


def contiguous(
    dtype: str,
    *,
    batch: int,
    num_heads: int,
    num_key_heads1: int,
    num_key_heads2: int,
    num_queries: int,
    num_keys: int,
    head_dim1: int,
    head_dim2: int,
    causal: bool,
    window: Any = None,
    q_offset: Any = None,
    softcap1: Any = None,
    softcap2: Any = None,
    precision: Any = None,
) -> Problem:
    """Describe a call of contiguous, aligned arrays on a card, for planning without arrays.

    Raises
    ------
    TypeError, ValueError
        As `describe` and `check_gpu`.

    Examples
    --------
    >>> heads = {"batch": 1, "num_heads": 8, "num_key_heads1": 2, "num_key_heads2": 8}
    >>> sizes = {"num_queries": 5, "num_keys": 9, "head_dim1": 64, "head_dim2": 32}
    >>> contiguous("bfloat16", **heads, **sizes, causal=True).group1
    4
    """
    shapes = (
        (batch, num_heads, num_queries, head_dim1),
        (batch, num_key_heads1, num_keys, head_dim1),
        (batch, num_heads, num_queries, head_dim2),
        (batch, num_key_heads2, num_keys, head_dim2),
    )
    operands = []
    for name, shape in zip(INPUTS, shapes, strict=True):
        _, heads, length, head_dim = shape
        strides = (heads * length * head_dim, length * head_dim, head_dim, 1)
        operands.append(
            Operand(name, shape, strides, dtype, Device("cuda", 0), pointer=ALIGNMENT_BYTES)
        )
    problem = describe(
        *operands,
        causal=causal,
        window=window,
        q_offset=q_offset,
        softcap1=softcap1,
        softcap2=softcap2,
        precision=precision,
    )
    check_gpu(problem)
    return problem


def check_options(
    causal: Any, scale1: Any, scale2: Any, layout: Any
) -> tuple[bool, float | None, float | None, str]:
    """Check the options that all calls share, and bring the scales to float.

    Parameters
    ----------
    causal, scale1, scale2, layout
        As `describe` takes them.

    Returns
    -------
    tuple
        The four, the scales as float or None.

    Raises
    ------
    TypeError
        If one has the wrong type.
    ValueError
        If a scale is not finite or the layout is unknown.

    Examples
    --------
    >>> check_options(False, 2, None, "bhnd")
    (False, 2.0, None, 'bhnd')
    """
    check_flag("causal", causal)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        error = ValueError if isinstance(layout, str) else TypeError
        raise error(
            message(
                "layout",
                '"bhnd" (batch, heads, length, head_dim) or "bnhd" (heads and length swapped)',
                repr(layout),
                "name the order of the axes of the four inputs",
            )
        )
    if scale1 is not None:
        scale1 = _check_scale("scale1", scale1)
    if scale2 is not None:
        scale2 = _check_scale("scale2", scale2)
    return causal, scale1, scale2, layout


def check_window(window: Any, q_offset: Any) -> tuple[Window, int | None]:
    """Check a sliding window and the place of the first query.

    Parameters
    ----------
    window
        ``(left, right)``: a query sees so many keys before and behind its own place. Each is an
        int from 0 up; -1 or None, and None for the pair, set no limit.
    q_offset
        The place of query 0 among the keys, any int; None leaves it to the lengths.

    Returns
    -------
    tuple
        The window with None where there is no limit, and the offset as int or None. Numbers that
        no length comes near are replaced by smaller ones that make the same mask.

    Raises
    ------
    TypeError
        If one has the wrong type.
    ValueError
        If there are not two sides, or one is below -1.

    Examples
    --------
    >>> check_window((4096, -1), None), check_window(None, -3)
    (((4096, None), None), ((None, None), -3))
    """
    remedy = "pass how many keys a query sees on each side, for example window=(4096, 0)"
    expected = "two whole numbers from 0 up, or -1 or None for no limit"
    sides: tuple[Any, ...] = NO_WINDOW
    if window is not None:
        if not isinstance(window, tuple | list):
            raise TypeError(message("window", f"a tuple of {expected}", _spell(window), remedy))
        sides = tuple(window)
        if not all(side is None or _is_int(side) for side in sides):
            raise TypeError(message("window", expected, _spell(window), remedy))
        if len(sides) != 2 or any(side is not None and side < -1 for side in sides):
            raise ValueError(message("window", expected, _spell(window), remedy))
    if q_offset is not None and not _is_int(q_offset):
        remedy = "pass the place of the first query among the keys, or leave it out"
        raise TypeError(message("q_offset", "a whole number", _spell(q_offset), remedy))
    left, right = (None if side is None or side == -1 else int(side) for side in sides)
    q_offset = None if q_offset is None else int(q_offset)
    if q_offset is not None and not -MAX_LENGTH <= q_offset <= MAX_LENGTH:
        # From there no query has a key at its place, and what counts is where its window begins
        # and ends: both sides move against the offset.
        moved = max(-MAX_LENGTH, min(MAX_LENGTH, q_offset)) - q_offset
        left = None if left is None else max(0, left + moved)
        right = None if right is None else max(0, right - moved)
        q_offset += moved
    if left is not None and left > 2 * MAX_LENGTH:
        left = 2 * MAX_LENGTH
    if right is not None and right > 2 * MAX_LENGTH:
        right = 2 * MAX_LENGTH
    return (left, right), q_offset


def check_softcaps(softcap1: Any, softcap2: Any) -> tuple[float, float]:
    """Check the bounds of the logits.

    Parameters
    ----------
    softcap1, softcap2
        Finite numbers above 0; 0 and None set no bound.

    Returns
    -------
    tuple of float
        Both, 0 where there is none.

    Raises
    ------
    TypeError
        If one is no number.
    ValueError
        If one is negative, infinite or NaN.

    Examples
    --------
    >>> check_softcaps(50, None)
    (50.0, 0.0)
    """
    return _check_softcap("softcap1", softcap1), _check_softcap("softcap2", softcap2)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is not a bool.

    Parameters
    ----------
    name
        The argument.
    value
        What came.

    Raises
    ------
    TypeError
        If `value` is not a bool.

    Examples
    --------
    >>> check_flag("causal", 1)
    Traceback (most recent call last):
    ...
    TypeError: causal: expected True or False, got 1 (int); pass bool(...) of it.
    """
    if not isinstance(value, bool):
        raise TypeError(message(name, "True or False", _spell(value), "pass bool(...) of it"))


def check_wrt(wrt: Any) -> tuple[str, ...]:
    """Check which gradients are asked for.

    Parameters
    ----------
    wrt
        Names out of ``q1 k1 q2 k2``, in any order.

    Returns
    -------
    tuple of str
        The names in the order given.

    Raises
    ------
    TypeError
        If it is a single string or not a collection of names.
    ValueError
        If it is empty, or a name is unknown or comes twice.

    Examples
    --------
    >>> check_wrt(["k2", "q1"])
    ('k2', 'q1')
    """
    expected = "one or more of 'q1', 'k1', 'q2', 'k2', each at most once"
    remedy = 'name the inputs whose gradients you want, for example wrt=("q2", "k2")'
    if isinstance(wrt, str) or not isinstance(wrt, Iterable):
        raise TypeError(message("wrt", f"a tuple of {expected}", _spell(wrt), remedy))
    names = tuple(wrt)
    try:
        is_known = names in _WRT
    except TypeError:  # what cannot be hashed is no name
        is_known = False
    if not is_known:
        raise ValueError(message("wrt", expected, _spell(wrt), remedy))
    return names


def check_reduction(reduction: Any) -> None:
    """Check how the rows of kl become one number.

    Parameters
    ----------
    reduction
        ``"none"``, ``"sum"``, ``"mean"`` or ``"batchmean"``.

    Raises
    ------
    TypeError
        If it is no string.
    ValueError
        If it is another one.

    Examples
    --------
    >>> check_reduction("mean")
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        error = ValueError if isinstance(reduction, str) else TypeError
        expected = '"none", "sum", "mean" or "batchmean"'
        raise error(message("reduction", expected, repr(reduction), "leave it out for the default"))


def lags_of(
    num_queries: int,
    num_keys: int,
    causal: bool,
    window: Window = NO_WINDOW,
    q_offset: int | None = None,
) -> tuple[int, int]:
    """Bring every mask into one form: query i sees the keys from ``i - begin_lag`` through
    ``i - end_lag``, as far as they exist.

    Returns
    -------
    tuple of int
        Both lags, no smaller than ``-num_keys`` and no larger than ``num_queries``: further out no
        query tells the difference.

    Examples
    --------
    >>> lags_of(5, 8, True), lags_of(5, 8, False), lags_of(5, 8, False, (2, 1), 0)
    ((5, -3), (5, -8), (2, -1))
    """
    offset = num_keys - num_queries if q_offset is None else q_offset
    left, right = window
    if causal:
        right = 0
    begin_lag = num_queries if left is None else left - offset
    end_lag = -num_keys if right is None else -(offset + right)
    begin_lag = max(-num_keys, min(num_queries, begin_lag))
    return begin_lag, max(-num_keys, min(num_queries, end_lag))


def rows_seeing(num_queries: int, num_keys: int, lags: tuple[int, int]) -> tuple[int, int]:
    """Find the rows of a head that see a key: they are neighbours.

    Returns
    -------
    tuple of int
        The first one, and the first one behind the last.

    Examples
    --------
    >>> rows_seeing(5, 3, lags_of(5, 3, True)), rows_seeing(5, 3, lags_of(5, 3, False))
    ((2, 5), (0, 5))
    >>> rows_seeing(5, 3, lags_of(5, 3, False, (0, 0), 0)), rows_seeing(5, 0, lags_of(5, 0, False))
    ((0, 3), (0, 0))
    """
    if num_keys == 0:
        return 0, 0
    begin_lag, end_lag = lags
    first = max(0, end_lag)
    return first, max(first, min(num_queries, num_keys + begin_lag))


def check_strategy(strategy: Any, deterministic: Any) -> None:
    """Check how the backward is to be computed.

    Parameters
    ----------
    strategy
        ``"auto"``, ``"fused"`` or ``"separate"``.
    deterministic
        Whether two runs must agree bit for bit, which ``"fused"`` does not promise.

    Raises
    ------
    TypeError
        If `deterministic` is not a bool.
    ValueError
        If the strategy is unknown, or fused and deterministic are asked for together.

    Examples
    --------
    >>> check_strategy("auto", True)
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            message(
                "strategy",
                '"auto", "fused" or "separate"',
                repr(strategy),
                'leave it out, or pass "auto", to let the package choose',
            )
        )
    check_flag("deterministic", deterministic)
    if deterministic and strategy == "fused":
        raise ValueError(
            message(
                "strategy",
                '"auto" or "separate" with deterministic=True',
                "'fused', whose sums arrive in no fixed order",
                'leave strategy out or pass "separate"',
            )
        )


def check_precision(precision: Any, dtype: str = "float32") -> str | None:
    """Check how float32 inputs are to be multiplied.

    Parameters
    ----------
    precision
        ``"float32"``, ``"tf32"`` or None.
    dtype
        Of the four inputs, where it is known.

    Returns
    -------
    str or None
        ``"float32"`` for float32 inputs unless something else was given; None for other inputs.

    Raises
    ------
    TypeError
        If it is no string.
    ValueError
        If it is another one, or comes with inputs that are not float32.

    Examples
    --------
    >>> check_precision(None, "float32"), check_precision("tf32", "float32")
    ('float32', 'tf32')
    """
    if precision is None:
        return "float32" if dtype == "float32" else None
    if not isinstance(precision, str) or precision not in PRECISIONS:
        error = ValueError if isinstance(precision, str) else TypeError
        expected = '"float32" or "tf32"'
        raise error(message("precision", expected, repr(precision), "leave it out for the default"))
    if dtype != "float32":
        expected, remedy = (
            f"None with {dtype} inputs",
            "leave it out, or cast the inputs to float32",
        )
        raise ValueError(message("precision", expected, repr(precision), remedy))
    return precision


def check_dtype(name: str, dtype: str, device: Device) -> None:
    """Refuse an input dtype that is not computed on the device.

    Parameters
    ----------
    name
        The argument.
    dtype
        Its dtype as NumPy spells it.
    device
        Where it lies.

    Raises
    ------
    TypeError
        If the dtype is not supported there.

    Examples
    --------
    >>> check_dtype("q1", "bfloat16", Device("cuda", 0))
    """
    if device.kind == "cpu":
        if dtype not in CPU_DTYPES:
            expected = "bfloat16, float16, float32 or float64 on the CPU"
            raise TypeError(message(name, expected, dtype, "cast the four inputs to one of them"))
    elif dtype not in GPU_DTYPES:
        raise TypeError(
            message(
                name,
                "bfloat16, float16 or float32 on a GPU",
                dtype,
                "cast the four inputs to one of them",
            )
        )


def check_gpu(problem: Problem) -> None:
    """Refuse what the reference computes and the kernels do not.

    Parameters
    ----------
    problem
        The description of the call.

    Raises
    ------
    TypeError
        If the dtype is none of bfloat16, float16 and float32.
    ValueError
        If a head dimension is not a multiple of 8 from 8 to 256, or a scale is out of the range
        of float32.

    Examples
    --------
    >>> q = Operand("q", (100, 64), (64, 1), "bfloat16", Device("cuda", 0), 4096)
    >>> check_gpu(describe(q, q, q, q))
    """
    check_dtype("q1", problem.dtype, Device("cuda", 0))
    check_head_dim("q1 and k1", problem.head_dim1)
    check_head_dim("q2 and k2", problem.head_dim2)
    for name, scale in (("scale1", problem.scale1), ("scale2", problem.scale2)):
        if abs(scale) > MAX_GPU_SCALE:
            expected = "a magnitude below 2.3e38 on a GPU, where logits are float32"
            raise ValueError(message(name, expected, repr(scale), "scale the queries instead"))


def check_head_dim(name: str, head_dim: Any) -> None:
    """Refuse a head dimension for which there is no kernel.

    Parameters
    ----------
    name
        The argument or arguments.
    head_dim
        Number of components of a head.

    Raises
    ------
    TypeError
        If it is no int.
    ValueError
        If it is not a multiple of 8 from 8 to 256.

    Examples
    --------
    >>> check_head_dim("head_dim1", 96)
    """
    expected = f"a head dimension that is a multiple of 8 from 8 to {MAX_HEAD_DIM} on a GPU"
    if not isinstance(head_dim, int) or isinstance(head_dim, bool):
        raise TypeError(message(name, expected, _spell(head_dim), "pass an int"))
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        if 0 < head_dim < MAX_HEAD_DIM:
            multiple = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
            remedy = f"pad with zeros to {multiple} and keep the scale of {head_dim}"
        else:
            remedy = "compute on the CPU, where any head dimension is accepted"
        raise ValueError(message(name, expected, str(head_dim), remedy))


def check_max_seqlen(name: str, value: Any) -> int:
    """Check the most queries or keys that a packed sequence has.

    Parameters
    ----------
    name
        ``max_seqlen_q`` or ``max_seqlen_k``.
    value
        An int from 0 up, on the host.

    Returns
    -------
    int
        The value.

    Raises
    ------
    TypeError
        If it is no int.
    ValueError
        If it is negative.

    Examples
    --------
    >>> check_max_seqlen("max_seqlen_q", 4096)
    4096
    """
    expected = "a whole number from 0 up"
    if not _is_int(value):
        remedy = "pass the length of the longest sequence as an int, or leave it out"
        raise TypeError(message(name, expected, _spell(value), remedy))
    if value < 0:
        remedy = "pass the length of the longest sequence"
        raise ValueError(message(name, expected, str(value), remedy))
    return int(value)


def describe_lengths(names: tuple[str, ...], max_seqlen_q: Any, max_seqlen_k: Any) -> Ragged:
    """Check which lengths of a batch come together.

    Parameters
    ----------
    names
        Which of `LENGTHS` come, in this order.
    max_seqlen_q, max_seqlen_k
        None, or as `check_max_seqlen` takes them.

    Returns
    -------
    Ragged
        Of packed sequences without their number.

    Raises
    ------
    TypeError
        If one of the last two has the wrong type.
    ValueError
        If what comes does not go together.

    Examples
    --------
    >>> describe_lengths(("kv_lens",), None, None).is_packed
    False
    """
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    bounds = {n: check_max_seqlen(n, bound) for n, bound in bounds.items() if bound is not None}
    packed = [name for name in names if name in CU_SEQLENS]
    if packed and len(packed) < len(names):
        padding = " and ".join(name for name in names if name in PADDING)
        remedy = f"leave out {padding}, or {' and '.join(packed)}"
        raise ValueError(message(packed[0], f"None together with {padding}", "an array", remedy))
    if packed and len(packed) == 1:
        (missing,) = (name for name in CU_SEQLENS if name not in packed)
        expected, remedy = f"an array together with {packed[0]}", "pass both"
        raise ValueError(message(missing, expected, "None", remedy))
    if bounds and not packed:
        name, bound = next(iter(bounds.items()))
        remedy = "pass cu_seqlens_q and cu_seqlens_k as well, or leave it out"
        raise ValueError(message(name, "None without cu_seqlens_q", str(bound), remedy))
    return Ragged(names, 0, bounds.get("max_seqlen_q", 0), bounds.get("max_seqlen_k", 0))


def check_lengths(problem: Problem, operand: Operand, device: Device) -> None:
    """Check an array of lengths, whose values are not looked at.

    A padded batch has one length a batch entry, inputs of rank 3 and 2 one for all heads.

    Parameters
    ----------
    problem
        The description of the call.
    operand
        One of `LENGTHS`.
    device
        Where the inputs lie.

    Raises
    ------
    TypeError
        If the dtype is not int32.
    ValueError
        If shape, device, strides or alignment are not as said.

    Examples
    --------
    >>> cpu = Device("cpu")
    >>> q = Operand("q", (4, 2, 100, 64), (12800, 6400, 64, 1), "float32", cpu, 4096)
    >>> problem = describe(q, q, q, q, ragged=Ragged(("kv_lens",)))
    >>> check_lengths(problem, Operand("kv_lens", (4,), (1,), "int32", cpu, 64), cpu)
    """
    if operand.dtype != "int32":
        raise TypeError(message(operand.name, "int32", operand.dtype, "cast it to int32"))
    _check_device(operand, "q1", device)
    assert problem.ragged is not None
    shape, expected = (problem.batch,), "one length a batch entry"
    if problem.ragged.is_packed:
        shape = (problem.ragged.num_sequences + 1,)
        expected = "where each sequence begins and the last one ends, the same for both"
    if operand.shape != shape:
        got = str(operand.shape)
        remedy = "pass it for the whole batch"
        if shape == (1,) and not problem.ragged.is_packed:
            remedy = "pass one length for all heads, or batch and heads apart, at rank 4"
        raise ValueError(message(operand.name, f"{expected}, shape {shape}", got, remedy))
    _check_contiguous(operand)
    _check_alignment(operand, 4)


def check_rows(
    problem: Problem,
    operand: Operand,
    *,
    shape: tuple[int, ...],
    device: Device,
    contiguous: bool,
) -> Strides:
    """Check an array with one value a query row: the upstream gradient or a part of the state.

    Parameters
    ----------
    problem
        The description of the call.
    operand
        The array. float32 on the GPU, any of the float dtypes on the CPU.
    shape
        The shape it must have: that of q1 without its last axis, in the caller's layout; of
        packed sequences ``(H, N_Q)``.
    device
        Where the inputs lie.
    contiguous
        Whether it must be C-contiguous, as the state must; otherwise any strides from 0 up do.

    Returns
    -------
    Strides
        In the canonical order; 0 along axes of length 1.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If shape, device, strides or alignment are not as said.

    Examples
    --------
    >>> cpu = Device("cpu")
    >>> q = Operand("q", (4, 100, 64), (6400, 64, 1), "float32", cpu, 4096)
    >>> dkl = Operand("dkl", (4, 100), (0, 0), "float32", cpu, 4096)
    >>> check_rows(describe(q, q, q, q), dkl, shape=(4, 100), device=cpu, contiguous=False)
    Strides(batch=0, head=0, row=0)
    """
    _check_row_dtype(operand, device)
    _check_device(operand, "q1", device)
    if operand.shape != shape:
        expected = "the shape of q1 without its last axis"
        if problem.layout == "packed":
            expected = "the shape of kl, (H, N_Q) for packed sequences"
        got, remedy = str(operand.shape), "pass one value a query row"
        raise ValueError(message(operand.name, f"{expected}, {shape}", got, remedy))
    _check_strides(operand)
    if contiguous:
        _check_contiguous(operand)
    _check_alignment(operand, ITEM_BYTES[operand.dtype])
    _, strides = _canonical(operand, problem.layout, rows=True)
    return Strides(*strides[:3])


def check_parts(operands: Sequence[Operand]) -> None:
    """Check the arrays of states that are to be merged.

    Parameters
    ----------
    operands
        All of them. The first says shape and device.

    Raises
    ------
    TypeError
        If a dtype is not float32 on the GPU, or none of the float dtypes on the CPU.
    ValueError
        If shapes or devices differ, or an array is not C-contiguous.

    Examples
    --------
    >>> check_parts([Operand("states[0].kl", (4, 100), (100, 1), "float32", Device("cpu"), 4096)])
    """
    first = operands[0]
    for operand in operands:
        _check_row_dtype(operand, first.device)
        _check_device(operand, first.name, first.device)
        if operand.shape != first.shape:
            expected = f"the shape of {first.name}, {first.shape}"
            remedy = "pass states of the same query rows"
            raise ValueError(message(operand.name, expected, str(operand.shape), remedy))
        _check_contiguous(operand)
        _check_alignment(operand, ITEM_BYTES[operand.dtype])


def check_output(
    operand: Operand,
    *,
    shape: tuple[int, ...],
    dtype: str,
    device: Device,
    alignment: int,
    others: Sequence[Operand],
) -> None:
    """Check an array of the caller that a result is to be written to.

    Parameters
    ----------
    operand
        The array.
    shape, dtype, device
        What the result has.
    alignment
        Bytes that its address must be a multiple of.
    others
        The inputs and the other outputs of the call, whose memory it must not share.

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If anything else is not as said, or the array is not C-contiguous or is read-only.

    Examples
    --------
    >>> cpu = Device("cpu")
    >>> kl = Operand("out", (4, 100), (100, 1), "float64", cpu, 4096)
    >>> check_output(kl, shape=(4, 100), dtype="float64", device=cpu, alignment=8, others=())
    """
    name = operand.name
    if operand.readonly:
        remedy = "pass a writable array, or leave out= out"
        raise ValueError(message(name, "an array to write to", "a read-only one", remedy))
    if operand.dtype != dtype:
        raise TypeError(message(name, dtype, operand.dtype, f"allocate it as {dtype}"))
    _check_device(operand, "q1", device)
    if operand.shape != shape:
        expected = f"the shape of the result, {shape}"
        raise ValueError(message(name, expected, str(operand.shape), "allocate it in that shape"))
    _check_contiguous(operand)
    _check_alignment(operand, alignment)
    first, last = _span(operand)
    for other in others:
        other_first, other_last = _span(other)
        if first < other_last and other_first < last:
            expected = "memory of its own"
            got = f"memory that overlaps with that of {other.name}"
            raise ValueError(message(name, expected, got, "allocate it separately"))


def _check_scale(name: str, scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        remedy = "pass float(...) of it, or leave it out for head_dim ** -0.5"
        raise TypeError(message(name, "a real number", _spell(scale), remedy))
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        remedy = "pass a finite one, or leave it out for head_dim ** -0.5"
        raise ValueError(message(name, "a finite number", repr(scale), remedy))
    return value


def _check_softcap(name: str, softcap: Any) -> float:
    expected = "a finite number above 0, or 0 or None for no bound"
    remedy = "pass the bound of the logits of that side, for example 50.0"
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(message(name, expected, _spell(softcap), remedy))
    try:
        value = float(softcap)
    except OverflowError:
        value = math.inf
    if not 0 <= value < math.inf:
        raise ValueError(message(name, expected, repr(softcap), remedy))
    return value


def _check_row_dtype(operand: Operand, device: Device) -> None:
    if device.kind == "cpu":
        if operand.dtype not in CPU_DTYPES:
            expected = "bfloat16, float16, float32 or float64"
            raise TypeError(message(operand.name, expected, operand.dtype, "cast it"))
    elif operand.dtype != "float32":
        raise TypeError(message(operand.name, "float32", operand.dtype, "cast it to float32"))


def _check_device(operand: Operand, reference: str, device: Device) -> None:
    if operand.device != device:
        expected = f"an array on {device} like {reference}"
        got = f"one on {operand.device}"
        raise ValueError(message(operand.name, expected, got, f"move it to {device}"))


def _check_rank(operand: Operand, first: Operand, is_packed: bool) -> None:
    rank = len(operand.shape)
    if is_packed and rank != 3:
        expected = "3 axes with cu_seqlens_q and cu_seqlens_k"
        got = f"{rank} (shape {operand.shape})"
        remedy = "pass (length of all sequences, heads, head_dim), or kv_lens= for a padded batch"
        raise ValueError(message(operand.name, expected, got, remedy))
    if not 2 <= rank <= 4:
        got = f"{rank} (shape {operand.shape})"
        remedy = "pass (batch, heads, length, head_dim), (batch * heads, length, head_dim) or "
        remedy += "(length, head_dim)"
        raise ValueError(message(operand.name, "2, 3 or 4 axes", got, remedy))
    if rank != len(first.shape):
        expected = f"{len(first.shape)} axes like {first.name}"
        got = f"{rank} (shape {operand.shape})"
        raise ValueError(
            message(operand.name, expected, got, "give the four inputs the same number of axes")
        )


def _check_strides(operand: Operand) -> None:
    used = zip(operand.shape, operand.strides, strict=True)
    if any(length > 1 and stride < 0 for length, stride in used) and operand.size:
        expected = "strides from 0 up"
        got = f"strides {operand.strides} for shape {operand.shape}"
        raise ValueError(message(operand.name, expected, got, "pass a copy of it"))


def _check_last_stride(operand: Operand) -> None:
    if operand.strides[-1] != 1:
        got = f"strides {operand.strides} for shape {operand.shape}"
        remedy = "make the head dimension contiguous, for example by a contiguous copy"
        raise ValueError(message(operand.name, "a last stride of 1", got, remedy))


def _check_contiguous(operand: Operand) -> None:
    expected = 1
    contiguous = True
    for length, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        contiguous &= length == 1 or stride == expected
        expected *= length
    if operand.size and not contiguous:
        got = f"strides {operand.strides} for shape {operand.shape}"
        remedy = "pass a contiguous array"
        raise ValueError(message(operand.name, "a C-contiguous array", got, remedy))


def _check_alignment(operand: Operand, alignment: int) -> None:
    if operand.size == 0:
        return
    if operand.pointer == 0:
        remedy = "pass an array whose memory is allocated"
        raise ValueError(message(operand.name, "an array with data", "a null address", remedy))
    if operand.pointer % alignment:
        expected = f"an address that is a multiple of {alignment} bytes"
        got = f"one with remainder {operand.pointer % alignment}"
        raise ValueError(message(operand.name, expected, got, "pass a copy of it"))


def _check_shapes(
    operands: Sequence[Operand], shapes: Sequence[tuple[int, ...]], layout: str
) -> None:
    """Check that four shapes in the canonical order fit together."""
    names = [operand.name for operand in operands]
    batch, num_heads, num_queries, _ = shapes[0]
    num_keys = shapes[1][2]

    def mismatch(position: int, expected: str, got: int, remedy: str) -> ValueError:
        shape = f"{got} (shape {operands[position].shape}, layout {layout!r})"
        return ValueError(message(names[position], expected, shape, remedy))

    for position in (1, 2, 3):
        if shapes[position][0] != batch:
            expected = f"the batch size of {names[0]}, {batch}"
            remedy = "give the four inputs the same batch size"
            raise mismatch(position, expected, shapes[position][0], remedy)
    if shapes[2][1] != num_heads:
        expected = f"the number of heads of {names[0]}, {num_heads}"
        raise mismatch(2, expected, shapes[2][1], "give both queries the same heads")
    if shapes[2][2] != num_queries:
        expected = f"the length of {names[0]}, {num_queries}"
        raise mismatch(2, expected, shapes[2][2], "compare the same queries on both sides")
    if shapes[3][2] != num_keys:
        expected = f"the length of {names[1]}, {num_keys}"
        raise mismatch(3, expected, shapes[3][2], "compare over the same keys on both sides")
    for query, key in ((0, 1), (2, 3)):
        head_dim, key_heads = shapes[query][3], shapes[key][1]
        if head_dim == 0:
            expected = "a head dimension of at least 1"
            raise mismatch(query, expected, 0, "pass heads with components")
        if shapes[key][3] != head_dim:
            expected = f"the head dimension of {names[query]}, {head_dim}"
            remedy = f"give {names[query]} and {names[key]} the same head dimension"
            raise mismatch(key, expected, shapes[key][3], remedy)
        if key_heads != num_heads and (key_heads == 0 or num_heads % key_heads):
            expected = f"a number of heads that divides the {num_heads} of {names[query]}"
            remedy = "pass one key head for each group of query heads, or check layout="
            raise mismatch(key, expected, key_heads, remedy)
    for position, length in ((0, num_queries), (1, num_keys)):
        if length > MAX_LENGTH:
            expected = f"a length of at most {MAX_LENGTH}"
            raise mismatch(position, expected, length, "split the sequence")
    if num_queries + num_keys > MAX_LENGTH:
        expected = f"a length that together with that of {names[0]} is at most {MAX_LENGTH}"
        raise mismatch(1, expected, num_keys, "split the sequence")


def _canonical(
    operand: Operand, layout: str, *, rows: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in the order batch, head, row, component, with 0 for unused strides.

    With `rows` the operand lacks the last axis and gets one of length 1.
    """
    shape = (*operand.shape, 1) if rows else operand.shape
    strides = (*operand.strides, 1) if rows else operand.strides
    missing = 4 - len(shape)
    shape, strides = (1,) * missing + shape, (0,) * missing + strides
    if layout == "packed" and not rows:
        shape = (1, shape[2], shape[1], shape[3])
        strides = (0, strides[2], strides[1], strides[3])
    if layout == "bnhd" and not missing:
        shape = (shape[0], shape[2], shape[1], shape[3])
        strides = (strides[0], strides[2], strides[1], strides[3])
    is_empty = 0 in shape
    used = zip(shape, strides, strict=True)
    return shape, tuple(0 if length == 1 or is_empty else stride for length, stride in used)


def _contiguous(num_heads: int, length: int, head_dim: int, layout: str) -> Strides:
    """Strides of a C-contiguous tensor ``(B, H, N, D)``, ``(B, N, H, D)`` or ``(N, H, D)``."""
    if layout in ("bnhd", "packed"):
        return Strides(num_heads * length * head_dim, head_dim, num_heads * head_dim)
    return Strides(num_heads * length * head_dim, length * head_dim, head_dim)


def _is_aligned(operand: Operand, strides: Strides) -> bool:
    item_bytes = ITEM_BYTES[operand.dtype]
    offsets = (strides.batch * item_bytes, strides.head * item_bytes, strides.row * item_bytes)
    return not any(offset % ALIGNMENT_BYTES for offset in (operand.pointer, *offsets))


def _span(operand: Operand) -> tuple[int, int]:
    """First address of an operand and the one past its last; (0, 0) if it is empty."""
    if operand.size == 0:
        return 0, 0
    pairs = zip(operand.shape, operand.strides, strict=True)
    last = sum((length - 1) * stride for length, stride in pairs)
    return operand.pointer, operand.pointer + (last + 1) * ITEM_BYTES[operand.dtype]


def _is_int(value: Any) -> bool:
    # An int that torch.compile traces is an int to it, and no more.
    return isinstance(value, int | numbers.Integral) and not isinstance(value, bool)


def _spell(value: Any) -> str:
    """A value for a message: short, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"

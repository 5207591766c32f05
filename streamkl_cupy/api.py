"""The public functions. Each reads from top to bottom:

take in -> describe -> plan -> launch -> hand back.

Arrays on the CPU go to the float64 reference instead of plan and launch. What depends only on the
shapes of a call (its checks, its plan) is kept for the next call of the same shapes; nothing else
outlives a call.

Who has addresses instead of arrays (a front door of another library) starts in the middle:
`prepare_forward` or `prepare_backward` turns a `Problem` into a `Prepared`, which is kept for the
next problem like it, and `Prepared.launch` takes addresses, a workspace and a stream. It wants
``interop.under_device`` around it, which also refuses a forked process.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast, overload

import numpy as np

from streamkl_cupy import catalogue, choices, env, interop, jit, launch, plan, reference, tiling
from streamkl_cupy.chain import Bound, Chain
from streamkl_cupy.interop import CPU, Array, CudaLibrary, Group, HostLibrary
from streamkl_cupy.problem import (
    ALIGNMENT_BYTES,
    GPU_DTYPES,
    INPUTS,
    ITEM_BYTES,
    LENGTHS,
    STRATEGIES,
    Device,
    Operand,
    Problem,
    Ragged,
    Strides,
    Window,
    check_flag,
    check_gpu,
    check_head_dim,
    check_lengths,
    check_options,
    check_output,
    check_parts,
    check_precision,
    check_rows,
    check_softcaps,
    check_strategy,
    check_window,
    check_wrt,
    describe,
    describe_lengths,
    message,
)
from streamkl_cupy.state import KLState, SupportsDLPack

ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)

_STATE = launch.STATE
_LOWS = _STATE[3:]
_GIVEN = ((), ("lse1",), ("lse2",), ("lse1", "lse2"))
NULL_POINTERS = dict.fromkeys(
    (*INPUTS, *_STATE, *launch.GIVEN, *launch.ENTROPIES, "dkl", *launch.GRADIENTS, *LENGTHS), 0
)

_HostState: TypeAlias = reference.ReferenceState | reference.GivenState | reference.EntropyState

# causal, window and q_offset as the checks leave them.
Mask: TypeAlias = tuple[bool, Window, int | None]

# Shape and dtype of each result.
Results: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]

# Shapes of calls that are remembered. A training run with ragged batches sees many.
_REMEMBERED = 4096

# Heads and keys of the calls that `warmup` plans: enough keys that a single query splits them.
_WARMUP_HEADS, _WARMUP_KEYS = 12, 131072
# Query heads to a key head of each side: few queries of the second take other kernels.
_WARMUP_GROUPS = ((1, 1), (2, 3))


@overload
def attention_kl(
    q1: ArrayT,
    k1: ArrayT,
    q2: ArrayT,
    k2: ArrayT,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: ArrayT | None = ...,
    kv_lens: ArrayT | None = ...,
    q_lens: ArrayT | None = ...,
    cu_seqlens_q: ArrayT | None = ...,
    cu_seqlens_k: ArrayT | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    lse1: ArrayT | None = ...,
    lse2: ArrayT | None = ...,
    return_state: Literal[False] = ...,
    return_entropy: Literal[False] = ...,
    out: ArrayT | None = ...,
) -> ArrayT: ...
@overload
def attention_kl(
    q1: SupportsDLPack,
    k1: SupportsDLPack,
    q2: SupportsDLPack,
    k2: SupportsDLPack,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: SupportsDLPack | None = ...,
    kv_lens: SupportsDLPack | None = ...,
    q_lens: SupportsDLPack | None = ...,
    cu_seqlens_q: SupportsDLPack | None = ...,
    cu_seqlens_k: SupportsDLPack | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    lse1: SupportsDLPack | None = ...,
    lse2: SupportsDLPack | None = ...,
    return_state: Literal[True],
    return_entropy: bool = ...,
    out: KLState | None = ...,
) -> KLState: ...
@overload
def attention_kl(
    q1: SupportsDLPack,
    k1: SupportsDLPack,
    q2: SupportsDLPack,
    k2: SupportsDLPack,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    q_offset: int | None = ...,
    scale1: float | None = ...,
    scale2: float | None = ...,
    softcap1: float | None = ...,
    softcap2: float | None = ...,
    layout: str = ...,
    kv_starts: SupportsDLPack | None = ...,
    kv_lens: SupportsDLPack | None = ...,
    q_lens: SupportsDLPack | None = ...,
    cu_seqlens_q: SupportsDLPack | None = ...,
    cu_seqlens_k: SupportsDLPack | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    precision: str | None = ...,
    return_state: bool = ...,
    return_entropy: Literal[True],
    out: KLState | None = ...,
) -> KLState: ...
def attention_kl(
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
    kv_starts: Any = None,
    kv_lens: Any = None,
    q_lens: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str | None = None,
    lse1: Any = None,
    lse2: Any = None,
    return_state: bool = False,
    return_entropy: bool = False,
    out: Any = None,
) -> Any:
    """KL divergence between two attention distributions, one value a query row, in nats.

    ``P_t`` is the softmax over the keys of ``scale_t * q_t k_t^T``; the result is
    ``KL(P1 || P2)``. No distribution is ever stored.

    Parameters
    ----------
    q1, k1
        Queries ``(B, H, N_Q, D1)`` and keys ``(B, HK1, N_K, D1)`` of P1, usually the fixed
        teacher. ``HK1`` divides ``H``; query head h uses key head ``h // (H // HK1)``.
    q2, k2
        The same of P2, usually the student: ``(B, H, N_Q, D2)`` and ``(B, HK2, N_K, D2)``.
        The four are arrays of one library, one device and one dtype: bfloat16, float16 or
        float32 on a GPU, with D1 and D2 multiples of 8 from 8 to 256; on the CPU also float64,
        and any D. Any view goes in without a copy if its last stride is 1. Ranks 3
        ``(B * H, N, D)`` and 2 ``(N, D)`` are accepted.
    causal
        Aligned to the bottom right, unlike torch's ``scaled_dot_product_attention``: query i
        sees key j only if ``j <= i + N_K - N_Q``.
    window
        A sliding window ``(left, right)``: query i, whose place among the keys is
        ``p = i + N_K - N_Q``, sees key j only if ``p - left <= j <= p + right``; -1 or None sets
        no limit. With `causal` right is 0. The time goes with the width of the window: tiles
        outside of it are never read.
    q_offset
        The place of query 0 among the keys instead of ``N_K - N_Q``, any int: for queries that
        come in chunks, or keys of which each device holds a part. Queries may lie before the
        first key or behind the last. One int for the whole batch, where the default of a padded or
        packed one is each entry's own: under a mask its queries come in chunks, or its keys in
        parts, only if the offset is the same in every entry.
    scale1, scale2
        Factors of the logits, any finite number; by default ``D_t ** -0.5``. A softmax at
        temperature T is one of the scale ``D_t ** -0.5 / T``.
    softcap1, softcap2
        Soft bounds of the logits: c > 0 makes ``c * tanh(s / c)`` of each scaled logit s, which
        then lies between -c and c. 0 or None sets none.
    layout
        ``"bhnd"`` as above, or ``"bnhd"``, which swaps heads and length at rank 4.
    kv_starts, kv_lens, q_lens
        Of a padded batch: the first key of each batch entry, how many keys it has from there on,
        and how many queries; int32 of shape ``(B,)``, where the inputs lie. What is left out is 0
        or the whole length. All else is padding, whose memory may hold anything: padded queries
        have ``kl = 0`` and ``lse = -inf``, and their `lse1`, `lse2` and dkl do not matter. Masks
        are counted from what is there: `causal` lets the last query of each entry see the last
        key of it. The lengths are read on the device alone, and cut to what there is. Inputs of
        rank 3 or 2 are one entry, with one length for all heads.
    cu_seqlens_q, cu_seqlens_k
        Of packed sequences, both together: where each begins, and where the last one ends; int32
        of shape ``(B + 1,)``, where the inputs lie. q1 is ``(N_Q, H, D1)`` then, k1
        ``(N_K, HK1, D1)``, q2 and k2 alike, N_Q and N_K the lengths of all sequences together, and
        kl and lse are ``(H, N_Q)``. Masks are counted within each sequence, which may have no
        queries or no keys. Queries of no sequence are as padded ones. The values must never
        decrease and lie within the arrays. On the CPU others raise; on a GPU that is not checked,
        as nothing on the device is read by the host.
    max_seqlen_q, max_seqlen_k
        The lengths of the longest sequences, or more: the plan goes by them, the values do not. By
        default N_Q and N_K.
    precision
        How float32 inputs are multiplied on a GPU: ``"float32"``, the default, to the accuracy of
        float32, or ``"tf32"``, which rounds them to 11 significant bits, about three digits of the
        logits, and is faster. No setting of torch or JAX changes it. No matter on the CPU; inputs
        that are not float32 take None alone.
    lse1, lse2
        Log-sum-exps to divide by instead of those over the keys of this call, one or both: of a
        softmax that also covers keys that are not here, such as sinks or another shard. One value
        a query row in the shape of kl, of any strides from 0 up: float32 on a GPU, any float dtype
        on the CPU. Finite wherever a row sees a key: else what comes of the row is not defined.
        Constants for `attention_kl_backward`.
    return_state
        Return all that `attention_kl_backward` needs.
    return_entropy
        Return a state that also has the entropy of P1 and its cross-entropy with P2, from the same
        pass over the keys. Not together with `lse1` or `lse2`.
    out
        Where to write: an array for kl, or with `return_state` a `KLState` whose low parts may
        be missing. C-contiguous, of the dtype of the result. With `lse1` or `lse2` it must say so
        in ``given`` and have an array for ``mass1``; with `return_entropy` arrays for both
        entropies.

    Returns
    -------
    array or KLState
        ``kl`` in the shape of q1 without its last axis, float32 on a GPU and float64 on the CPU
        (float32 in JAX without ``jax_enable_x64``); an array of the caller's library on the
        device of the inputs, in order with the caller's current stream. With `return_state` or
        `return_entropy` a `KLState` of such arrays. A row that sees no key has ``kl = 0`` and
        ``lse = -inf``. Of packed sequences ``(H, N_Q)``.

    Raises
    ------
    TypeError
        If an argument is of the wrong type or dtype, libraries are mixed, or a gradient would be
        lost: a torch tensor that requires grad, a JAX tracer.
    ValueError
        If shapes, strides, devices or options do not fit. Every check comes before any launch.
    ImportError
        For arrays on a GPU without CuPy.
    RuntimeError
        When a graph is being captured and a kernel has not been loaded by `warmup`, or in a
        process that was forked after the GPU had been used.

    Notes
    -----
    ``KL = sum_j P1_j (s1_j - s2_j) + lse2 - lse1`` in one pass over the keys, Algorithm 1 of
    StreamKL (arXiv 2606.20005).

    With a given ``lse_t`` the masses ``p_t,j = exp(s_t,j - lse_t)`` need not add up to 1, and
    ``kl = sum_j p1_j (log p1_j - log p2_j)``, this call's share of the divergence over all keys
    that the log-sum-exps cover. ``mass1`` of the state is ``sum_j p1_j``. A row without keys has
    ``kl = mass1 = 0``. The pass over the keys is the same, and what is given takes the place of the
    rows' own log-sum-exps behind it: it saves no time.

    Examples
    --------
    >>> import numpy as np
    >>> q, k1 = np.ones((1, 1)), np.zeros((2, 1))
    >>> k2 = np.log([[1.0], [3.0]])
    >>> attention_kl(q, k1, q, k2).round(6)        # P1 = (1/2, 1/2), P2 = (1/4, 3/4)
    array([0.143841])

    A sink takes half of P1 and none of P2:

    >>> lse1 = np.log([4.0])
    >>> state = attention_kl(q, k1, q, k2, lse1=lse1, return_state=True)
    >>> state.kl.round(6), state.mass1             # p1 = (1/4, 1/4)
    (array([-0.274653]), array([0.5]))

    Entropy and cross-entropy differ by the divergence:

    >>> state = attention_kl(q, k1, q, k2, return_entropy=True)
    >>> state.entropy.round(6), state.cross_entropy.round(6)
    (array([0.693147]), array([0.836988]))

    Logits of 0 and 1.1 of P2 are bounded softly by 0.5, as Gemma 2 bounds its own by 50:

    >>> attention_kl(q, k1, q, k2, softcap2=0.5).round(6)
    array([0.029454])

    At temperature 2 the logits of P2 are 0 and 0.55:

    >>> attention_kl(q, k1, q, k2, scale1=0.5, scale2=0.5).round(6)
    array([0.037252])

    Three queries on three keys, each of which sees its own key and the one before:

    >>> q, k1 = np.ones((3, 1)), np.zeros((3, 1))
    >>> k2 = np.log([[1.0], [3.0], [1.0]])
    >>> attention_kl(q, k1, q, k2, window=(1, 0)).round(6)
    array([0.      , 0.143841, 0.143841])

    The same for the query of the second key alone:

    >>> attention_kl(q[1:2], k1, q[1:2], k2, window=(1, 0), q_offset=1).round(6)
    array([0.143841])

    A padded batch of one query on two keys and of one query on one key:

    >>> q, k1 = np.ones((2, 1, 1, 1)), np.zeros((2, 1, 2, 1))
    >>> k2 = np.log([1.0, 3.0, 1.0, 3.0]).reshape(2, 1, 2, 1)
    >>> attention_kl(q, k1, q, k2, kv_lens=np.int32([2, 1])).round(6).tolist()
    [[[0.143841]], [[0.0]]]

    Two sequences, packed, of two queries on one key and of one query on two:

    >>> q, k1 = np.ones((3, 1, 1)), np.zeros((3, 1, 1))
    >>> k2 = np.log([1.0, 1.0, 3.0]).reshape(3, 1, 1)
    >>> ends = {"cu_seqlens_q": np.int32([0, 2, 3]), "cu_seqlens_k": np.int32([0, 1, 3])}
    >>> attention_kl(q, k1, q, k2, **ends).round(6)
    array([[0.      , 0.      , 0.143841]])
    """
    # Take in.
    causal, scale1, scale2, layout = check_options(causal, scale1, scale2, layout)
    mask = (causal, *check_window(window, q_offset))
    softcaps = check_softcaps(softcap1, softcap2)
    check_flag("return_state", return_state)
    check_flag("return_entropy", return_entropy)
    returns_state = return_state or return_entropy
    inputs = interop.take_all(INPUTS, (q1, k1, q2, k2))
    lengths = _take_lengths(
        (kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        inputs,
    )
    given, of_given = _take_given(lse1, lse2, inputs)
    if given and return_entropy:
        expected, remedy = "False with given log-sum-exps", f"leave out {_listed(given)}"
        raise ValueError(message("return_entropy", expected, "True", remedy))
    names = _STATE + ("mass1",) * bool(given) + launch.ENTROPIES * return_entropy
    outputs = {} if out is None else _take_state_outputs(out, returns_state, inputs, names, given)

    # Describe.
    precision = check_precision(precision, inputs.keys[0][2])
    problem = _describe(
        inputs.keys, mask, scale1, scale2, softcaps, layout, precision, lengths.ragged
    )
    index = inputs.keys[0][3]
    shape = _row_shape(problem, inputs)
    lengths.check(problem, index)
    row_dtype = "float64" if index == CPU else "float32"
    results = dict.fromkeys(names if returns_state else names[:1], (shape, row_dtype))
    given_strides = (
        _describe_given(problem, shape, index, given, of_given.keys) if of_given else (None, None)
    )
    if outputs:
        labels = {name: f"out.{name}" if returns_state else "out" for name in outputs}
        others = inputs.operands(INPUTS) + (of_given.operands(given) if of_given else [])
        _check_outputs(outputs, labels, results, ITEM_BYTES[row_dtype], others)
    if index == CPU:
        options = _options(mask, scale1, scale2, softcaps, layout) | lengths.views
        if of_given:
            options |= {n: x.view for n, x in zip(given, of_given.arrays, strict=True)}
        options |= {"return_entropy": True} if return_entropy else {"return_state": True}
        values = _refer_forward(inputs.arrays, options, returns_state, outputs)
        return values if out is None else out

    library = cast(CudaLibrary, inputs.library)
    with interop.under_device(index):
        # Plan.
        prepared = prepare_forward(
            problem, index, env.force(), plan.current_override(), given_strides, return_entropy
        )
        stream = library.current_stream(index)
        prepared.require_loaded(stream)

        # Launch.
        pointers = NULL_POINTERS.copy()
        pointers.update(zip(INPUTS, inputs.pointers, strict=True))
        pointers.update(lengths.pointers)
        if of_given:
            pointers.update(zip(map(given_address, given), of_given.pointers, strict=True))
        pointers.update({name: array.pointer for name, array in outputs.items()})
        buffers = [] if outputs else _allocate(library, results, index, pointers)
        _launch(prepared, pointers, library, index, stream)

        # Hand back.
        library.settle(stream)
        if out is not None:
            return out
        arrays = [library.hand_back(buffer) for buffer in buffers]
    if not returns_state:
        return arrays[0]
    return KLState(**dict(zip(results, arrays, strict=True)), given=given)


def attention_kl_backward(
    dkl: ArrayT,
    q1: ArrayT,
    k1: ArrayT,
    q2: ArrayT,
    k2: ArrayT,
    state: KLState,
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
    kv_starts: ArrayT | None = None,
    kv_lens: ArrayT | None = None,
    q_lens: ArrayT | None = None,
    cu_seqlens_q: ArrayT | None = None,
    cu_seqlens_k: ArrayT | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str | None = None,
    strategy: str = "auto",
    deterministic: bool = False,
    out: Sequence[ArrayT] | None = None,
) -> tuple[ArrayT, ...]:
    """Gradients of ``sum(dkl * kl)`` with respect to any of the four inputs.

    Parameters
    ----------
    dkl
        Upstream gradient in the shape of kl, of any strides from 0 up: float32 on a GPU, any
        float dtype on the CPU.
    q1, k1, q2, k2, causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout, precision
        As given to `attention_kl`.
    kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to `attention_kl`. What is padding or of no sequence has zero gradients.
    state
        Its result with ``return_state=True``, or one of `KLState.from_lse`.
    wrt
        Names of the inputs whose gradients are wanted, in any order. What is not asked for is
        not computed.
    strategy
        ``"fused"`` computes the gradients of a side together, ``"separate"`` those of queries and
        of keys one by one, on Hopper by kernels that serve both sides where they can; ``"auto"``
        takes what is faster. No matter on the CPU. float32 inputs on a GPU have no ``"fused"``.
    deterministic
        Make two runs agree bit for bit, which ``"fused"`` does not promise. With ``"auto"`` the
        blocks of Hopper's fused kernel then add to dQ one after the other, where that is faster
        than ``"separate"``, which needs no float32 scratch of dQ.
    out
        Arrays to write to, in the order of `wrt`: C-contiguous, of the shape and the dtype of
        the inputs, on a GPU at addresses that are multiples of 16 bytes.

    Returns
    -------
    tuple of array
        In the order of `wrt`, each of the dtype, shape and layout of its input, C-contiguous.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `attention_kl`.

    Notes
    -----
    As in StreamKL (arXiv 2606.20005), with ``delta = kl - lse2 + lse1``::

        dKL/ds2_j = P2_j - P1_j               dKL/ds1_j = P1_j ((s1_j - s2_j) - delta)
        dq_t,i = scale_t * dkl_i * sum_j ds_t,ij k_t,j
        dk_t,j = scale_t * sum_i dkl_i ds_t,ij q_t,i

    where ``i`` runs over the queries of every head that shares the key head. With a softcap c
    ``ds_t`` is also multiplied by ``1 - tanh(s_t / c)**2``. A log-sum-exp that was given to the
    forward is a constant: given lse1, ``ds1_j = p1_j (log p1_j - log p2_j + 1)`` and
    ``ds2_j = mass1 P2_j - p1_j``; given lse2, ``ds2_j = -p1_j``. Its own gradients are made of the
    state: ``dKL/dlse1 = -(kl + mass1)`` and ``dKL/dlse2 = mass1``, times dkl.

    Examples
    --------
    >>> import numpy as np
    >>> q, k1 = np.ones((1, 1)), np.zeros((2, 1))
    >>> k2 = np.log([[1.0], [3.0]])
    >>> state = attention_kl(q, k1, q, k2, return_state=True)
    >>> (dk2,) = attention_kl_backward(np.ones(1), q, k1, q, k2, state, wrt=("k2",))
    >>> dk2.round(6).tolist()        # P2 - P1
    [[-0.25], [0.25]]
    """
    # Take in.
    causal, scale1, scale2, layout = check_options(causal, scale1, scale2, layout)
    mask = (causal, *check_window(window, q_offset))
    softcaps = check_softcaps(softcap1, softcap2)
    wrt = check_wrt(wrt)
    check_strategy(strategy, deterministic)
    inputs = interop.take_all(INPUTS, (q1, k1, q2, k2))
    lengths = _take_lengths(
        (kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        inputs,
    )
    names, rows = _take_rows(dkl, state, inputs)
    outputs = {} if out is None else _take_gradient_outputs(out, wrt, inputs)

    # Describe.
    precision = check_precision(precision, inputs.keys[0][2])
    problem = _describe(
        inputs.keys, mask, scale1, scale2, softcaps, layout, precision, lengths.ragged
    )
    _, _, dtype, index, _ = inputs.keys[0]
    lengths.check(problem, index)
    shape = _row_shape(problem, inputs)
    dkl_strides = _describe_rows(problem, shape, index, names, rows.keys)
    shapes = dict(zip(INPUTS, inputs.keys, strict=True))
    results = {"d" + name: (shapes[name][0], dtype) for name in wrt}
    if outputs:
        alignment = ITEM_BYTES[dtype] if index == CPU else ALIGNMENT_BYTES
        labels = {name: f"out[{position}]" for position, name in enumerate(outputs)}
        others = inputs.operands(INPUTS) + rows.operands(_row_arguments(names))
        _check_outputs(outputs, labels, results, alignment, others)
    if index == CPU:
        options = _options(mask, scale1, scale2, softcaps, layout) | lengths.views
        of_rows = dict(zip(names, rows.arrays, strict=True))
        values = _refer_backward(inputs.arrays, of_rows, state.given, wrt, options, outputs)
        return values if out is None else tuple(out)

    library = cast(CudaLibrary, inputs.library)
    with interop.under_device(index):
        # Plan.
        prepared = prepare_backward(
            problem,
            index,
            env.force(),
            plan.current_override(),
            wrt,
            strategy,
            deterministic,
            dkl_strides,
            state.given,
        )
        stream = library.current_stream(index)
        prepared.require_loaded(stream)

        # Launch.
        pointers = NULL_POINTERS.copy()
        pointers.update(zip(INPUTS, inputs.pointers, strict=True))
        pointers.update(zip(names, rows.pointers, strict=True))
        pointers.update(lengths.pointers)
        pointers.update({name: array.pointer for name, array in outputs.items()})
        buffers = [] if outputs else _allocate(library, results, index, pointers)
        _launch(prepared, pointers, library, index, stream)

        # Hand back.
        library.settle(stream)
        if out is not None:
            return tuple(out)
        return tuple([library.hand_back(buffer) for buffer in buffers])


def merge_states(*states: KLState, out: KLState | None = None) -> KLState:
    """The state over all keys, from those over disjoint parts of them.

    For keys that do not come in one piece: shards of several devices, or blocks as they arrive.
    Each part is computed with the same queries and scales and the keys of the part; the states
    merge in any order, also merged ones again. Under a mask each part has a `q_offset` of its own,
    that of the whole less the part's first key, in the backward too. It is one int for the whole
    batch: parts of a padded or packed batch under a mask need the same offset in every entry, and
    merge freely without one.

    Parameters
    ----------
    *states
        At least one, of the same rows, on one device, each a result of `attention_kl` with
        ``return_state=True``, of this function or of `KLState.from_lse`; without entropies and
        without given log-sum-exps. A row that sees no key of a part has ``lse = -inf`` there, and
        the part adds nothing to it.
    out
        A `KLState` to write to, whose low parts may be missing.

    Returns
    -------
    KLState
        As the forward over all the keys returns it, to rounding. `attention_kl_backward` with this
        state and the keys of one part gives that part's share of dq1 and dq2, which add up over the
        parts, and the gradients of its own keys.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `attention_kl`. The arrays of a state are constants: a torch tensor that requires grad
        and a JAX tracer raise, and no gradient goes through the merge. A state with entropies
        raises because those of the whole come from one call over all keys alone.

    Notes
    -----
    ``lse_t = log sum_a exp(lse_t,a)`` and, by the chain rule of KL, with the weights
    ``w_t,a = exp(lse_t,a - lse_t)`` of the parts::

        kl = sum_a w_1,a (kl_a + log w_1,a - log w_2,a)

    in float64 on a GPU too, so that neither a small KL nor large logits lose anything.

    Examples
    --------
    >>> import numpy as np
    >>> q, k1 = np.ones((1, 1)), np.zeros((2, 1))
    >>> k2 = np.log([[1.0], [3.0]])
    >>> first = attention_kl(q, k1[:1], q, k2[:1], return_state=True)
    >>> second = attention_kl(q, k1[1:], q, k2[1:], return_state=True)
    >>> merge_states(first, second).kl.round(6)
    array([0.143841])
    """
    # Take in.
    if not states:
        remedy = "pass the states of the parts, for example merge_states(*states)"
        raise ValueError(message("states", "at least one KLState", "none", remedy))
    names: list[str] = []
    values: list[Any] = []
    for position, state in enumerate(states):
        _check_mergeable(f"states[{position}]", state)
        for name, value in _parts(state, _LOWS).items():
            names.append(f"{position}.{name}")
            values.append(value)
    parts = interop.take_all(_state_arguments(tuple(names)), tuple(values))
    outputs = {}
    if out is not None:
        outputs = _take_state_outputs(out, True, parts, first="states[0].kl")

    # Describe.
    _describe_parts(tuple(names), parts.keys)
    shape, _, _, index, _ = parts.keys[0]
    row_dtype = "float64" if index == CPU else "float32"
    results = dict.fromkeys(_STATE, (shape, row_dtype))
    if outputs:
        labels = {name: f"out.{name}" for name in outputs}
        others = parts.operands(_state_arguments(tuple(names)))
        _check_outputs(outputs, labels, results, ITEM_BYTES[row_dtype], others)
    if index == CPU:
        rows = dict(zip(names, parts.arrays, strict=True))
        merged = reference.merge_states(
            *(_reference_state(rows, f"{position}.") for position in range(len(states)))
        )
        _write_state(merged, outputs)
        return _host_state(merged, parts.arrays[0]) if out is None else out

    library = cast(CudaLibrary, parts.library)
    with interop.under_device(index):
        # Plan.
        prepared = prepare_merge(math.prod(shape), len(states), index)
        stream = library.current_stream(index)
        prepared.require_loaded(stream)

        # Launch.
        pointers = dict.fromkeys(_STATE, 0)
        for position in range(len(states)):
            pointers |= dict.fromkeys((f"{position}.{name}" for name in _STATE), 0)
        pointers.update(zip(names, parts.pointers, strict=True))
        pointers.update({name: array.pointer for name, array in outputs.items()})
        buffers = [] if outputs else _allocate(library, results, index, pointers)
        _launch(prepared, pointers, library, index, stream)

        # Hand back.
        library.settle(stream)
        if out is not None:
            return out
        return KLState(*(library.hand_back(buffer) for buffer in buffers))


def warmup(
    head_dim1: int = 128,
    head_dim2: int = 128,
    dtype: str = "bfloat16",
    *,
    precision: str | None = None,
    wrt: Sequence[str] = ("q2", "k2"),
    backward: bool = True,
    unaligned: bool = False,
    windowed: bool = False,
    ragged: bool = False,
    entropy: bool = False,
    softcap: bool = False,
    device: int | None = None,
    arch: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[str, ...]:
    """Build and load every kernel that later calls with these head dimensions run.

    Without it a kernel is built when a call first needs it, which takes seconds once per machine,
    and which is impossible while a graph is being captured.

    Parameters
    ----------
    head_dim1, head_dim2
        Head dimensions of the two sides.
    dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    precision
        Of float32 inputs, as `attention_kl` takes it.
    wrt
        The gradients that will be asked for, as `attention_kl_backward` takes it.
    backward
        Whether to prepare the backward too.
    unaligned
        Prepare also for inputs whose addresses or strides are not multiples of 16 bytes.
    windowed
        Prepare also for calls with a window, or with a mask at a `q_offset`.
    ragged
        Prepare also for padded batches and packed sequences.
    entropy
        Prepare also for ``return_entropy=True``.
    softcap
        Prepare also for calls with a softcap of one side or both.
    device
        Index of the card; by default the current one.
    arch
        Build for an architecture such as ``"sm_90a"`` and load nothing, which needs no card: the
        kernels are then found on disk. Not together with `device`.
    progress
        Called as ``progress(num_done, num_kernels, kernel)`` before each kernel, and with an
        empty name at the end.

    Returns
    -------
    tuple of str
        Names of the plans that are ready.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    ImportError, RuntimeError
        If a kernel cannot be built or loaded.

    Examples
    --------
    >>> warmup(64, 64, "float16", arch="sm_80")  # doctest: +SKIP
    """
    wrt = check_wrt(wrt)
    check_flag("backward", backward)
    check_flag("unaligned", unaligned)
    check_flag("windowed", windowed)
    check_flag("ragged", ragged)
    check_flag("entropy", entropy)
    check_flag("softcap", softcap)
    check_head_dim("head_dim1", head_dim1)
    check_head_dim("head_dim2", head_dim2)
    if dtype not in GPU_DTYPES:
        remedy = "name the dtype of the inputs"
        expected = '"bfloat16", "float16" or "float32"'
        raise ValueError(message("dtype", expected, repr(dtype), remedy))
    arithmetic = check_precision(precision, dtype) or dtype
    if device is not None and arch is not None:
        remedy = "leave out device to build for an arch, or arch to load on a device"
        raise ValueError(message("arch", "None together with device", repr(arch), remedy))

    prepare: Callable[[str, jit.Template, int], object]
    if arch is not None:
        facts = plan.device_facts(arch)

        def prepare(kernel: str, template: jit.Template, shared_memory: int) -> object:
            return jit.build(kernel, template, facts.arch)
    else:
        index = interop.current_device() if device is None else device
        facts = launch.device_facts(index)

        def prepare(kernel: str, template: jit.Template, shared_memory: int) -> object:
            return jit.function(kernel, template, facts.arch, index, shared_memory=shared_memory)

    force = env.force()
    plans: list[plan.ForwardPlan | plan.BackwardPlan] = []
    strategies = [s for s in STRATEGIES if s != "fused" or arithmetic not in tiling.WIDE]
    for problem in _warmup_problems(
        head_dim1, head_dim2, dtype, precision, unaligned, windowed, ragged, softcap
    ):
        for has_entropy in (False, True)[: 1 + entropy]:
            plans.append(plan.forward(problem, facts, force=force, has_entropy=has_entropy))
        for strategy in strategies if backward else ():
            planned = plan.backward(problem, facts, wrt, strategy=strategy, force=force)
            plans.append(planned)
            if planned.both is not None:
                # Unequal groups of heads and given log-sum-exps take a pass for each side.
                options: dict[str, Any] = {"strategy": strategy, "force": force}
                plans.append(plan.backward(problem, facts, wrt, given=("lse2",), **options))
        if backward and arithmetic not in tiling.WIDE:
            with plan.override(strategy="fused", both=False):
                fixed = plan.backward(problem, facts, wrt, deterministic=True, force=force)
            plans.append(fixed)
    dims = tiling.bucket(head_dim1), tiling.bucket(head_dim2)
    for one in facts.tuned:
        of, problem = one.problem_class, choices.problem_of(one)
        if (of.dtype, of.head_dim1, of.head_dim2) != (arithmetic, *dims):
            continue
        if not of.wrt:
            plans.append(plan.forward(problem, facts, force=force))
        elif backward:
            planned = plan.backward(
                problem, facts, of.wrt, deterministic=of.deterministic, force=force
            )
            plans.append(planned)
    kernels: dict[tuple[str, jit.Template], int] = {}
    for item in (kernel for ready in plans for kernel in ready.kernels):
        name = (item.kernel, item.template)
        kernels[name] = max(kernels.get(name, 0), item.shared_memory)

    masks = [m for m, is_in in zip(catalogue.MASKS, (True, windowed, ragged), strict=True) if is_in]
    for aligned, mask, has_entropy, has_softcap in itertools.product(
        (True, False)[: 1 + unaligned],
        masks,
        (False, True)[: 1 + entropy],
        (False, True)[: 1 + softcap],
    ):
        for kernel, template, shared_memory in catalogue.forward_kernels(
            arithmetic, *dims, aligned, mask, facts, has_entropy, has_softcap
        ):
            kernels.setdefault((kernel, template), shared_memory)

    for one_of_rows in catalogue.OF_FINISHED_ROWS:
        kernels.setdefault(one_of_rows, 0)
    for num_done, ((kernel, template), shared_memory) in enumerate(kernels.items()):
        if progress is not None:
            progress(num_done, len(kernels), jit.render(kernel, template))
        prepare(kernel, template, shared_memory)
    if progress is not None:
        progress(len(kernels), len(kernels), "")
    return tuple(dict.fromkeys(ready.name for ready in plans))


class Prepared:
    """A plan on a card, ready to be launched at any addresses, again and again, from any thread.

    Attributes
    ----------
    workspace_bytes
        Size of the workspace that a launch needs, on the card, aligned to 256 bytes.
    """

    __slots__ = (
        "_chain", "_chosen", "_device_index", "_is_loaded", "_warmup", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        chosen: plan.ForwardPlan | plan.BackwardPlan | plan.MergePlan,
        chain: Chain,
        device_index: int,
        warmup: Mapping[str, Any],
    ) -> None:
        self.workspace_bytes = chosen.workspace_bytes
        self._chosen = chosen
        self._chain = chain
        self._device_index = device_index
        self._warmup = warmup
        self._is_loaded = False
        if env.debug():
            kernels = " ".join(kernel.kernel for kernel in chosen.kernels) or "nothing to launch"
            print(
                f"streamkl_cupy: {chosen.name} on {interop.device_of(device_index)}: {kernels}, "
                f"workspace {chosen.workspace_bytes} bytes",
                file=sys.stderr,
            )

    def bind(self, places: Mapping[str, tuple[int, int]]) -> Bound:
        """Build and load the kernels, unless they are; return what launches them the fastest.

        Parameters
        ----------
        places
            As `Chain.bind` takes them.
        """
        bound = self._chain.bind(places)
        self._is_loaded = True
        return bound

    def require_loaded(self, stream: int) -> None:
        """Raise if a kernel would have to be loaded while a graph is being captured."""
        if self._is_loaded:
            return
        missing = [
            kernel.kernel
            for kernel in self._chosen.kernels
            if not jit.is_loaded(
                kernel.kernel, kernel.template, self._chosen.arch, self._device_index
            )
        ]
        if missing and interop.is_capturing(stream):
            options = {**self._warmup, "device": self._device_index}
            arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise RuntimeError(
                f"{self._chosen.name}: expected its kernels to be loaded before a graph is "
                f"captured, got {', '.join(missing)} not loaded; before the capture call "
                f"streamkl_cupy.warmup({arguments}), or make this call once."
            )

    def launch(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Launch the plan, under its device.

        Parameters
        ----------
        pointers
            `NULL_POINTERS` with the addresses of all that there is.
        workspace
            Address of the workspace; 0 if its size is 0.
        stream
            Handle of the stream.
        """
        self._chain.launch(pointers, workspace, stream)
        self._is_loaded = True


@functools.lru_cache(maxsize=_REMEMBERED)
def prepare_forward(
    problem: Problem,
    device_index: int,
    force: str | None,
    override: object,
    given: launch.GivenStrides = (None, None),
    has_entropy: bool = False,
) -> Prepared:
    """Plan the forward for a card; the same object comes back for the same arguments.

    Parameters
    ----------
    problem
        What to compute.
    device_index
        The card.
    force
        `env.force()`.
    override
        `plan.current_override()`, which only tells apart what `plan` would decide differently.
    given
        Strides of the given lse1 and lse2, None where the row's own serves.
    has_entropy
        Whether the entropies are wanted, too.
    """
    check_gpu(problem)
    facts = launch.device_facts(device_index)
    names = tuple(n for n, of in zip(("lse1", "lse2"), given, strict=True) if of is not None)
    chosen = plan.forward(problem, facts, force=force, given=names, has_entropy=has_entropy)
    chain = launch.forward(chosen, problem, device_index, given)
    options = {"backward": False} | ({"entropy": True} if has_entropy else {})
    return Prepared(chosen, chain, device_index, _warmup_options(problem) | options)


@functools.lru_cache(maxsize=_REMEMBERED)
def prepare_backward(
    problem: Problem,
    device_index: int,
    force: str | None,
    override: object,
    wrt: tuple[str, ...],
    strategy: str,
    deterministic: bool,
    dkl: Strides,
    given: tuple[str, ...] = (),
) -> Prepared:
    """Plan the backward for a card, as `prepare_forward` does the forward.

    Parameters
    ----------
    problem, device_index, override
        As there.
    wrt, strategy, deterministic
        As `attention_kl_backward` takes them.
    dkl
        Strides of the upstream gradient.
    given
        Of the state.
    """
    check_gpu(problem)
    facts = launch.device_facts(device_index)
    asked = tuple(name for name in INPUTS if name in wrt)  # the order makes no difference
    chosen = plan.backward(
        problem,
        facts,
        asked,
        strategy=strategy,
        deterministic=deterministic,
        force=force,
        given=given,
    )
    chain = launch.backward(chosen, problem, dkl, device_index)
    return Prepared(chosen, chain, device_index, _warmup_options(problem) | {"wrt": asked})


def _warmup_options(problem: Problem) -> dict[str, Any]:
    """What `warmup` must be told of a problem to load all that its plans need, whatever gradients
    and entropies are wanted."""
    options: dict[str, Any] = {
        "head_dim1": problem.head_dim1,
        "head_dim2": problem.head_dim2,
        "dtype": problem.dtype,
    }
    if problem.arithmetic != problem.dtype:
        options["precision"] = problem.precision
    flags = {
        "unaligned": not problem.aligned,
        "windowed": problem.kernel_mask == "kWindow",
        "ragged": problem.kernel_mask == "kRagged",
        "softcap": problem.has_softcap,
    }
    return options | {name: True for name, is_wanted in flags.items() if is_wanted}


@functools.lru_cache(maxsize=_REMEMBERED)
def prepare_merge(num_rows: int, num_states: int, device_index: int) -> Prepared:
    """Plan the merge of states, as `prepare_forward` does the forward.

    Parameters
    ----------
    num_rows
        Of each state.
    num_states
        How many there are.
    device_index
        The card.
    """
    chosen = plan.merge(num_rows, num_states, launch.device_facts(device_index))
    chain = launch.merge(chosen, num_rows, device_index)
    return Prepared(chosen, chain, device_index, {"backward": False})


def _launch(
    prepared: Prepared, pointers: Mapping[str, int], library: CudaLibrary, index: int, stream: int
) -> None:
    """Launch with a workspace of the caller's library."""
    # Held until after the launch; freed memory is handed out again in stream order only.
    workspace, address = None, 0
    if prepared.workspace_bytes:
        workspace, address = library.empty((prepared.workspace_bytes,), "uint8", index)
    prepared.launch(pointers, address, stream)
    del workspace


@functools.lru_cache(maxsize=_REMEMBERED)
def _describe(
    keys: tuple[interop.Key, ...],
    mask: Mask,
    scale1: float | None,
    scale2: float | None,
    softcaps: tuple[float, float],
    layout: str,
    precision: str | None,
    ragged: Ragged | None = None,
) -> Problem:
    operands = map(interop.operand_of, INPUTS, keys)
    options = _options(mask, scale1, scale2, softcaps, layout)
    return describe(*operands, **options, precision=precision, ragged=ragged)


class _Lengths:
    """What a call says of the lengths of a ragged batch."""

    __slots__ = ("group", "ragged")

    def __init__(self, ragged: Ragged | None = None, group: Group | None = None) -> None:
        self.ragged = ragged
        self.group = group

    def check(self, problem: Problem, device_index: int) -> None:
        if self.ragged is not None and self.group is not None:
            _check_lengths(problem, device_index, self.ragged.names, self.group.keys)

    @property
    def pointers(self) -> dict[str, int]:
        """The addresses for a launch."""
        if self.ragged is None or self.group is None:
            return {}
        return dict(zip(self.ragged.names, self.group.pointers, strict=True))

    @property
    def views(self) -> dict[str, Any]:
        """The arrays for the reference."""
        if self.ragged is None or self.group is None:
            return {}
        views = (array.view for array in self.group.arrays)
        return dict(zip(self.ragged.names, views, strict=True))


_NO_LENGTHS = _Lengths()


def _take_lengths(
    values: tuple[Any, ...], most: tuple[int | None, int | None], inputs: Group
) -> _Lengths:
    """The arrays of `LENGTHS` that are given, and the most queries and keys of a sequence."""
    if most == (None, None) and not any(value is not None for value in values):
        return _NO_LENGTHS
    given = {name: x for name, x in zip(LENGTHS, values, strict=True) if x is not None}
    ragged = describe_lengths(tuple(given), *most)
    group = interop.take_all(ragged.names, tuple(given.values()), inputs)
    if ragged.is_packed:
        num_sequences = max(0, math.prod(group.keys[0][0]) - 1)
        lengths = (inputs.keys[i][0][:1] for i in (0, 1))
        longest = (
            sum(length) if bound is None else bound
            for bound, length in zip(most, lengths, strict=True)
        )
        ragged = Ragged(ragged.names, num_sequences, *longest)
    return _Lengths(ragged, group)


@functools.lru_cache(maxsize=_REMEMBERED)
def _check_lengths(
    problem: Problem, device_index: int, names: tuple[str, ...], keys: tuple[interop.Key, ...]
) -> None:
    device = interop.device_of(device_index)
    for operand in map(interop.operand_of, names, keys):
        check_lengths(problem, operand, device)


def _row_shape(problem: Problem, inputs: Group) -> tuple[int, ...]:
    """The shape of kl."""
    shape: tuple[int, ...] = inputs.keys[0][0][:-1]
    return (shape[1], shape[0]) if problem.layout == "packed" else shape


def _options(
    mask: Mask,
    scale1: float | None,
    scale2: float | None,
    softcaps: tuple[float, float],
    layout: str,
) -> dict[str, Any]:
    """As keywords, which the reference takes, too."""
    causal, window, q_offset = mask
    return {
        "causal": causal,
        "window": window,
        "q_offset": q_offset,
        "scale1": scale1,
        "scale2": scale2,
        "softcap1": softcaps[0],
        "softcap2": softcaps[1],
        "layout": layout,
    }


@functools.lru_cache(maxsize=_REMEMBERED)
def _describe_rows(
    problem: Problem,
    shape: tuple[int, ...],
    device_index: int,
    names: tuple[str, ...],
    keys: tuple[interop.Key, ...],
) -> Strides:
    """Check upstream gradient and state, in this order; return the strides of the former."""
    device = interop.device_of(device_index)
    check = functools.partial(check_rows, problem, shape=shape, device=device)
    dkl, *state = map(interop.operand_of, _row_arguments(names), keys)
    for part in state:
        check(part, contiguous=True)
    return check(dkl, contiguous=False)


@functools.lru_cache(maxsize=_REMEMBERED)
def _describe_parts(names: tuple[str, ...], keys: tuple[interop.Key, ...]) -> None:
    """Check the arrays of states that are to be merged."""
    check_parts(list(map(interop.operand_of, _state_arguments(names), keys)))


@functools.lru_cache(maxsize=_REMEMBERED)
def _describe_given(
    problem: Problem,
    shape: tuple[int, ...],
    device_index: int,
    names: tuple[str, ...],
    keys: tuple[interop.Key, ...],
) -> launch.GivenStrides:
    """Check the given log-sum-exps; return the strides of each, None for one that is not."""
    device = interop.device_of(device_index)
    strides = {
        name: check_rows(
            problem, interop.operand_of(name, key), shape=shape, device=device, contiguous=False
        )
        for name, key in zip(names, keys, strict=True)
    }
    return strides.get("lse1"), strides.get("lse2")


def _take_given(lse1: Any, lse2: Any, inputs: Group) -> tuple[tuple[str, ...], Group | None]:
    """The log-sum-exps that are given, and what these are called."""
    if lse1 is None and lse2 is None:
        return (), None
    given = {name: x for name, x in (("lse1", lse1), ("lse2", lse2)) if x is not None}
    names = tuple(given)
    return names, interop.take_all(names, tuple(given.values()), inputs)


def given_address(name: str) -> str:
    """What a launch calls a given log-sum-exp."""
    return name.replace("lse", "given")


def _take_rows(dkl: Any, state: Any, inputs: Group) -> tuple[tuple[str, ...], Group]:
    """Upstream gradient and the parts of the state that there are, and what these are called."""
    parts = _parts(_check_state("state", state), (*_LOWS, "mass1"))
    if state.given not in _GIVEN:
        expected, got = 'a tuple of "lse1", "lse2", both or none', repr(state.given)
        raise ValueError(message("state.given", expected, got, "pass the state of attention_kl"))
    if state.given and "mass1" not in parts:
        expected = f"an array, because state.given is {state.given}"
        raise TypeError(message("state.mass1", expected, "None", "pass the state of attention_kl"))
    names = ("dkl", *parts)
    return names, interop.take_all(_row_arguments(names), (dkl, *parts.values()), inputs)


def _check_state(name: str, state: Any) -> KLState:
    if not isinstance(state, KLState):
        raise TypeError(
            message(
                name,
                "a KLState",
                type(state).__name__,
                "pass the result of attention_kl(..., return_state=True) or KLState.from_lse(...)",
            )
        )
    return state


def _check_mergeable(name: str, state: Any) -> None:
    if given := _check_state(name, state).given:
        remedy = "add up kl and mass1 of parts that share what is given"
        if len(given) == 1:
            # Each part has divided its other side by its own keys alone.
            remedy = (
                "compute the parts again with both lse1 and lse2 of the whole given, then add up "
                "kl and mass1"
            )
        expected, got = "a state with log-sum-exps of its own", f"one with given {_listed(given)}"
        raise ValueError(message(name, expected, got, remedy))
    if entropies := [n for n in launch.ENTROPIES if getattr(state, n) is not None]:
        remedy = (
            "leave out return_entropy to merge kl alone, or take the entropies from one call over "
            "all keys"
        )
        got = f"one with {_listed(entropies)}"
        raise ValueError(message(name, "a state without entropies", got, remedy))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


def _parts(state: KLState, optional: tuple[str, ...]) -> dict[str, Any]:
    """The arrays of a state, those in `optional` as far as there are any."""
    parts = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    for name in optional:
        if (value := getattr(state, name)) is not None:
            parts[name] = value
    return parts


@functools.cache
def _row_arguments(names: tuple[str, ...]) -> tuple[str, ...]:
    """What messages call the upstream gradient and the parts of the state."""
    return (names[0], *(f"state.{name}" for name in names[1:]))


@functools.cache
def _state_arguments(names: tuple[str, ...]) -> tuple[str, ...]:
    """What messages call the arrays ``0.kl 0.lse1 ...`` of states."""
    return tuple("states[{}].{}".format(*name.split(".")) for name in names)


def _take_state_outputs(
    out: Any,
    returns_state: bool,
    inputs: Group,
    names: tuple[str, ...] = _STATE,
    given: tuple[str, ...] = (),
    first: str = "q1",
) -> dict[str, Array]:
    """Where to write the parts of a state of these names, whose low parts may be missing."""
    if not returns_state and not isinstance(out, KLState):
        return {"kl": interop.take("out", out, inputs)}
    if not returns_state or not isinstance(out, KLState):
        expected = "a KLState with return_state=True" if returns_state else "an array for kl"
        remedy = "allocate one" if returns_state else "pass out.kl, or return_state=True as well"
        raise TypeError(message("out", expected, type(out).__name__, remedy))
    parts = _parts(out, (*_LOWS, "mass1", *launch.ENTROPIES))
    wanted = set(names) - set(_LOWS)
    if out.given != given or not wanted <= parts.keys() <= set(names):
        expected = f"a KLState with given={given} and arrays for {', '.join(sorted(wanted))}"
        got = f"given={out.given} and {', '.join(sorted(parts))}"
        raise ValueError(message("out", expected, got, "make it with what this call returns"))
    return {n: interop.take(f"out.{n}", value, inputs, first) for n, value in parts.items()}


def _take_gradient_outputs(out: Any, wrt: tuple[str, ...], inputs: Group) -> dict[str, Array]:
    expected = f"a tuple of {len(wrt)} arrays, in the order of wrt={wrt}"
    if not isinstance(out, tuple | list):
        remedy = "put the arrays into a tuple"
        raise TypeError(message("out", expected, type(out).__name__, remedy))
    if len(out) != len(wrt):
        remedy = "pass one array for each gradient"
        raise ValueError(message("out", expected, f"one of length {len(out)}", remedy))
    return {
        f"d{name}": interop.take(f"out[{position}]", value, inputs)
        for position, (name, value) in enumerate(zip(wrt, out, strict=True))
    }


def _check_outputs(
    outputs: Mapping[str, Array],
    labels: Mapping[str, str],
    results: Results,
    alignment: int,
    inputs: list[Operand],
) -> None:
    device, others = inputs[0].device, [*inputs]
    for name, array in outputs.items():
        operand = array.operand(labels[name])
        shape, dtype = results[name]
        check_output(
            operand, shape=shape, dtype=dtype, device=device, alignment=alignment, others=others
        )
        others.append(operand)


def _allocate(
    library: CudaLibrary, results: Results, device_index: int, pointers: dict[str, int]
) -> list[Any]:
    """A buffer for each result; puts their addresses among the others."""
    buffers = []
    for name, (shape, dtype) in results.items():
        buffer, pointers[name] = library.empty(shape, dtype, device_index)
        buffers.append(buffer)
    return buffers


def _refer_forward(
    inputs: tuple[Array, ...],
    options: dict[str, Any],
    returns_state: bool,
    outputs: Mapping[str, Array],
) -> Any:
    """`attention_kl` on the CPU, written to `outputs` if there are any."""
    state = reference.attention_kl(*(array.view for array in inputs), **options)
    if outputs:
        _write_state(state, outputs)
        return None
    if not returns_state:
        return cast(HostLibrary, inputs[0].library).from_numpy(state.kl, inputs[0])
    return _host_state(state, inputs[0])


def _write_state(state: _HostState, outputs: Mapping[str, Array]) -> None:
    """Write a state to the caller's arrays, as far as there are any."""
    for name, array in outputs.items():
        # In float64 nothing is missing from lse.
        array.view[...] = 0.0 if name.endswith("_low") else getattr(state, name)


def _host_state(state: _HostState, first: Array) -> KLState:
    """Turn a state into one of arrays like `first`."""
    values = {"kl": state.kl, "lse1": state.lse1, "lse2": state.lse2}
    given: tuple[str, ...] = ()
    if isinstance(state, reference.GivenState):
        values["mass1"], given = state.mass1, state.given
    if isinstance(state, reference.EntropyState):
        values |= {"entropy": state.entropy, "cross_entropy": state.cross_entropy}
    library = cast(HostLibrary, first.library)
    results = {name: library.from_numpy(value, first) for name, value in values.items()}
    for name in ("lse1", "lse2"):
        stored = interop.take(name, results[name]).view
        if stored.dtype != np.float64:
            # JAX keeps float32 unless told otherwise; large logits need the rest as well.
            results[f"{name}_low"] = library.from_numpy(_rest(values[name], stored), first)
    return KLState(**results, given=given)


def _refer_backward(
    inputs: tuple[Array, ...],
    rows: Mapping[str, Array],
    given: tuple[str, ...],
    wrt: tuple[str, ...],
    options: dict[str, Any],
    outputs: Mapping[str, Array],
) -> tuple[Any, ...]:
    """`attention_kl_backward` on the CPU, written to `outputs` if there are any."""
    own = _reference_state(rows)
    state: _HostState = own
    if given:
        mass1 = rows["mass1"].view.astype(np.float64)
        state = reference.GivenState(own.kl, own.lse1, own.lse2, mass1, given)
    views = {name: array.view for name, array in zip(INPUTS, inputs, strict=True)}
    dkl = rows["dkl"].view
    gradients = reference.attention_kl_backward(dkl, **views, state=state, wrt=wrt, **options)
    first = inputs[0]
    library = cast(HostLibrary, first.library)
    results = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name, gradient in zip(wrt, gradients, strict=True):
            if outputs:
                outputs[f"d{name}"].view[...] = gradient
            else:
                rounded = gradient.astype(interop.numpy_dtype(first.dtype))
                results.append(library.from_numpy(rounded, first))
    return tuple(results)


def _reference_state(rows: Mapping[str, Array], prefix: str = "") -> reference.ReferenceState:
    """The state whose arrays have these names."""

    def values(name: str) -> Any:
        return rows[prefix + name].view.astype(np.float64) if prefix + name in rows else 0.0

    return reference.ReferenceState(
        values("kl"),
        values("lse1") + values("lse1_low"),
        values("lse2") + values("lse2_low"),
    )


def _rest(exact: Any, stored: Any) -> Any:
    """What a rounded array lacks of the exact one; nothing where either is infinite or NaN."""
    with np.errstate(invalid="ignore"):
        rest = exact - stored
    return np.where(np.isfinite(rest), rest, 0.0)


def _warmup_problems(
    head_dim1: int,
    head_dim2: int,
    dtype: str,
    precision: str | None,
    unaligned: bool,
    windowed: bool,
    ragged: bool,
    softcap: bool,
) -> list[Problem]:
    """One problem for each kind of plan that these head dimensions can have."""
    card = Device("cuda", 0)
    addresses = (ALIGNMENT_BYTES, ALIGNMENT_BYTES + ITEM_BYTES[dtype])
    problems = []
    masks: list[dict[str, Any]] = [{}, {"causal": True}]
    if windowed:
        masks.append({"window": (_WARMUP_KEYS // 2, 0)})
    if ragged:
        masks.append({"ragged": Ragged(("kv_lens",))})
    softcaps = (None, 1.0)[: 1 + softcap]
    lengths = sorted({*catalogue.ROW_CLASSES, *tiling.FEW_ROWS})
    for num_queries, mask, softcap1, groups in itertools.product(
        lengths, masks, softcaps, _WARMUP_GROUPS
    ):
        for address in addresses if unaligned else addresses[:1]:
            operands = [
                Operand(
                    name,
                    (1, _WARMUP_HEADS // group, length, head_dim),
                    (_WARMUP_HEADS // group * length * head_dim, length * head_dim, head_dim, 1),
                    dtype,
                    card,
                    address,
                )
                for name, length, head_dim, group in (
                    ("q1", num_queries, head_dim1, 1),
                    ("k1", _WARMUP_KEYS, head_dim1, groups[0]),
                    ("q2", num_queries, head_dim2, 1),
                    ("k2", _WARMUP_KEYS, head_dim2, groups[1]),
                )
            ]
            problems.append(describe(*operands, **mask, softcap1=softcap1, precision=precision))
    return problems

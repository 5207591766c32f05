"""The KL divergence for JAX: differentiable, under jit, grad, vmap and shard_map.

>>> import jax.numpy as jnp
>>> from streamkl_cupy.jax import attention_kl
>>> q, k = jnp.ones((2, 8)), jnp.eye(3, 8)
>>> attention_kl(q, k, q, k).tolist()
[0.0, 0.0]

Two primitives, forward and backward, between XLA's buffers and what `api` prepares::

    attention_kl -> custom_vjp -> primitive -> lowering for the platform -> buffer_callback

Checks that need shapes and dtypes alone are made when a call is traced, those of the card when it
is lowered. A lowering for CUDA plans, builds and loads everything; what runs with the computation
is a launch on XLA's stream, on buffers and a workspace of XLA's, so XLA may record it in a command
buffer. A lowering for the CPU calls the float64 reference. Inside, arrays are of rank 4, and so are
those with one value a query row; packed sequences stay at rank 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamkl_cupy import api, env, interop, plan, reference
from streamkl_cupy.problem import (
    CPU_DTYPES,
    CU_SEQLENS,
    INPUTS,
    ITEM_BYTES,
    LENGTHS,
    Device,
    Operand,
    Problem,
    Ragged,
    Window,
    check_flag,
    check_lengths,
    check_options,
    check_precision,
    check_reduction,
    check_softcaps,
    check_window,
    describe,
    describe_lengths,
    message,
    rows_seeing,
)

_INSTALL = (
    "streamkl_cupy.jax needs JAX 0.10 or newer{got}; install jax (for the CPU), or jax[cuda13] or "
    "jax[cuda12] (for a GPU)."
)

try:
    import jax
    from jax.custom_derivatives import SymbolicZero
    from jax.experimental.buffer_callback import buffer_callback
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
except ImportError as _error:
    raise ImportError(_INSTALL.format(got=f", which cannot be imported ({_error})")) from _error
if jax.__version_info__ < (0, 10):
    raise ImportError(_INSTALL.format(got=f", got {jax.__version__}"))

__all__ = ["attention_kl"]

# What the forward keeps beside kl, in this order in one buffer, and what comes behind it where a
# log-sum-exp is given or where entropies are wanted, which are never both.
_SAVED = ("lse1", "lse2", "lse1_low", "lse2_low")
_MASS = ("mass1",)
_ENTROPIES = ("entropy", "cross_entropy")


@dataclass(frozen=True, slots=True)
class _Options:
    """What is fixed when a call is traced."""

    causal: bool
    window: Window
    q_offset: int | None
    scale1: float | None
    scale2: float | None
    softcap1: float
    softcap2: float
    layout: str
    precision: str | None
    deterministic: bool
    given: tuple[str, ...]
    has_entropy: bool
    lengths: tuple[str, ...] = ()  # which of `LENGTHS` come behind what is given
    max_seqlen: tuple[int | None, int | None] = (None, None)

    @property
    def is_packed(self) -> bool:
        return self.lengths == CU_SEQLENS

    @property
    def saved(self) -> tuple[str, ...]:
        """What the forward keeps beside kl."""
        return _SAVED + (_MASS if self.given else _ENTROPIES if self.has_entropy else ())


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
    reduction: str = "none",
    row_weights: Any = None,
    lse1: Any = None,
    lse2: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
) -> Any:
    """KL divergence between two attention distributions, in nats, differentiable in all arrays.

    Parameters
    ----------
    q1, k1, q2, k2, causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout, precision
        As `streamkl_cupy.attention_kl` takes them; JAX arrays, tracers or NumPy arrays. On a GPU
        bfloat16, float16 or float32. Options and scales are fixed when a call is traced. Note that
        ``causal=True`` is aligned to the bottom right, and that the default layout is not that of
        `jax.nn.dot_product_attention`, which is ``"bnhd"``. Only `precision` says how float32 is
        multiplied, not ``jax_default_matmul_precision``.
    kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        The lengths of a padded batch or of packed sequences, as `streamkl_cupy.attention_kl` takes
        them; the last two are fixed when a call is traced. Inputs of rank 3 are one batch entry,
        with one length for all heads. Of packed sequences kl is ``(H, N_Q)``, and `jax.vmap` maps
        none.
    reduction
        ``"none"`` for one value a query row; ``"sum"`` over all of them; ``"mean"`` over the rows
        that see a key, which is 0 where there is none; ``"batchmean"``, the sum divided by the
        length of the first axis, at rank 2 by 1, of packed sequences by their number.
    row_weights
        Weights of the rows, of a shape that broadcasts to that of kl, float or bool. Each row is
        multiplied by its weight, and ``"mean"`` divides by the weights of the rows that see a key
        (by 1 if these sum to 0). Differentiable too.
    lse1, lse2
        Log-sum-exps to divide by instead of the rows' own, as `streamkl_cupy.attention_kl` takes
        them, finite wherever a row sees a key: else what comes of the row is not defined.
        Differentiable too; `jax.lax.stop_gradient` makes constants of them.
    deterministic
        Make two backward runs agree bit for bit.
    return_lse
        Return ``(kl, lse1, lse2)``. The log-sum-exps are not differentiable: what is computed from
        them passes no gradient on. One that was given comes back.
    return_entropy
        Return the entropy of P1 and its cross-entropy with P2 as well, at the end of the tuple.
        They are not differentiable either; the gradient of the cross-entropy with respect to side 2
        is that of kl. Not together with `lse1` or `lse2`.

    Returns
    -------
    jax.Array or tuple of jax.Array
        Divergences in nats, of the shape of q1 without its last axis (of packed sequences
        ``(H, N_Q)``) or a scalar: float32, or float64 for float64 inputs.

    Raises
    ------
    TypeError
        If an argument is no array of JAX or NumPy, or of the wrong dtype or type.
    ValueError
        If shapes or options do not fit. Both come when the call is traced or, for what only a GPU
        refuses, compiled.
    NotImplementedError
        For second derivatives.

    Notes
    -----
    Only the gradients that are differentiated for are computed, each of the dtype of its input.
    `jax.vmap` folds its axis into the batch, and repeats an array that is not mapped. Arrays that
    are sharded by `jax.jit` alone are gathered by XLA: use `jax.shard_map` over a batch axis.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> q, k1, k2 = jnp.ones((1, 1)), jnp.zeros((2, 1)), jnp.log(jnp.array([[1.0], [3.0]]))
    >>> loss = lambda k2: attention_kl(q, k1, q, k2, reduction="sum")
    >>> jax.grad(loss)(k2).round(4).tolist()        # P2 - P1
    [[-0.25], [0.25]]
    """
    fixed: dict[str, Any] = {"causal": causal, "window": window, "q_offset": q_offset}
    fixed |= {"softcap1": softcap1, "softcap2": softcap2}
    fixed |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    for name, value in (fixed | {"scale1": scale1, "scale2": scale2}).items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            remedy = "name it in static_argnames of jax.jit"
            remedy += ", or multiply the queries by it" if name.startswith("scale") else ""
            raise TypeError(message(name, "a value that is known when traced", "a tracer", remedy))
    causal, scale1, scale2, layout = check_options(causal, scale1, scale2, layout)
    window, q_offset = check_window(window, q_offset)
    softcap1, softcap2 = check_softcaps(softcap1, softcap2)
    check_precision(precision)
    check_flag("deterministic", deterministic)
    check_flag("return_lse", return_lse)
    check_flag("return_entropy", return_entropy)
    check_reduction(reduction)
    arrays = dict(zip(INPUTS, (q1, k1, q2, k2), strict=True))
    optional = {"row_weights": row_weights, "lse1": lse1, "lse2": lse2}
    of_lengths = (kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k)
    optional |= zip(LENGTHS, of_lengths, strict=True)
    arrays |= {name: array for name, array in optional.items() if array is not None}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array | np.ndarray):
            kind = type(array)
            got = f"{kind.__module__}.{kind.__qualname__}"
            raise TypeError(
                message(name, "an array of JAX or NumPy", got, "pass jax.numpy.asarray(...) of it")
            )
    if row_weights is not None and jax.numpy.iscomplexobj(row_weights):
        got = str(row_weights.dtype)
        raise TypeError(message("row_weights", "real weights", got, "pass its real part"))
    lengths = {name: arrays[name] for name in LENGTHS if name in arrays}
    describe_lengths(tuple(lengths), max_seqlen_q, max_seqlen_k)
    lse = {name: arrays[name] for name in ("lse1", "lse2") if name in arrays}
    rows = q1.shape[:-1] if cu_seqlens_q is None else q1.shape[-2::-1]
    for name, array in lse.items():
        if array.shape != rows:
            expected = f"the shape of kl, {rows}"
            remedy = "pass one value a query row"
            raise ValueError(message(name, expected, str(array.shape), remedy))
        if array.dtype.name not in CPU_DTYPES:
            expected = "bfloat16, float16, float32 or float64"
            raise TypeError(message(name, expected, array.dtype.name, "cast it"))
    if lse and return_entropy:
        expected, remedy = "False with given log-sum-exps", f"leave out {' and '.join(lse)}"
        raise ValueError(message("return_entropy", expected, "True", remedy))
    options = _Options(
        causal,
        window,
        q_offset,
        scale1,
        scale2,
        softcap1,
        softcap2,
        layout,
        precision,
        deterministic,
        tuple(lse),
        return_entropy,
        tuple(lengths),
        (max_seqlen_q, max_seqlen_k),
    )
    kl, *of_rows = _compiled(
        q1,
        k1,
        q2,
        k2,
        row_weights,
        *lse.values(),
        *lengths.values(),
        options=options,
        reduction=reduction,
        return_lse=return_lse,
    )
    return (kl, *of_rows) if of_rows else kl


def _attention_kl(
    q1: Any,
    k1: Any,
    q2: Any,
    k2: Any,
    row_weights: Any,
    *behind: Any,
    options: _Options,
    reduction: str,
    return_lse: bool,
) -> tuple[Any, ...]:
    lse, lengths = behind[: len(options.given)], behind[len(options.given) :]
    inputs = (q1, k1, q2, k2)
    shape = q1.shape[-2::-1] if options.is_packed else q1.shape[:-1]
    problem = _describe(inputs, options, Device("cpu"), lengths)
    rank = 4
    if options.is_packed:
        rank = 3
    else:
        options = replace(options, layout=problem.layout)
    arrays = (*inputs, *(x[..., None] for x in lse))
    of_rank = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays)
    inputs = _vary_alike((*of_rank, *lengths))
    wanted = ("lse1", "lse2") * return_lse + _ENTROPIES * options.has_entropy
    # Which rows of a ragged batch see a key is known on the device alone, by their log-sum-exps.
    is_counted = reduction == "mean" and bool(lengths)
    kl, *saved = _rows(options, bool(wanted) or is_counted, *inputs)
    rows = {}
    if saved:
        rows = dict(zip(options.saved, jax.lax.stop_gradient(saved[0]), strict=True))
    sees = rows["lse1"].reshape(shape) != -np.inf if is_counted else None
    num_entries = lengths[0].shape[0] - 1 if options.is_packed else None
    kl = _reduce(kl.reshape(shape), row_weights, problem, reduction, sees, num_entries)
    if not wanted:
        return (kl,)
    return kl, *(rows[name].reshape(shape) for name in wanted)


def _reduce(
    kl: Any,
    row_weights: Any,
    problem: Problem,
    reduction: str,
    sees: Any = None,
    num_entries: int | None = None,
) -> Any:
    """One number of the rows; which of them see a key, and the number of packed sequences."""
    weights = None
    if row_weights is not None:
        try:
            weights = jax.numpy.broadcast_to(row_weights, kl.shape).astype(kl.dtype)
        except ValueError as error:
            raise ValueError(
                message(
                    "row_weights",
                    f"a shape that broadcasts to that of kl, {kl.shape}",
                    str(row_weights.shape),
                    "pass one weight a query row",
                )
            ) from error
        kl = kl * weights
    if reduction == "none":
        return kl
    if reduction == "sum":
        return kl.sum()
    if reduction == "batchmean":
        first_axis = kl.shape[0] if kl.ndim > 1 else 1
        return kl.sum() / max(first_axis if num_entries is None else num_entries, 1)
    if sees is not None:
        counted = sees.astype(kl.dtype) if weights is None else weights * sees
        total = counted.sum()
        return kl.sum() / jax.numpy.where(total == 0, 1, total)
    # Which rows see a key follows from the lengths.
    first, stop = rows_seeing(problem.num_queries, problem.num_keys, problem.lags)
    if weights is None:
        heads = problem.batch * problem.num_heads
        return kl.sum() / max(heads * (stop - first), 1)
    row_axis = 1 if problem.layout == "bnhd" else kl.ndim - 1
    total = jax.lax.slice_in_dim(weights, first, stop, axis=row_axis).sum()
    # No weight at all: no row counts, and the mean of none is 0 as it is without weights.
    return kl.sum() / jax.numpy.where(total == 0, 1, total)


# -------------------------------------------------------------------------------------------------
# The gradient


def _rows_alone(options: _Options, is_kept: bool, *inputs: Any) -> tuple[Any, ...]:
    return tuple(_forward_p.bind(*inputs, options=options, is_kept=is_kept))


def _rows_forward(
    options: _Options, is_kept: bool, *primals: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = (*INPUTS, *options.given)
    wrt = tuple(n for n, x in zip(names, primals, strict=False) if x.perturbed)
    inputs = tuple(x.value for x in primals)
    if not wrt:
        return _rows_alone(options, is_kept, *inputs), ()
    results = _rows_alone(options, True, *inputs)
    # Names have no place among residuals but as the keys of a dictionary.
    residuals = (*inputs, *results, dict.fromkeys(wrt))
    return results if is_kept else results[:1], residuals


def _rows_backward(
    options: _Options, is_kept: bool, residuals: tuple[Any, ...], upstream: tuple[Any, ...]
) -> tuple[Any, ...]:
    dkl, names = upstream[0], (*INPUTS, *options.given, *options.lengths)
    if not residuals or isinstance(dkl, SymbolicZero):
        return (None,) * len(names)
    *inputs, kl, saved, wanted = residuals
    lengths = inputs[4 + len(options.given) :]
    found = {}
    if wrt := tuple(name for name in INPUTS if name in wanted):
        arrays = (dkl, *inputs[:4], kl, saved, *lengths)
        gradients = _backward_p.bind(*arrays, options=options, wrt=wrt)
        found = dict(zip(wrt, gradients, strict=True))
    for name, lse in zip(options.given, inputs[4:], strict=False):
        if name in wanted:
            mass1 = saved[options.saved.index("mass1"), ..., None]
            gradient = dkl * (mass1 if name == "lse2" else -(kl + mass1))
            # No key, whatever dkl holds, or no more of P1 than underflows, as kl then does, too.
            gradient = jax.numpy.where(mass1 == 0, 0, gradient)
            found[name] = gradient.astype(lse.dtype)
    return tuple(found.get(name) for name in names)


def _refuse_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "streamkl_cupy.jax.attention_kl has first derivatives only, by reverse mode; got a "
        "derivative of its gradient; differentiate once, for example by jax.grad."
    )


_rows = jax.custom_vjp(_rows_alone, nondiff_argnums=(0, 1))
_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
_compiled = jax.jit(_attention_kl, static_argnames=("options", "reduction", "return_lse"))


# -------------------------------------------------------------------------------------------------
# The primitives

_forward_p = Primitive("streamkl_forward")
_backward_p = Primitive("streamkl_backward")


def _forward_types(q1: Any, *_: Any, options: _Options, is_kept: bool) -> tuple[Any, ...]:
    """``kl`` and, if it is kept, the rest of the state."""
    rows = (*q1.shape[-2::-1], 1) if options.is_packed else (*q1.shape[:-1], 1)
    kl = q1.update(shape=rows, dtype=_row_dtype(q1), weak_type=False)
    saved = q1.update(shape=(len(options.saved), *rows[:-1]), dtype=kl.dtype, weak_type=False)
    return (kl, saved) if is_kept else (kl,)


def _backward_types(
    dkl: Any, q1: Any, k1: Any, q2: Any, k2: Any, *_: Any, wrt: Any, **__: Any
) -> tuple[Any, ...]:
    inputs = dict(zip(INPUTS, (q1, k1, q2, k2), strict=True))
    return tuple(inputs[name].update(weak_type=False) for name in wrt)


def _forward_batch(
    arrays: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int]]:
    _refuse_packed(params["options"])
    size = _mapped_size(arrays, axes)
    folded = [_fold(x, axis, size) for x, axis in zip(arrays, axes, strict=True)]
    results = _forward_p.bind(*_vary_alike(folded), **params)
    batch = _batch(arrays[0], axes[0])
    unfolded = [_unfold(x, size, batch, axis) for axis, x in enumerate(results)]
    return unfolded, list(range(len(results)))


def _backward_batch(
    arrays: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int]]:
    _refuse_packed(params["options"])
    size = _mapped_size(arrays, axes)
    folded = [
        _fold(x, axis, size, batch_axis=int(position == _PLACE_OF_SAVED))
        for position, (x, axis) in enumerate(zip(arrays, axes, strict=True))
    ]
    results = _backward_p.bind(*_vary_alike(folded), **params)
    batch = _batch(arrays[1], axes[1])
    return [_unfold(x, size, batch, 0) for x in results], [0] * len(results)


# Among the arrays of the backward, dkl q1 k1 q2 k2 kl saved and the lengths.
_PLACE_OF_SAVED = 6


def _refuse_packed(options: _Options) -> None:
    if options.is_packed:
        raise NotImplementedError(
            "streamkl_cupy.jax.attention_kl: expected padded batches under jax.vmap, got packed "
            "sequences; call it once for each, or pack all of them."
        )


def _mapped_size(arrays: Sequence[Any], axes: Sequence[Any]) -> int:
    sizes = (x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    return int(next(sizes))


def _fold(array: Any, axis: int | None, size: int, batch_axis: int = 0) -> Any:
    """Put an axis that is mapped, or a repetition, before the batch and make one of the two."""
    if axis is None:
        array = jax.lax.broadcast_in_dim(
            array,
            (*array.shape[:batch_axis], size, *array.shape[batch_axis:]),
            [i + (i >= batch_axis) for i in range(array.ndim)],
        )
    else:
        array = jax.numpy.moveaxis(array, axis, batch_axis)
    before, after = array.shape[:batch_axis], array.shape[batch_axis + 2 :]
    return array.reshape(*before, size * array.shape[batch_axis + 1], *after)


def _unfold(array: Any, size: int, batch: int, axis: int) -> Any:
    return array.reshape(*array.shape[:axis], size, batch, *array.shape[axis + 1 :])


def _batch(array: Any, axis: int | None) -> int:
    """The batch of an array of rank 4 without the axis that is mapped."""
    return int(array.shape[0 if axis is None or axis > 0 else 1])


def _vary_alike(arrays: Any) -> tuple[Any, ...]:
    """Make arrays inside `jax.shard_map` vary over the same axes of the mesh."""
    arrays = tuple(arrays)
    each = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    everything = frozenset().union(*each)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(everything - own, key=str)), to="varying")
        if everything - own
        else x
        for x, own in zip(arrays, each, strict=True)
    )


def _row_dtype(array: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def _describe(
    inputs: Sequence[Any], options: _Options, device: Device, lengths: Sequence[Any]
) -> Problem:
    """Check the arrays by shape and dtype; XLA's buffers are contiguous and aligned."""
    operands = []
    names = (*INPUTS, *options.lengths)
    for name, array in zip(names, (*inputs, *lengths), strict=True):
        strides, step = [], 1
        for length in reversed(array.shape):
            strides.append(step)
            step *= length
        shape = tuple(array.shape)
        operands.append(
            Operand(name, shape, tuple(reversed(strides)), array.dtype.name, device, pointer=256)
        )
    ragged = None
    if options.lengths:
        ragged = describe_lengths(options.lengths, *options.max_seqlen)
        if ragged.is_packed:
            longest = (
                x.shape[0] if most is None else most
                for most, x in zip(options.max_seqlen, inputs[:2], strict=True)
            )
            num_sequences = max(0, lengths[0].size - 1)
            ragged = Ragged(options.lengths, num_sequences, *longest)
    q1, k1, q2, k2, *of_lengths = operands
    problem = describe(
        q1,
        k1,
        q2,
        k2,
        causal=options.causal,
        window=options.window,
        q_offset=options.q_offset,
        scale1=options.scale1,
        scale2=options.scale2,
        softcap1=options.softcap1,
        softcap2=options.softcap2,
        layout=options.layout,
        precision=options.precision,
        ragged=ragged,
    )
    for operand in of_lengths:
        check_lengths(problem, operand, device)
    return problem


# -------------------------------------------------------------------------------------------------
# On a GPU


def _forward_on_cuda(*inputs: Any, options: _Options, is_kept: bool) -> list[Any]:
    num_given = len(options.given)
    lengths = inputs[4 + num_given :]
    problem = _describe(inputs[:4], options, Device("cuda"), lengths)
    for name, lse in zip(options.given, inputs[4 : 4 + num_given], strict=True):
        if lse.dtype != np.float32:
            raise TypeError(message(name, "float32", lse.dtype.name, "cast it to float32"))
    # Like all of XLA's buffers they are contiguous.
    strides = [problem.row if name in options.given else None for name in ("lse1", "lse2")]
    given = strides[0], strides[1]
    force, override = env.force(), plan.current_override()
    prepared = {
        index: api.prepare_forward(problem, index, force, override, given, options.has_entropy)
        for index in _cards()
    }
    types = _forward_types(*map(jax.typeof, inputs), options=options, is_kept=is_kept)
    addresses = map(api.given_address, options.given)
    names = (*INPUTS, *addresses, *options.lengths, "kl", *("saved",) * is_kept)
    return _call(prepared, problem, inputs, types, names, options.saved)


def _backward_on_cuda(dkl: Any, *arrays: Any, options: _Options, wrt: tuple[str, ...]) -> list[Any]:
    problem = _describe(arrays[:4], options, Device("cuda"), arrays[6:])
    force, override = env.force(), plan.current_override()
    prepared = {
        index: api.prepare_backward(
            problem,
            index,
            force,
            override,
            wrt,
            "auto",
            options.deterministic,
            problem.row,
            options.given,
        )
        for index in _cards()
    }
    types = _backward_types(*map(jax.typeof, (dkl, *arrays)), wrt=wrt)
    names = ("dkl", *INPUTS, "kl", "saved", *options.lengths, *("d" + name for name in wrt))
    return _call(prepared, problem, (dkl, *arrays), types, names, options.saved)


def _cards() -> list[int]:
    """The CUDA devices of this process, as CUDA counts them."""
    return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]


def _call(
    prepared: Mapping[int, api.Prepared],
    problem: Problem,
    arrays: Sequence[Any],
    types: Sequence[Any],
    names: Sequence[str],
    of_saved: Sequence[str],
) -> list[Any]:
    """Results of the types, computed from the arrays by what is prepared for each card.

    All kernels are built and loaded here: nothing can be loaded any more while XLA records a
    command buffer. What comes at each call does no more than it must: read addresses and launch.

    Parameters
    ----------
    names
        Of the arrays and the results, in this order.
    of_saved
        What lies in ``saved``.
    """
    places = {name: (position, 0) for position, name in enumerate(names)}
    if saved := places.pop("saved", None):
        part_bytes = problem.num_rows * ITEM_BYTES["float32"]
        places |= {name: (saved[0], part * part_bytes) for part, name in enumerate(of_saved)}
    size = max(each.workspace_bytes for each in prepared.values())
    workspaces = []
    if size:
        places["workspace"] = (len(names), 0)
        # XLA may align less than the kernels need.
        workspaces = [jax.ShapeDtypeStruct((size + plan.WORKSPACE_ALIGNMENT,), np.uint8)]
    bound = {index: each.bind(places) for index, each in prepared.items()}
    current_device = interop.cupy().cuda.runtime.getDevice
    alone = next(iter(bound.values())) if len(bound) == 1 else None

    def start(context: Any, results: Sequence[Any], *arrays: Any) -> None:
        addresses = [x.__cuda_array_interface__["data"][0] for x in (*arrays, *results)]
        if size:
            addresses[-1] = -(-addresses[-1] // plan.WORKSPACE_ALIGNMENT) * plan.WORKSPACE_ALIGNMENT
        # XLA has made the card of the computation the current one.
        (alone or bound[current_device()]).launch(addresses, context.stream)

    call = buffer_callback(start, [*types, *workspaces], command_buffer_compatible=True)
    return list(call(*arrays))[: len(types)]


# -------------------------------------------------------------------------------------------------
# On the CPU


def _forward_on_cpu(*inputs: Any, options: _Options, is_kept: bool) -> list[Any]:
    types = _forward_types(*map(jax.typeof, inputs), options=options, is_kept=is_kept)
    choices = _reference_options(options)

    def compute(_: Any, results: Sequence[Any], *inputs: Any) -> None:
        q1, k1, q2, k2, *behind = map(np.asarray, inputs)
        given: dict[str, Any] = {n: x[..., 0] for n, x in zip(options.given, behind, strict=False)}
        lengths = behind[len(given) :]
        ragged: dict[str, Any] = dict(zip(options.lengths, lengths, strict=True))
        state: Any
        if options.has_entropy:
            state = reference.attention_kl(q1, k1, q2, k2, **choices, **ragged, return_entropy=True)
        else:
            state = reference.attention_kl(
                q1, k1, q2, k2, **choices, **ragged, **given, return_state=True
            )
        np.asarray(results[0])[...] = state.kl[..., None]
        if is_kept:
            saved = np.asarray(results[1])
            saved[0], saved[1] = state.lse1, state.lse2
            with np.errstate(invalid="ignore"):
                rest = np.stack([state.lse1, state.lse2]) - saved[:2]
            saved[2:4] = np.where(np.isfinite(rest), rest, 0.0)
            for position, name in enumerate(options.saved[4:], 4):
                saved[position] = getattr(state, name)

    return list(buffer_callback(compute, list(types))(*inputs))


def _backward_on_cpu(*arrays: Any, options: _Options, wrt: tuple[str, ...]) -> list[Any]:
    types = _backward_types(*map(jax.typeof, arrays), wrt=wrt)
    choices = _reference_options(options)

    def compute(_: Any, results: Sequence[Any], *arrays: Any) -> None:
        dkl, q1, k1, q2, k2, kl, saved, *lengths = map(np.asarray, arrays)
        ragged: dict[str, Any] = dict(zip(options.lengths, lengths, strict=True))
        lse1, lse2, lse1_low, lse2_low, *mass1 = saved.astype(np.float64)
        rows = (kl[..., 0].astype(np.float64), lse1 + lse1_low, lse2 + lse2_low)
        state = (
            reference.GivenState(*rows, mass1[0], options.given)
            if options.given
            else reference.ReferenceState(*rows)
        )
        gradients = reference.attention_kl_backward(
            dkl[..., 0], q1, k1, q2, k2, state, wrt=wrt, **choices, **ragged
        )
        with np.errstate(over="ignore", invalid="ignore"):
            for result, gradient in zip(results, gradients, strict=True):
                np.asarray(result)[...] = gradient

    return list(buffer_callback(compute, list(types))(*arrays))


def _reference_options(options: _Options) -> dict[str, Any]:
    return {
        "causal": options.causal,
        "window": options.window,
        "q_offset": options.q_offset,
        "scale1": options.scale1,
        "scale2": options.scale2,
        "softcap1": options.softcap1,
        "softcap2": options.softcap2,
        "layout": options.layout,
    }


# -------------------------------------------------------------------------------------------------


def _register(
    primitive: Any,
    types: Callable[..., Any],
    batch: Callable[..., Any],
    on_cpu: Callable[..., Any],
    on_cuda: Callable[..., Any],
) -> None:
    def evaluate(*arrays: Any, **params: Any) -> list[Any]:
        # Reached under `jax.disable_jit` alone, which cannot go further down than to here.
        with jax.disable_jit(False):
            results: list[Any] = jax.jit(lambda *arrays: primitive.bind(*arrays, **params))(*arrays)
        return results

    primitive.multiple_results = True
    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = _refuse_derivative
    for platform, function in (("cpu", on_cpu), ("cuda", on_cuda)):
        rule = mlir.lower_fun(function, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform=platform)


_register(_forward_p, _forward_types, _forward_batch, _forward_on_cpu, _forward_on_cuda)
_register(_backward_p, _backward_types, _backward_batch, _backward_on_cpu, _backward_on_cuda)

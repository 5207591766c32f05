"""The functions of the package as torch has its own: differentiable, traceable, transformable.

>>> import torch
>>> from streamkl_cupy.torch import attention_kl
>>> q, k = torch.ones(2, 8, requires_grad=True), torch.eye(3, 8)
>>> attention_kl(q.detach(), k, q, k, reduction="mean").backward()
>>> q.grad.abs().max().item()
0.0

Three operators stand between torch and `api`: ``streamkl_cupy::attention_kl`` (kl alone),
``attention_kl_state`` (with what the backward needs) and ``attention_kl_backward``. Each has a
kernel, which calls `api`, a fake kernel, which computes shapes, and a rule for vmap; the first two
have a formula for their gradient, the third has none, so that a second derivative is an error.
Three more, ``attention_kl_entropy``, ``attention_kl_given`` and ``attention_kl_given_backward``,
are the same for calls with entropies and with given log-sum-exps, apart so that the others have no
argument and no result more; ``attention_kl_ragged`` and ``attention_kl_ragged_backward`` take the
lengths of padded batches and packed sequences, and all of that.

The operators are defined through `torch.library.Library`, of which `torch.library.custom_op` is a
wrapper, because a call through the wrapper costs the host as much as four allocations. For the same
reason an eager call comes to its operator below autograd, through an autograd function of its own:
`torch.compile` sees the operators alone, and so a transform of `torch.func` inside of a function
compiled with ``fullgraph=True`` is refused, because it would not see their formulas. Transform the
compiled function, or compile without ``fullgraph=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from streamkl_cupy import api
from streamkl_cupy.problem import (
    INPUTS,
    LENGTHS,
    MAX_LENGTH,
    NO_WINDOW,
    REDUCTIONS,
    Device,
    Operand,
    Ragged,
    Window,
    check_flag,
    check_gpu,
    check_options,
    check_precision,
    check_reduction,
    check_softcaps,
    check_window,
    describe,
    describe_lengths,
    lags_of,
    message,
    rows_seeing,
)
from streamkl_cupy.state import KLState

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError(
        "streamkl_cupy.torch needs PyTorch 2.6 or newer, which cannot be imported; install it as "
        "https://pytorch.org says for your CUDA, or call streamkl_cupy.attention_kl, which does "
        "without."
    ) from error

__all__ = ["REDUCTIONS", "AttentionKLLoss", "attention_kl"]

_LSE = ("lse1", "lse2")
# The lengths of a batch as an operator has them.
_LENGTHS = (*LENGTHS, "max_seqlen_q", "max_seqlen_k")

# In place of an address where there is no memory: aligned, and not null.
_NO_ADDRESS = 16


def attention_kl(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | None = None,
    scale1: float | None = None,
    scale2: float | None = None,
    softcap1: float | None = None,
    softcap2: float | None = None,
    layout: str = "bhnd",
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: str | None = None,
    reduction: str = "none",
    row_weights: Tensor | None = None,
    lse1: Tensor | None = None,
    lse2: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
) -> Any:
    """KL divergence between two attention distributions, differentiable in all four inputs.

    Parameters
    ----------
    q1, k1, q2, k2, causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout, precision
        As `streamkl_cupy.attention_kl` takes them. What does not require grad costs nothing in the
        backward, and nothing is kept for it: detach the teacher, or run it under
        ``torch.no_grad()``. Note that ``causal=True`` is aligned to the bottom right, unlike
        ``scaled_dot_product_attention``, and that autocast casts nothing here: the four inputs
        have one dtype. Only `precision` says how float32 is multiplied, not
        ``torch.backends.cuda.matmul.allow_tf32``.
    kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        The lengths of a padded batch or of packed sequences, as `streamkl_cupy.attention_kl` takes
        them. Inputs of rank 3 are one batch entry, with one length for all heads. Of packed
        sequences kl is ``(H, N_Q)``, and `torch.func.vmap` maps none.
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
        them, finite wherever a row sees a key: else what comes of the row is not defined. They get
        gradients if they require them, and are constants otherwise.
    deterministic
        Make two backward runs agree bit for bit; by default whatever
        ``torch.use_deterministic_algorithms`` says.
    return_lse
        Return ``(kl, lse1, lse2)``. The log-sum-exps are not differentiable. One that was given
        comes back.
    return_entropy
        Return the entropy of P1 and its cross-entropy with P2 as well, at the end of the tuple.
        They are not differentiable; the gradient of the cross-entropy with respect to side 2 is
        that of kl. Not together with `lse1` or `lse2`.

    Returns
    -------
    Tensor or tuple of Tensor
        Divergences in nats: float32 on a GPU, float64 on the CPU.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `streamkl_cupy.attention_kl`. A second derivative is a RuntimeError when it is asked for,
        and so is a transform of `torch.func` inside of ``torch.compile(fullgraph=True)``; compile
        without it, or transform the compiled function.
    NotImplementedError
        For forward mode.

    Notes
    -----
    Nothing waits for the device, and memory comes from torch's allocator. Kernels are built and
    loaded in the first call that needs them, which cannot be done while `torch.cuda.graph` records:
    before a capture make the call once, backward included, or call `streamkl_cupy.warmup`.

    Examples
    --------
    >>> q, k1, k2 = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[0.0], [1.0986123]])
    >>> kl = attention_kl(q, k1, q, k2.requires_grad_(), reduction="sum")
    >>> round(kl.item(), 6)                           # P1 = (1/2, 1/2), P2 = (1/4, 3/4)
    0.143841
    >>> torch.autograd.grad(kl, k2)[0].flatten()      # P2 - P1
    tensor([-0.2500,  0.2500])
    """
    is_traced = torch.compiler.is_compiling()
    if is_traced:
        # A number may be symbolic here; the kernel checks its value.
        check_options(causal, None, None, layout)
        for name, scale in (("scale1", scale1), ("scale2", scale2)):
            if isinstance(scale, Tensor):
                remedy = "pass float(...) of it, or multiply the queries by it"
                raise TypeError(message(name, "a real number", "a tensor", remedy))
        for name, softcap in (("softcap1", softcap1), ("softcap2", softcap2)):
            if isinstance(softcap, Tensor):
                remedy = "pass float(...) of it"
                raise TypeError(message(name, "a real number", "a tensor", remedy))
    else:
        causal, scale1, scale2, layout = check_options(causal, scale1, scale2, layout)
        softcap1, softcap2 = check_softcaps(softcap1, softcap2)
    (left, right), q_offset = check_window(window, q_offset)
    check_precision(precision)
    check_reduction(reduction)
    check_flag("return_lse", return_lse)
    check_flag("return_entropy", return_entropy)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        check_flag("deterministic", deterministic)
    inputs = (q1, k1, q2, k2)
    for name, value in zip(INPUTS, inputs, strict=True):
        if not isinstance(value, Tensor) or value.is_nested:
            raise TypeError(_not_a_tensor(name, value))
    lengths = (kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k)
    most = (max_seqlen_q, max_seqlen_k)
    is_ragged = most != (None, None) or any(x is not None for x in lengths)
    if is_ragged:
        _check_lengths(lengths, most, q1)
        # An operator takes 64 bits; no sequence is longer than this.
        max_queries, max_keys = (None if x is None else min(x, MAX_LENGTH) for x in most)
        most = max_queries, max_keys
    rows = _row_shape(q1, cu_seqlens_q)
    if row_weights is not None:
        _check_row_weights(row_weights, q1, rows)
    has_given = lse1 is not None or lse2 is not None
    if has_given:
        _check_given(lse1, lse2, q1, rows)
        if return_entropy:
            remedy = "leave out lse1 and lse2"
            raise ValueError(
                message("return_entropy", "False with given log-sum-exps", "True", remedy)
            )

    numbers = (scale1, scale2, softcap1, softcap2)
    options = (causal, left, right, q_offset, *numbers, precision, layout, deterministic)
    is_differentiated = torch.is_grad_enabled() and (
        q1.requires_grad or k1.requires_grad or q2.requires_grad or k2.requires_grad
    )
    entropies: list[Tensor] = []
    arguments: tuple[Any, ...]
    if is_ragged:
        arguments = (*inputs, lse1, lse2, *lengths, *most, return_entropy, *options)
        kl, *lse = _rarely(_Ragged, _attention_kl_ragged, arguments, is_traced)
        entropies = lse[5:]
    elif has_given:
        arguments = (*inputs, lse1, lse2, *options)
        kl, *lse = _rarely(_Given, _attention_kl_given, arguments, is_traced)
    elif return_entropy:
        kl, *lse = _rarely(_Entropy, _attention_kl_entropy, (*inputs, *options), is_traced)
        entropies = lse[4:]
    elif is_traced:
        kl, *lse = _trace(inputs, options, is_differentiated or return_lse)
    elif torch._C._are_functorch_transforms_active():
        # It cannot be seen from here whether an outer transform wants a gradient.
        kl, *lse = _Transformed.apply(*inputs, *options)
    elif is_differentiated:
        kl, *lse = _AttentionKL.apply(*inputs, options, return_lse)
    else:
        with _below_autograd():
            if return_lse:
                kl, *lse = _attention_kl_state(*inputs, *options)
            else:
                kl = _attention_kl(*inputs, *options)

    if is_ragged:
        num_entries = kl.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        kl = _reduce_ragged(kl, lse[0], num_entries, reduction, row_weights)
    elif reduction != "none" or row_weights is not None:
        num_keys = k1.shape[1 if k1.ndim == 4 and layout == "bnhd" else -2]
        mask = causal, (left, right), q_offset
        kl = _reduce(kl, num_keys, mask, layout, reduction, row_weights)
    if return_lse or return_entropy:
        lse = lse[:2] if return_lse else []
        return (kl, *lse, *(entropies if return_entropy else ()))
    return kl


class AttentionKLLoss(torch.nn.Module):
    """`attention_kl` as a module.

    Parameters
    ----------
    causal, window, q_offset, scale1, scale2, softcap1, softcap2, layout, precision, deterministic
        As `attention_kl` takes them.
    reduction
        Likewise, but ``"mean"`` by default.

    Raises
    ------
    TypeError, ValueError
        If an option does not fit.

    Examples
    --------
    >>> loss = AttentionKLLoss(causal=True)
    >>> q, k = torch.ones(2, 8), torch.eye(3, 8)
    >>> loss(q, k, q, k).item()
    0.0
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window: Window | None = None,
        q_offset: int | None = None,
        scale1: float | None = None,
        scale2: float | None = None,
        softcap1: float | None = None,
        softcap2: float | None = None,
        layout: str = "bhnd",
        precision: str | None = None,
        reduction: str = "mean",
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale1, self.scale2, self.layout = check_options(
            causal, scale1, scale2, layout
        )
        self.window, self.q_offset = check_window(window, q_offset)
        self.softcap1, self.softcap2 = check_softcaps(softcap1, softcap2)
        check_precision(precision)
        self.precision = precision
        check_reduction(reduction)
        if deterministic is not None:
            check_flag("deterministic", deterministic)
        self.reduction = reduction
        self.deterministic = deterministic

    def forward(
        self,
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        row_weights: Tensor | None = None,
        lse1: Tensor | None = None,
        lse2: Tensor | None = None,
        kv_starts: Tensor | None = None,
        kv_lens: Tensor | None = None,
        q_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """The loss of one call.

        Parameters
        ----------
        q1, k1, q2, k2
            Queries and keys of both sides, as `attention_kl` takes them.
        row_weights
            Weights of the rows, likewise.
        lse1, lse2
            Log-sum-exps to divide by, likewise.
        kv_starts, kv_lens, q_lens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            The lengths of a padded batch or of packed sequences, likewise.

        Returns
        -------
        Tensor
            A scalar, or kl of each row with ``reduction="none"``.

        Raises
        ------
        TypeError, ValueError, ImportError, RuntimeError
            As `attention_kl`.
        """
        return attention_kl(
            q1,
            k1,
            q2,
            k2,
            causal=self.causal,
            window=self.window,
            q_offset=self.q_offset,
            scale1=self.scale1,
            scale2=self.scale2,
            softcap1=self.softcap1,
            softcap2=self.softcap2,
            layout=self.layout,
            kv_starts=kv_starts,
            kv_lens=kv_lens,
            q_lens=q_lens,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            precision=self.precision,
            reduction=self.reduction,
            row_weights=row_weights,
            lse1=lse1,
            lse2=lse2,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        """The options, for ``repr``."""
        names = ("causal", "scale1", "scale2", "layout", "reduction", "deterministic")
        rare = {"window": NO_WINDOW, "q_offset": None, "softcap1": 0.0, "softcap2": 0.0}
        rare |= {"precision": None}
        shown = [name for name, default in rare.items() if getattr(self, name) != default]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*names, *shown))


# Calls inside of it go to the kernel of an operator, past its formula.
_below_autograd = torch._C._AutoDispatchBelowAutograd


def _refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "streamkl_cupy.torch.attention_kl: expected reverse mode, got forward mode AD (jvp, "
        "jacfwd, hessian or a dual tensor); differentiate by torch.func.grad, vjp or jacrev."
    )


class _AttentionKL(torch.autograd.Function):
    """The gradient outside of torch.func.

    It has no ``setup_context``, for which torch would look up the signature of ``forward`` in
    every call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        options: tuple[Any, ...],
        return_lse: bool,
    ) -> Any:
        with _below_autograd():
            state = _attention_kl_state(q1, k1, q2, k2, *options)
        ctx.save_for_backward(q1, k1, q2, k2, *state)
        ctx.options = options
        if not return_lse:
            return state[:1]
        ctx.mark_non_differentiable(state[1], state[2])
        ctx.set_materialize_grads(False)
        return state[:3]

    @staticmethod
    def backward(ctx: Any, dkl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, dkl), None, None)

    jvp = staticmethod(_refuse_forward_mode)


class _Transformed(torch.autograd.Function):
    """The gradient inside of torch.func, whose transforms want ``setup_context``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        *options: Any,
    ) -> Any:
        return _attention_kl_state(q1, k1, q2, k2, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_state(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dkl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dkl)

    jvp = staticmethod(_refuse_forward_mode)


class _Entropy(torch.autograd.Function):
    """The gradient where entropies are wanted, inside and outside of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _attention_kl_entropy(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_all_but_entropies(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dkl: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return _entropy_backward(ctx, dkl)

    jvp = staticmethod(_refuse_forward_mode)


class _Given(torch.autograd.Function):
    """The gradient with given log-sum-exps, inside and outside of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _attention_kl_given(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_given(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dkl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _given_backward(ctx, dkl)

    jvp = staticmethod(_refuse_forward_mode)


class _Ragged(torch.autograd.Function):
    """The gradient of a padded or packed batch, inside and outside of torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _attention_kl_ragged(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_ragged(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dkl: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return _ragged_backward(ctx, dkl)

    jvp = staticmethod(_refuse_forward_mode)


class _Gradients(torch.autograd.Function):
    """The gradients where autograd follows them: an error when it is to go back through them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator: Any, *arguments: Any) -> Any:
        return tuple(operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "streamkl_cupy.torch.attention_kl: expected to be differentiated once, got a second "
            "derivative, for which there is no formula; compute it from the matrices of logits, or "
            "detach the gradients."
        )


def _rarely(
    function: Any, operator: Any, arguments: tuple[Any, ...], is_traced: bool
) -> tuple[Tensor, ...]:
    """A call that one function serves, differentiated or not, under a transform or not."""
    if is_traced:
        _refuse_transforms()
        state: tuple[Tensor, ...] = operator(*arguments)
    else:
        state = function.apply(*arguments)
    return state


def _trace(
    inputs: Sequence[Tensor], options: tuple[Any, ...], with_state: bool
) -> tuple[Tensor, ...]:
    """What `torch.compile` sees: an operator, with its formula."""
    _refuse_transforms()
    if with_state:
        state: tuple[Tensor, ...] = _attention_kl_state(*inputs, *options)
        return state
    return (_attention_kl(*inputs, *options),)


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        # The formula would go unseen by the transform.
        raise RuntimeError(
            "streamkl_cupy.torch.attention_kl: expected torch.compile and torch.func apart, got a "
            "transform inside of a compiled function; transform the compiled function, or compile "
            "without fullgraph=True."
        )


def _keep_state(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward of ``attention_kl_state``."""
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # nothing is to be filled with zeros for the others


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save for the backward of ``attention_kl``, which is differentiated by accident only.

    As when a program that was exported for evaluation is trained: the state is computed then.
    """
    with _below_autograd():
        state = _attention_kl_state(*inputs)
    ctx.save_for_backward(*inputs[:4], *state)
    ctx.options = inputs[4:]


def _keep_all_but_entropies(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward of ``attention_kl_entropy``."""
    ctx.save_for_backward(*inputs[:4], *output[:5])
    ctx.options = inputs[4:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _entropy_backward(ctx: Any, dkl: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The formula of the gradient of ``attention_kl_entropy``."""
    if dkl is None:  # nothing comes back to kl
        return (None,) * (len(INPUTS) + len(ctx.options))
    return _backward(ctx, dkl)


def _keep_given(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward of ``attention_kl_given``."""
    ctx.save_for_backward(*inputs[:4], *output)
    given = dict(zip(_LSE, inputs[4:6], strict=True))
    ctx.given = [name for name, value in given.items() if value is not None]
    ctx.dtypes = {name: given[name].dtype for name in ctx.given}
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _given_backward(ctx: Any, dkl: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The formula of the gradient with given log-sum-exps, as an operator has it."""
    names = (*INPUTS, *_LSE)
    if dkl is None:  # nothing comes back to kl
        return (None,) * (len(names) + len(ctx.options))
    wrt = [n for n, wanted in zip(names, ctx.needs_input_grad[:6], strict=True) if wanted]
    arguments = (dkl, *ctx.saved_tensors, ctx.given, wrt, *ctx.options)
    found = dict(zip(wrt, _once(_attention_kl_given_backward, arguments), strict=True))
    for name, dtype in ctx.dtypes.items():
        if name in found:
            found[name] = found[name].to(dtype)
    return tuple(found.get(name) for name in names) + (None,) * len(ctx.options)


def _keep_ragged(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward of ``attention_kl_ragged``."""
    lengths, (*most, _), ctx.options = inputs[6:11], inputs[11:14], inputs[14:]
    ctx.save_for_backward(*inputs[:4], *output[:6], *lengths)
    given = dict(zip(_LSE, inputs[4:6], strict=True))
    ctx.given = [name for name, value in given.items() if value is not None]
    ctx.dtypes = {name: given[name].dtype for name in ctx.given}
    ctx.most = most
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _ragged_backward(ctx: Any, dkl: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """The formula of the gradient of a padded or packed batch, as an operator has it."""
    num_inputs: int = ctx.num_inputs
    if dkl is None:  # nothing comes back to kl
        return (None,) * num_inputs
    names = (*INPUTS, *_LSE)
    wrt = [n for n, wanted in zip(names, ctx.needs_input_grad[:6], strict=True) if wanted]
    saved, lengths = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
    arguments = (dkl, *saved, ctx.given, wrt, *lengths, *ctx.most, *ctx.options)
    found = dict(zip(wrt, _once(_attention_kl_ragged_backward, arguments), strict=True))
    for name, dtype in ctx.dtypes.items():
        if name in found:
            found[name] = found[name].to(dtype)
    return tuple(found.get(name) for name in names) + (None,) * (num_inputs - len(names))


def _once(operator: Any, arguments: tuple[Any, ...]) -> Sequence[Tensor]:
    """What an operator of gradients returns, which cannot be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gradients: Sequence[Tensor] = _Gradients.apply(operator, *arguments)
    else:
        gradients = operator(*arguments)
    return gradients


def _backward(ctx: Any, dkl: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """The formula of the gradient, as an operator has it."""
    return _gradients(ctx, dkl) + (None,) * len(ctx.options)


def _gradients(ctx: Any, dkl: Tensor) -> tuple[Tensor | None, ...]:
    """One entry an input, None where no gradient is wanted."""
    wanted = ctx.needs_input_grad[:4]
    wrt = [name for name, is_wanted in zip(INPUTS, wanted, strict=True) if is_wanted]
    arguments = (dkl, *ctx.saved_tensors, wrt, *ctx.options)
    gradients = iter(_once(_attention_kl_backward, arguments))
    return tuple(next(gradients) if is_wanted else None for is_wanted in wanted)


def _reduce(
    kl: Tensor,
    num_keys: int,
    mask: tuple[bool, Window, int | None],
    layout: str,
    reduction: str,
    row_weights: Tensor | None,
) -> Tensor:
    # Which rows see a key follows from the lengths: nothing is read back from the device.
    axis = 1 if kl.ndim == 3 and layout == "bnhd" else kl.ndim - 1
    num_queries = kl.shape[axis]
    first, stop = rows_seeing(num_queries, num_keys, lags_of(num_queries, num_keys, *mask))
    weighted = kl if row_weights is None else kl * row_weights
    if reduction == "none":
        return weighted
    total = weighted.sum()
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / (max(kl.shape[0], 1) if kl.ndim > 1 else 1)
    if row_weights is None:
        num_rows = stop - first
        for position, length in enumerate(kl.shape):
            num_rows *= length if position != axis else 1
        return total / max(num_rows, 1)
    seeing = row_weights.expand(kl.shape).narrow(axis, first, stop - first)
    divisor = seeing.sum(dtype=kl.dtype)
    return total / torch.where(divisor == 0, 1.0, divisor)


def _reduce_ragged(
    kl: Tensor, lse1: Tensor, num_entries: int, reduction: str, row_weights: Tensor | None
) -> Tensor:
    weighted = kl if row_weights is None else kl * row_weights
    if reduction == "none":
        return weighted
    total = weighted.sum()
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / max(num_entries, 1)
    # Which rows see a key is known on the device alone, where their log-sum-exps tell.
    sees = torch.ne(lse1, -torch.inf)
    counted = sees if row_weights is None else sees * row_weights
    divisor = counted.sum(dtype=kl.dtype)
    return total / torch.where(divisor == 0, 1.0, divisor)


def _row_shape(q1: Tensor, cu_seqlens_q: Tensor | None) -> tuple[int, ...]:
    """The shape of kl."""
    shape = tuple(q1.shape[:-1])
    return shape if cu_seqlens_q is None else shape[::-1]


def _check_lengths(
    lengths: tuple[Tensor | None, ...], most: tuple[int | None, int | None], q1: Tensor
) -> None:
    given = {name: x for name, x in zip(LENGTHS, lengths, strict=True) if x is not None}
    describe_lengths(tuple(given), *most)
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.is_nested:
            raise TypeError(_not_a_tensor(name, value))
        if value.device != q1.device:
            expected, got = f"a tensor on {q1.device} like q1", f"one on {value.device}"
            raise ValueError(message(name, expected, got, f"move it to {q1.device}"))


def _check_row_weights(row_weights: Any, q1: Tensor, rows: tuple[int, ...]) -> None:
    if not isinstance(row_weights, Tensor) or row_weights.is_nested:
        raise TypeError(_not_a_tensor("row_weights", row_weights))
    if row_weights.layout != torch.strided:
        got = f"one of layout {row_weights.layout}"
        raise TypeError(message("row_weights", "a dense torch tensor", got, "pass a dense copy"))
    if row_weights.is_complex():
        remedy = "pass its real part"
        raise TypeError(message("row_weights", "real weights", str(row_weights.dtype), remedy))
    if row_weights.device != q1.device:
        expected = f"a tensor on {q1.device} like q1"
        got = f"one on {row_weights.device}"
        raise ValueError(message("row_weights", expected, got, f"move it to {q1.device}"))
    shape = tuple(row_weights.shape)
    pairs = zip(reversed(shape), reversed(rows), strict=False)
    if len(shape) > len(rows) or any(ours != 1 and ours != theirs for ours, theirs in pairs):
        expected = f"a shape that broadcasts to that of kl, {rows}"
        remedy = "give it axes of length 1 where all have one weight"
        raise ValueError(message("row_weights", expected, str(shape), remedy))


def _check_given(lse1: Any, lse2: Any, q1: Tensor, rows: tuple[int, ...]) -> None:
    for name, value in zip(_LSE, (lse1, lse2), strict=True):
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.is_nested:
            raise TypeError(_not_a_tensor(name, value))
        if value.device != q1.device:
            expected, got = f"a tensor on {q1.device} like q1", f"one on {value.device}"
            raise ValueError(message(name, expected, got, f"move it to {q1.device}"))
        shape = tuple(value.shape)
        if shape != rows:
            expected = f"the shape of kl, {rows}"
            raise ValueError(message(name, expected, str(shape), "pass one value a query row"))


def _not_a_tensor(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return message(name, "a dense torch tensor", "a nested one", "pass a dense, padded copy")
    remedy = "call streamkl_cupy.attention_kl with arrays of other libraries"
    return message(name, "a torch tensor", type(value).__name__, remedy)


# The operators: kernels.


def _keywords(options: Sequence[Any]) -> dict[str, Any]:
    """What both functions of `api` take of an operator's options."""
    causal, left, right, q_offset, scale1, scale2, softcap1, softcap2, precision, layout, _ = (
        options
    )
    return {
        "causal": causal,
        "window": (left, right),
        "q_offset": q_offset,
        "scale1": scale1,
        "scale2": scale2,
        "softcap1": softcap1,
        "softcap2": softcap2,
        "layout": layout,
        "precision": precision,
    }


def _run_attention_kl(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any) -> Tensor:
    kl: Tensor = api.attention_kl(q1, k1, q2, k2, **_keywords(options))
    return kl


def _run_attention_kl_state(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any
) -> tuple[Any, ...]:
    state = api.attention_kl(q1, k1, q2, k2, **_keywords(options), return_state=True)
    return _state_tensors(state)


def _state_tensors(state: KLState) -> tuple[Any, ...]:
    # In float64 nothing is missing, but an operator always returns tensors, and no two alike.
    lows = [
        torch.zeros_like(cast(Tensor, state.kl)) if low is None else low
        for low in (state.lse1_low, state.lse2_low)
    ]
    return (state.kl, state.lse1, state.lse2, *lows)


def _run_attention_kl_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    q1, k1, q2, k2, *state = arguments[:9]
    wrt, *options = arguments[9:]
    gradients = api.attention_kl_backward(
        dkl,
        q1,
        k1,
        q2,
        k2,
        KLState(*state),
        wrt=wrt,
        **_keywords(options),
        deterministic=options[-1],
    )
    return list(gradients)


def _run_attention_kl_entropy(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any
) -> tuple[Any, ...]:
    state = api.attention_kl(q1, k1, q2, k2, **_keywords(options), return_entropy=True)
    return (*_state_tensors(state), state.entropy, state.cross_entropy)


def _run_attention_kl_given(*arguments: Any) -> tuple[Any, ...]:
    q1, k1, q2, k2, lse1, lse2, *options = arguments
    state = api.attention_kl(
        q1, k1, q2, k2, **_keywords(options), lse1=lse1, lse2=lse2, return_state=True
    )
    return (*_state_tensors(state), state.mass1)


def _run_attention_kl_ragged(*arguments: Any) -> tuple[Any, ...]:
    q1, k1, q2, k2, lse1, lse2 = arguments[:6]
    lengths, has_entropy, options = arguments[6:13], arguments[13], arguments[14:]
    keywords = _keywords(options) | dict(zip(_LENGTHS, lengths, strict=True))
    if has_entropy:
        keywords["return_entropy"] = True
    else:
        keywords |= {"lse1": lse1, "lse2": lse2, "return_state": True}
    state = api.attention_kl(q1, k1, q2, k2, **keywords)
    optional = (state.mass1, state.entropy, state.cross_entropy)
    nothing = (_nothing(state.kl) if x is None else x for x in optional)
    return (*_state_tensors(state), *nothing)


def _run_attention_kl_ragged_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    inputs_and_state, (given, wrt), lengths = arguments[:10], arguments[10:12], arguments[12:19]
    keywords = dict(zip(_LENGTHS, lengths, strict=True))
    return _all_gradients(dkl, inputs_and_state, given, wrt, arguments[19:], keywords)


def _nothing(like: Any) -> Tensor:
    """In place of a result that there is not."""
    nothing: Tensor = like.new_empty(0)
    return nothing


def _run_attention_kl_given_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    given, wrt, *options = arguments[10:]
    return _all_gradients(dkl, arguments[:10], given, wrt, options, {})


def _all_gradients(
    dkl: Tensor,
    inputs_and_state: tuple[Any, ...],
    given: Sequence[str],
    wrt: Sequence[str],
    options: Sequence[Any],
    lengths: dict[str, Any],
) -> list[Tensor]:
    """Of inputs and of given log-sum-exps."""
    q1, k1, q2, k2, *state = inputs_and_state
    kl, lse1, lse2, lse1_low, lse2_low, mass1 = state
    mass_of_given = mass1 if given else None
    of_inputs = [name for name in wrt if name in INPUTS]
    gradients: dict[str, Tensor] = {}
    for name in _LSE:
        if name in wrt:
            gradient = dkl * mass1 if name == "lse2" else -dkl * (kl + mass1)
            # No key, whatever dkl holds, or no more of P1 than underflows, as kl then does, too.
            gradients[name] = gradient.masked_fill(mass1 == 0, 0.0)
    if of_inputs:
        computed = api.attention_kl_backward(
            dkl,
            q1,
            k1,
            q2,
            k2,
            KLState(kl, lse1, lse2, lse1_low, lse2_low, mass_of_given, tuple(given)),
            wrt=of_inputs,
            **_keywords(options),
            **lengths,
            deterministic=options[-1],
        )
        gradients |= zip(of_inputs, computed, strict=True)
    return [gradients[name] for name in wrt]


# The operators: fake kernels.


def _fake_attention_kl(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any) -> Tensor:
    _check_fake((q1, k1, q2, k2), options)
    return _fake_rows(q1)


def _fake_attention_kl_state(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    _check_fake((q1, k1, q2, k2), options)
    return tuple(_fake_rows(q1) for _ in range(5))


def _fake_attention_kl_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = dict(zip(INPUTS, arguments[:4], strict=True))
    return [inputs[name].new_empty(inputs[name].shape) for name in arguments[9]]


def _fake_attention_kl_entropy(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    _check_fake((q1, k1, q2, k2), options)
    return tuple(_fake_rows(q1) for _ in range(7))


def _fake_attention_kl_given(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, lse1: Any, lse2: Any, *options: Any
) -> tuple[Tensor, ...]:
    _check_fake((q1, k1, q2, k2), options)
    return tuple(_fake_rows(q1) for _ in range(6))


def _fake_attention_kl_given_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    likes = dict(zip(INPUTS, arguments[:4], strict=True)) | dict.fromkeys(_LSE, arguments[4])
    return [likes[name].new_empty(likes[name].shape) for name in arguments[11]]


def _fake_attention_kl_ragged(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, given, lengths = arguments[:4], arguments[4:6], arguments[6:11]
    has_entropy = arguments[13]
    names = tuple(name for name, x in zip(LENGTHS, lengths, strict=True) if x is not None)
    ragged = describe_lengths(names, None, None)
    if ragged.is_packed:
        ragged = replace(ragged, num_sequences=_known(lengths[3].shape[0]) - 1)
    _check_fake(inputs, arguments[14:], ragged)
    rows = _row_shape(inputs[0], lengths[3])
    exist = _which_exist(given, has_entropy)
    return tuple(_fake_rows(inputs[0], rows if exists else (0,)) for exists in exist)


def _which_exist(given: Sequence[Any], has_entropy: bool) -> tuple[bool, ...]:
    """Which results of a ragged call are more than `_nothing`."""
    has_mass = any(x is not None for x in given)
    return (True,) * 5 + (has_mass, has_entropy, has_entropy)


def _known(length: Any) -> int:
    """A length, or any where it is not known yet."""
    return length if type(length) is int else 1


def _fake_attention_kl_ragged_backward(dkl: Tensor, *arguments: Any) -> list[Tensor]:
    return _fake_attention_kl_given_backward(dkl, *arguments[:12])


def _fake_rows(q1: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    dtype = torch.float64 if q1.device.type == "cpu" else torch.float32
    return q1.new_empty(q1.shape[:-1] if shape is None else shape, dtype=dtype)


def _check_fake(
    inputs: Sequence[Tensor], options: tuple[Any, ...], ragged: Ragged | None = None
) -> None:
    """Raise what the kernel would raise of lengths that are known."""
    device = inputs[0].device
    for name, value in zip(INPUTS, inputs, strict=True):
        # One tensor without memory makes the call a fake one, whatever the others are.
        if value.device != device:
            expected, got = f"a tensor on {device} like q1", f"one on {value.device}"
            raise ValueError(message(name, expected, got, f"move it to {device}"))
    keywords = _keywords(options)
    lengths = [length for x in inputs for length in (*x.shape, *x.stride())]
    lengths += [x for x in (*keywords["window"], keywords["q_offset"]) if x is not None]
    if not all(type(length) is int for length in lengths):
        return
    # A device without memory computes nothing, so it takes what any device takes.
    place = Device("cuda", inputs[0].get_device()) if device.type == "cuda" else Device("cpu")
    operands = (
        Operand(
            name,
            tuple(value.shape),
            tuple(value.stride()),
            str(value.dtype).removeprefix("torch."),
            place,
            _NO_ADDRESS,
        )
        for name, value in zip(INPUTS, inputs, strict=True)
    )
    for name in ("scale1", "scale2", "softcap1", "softcap2"):
        keywords[name] = keywords[name] if isinstance(keywords[name], float) else None
    problem = describe(*operands, **keywords, ragged=ragged)
    if device.type == "cuda":
        check_gpu(problem)


# The operators: rules for vmap. The new axis becomes the batch, or is folded into it.


def _vmap_attention_kl(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    *inputs, layout, deterministic = arguments
    inputs, options = inputs[:4], inputs[4:]
    rank, batch = _rank_and_batch(inputs[0], in_dims[0])
    folded = _fold_inputs(inputs, in_dims, info.batch_size)
    layout = _folded_layout(layout, rank)
    kl = _attention_kl(*folded, *options, layout, deterministic)
    return _unfold(kl, info.batch_size, batch), 0


def _vmap_attention_kl_state(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    return _vmap_rows(_attention_kl_state, info, in_dims, *arguments)


def _vmap_attention_kl_entropy(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    return _vmap_rows(_attention_kl_entropy, info, in_dims, *arguments)


def _vmap_rows(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    *inputs, layout, deterministic = arguments
    inputs, options = inputs[:4], inputs[4:]
    rank, batch = _rank_and_batch(inputs[0], in_dims[0])
    folded = _fold_inputs(inputs, in_dims, info.batch_size)
    layout = _folded_layout(layout, rank)
    state = operator(*folded, *options, layout, deterministic)
    return tuple(_unfold(part, info.batch_size, batch) for part in state), (0,) * len(state)


def _vmap_attention_kl_backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    dkl, *inputs = arguments[:5]
    state, (wrt, *options, layout, deterministic) = arguments[5:10], arguments[10:]
    rank, batch = _rank_and_batch(inputs[0], in_dims[1])
    rows = [
        _fold(value, in_dim, info.batch_size, rank)
        for value, in_dim in zip((dkl, *state), (in_dims[0], *in_dims[5:10]), strict=True)
    ]
    gradients = _attention_kl_backward(
        rows[0],
        *_fold_inputs(inputs, in_dims[1:5], info.batch_size),
        *(part.contiguous() for part in rows[1:]),
        wrt,
        *options,
        _folded_layout(layout, rank),
        deterministic,
    )
    return [_unfold(part, info.batch_size, batch) for part in gradients], [0] * len(gradients)


def _vmap_attention_kl_given(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    inputs, lse = arguments[:4], arguments[4:6]
    *most, layout, deterministic = arguments[6:]
    rank, batch = _rank_and_batch(inputs[0], in_dims[0])
    given = [
        None if value is None else _fold(value, in_dim, info.batch_size, rank)
        for value, in_dim in zip(lse, in_dims[4:6], strict=True)
    ]
    folded = _fold_inputs(inputs, in_dims, info.batch_size)
    options = (*most, _folded_layout(layout, rank), deterministic)
    state = _attention_kl_given(*folded, *given, *options)
    return tuple(_unfold(part, info.batch_size, batch) for part in state), (0,) * len(state)


def _vmap_attention_kl_given_backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    dkl, inputs, state = arguments[0], arguments[1:5], arguments[5:11]
    *most, layout, deterministic = arguments[11:]
    rank, batch = _rank_and_batch(inputs[0], in_dims[1])
    rows = [
        _fold(value, in_dim, info.batch_size, rank)
        for value, in_dim in zip((dkl, *state), (in_dims[0], *in_dims[5:11]), strict=True)
    ]
    gradients = _attention_kl_given_backward(
        rows[0],
        *_fold_inputs(inputs, in_dims[1:5], info.batch_size),
        *(part.contiguous() for part in rows[1:]),
        *most,
        _folded_layout(layout, rank),
        deterministic,
    )
    return [_unfold(part, info.batch_size, batch) for part in gradients], [0] * len(gradients)


def _vmap_attention_kl_ragged(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    inputs, lse, lengths = arguments[:4], arguments[4:6], arguments[6:11]
    *most, layout, deterministic = arguments[11:]
    _refuse_packed(lengths)
    rank, batch = _rank_and_batch(inputs[0], in_dims[0])
    given = [
        None if value is None else _fold(value, in_dim, info.batch_size, rank)
        for value, in_dim in zip(lse, in_dims[4:6], strict=True)
    ]
    state = _attention_kl_ragged(
        *_fold_inputs(inputs, in_dims, info.batch_size),
        *given,
        *_fold_lengths(lengths, in_dims[6:11], info.batch_size),
        *most,
        _folded_layout(layout, rank),
        deterministic,
    )
    # A result may have no rows and exist all the same.
    exist = _which_exist(lse, most[2])
    unfolded = (
        _unfold(part, info.batch_size, batch) if exists else part
        for part, exists in zip(state, exist, strict=True)
    )
    return tuple(unfolded), tuple(0 if exists else None for exists in exist)


def _vmap_attention_kl_ragged_backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    dkl, inputs, state = arguments[0], arguments[1:5], arguments[5:11]
    given, wrt, lengths = arguments[11], arguments[12], arguments[13:18]
    *most, layout, deterministic = arguments[18:]
    _refuse_packed(lengths)
    rank, batch = _rank_and_batch(inputs[0], in_dims[1])
    exist = (True,) * 6 + (bool(given),)  # mass1 comes last
    rows = [
        _fold(value, in_dim, info.batch_size, rank) if exists else value
        for value, in_dim, exists in zip(
            (dkl, *state), (in_dims[0], *in_dims[5:11]), exist, strict=True
        )
    ]
    gradients = _attention_kl_ragged_backward(
        rows[0],
        *_fold_inputs(inputs, in_dims[1:5], info.batch_size),
        *(part.contiguous() for part in rows[1:]),
        given,
        wrt,
        *_fold_lengths(lengths, in_dims[13:18], info.batch_size),
        *most,
        _folded_layout(layout, rank),
        deterministic,
    )
    return [_unfold(part, info.batch_size, batch) for part in gradients], [0] * len(gradients)


def _refuse_packed(lengths: Sequence[Tensor | None]) -> None:
    if lengths[-1] is not None:
        raise RuntimeError(
            "streamkl_cupy.torch.attention_kl: expected padded batches under torch.func.vmap, got "
            "packed sequences; call it once for each, or pack all of them."
        )


def _fold_lengths(lengths: Sequence[Tensor | None], in_dims: Any, size: int) -> list[Tensor | None]:
    return [
        None if value is None else _fold(value, in_dim, size, 4).contiguous()
        for value, in_dim in zip(lengths, in_dims, strict=True)
    ]


def _fold_inputs(inputs: Sequence[Tensor], in_dims: Any, size: int) -> list[Tensor]:
    folded = []
    for value, in_dim in zip(inputs, in_dims, strict=False):
        rank, _ = _rank_and_batch(value, in_dim)
        value = _fold(value, in_dim, size, rank)
        folded.append(value if value.stride(-1) == 1 else value.contiguous())
    return folded


def _fold(value: Tensor, in_dim: int | None, size: int, rank: int) -> Tensor:
    """Bring the new axis to the front; at rank 4 it is folded into the batch behind it."""
    if in_dim is None:
        value = value.unsqueeze(0).expand(size, *value.shape)
    else:
        value = value.movedim(in_dim, 0)
    return value.flatten(0, 1) if rank == 4 else value


def _unfold(value: Tensor, size: int, batch: int | None) -> Tensor:
    return value if batch is None else value.unflatten(0, (size, batch))


def _folded_layout(layout: str, rank: int) -> str:
    # Rank 3 has become rank 4: heads before length, whatever the layout.
    return layout if rank == 4 else "bhnd"


def _rank_and_batch(value: Tensor, in_dim: int | None) -> tuple[int, int | None]:
    """The rank without the new axis, and the batch where that axis is folded into it."""
    shape = list(value.shape)
    if in_dim is not None:
        del shape[in_dim]
    return len(shape), shape[0] if len(shape) == 4 else None


def _refuse_old_vmap(*_: Any) -> Any:
    """What ``is_grads_batched`` maps with, which knows no rules like those above."""
    raise RuntimeError(
        "streamkl_cupy.torch.attention_kl: expected torch.func.vmap or jacrev, got "
        "is_grads_batched=True or vectorize=True, which map in a way that operators cannot follow."
    )


# The operators: definitions.

_INPUTS = "Tensor q1, Tensor k1, Tensor q2, Tensor k2"
_STATE = "Tensor kl, Tensor lse1, Tensor lse2, Tensor lse1_low, Tensor lse2_low"
_OPTIONS = (
    "bool causal, SymInt? window_left, SymInt? window_right, SymInt? q_offset, "
    "float? scale1, float? scale2, float? softcap1, float? softcap2, "
    "str? precision, str layout, bool deterministic"
)

_RAGGED = (
    "Tensor? kv_starts, Tensor? kv_lens, Tensor? q_lens, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)

# Kept alive: with it the operators would go.
_library = torch.library.Library("streamkl_cupy", "DEF")


def _define(
    name: str,
    schema: str,
    kernel: Any,
    fake: Any,
    vmap: Any,
    keep: Any = None,
    backward: Any = _backward,
) -> Any:
    """Define an operator; return its only overload, which is what can be called fastest."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # Whatever the device is: `api` knows the devices, and words the errors about others.
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    qualified = f"streamkl_cupy::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_vmap(qualified, vmap, lib=_library)
    if keep is not None:
        torch.library.register_autograd(qualified, backward, setup_context=keep, lib=_library)
    return getattr(torch.ops.streamkl_cupy, name).default


_attention_kl = _define(
    "attention_kl",
    f"({_INPUTS}, {_OPTIONS}) -> Tensor",
    _run_attention_kl,
    _fake_attention_kl,
    _vmap_attention_kl,
    _keep_inputs,
)
_attention_kl_state = _define(
    "attention_kl_state",
    f"({_INPUTS}, {_OPTIONS}) -> ({_STATE})",
    _run_attention_kl_state,
    _fake_attention_kl_state,
    _vmap_attention_kl_state,
    _keep_state,
)
_attention_kl_backward = _define(
    "attention_kl_backward",
    f"(Tensor dkl, {_INPUTS}, {_STATE}, str[] wrt, {_OPTIONS}) -> Tensor[]",
    _run_attention_kl_backward,
    _fake_attention_kl_backward,
    _vmap_attention_kl_backward,
)
_attention_kl_entropy = _define(
    "attention_kl_entropy",
    f"({_INPUTS}, {_OPTIONS}) -> ({_STATE}, Tensor entropy, Tensor cross_entropy)",
    _run_attention_kl_entropy,
    _fake_attention_kl_entropy,
    _vmap_attention_kl_entropy,
    _keep_all_but_entropies,
    _entropy_backward,
)
_attention_kl_given = _define(
    "attention_kl_given",
    f"({_INPUTS}, Tensor? lse1, Tensor? lse2, {_OPTIONS}) -> ({_STATE}, Tensor mass1)",
    _run_attention_kl_given,
    _fake_attention_kl_given,
    _vmap_attention_kl_given,
    _keep_given,
    _given_backward,
)
_attention_kl_given_backward = _define(
    "attention_kl_given_backward",
    f"(Tensor dkl, {_INPUTS}, {_STATE}, Tensor mass1, str[] given, str[] wrt, {_OPTIONS})"
    " -> Tensor[]",
    _run_attention_kl_given_backward,
    _fake_attention_kl_given_backward,
    _vmap_attention_kl_given_backward,
)
_attention_kl_ragged = _define(
    "attention_kl_ragged",
    f"({_INPUTS}, Tensor? lse1, Tensor? lse2, {_RAGGED}, bool has_entropy, {_OPTIONS})"
    f" -> ({_STATE}, Tensor mass1, Tensor entropy, Tensor cross_entropy)",
    _run_attention_kl_ragged,
    _fake_attention_kl_ragged,
    _vmap_attention_kl_ragged,
    _keep_ragged,
    _ragged_backward,
)
_attention_kl_ragged_backward = _define(
    "attention_kl_ragged_backward",
    f"(Tensor dkl, {_INPUTS}, {_STATE}, Tensor mass1, str[] given, str[] wrt, {_RAGGED}, "
    f"{_OPTIONS}) -> Tensor[]",
    _run_attention_kl_ragged_backward,
    _fake_attention_kl_ragged_backward,
    _vmap_attention_kl_ragged_backward,
)
# The others are never reached with such tensors: only upstream gradients are mapped that way.
for _name in (
    "attention_kl_backward",
    "attention_kl_given_backward",
    "attention_kl_ragged_backward",
):
    _library.impl(_name, _refuse_old_vmap, "Batched")

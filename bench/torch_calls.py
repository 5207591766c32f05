"""What torch adds to a call: `streamkl_cupy.torch`, and the Triton peer behind one alike.

The peer's kernels stand behind operators that are defined as those of `streamkl_cupy.torch` are,
and an autograd function built the same way, so that what differs is the call below them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import streamkl_cupy as skl

from . import peers
from .case import Case
from .contender import Contender, Entry, Errors, Outputs, Work

OPERATOR, AUTOGRAD, TRAINING = "torch operator", "torch autograd", "torch autograd and backward"

# Whose host time each call is compared with, by the names of the table.
MEASURED_BY = {
    "ours, kl alone: attention_kl": "triton, bare launch",
    f"ours, {OPERATOR}": f"triton, {OPERATOR}",
    f"ours, {AUTOGRAD}": f"triton, {AUTOGRAD}",
    f"ours, {TRAINING}": f"triton, {TRAINING}",
}

Check = Callable[[Outputs], Errors]


def entries(case: Case, *, with_triton: bool) -> list[Entry]:
    """Each way through torch, of this package and of the peer."""
    found = []
    for way in (OPERATOR, AUTOGRAD, TRAINING):
        found.append(Entry(f"ours, {way}", partial(_ours, case, way), ours=True))
        if with_triton:
            found.append(Entry(f"triton, {way}", partial(_triton, case, way)))
    return [_bare_triton_entry(case), *found] if with_triton else found


def kl_entry(case: Case) -> Entry:
    """The public function on torch tensors, the divergences alone."""

    def make() -> Contender:
        return Contender(
            name="attention_kl",
            call=lambda: (skl.attention_kl(*case.inputs, causal=case.workload.causal),),
            check=case.check_forward,
            tolerances=case.tolerances_forward,
            work=case.forward_work,
            ours=True,
        )

    return Entry("ours, kl alone", make, ours=True)


def _bare_triton_entry(case: Case) -> Entry:
    """The peer's launch into outputs that are there: the least that Triton can cost."""

    def make() -> Contender:
        triton_kl = peers.load("triton").triton_kl
        rows = (case.workload.heads, case.workload.num_queries)
        outputs = tuple(torch.empty(rows, device=case.device) for _ in range(3))
        launch = triton_kl.prepared_forward(
            case.inputs,
            outputs,
            causal=case.workload.causal,
            scale1=case.scale1,
            scale2=case.scale2,
            config=triton_kl.FORWARD_CONFIGS[-2],
        )

        def call() -> Outputs:
            launch()
            return outputs

        return Contender(
            name="triton, bare launch",
            call=call,
            check=case.check_forward,
            tolerances=case.tolerances_forward,
            work=case.forward_work,
        )

    return Entry("triton, bare launch", make)


def _ours(case: Case, way: str) -> Contender:
    from streamkl_cupy.torch import attention_kl

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        kl: torch.Tensor = attention_kl(*inputs, causal=case.workload.causal)
        return kl

    return _contender(f"ours, {way}", case, way, attend, ours=True)


def _triton(case: Case, way: str) -> Contender:
    attend = _triton_operators()
    options = (case.workload.causal, case.scale1, case.scale2, case.workload.setting)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return attend(*inputs, *options)

    return _contender(f"triton, {way}", case, way, call)


def _contender(
    name: str, case: Case, way: str, attend: Callable[..., torch.Tensor], *, ours: bool = False
) -> Contender:
    """A contender of a function from four tensors to kl."""
    inputs = dict(zip(("q1", "k1", "q2", "k2"), case.inputs, strict=True))
    call: Callable[[], Outputs]
    check: Check
    if way == OPERATOR:

        def call() -> Outputs:
            return (attend(*inputs.values()),)

    else:
        trained = [inputs[name].detach().requires_grad_() for name in case.wrt]
        inputs |= zip(case.wrt, trained, strict=True)
        if way == AUTOGRAD:

            def call() -> Outputs:
                return (attend(*inputs.values()),)

        else:

            def call() -> Outputs:
                return torch.autograd.grad(attend(*inputs.values()), trained, case.dkl)

    def check(outputs: Outputs) -> Errors:
        results = tuple(output.detach() for output in outputs)
        return case.check_backward(results) if way == TRAINING else case.check_forward(results)

    work: Work = case.backward_work if way == TRAINING else case.forward_work
    return Contender(
        name=name,
        call=call,
        check=check,
        tolerances=case.tolerances_backward if way == TRAINING else case.tolerances_forward,
        work=work,
        ours=ours,
    )


@cache
def _triton_operators() -> Callable[..., torch.Tensor]:
    """The peer as a differentiable function of ``q1 k1 q2 k2 causal scale1 scale2 setting``."""
    triton_kl = peers.load("triton").triton_kl
    library = torch.library.Library("streamkl_bench", "DEF")
    inputs = "Tensor q1, Tensor k1, Tensor q2, Tensor k2"
    options = "bool causal, float scale1, float scale2"

    def run_forward(*arguments: Any) -> Any:
        *tensors, causal, scale1, scale2 = arguments
        config = triton_kl.FORWARD_CONFIGS[-2]
        return triton_kl.forward(
            *tensors, causal=causal, scale1=scale1, scale2=scale2, config=config
        )

    def run_backward(*arguments: Any) -> Any:
        *tensors, causal, scale1, scale2, setting = arguments
        return triton_kl.backward(
            *tensors,
            setting=setting,
            fused=False,
            causal=causal,
            scale1=scale1,
            scale2=scale2,
            configs=(triton_kl.DQ_CONFIGS[-1], triton_kl.DK_CONFIGS[-1]),
        )

    library.define(f"kl({inputs}, {options}) -> (Tensor, Tensor, Tensor)")
    library.define(
        f"kl_backward(Tensor dkl, {inputs}, Tensor kl, Tensor lse1, Tensor lse2, {options}, "
        "int setting) -> (Tensor, Tensor)"
    )
    library.impl("kl", run_forward, "CompositeExplicitAutograd")
    library.impl("kl_backward", run_backward, "CompositeExplicitAutograd")
    forward_operator = torch.ops.streamkl_bench.kl.default
    backward_operator = torch.ops.streamkl_bench.kl_backward.default

    class TritonKL(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *tensors, causal, scale1, scale2, setting = arguments
            state = forward_operator(*tensors, causal, scale1, scale2)
            ctx.save_for_backward(*tensors, *state)
            ctx.options = (causal, scale1, scale2, setting)
            return state[0]

        @staticmethod
        def backward(ctx: Any, dkl: torch.Tensor) -> Any:
            gradients = backward_operator(dkl, *ctx.saved_tensors, *ctx.options)
            before = (None, None) if ctx.options[-1] == 1 else ()
            return (*before, *gradients, *(None,) * (6 - len(before)))

    def attend(*arguments: Any) -> torch.Tensor:
        # The library is named here so that it lives as long as this function.
        assert library is not None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:4]):
            kl: torch.Tensor = TritonKL.apply(*arguments)
            return kl
        kl = forward_operator(*arguments[:-1])[0]
        return kl

    return attend

"""The kernels of this package as contenders, called through the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import streamkl_cupy as skl
from streamkl_cupy import launch, plan, problem

from .case import Case
from .contender import Contender, Entry, Outputs

Overrides = Mapping[str, Any]


def describe(case: Case) -> problem.Problem:
    """The problem that the public functions would plan for the inputs of a case."""
    device = problem.Device("cuda", case.q1.device.index or 0)
    operands = [
        problem.Operand(
            name=name,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            dtype=case.workload.dtype,
            device=device,
            pointer=tensor.data_ptr(),
        )
        for name, tensor in zip(problem.INPUTS, case.inputs, strict=True)
    ]
    return problem.describe(
        *operands, causal=case.workload.causal, scale1=case.scale1, scale2=case.scale2
    )


def forward_plan(case: Case) -> Any:
    """The plan of the forward."""
    return plan.forward(describe(case), launch.device_facts(case.q1.device.index or 0))


def backward_plan(case: Case, strategy: str, deterministic: bool) -> Any:
    """The plan of the backward."""
    facts = launch.device_facts(case.q1.device.index or 0)
    return plan.backward(
        describe(case), facts, case.wrt, strategy=strategy, deterministic=deterministic
    )


def kernel_names(chosen: Any) -> str:
    """The kernels of a plan, the small ones that prepare, merge and cast left out."""
    helpers = ("backward_prepare", "backward_finish", "reduce_splits")
    names = dict.fromkeys(kernel.kernel for kernel in chosen.kernels)
    return " + ".join(name for name in names if name not in helpers)


def portable_forward_entry(case: Case) -> Entry:
    """The portable kernel, which a card may have a faster one than."""
    return forward_entry(case, label=", portable", overrides={"forward_kernel": "forward_sm80"})


def unshared_forward_entry(case: Case) -> Entry:
    """The tile of many queries, and no keys split: neither among blocks nor among warps."""
    facts = launch.device_facts(case.q1.device.index or 0)
    dims = plan.bucket(case.workload.head_dim1), plan.bucket(case.workload.head_dim2)
    tile = plan.forward_tile(*dims, plan.FEW_QUERIES + 1, facts)
    overrides = {"num_splits": 1, "forward_tile": tile}
    return forward_entry(case, label=", keys not shared", overrides=overrides)


def forward_state(case: Case) -> skl.KLState:
    """One call of the forward."""
    return skl.attention_kl(*case.inputs, causal=case.workload.causal, return_state=True)


def forward_entry(case: Case, *, label: str = "", overrides: Overrides | None = None) -> Entry:
    """The forward that the plan chooses, or chooses under ``plan.override(**overrides)``."""

    def context() -> AbstractContextManager[Any]:
        return plan.override(**overrides) if overrides else nullcontext()

    def call() -> Outputs:
        with context():
            state = forward_state(case)
        return state.kl, state.lse1, state.lse2

    def make() -> Contender:
        with context():
            chosen = forward_plan(case)
        return Contender(
            name=kernel_names(chosen) + label,
            call=call,
            check=case.check_forward,
            tolerances=case.tolerances_forward,
            work=case.forward_work,
            detail=lambda: chosen.name,
            ours=True,
        )

    return Entry(f"ours{label}", make, ours=True)


def backward_call(case: Case, strategy: str, deterministic: bool) -> Callable[[], Outputs]:
    """The backward from a state that is computed once, here."""
    state = forward_state(case)

    def call() -> Outputs:
        gradients = skl.attention_kl_backward(
            case.dkl,
            *case.inputs,
            state,
            wrt=case.wrt,
            causal=case.workload.causal,
            strategy=strategy,
            deterministic=deterministic,
        )
        return tuple(gradients)

    return call


def backward_entry(case: Case, strategy: str) -> Entry:
    """The backward by ``"separate"`` kernels (the deterministic pair) or the ``"fused"`` one."""
    deterministic = strategy == "separate"

    def make() -> Contender:
        chosen = backward_plan(case, strategy, deterministic)
        return Contender(
            name=kernel_names(chosen),
            call=backward_call(case, strategy, deterministic),
            check=case.check_backward,
            tolerances=case.tolerances_backward,
            work=case.backward_work,
            detail=lambda: chosen.name,
            ours=True,
        )

    return Entry(f"ours, {strategy}", make, ours=True)


def cupy_call(case: Case) -> Callable[[], Outputs]:
    """The forward on CuPy arrays that share the memory of the inputs."""
    import cupy

    arrays = [cupy.from_dlpack(tensor) for tensor in case.inputs]

    def call() -> Outputs:
        return (skl.attention_kl(*arrays, causal=case.workload.causal),)

    return call


def cupy_check(case: Case, outputs: Outputs) -> dict[str, float]:
    """Errors of what `cupy_call` returned."""
    return case.check_forward(tuple(torch.from_dlpack(x) for x in outputs))

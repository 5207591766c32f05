"""The kernels of this package as contenders, called through the public functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import streamkl_cupy as skl
from streamkl_cupy import catalogue, launch, plan, problem, tiling, tune

from .case import Case
from .contender import Contender, Entry, Errors, Outputs, Work
from .workloads import Workload

Overrides = Mapping[str, Any]


def problem_of(workload: Workload) -> problem.Problem:
    """The problem of a workload, without its data."""
    whole = problem.contiguous(
        workload.dtype,
        batch=1,
        num_heads=workload.heads,
        num_key_heads1=workload.key_heads,
        num_key_heads2=workload.key_heads,
        num_queries=workload.num_queries,
        num_keys=workload.num_keys,
        head_dim1=workload.head_dim1,
        head_dim2=workload.head_dim2,
        **workload.mask,
        **workload.softcaps,
    )
    return replace(whole, ragged=_ragged(workload)) if workload.lengths else whole


def _ragged(workload: Workload) -> problem.Ragged | None:
    if not workload.lengths:
        return None
    longest = max(workload.lengths)
    return problem.Ragged(problem.CU_SEQLENS, len(workload.lengths), longest, longest)


def gradients_of(workload: Workload) -> tuple[str, str]:
    """Names of the inputs that get gradients."""
    return ("q2", "k2") if workload.setting == 1 else ("q1", "k1")


def compile_ahead(
    workloads: Iterable[Workload],
    strategies: Iterable[str],
    overrides: Iterable[Overrides] = ({},),
) -> None:
    """Compile what the plans of workloads need, many kernels at a time.

    Parameters
    ----------
    workloads
        The problems.
    strategies
        Of the backward; none for the forward alone.
    overrides
        Of the plan: the kernels under each are compiled.
    """
    facts = launch.device_facts(torch.cuda.current_device())
    strategies = tuple(strategies)
    plans: list[tune.Plan] = []
    for workload, changes in itertools.product(tuple(workloads), tuple(overrides)):
        described, wrt = problem_of(workload), gradients_of(workload)
        with plan.override(**changes):
            plans.append(plan.forward(described, facts))
            # There is no fused kernel of float32.
            known = [one for one in strategies if workload.dtype != "float32" or one != "fused"]
            plans += (plan.backward(described, facts, wrt, strategy=one) for one in known)
            if known:
                plans.append(plan.backward(described, facts, wrt, deterministic=True))
    tune.compile_kernels(tune.kernels_of(plans), facts.arch)


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
        *operands,
        **case.workload.mask,
        **case.workload.softcaps,
        scale1=case.scale1,
        scale2=case.scale2,
        ragged=_ragged(case.workload),
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
    helpers = ("backward_prepare", "backward_finish", "reduce_splits", "key_table")
    names = dict.fromkeys(kernel.kernel for kernel in chosen.kernels)
    return " + ".join(name for name in names if name not in helpers)


def portable_backward_entry(case: Case, strategy: str) -> Entry:
    """The portable kernels of a strategy."""
    kernel = "backward_fused_sm80" if strategy == "fused" else "backward_dq_sm80"
    return backward_entry(
        case,
        strategy,
        name=f"ours, portable, {strategy}",
        label=", portable",
        overrides={"backward_kernel": kernel},
    )


def deterministic_backward_entry(case: Case) -> Entry:
    """What the plan chooses where the last bits must be the same in every run."""
    return backward_entry(
        case, "auto", deterministic=True, name="ours, deterministic", label=", deterministic"
    )


def portable_forward_entry(case: Case) -> Entry:
    """The portable kernel, which a card may have a faster one than."""
    return forward_entry(case, label=", portable", overrides={"forward_kernel": "forward_sm80"})


def is_portable(case: Case) -> bool:
    """Whether the plan chooses the portable kernel by itself."""
    return kernel_names(forward_plan(case)) == "forward_sm80"


def whole_forward_entry(case: Case) -> Entry:
    """The plan's kernel with the keys of a row in one block."""
    return forward_entry(case, label=", no split", overrides={"num_splits": 1})


def unshared_forward_entry(case: Case) -> Entry:
    """The tile of many queries, and no keys split: neither among blocks nor among warps."""
    facts = launch.device_facts(case.q1.device.index or 0)
    dims = tiling.bucket(case.workload.head_dim1), tiling.bucket(case.workload.head_dim2)
    tile = tiling.forward_tile(
        *dims, tiling.FEW_QUERIES + 1, tiling.PLAIN, facts.shared_memory_per_block
    )
    overrides = {"num_splits": 1, "forward_tile": tile}
    return forward_entry(case, label=", keys not shared", overrides=overrides)


def split_entries(case: Case) -> list[Entry]:
    """The plan's kernel and tile with the other numbers of splits that the tuner would try."""
    own = forward_plan(case)
    facts = launch.device_facts(case.q1.device.index or 0)
    numbers = sorted(
        made.num_splits
        for made in catalogue.forward_candidates(describe(case), facts)
        if made.tile == own.tile and made.num_splits not in (1, own.num_splits)
    )
    return [
        forward_entry(case, label=f", {number} splits", overrides={"num_splits": number})
        for number in numbers
    ]


def forward_state(case: Case) -> skl.KLState:
    """One call of the forward."""
    options = {**case.mask, **case.workload.softcaps}
    return skl.attention_kl(*case.inputs, **options, return_state=True)


def forward_call(case: Case) -> Callable[[], Outputs]:
    """One call of the forward, its three public outputs."""

    def call() -> Outputs:
        state = forward_state(case)
        return state.kl, state.lse1, state.lse2

    return call


def forward_entry(case: Case, *, label: str = "", overrides: Overrides | None = None) -> Entry:
    """The forward that the plan chooses, or chooses under ``plan.override(**overrides)``."""

    def context() -> AbstractContextManager[Any]:
        return plan.override(**overrides) if overrides else nullcontext()

    whatever = forward_call(case)

    def call() -> Outputs:
        with context():
            return whatever()

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
    """The backward from the state of the case, or from one that is computed once, here."""
    state = forward_state(case) if case.state is None else case.state

    def call() -> Outputs:
        gradients = skl.attention_kl_backward(
            case.dkl,
            *case.inputs,
            state,
            wrt=case.wrt,
            **case.mask,
            **case.workload.softcaps,
            strategy=strategy,
            deterministic=deterministic,
        )
        return tuple(gradients)

    return call


def backward_entry(
    case: Case,
    strategy: str,
    *,
    label: str = "",
    name: str | None = None,
    deterministic: bool | None = None,
    overrides: Overrides | None = None,
) -> Entry:
    """The backward by ``"separate"`` kernels, by the ``"fused"`` one, or ``"auto"``; under
    ``plan.override(**overrides)`` where there are any."""
    is_deterministic = strategy == "separate" if deterministic is None else deterministic

    def context() -> AbstractContextManager[Any]:
        return plan.override(**overrides) if overrides else nullcontext()

    def make() -> Contender:
        with context():
            chosen = backward_plan(case, strategy, is_deterministic)
        whatever = backward_call(case, strategy, is_deterministic)

        def call() -> Outputs:
            with context():
                return whatever()

        return Contender(
            name=kernel_names(chosen) + label,
            call=call,
            check=case.check_backward,
            tolerances=case.tolerances_backward,
            work=case.backward_work,
            detail=lambda: chosen.name,
            ours=True,
        )

    if name is None:
        name = f"ours{label}" if strategy == "auto" else f"ours, {strategy}"
    return Entry(name, make, ours=True)


def both_sides_entry(
    cases: tuple[Case, Case],
    strategy: str = "auto",
    *,
    name: str = "ours, all four",
    label: str = ", all four",
    overrides: Overrides | None = None,
) -> Entry:
    """All four gradients in one call; the cases are the two settings of one problem. Under
    ``plan.override(**overrides)`` where there are any."""
    first, second = cases
    work = Work(first.backward_work.amount + second.backward_work.amount, first.backward_work.unit)
    wrt = (*first.wrt, *second.wrt)

    def check(outputs: Outputs) -> Errors:
        errors: Errors = {}
        for case, gradients in ((first, outputs[:2]), (second, outputs[2:])):
            side = case.wrt[0][1]
            errors |= {name + side: e for name, e in case.check_backward(gradients).items()}
        return errors

    def make() -> Contender:
        facts = launch.device_facts(first.q1.device.index or 0)
        with plan.override(**(overrides or {})):
            chosen = plan.backward(describe(first), facts, wrt, strategy=strategy)
        state = forward_state(first)

        def call() -> Outputs:
            with plan.override(**overrides) if overrides else nullcontext():
                gradients = skl.attention_kl_backward(
                    first.dkl,
                    *first.inputs,
                    state,
                    wrt=wrt,
                    causal=first.workload.causal,
                    strategy=strategy,
                )
            return tuple(gradients)

        tolerance = max(first.tolerances_backward.values())
        return Contender(
            name=kernel_names(chosen) + label,
            call=call,
            check=check,
            tolerances=dict.fromkeys(("dq1", "dk1", "dq2", "dk2"), tolerance),
            work=work,
            detail=lambda: chosen.name,
            ours=True,
        )

    return Entry(name, make, ours=True)


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

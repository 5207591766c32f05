"""The Triton kernels of `triton_kl` as contenders."""

from __future__ import annotations

from typing import Any

from ..case import Case
from ..contender import Contender, Outputs, SkipError
from . import triton_kl


def require(case: Case) -> None:
    """Raise `SkipError` for what the kernels do not do."""
    if case.workload.group > 1:
        raise SkipError("shared keys")
    for head_dim in (case.workload.head_dim1, case.workload.head_dim2):
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise SkipError(f"head dim {head_dim} is not a power of two from 16 up")
    if case.workload.heads > 65535:
        raise SkipError("more than 65535 heads")


def _tiles(*kernels: str) -> str:
    """The tiles that the tuning chose for the call just made."""
    return ", ".join(f"{kernel} {triton_kl.latest_config(kernel)}" for kernel in kernels)


def forward(name: str, case: Case) -> Contender:
    """The forward, tuned over its list of tiles."""
    require(case)
    options = _options(case)
    return Contender(
        name=name,
        call=lambda: triton_kl.forward(*case.inputs, **options),
        check=case.check_forward,
        tolerances=case.tolerances_forward,
        work=case.forward_work,
        detail=lambda: _tiles("forward"),
    )


def backward_separate(name: str, case: Case) -> Contender:
    """A kernel for dQ and one for dK."""
    return _backward(f"{name}, separate", case, fused=False)


def backward_fused(name: str, case: Case) -> Contender:
    """One kernel with atomics, the zeroing and the cast of its dQ included."""
    return _backward(f"{name}, fused", case, fused=True)


def _backward(name: str, case: Case, *, fused: bool) -> Contender:
    require(case)
    options = _options(case)
    # Its own forward supplies the row statistics; that one need not be tuned.
    state = triton_kl.forward(*case.inputs, **options, config=triton_kl.FORWARD_CONFIGS[-2])

    def call() -> Outputs:
        return triton_kl.backward(
            case.dkl, *case.inputs, *state, setting=case.workload.setting, fused=fused, **options
        )

    return Contender(
        name=name,
        call=call,
        check=case.check_backward,
        tolerances=case.tolerances_backward,
        work=case.backward_work,
        detail=lambda: _tiles("fused") if fused else _tiles("dq", "dk"),
    )


def _options(case: Case) -> dict[str, Any]:
    return {
        "causal": case.workload.causal,
        "scale1": case.scale1,
        "scale2": case.scale2,
    }

"""What the card and its libraries can do: cuBLAS, bandwidths, softmax attention through PyTorch.

None of these computes the KL divergence; they say how fast products and memory are in the same
run. Attention counts its own products: 4 * pairs * d forward, 10 * pairs * d backward.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..case import GRADIENT_TOLERANCES, Case
from ..contender import Contender, Errors, Outputs, SkipError, Work
from . import ATTENTION

MATMUL_SIZE = 8192
COPY_BYTES = 1 << 31
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def forward(name: str, case: Case) -> Contender:
    """A yardstick of the forward."""
    if name == "cublas":
        return _cublas("bf16", case)
    if name.startswith("cublas, "):
        return _cublas(name.removeprefix("cublas, "), case)
    if name == "copy":
        return _copy(case)
    if name == "read":
        return _read(case)
    return _attention_forward(name, case)


def backward(name: str, case: Case) -> Contender:
    """A yardstick of the backward; products and bandwidths are the same there."""
    return _attention_backward(name, case) if name in _BACKENDS else forward(name, case)


def _relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def _random(shape: tuple[int, ...], dtype: torch.dtype, case: Case) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=case.device)


def _cublas(precision: str, case: Case) -> Contender:
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (_random(shape, dtype, case) for _ in range(2))

    def call() -> Outputs:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            return (torch.matmul(a, b),)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    def check(outputs: Outputs) -> Errors:
        rows = torch.arange(0, MATMUL_SIZE, MATMUL_SIZE // 64, device=case.device)
        return {"c": _relative(outputs[0][rows], a[rows].double() @ b.double())}

    return Contender(
        name=f"cuBLAS {precision} {MATMUL_SIZE}^3",
        call=call,
        check=check,
        tolerances={"c": 1e-2},
        work=Work(2.0 * MATMUL_SIZE**3, "TFLOP/s"),
    )


def _copy(case: Case) -> Contender:
    source = _random((COPY_BYTES // 4,), torch.float32, case)
    target = torch.full_like(source, float("nan"))
    return Contender(
        name="copy (bytes read + written)",
        call=lambda: (target.copy_(source),),
        check=lambda outputs: {"x": float((outputs[0] - source).abs().max())},
        tolerances={"x": 1e-30},
        work=Work(2.0 * COPY_BYTES, "TB/s"),
    )


def _read(case: Case) -> Contender:
    source = _random((COPY_BYTES // 4,), torch.float32, case)

    def check(outputs: Outputs) -> Errors:
        scale = source.abs().sum(dtype=torch.float64)
        return {"sum": float((outputs[0] - source.sum(dtype=torch.float64)).abs() / scale)}

    return Contender(
        name="read only (sum)",
        call=lambda: (source.sum(),),
        check=check,
        tolerances={"sum": 1e-5},
        work=Work(float(COPY_BYTES), "TB/s"),
    )


def _attention_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k and v as ``(1, BH, N, D)``; v are the keys of side 2."""
    workload = case.workload
    if workload.group > 1:
        raise SkipError("attention is not measured with shared keys")
    if workload.head_dim1 != workload.head_dim2:
        raise SkipError("attention is not measured with two head dims")
    if workload.causal and workload.num_queries != workload.num_keys:
        raise SkipError("the mask of PyTorch is not aligned to the bottom right")
    return case.q1[None], case.k1[None], case.k2[None]


def _attend(name: str, case: Case, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with sdpa_kernel(_BACKENDS[name]):
        q, k, v = inputs
        return scaled_dot_product_attention(q, k, v, is_causal=case.workload.causal)


def _probabilities(case: Case, head: int) -> torch.Tensor:
    """float64 probabilities of side 1, on the sampled rows of a head."""
    s = case.q1[head, case.rows].double() @ case.k1[head].double().T * case.scale1
    if case.workload.causal:
        hidden = torch.arange(s.shape[1], device=s.device) > case.rows[:, None]
        s = s.masked_fill(hidden, float("-inf"))
    return s.softmax(-1)


def _attention_forward(name: str, case: Case) -> Contender:
    inputs = _attention_inputs(case)

    def check(outputs: Outputs) -> Errors:
        ours = torch.stack([outputs[0][0, head, case.rows] for head in case.heads])
        reference = [_probabilities(case, head) @ case.k2[head].double() for head in case.heads]
        return {"o": _relative(ours, torch.stack(reference))}

    return Contender(
        name=ATTENTION[name],
        call=lambda: (_attend(name, case, inputs),),
        check=check,
        tolerances={"o": 1e-2},
        work=Work(case.workload.attention_forward_flops, "TFLOP/s"),
    )


def _attention_backward(name: str, case: Case) -> Contender:
    inputs = tuple(x.detach().requires_grad_() for x in _attention_inputs(case))
    output = _attend(name, case, inputs)
    upstream = torch.randn_like(output)

    def call() -> Outputs:
        gradients: Outputs = torch.autograd.grad(output, inputs, upstream, retain_graph=True)
        return gradients

    def check(outputs: Outputs) -> Errors:
        """dQ alone: a wrong dK or dV would make a yardstick, not a peer, too fast."""
        references = []
        for head in case.heads:
            p = _probabilities(case, head)
            dp = upstream[0, head, case.rows].double() @ case.k2[head].double().T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            references.append(ds @ case.k1[head].double() * case.scale1)
        ours = torch.stack([outputs[0][0, head, case.rows] for head in case.heads])
        return {"dq": _relative(ours, torch.stack(references))}

    return Contender(
        name=ATTENTION[name],
        call=call,
        check=check,
        tolerances={"dq": GRADIENT_TOLERANCES[case.workload.dtype]},
        work=Work(case.workload.attention_backward_flops, "TFLOP/s"),
    )

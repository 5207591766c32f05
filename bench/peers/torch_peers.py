"""The same quantity in PyTorch operations: eager, compiled, and eager in blocks of rows; a
compiled backward that finds both distributions in memory.

The products take the inputs as they are (bfloat16, float16) and give float32 logits; all else is
float32. The logits are materialised: whole by ``eager`` and ``compile``, for 1024 query rows at
a time by ``chunked``. The backward computes the probabilities again from the row statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..case import Case
from ..contender import Contender, Outputs, SkipError

CHUNK_ROWS = 1024
# Finite, so that a hidden key gives 0 * 0 and not 0 * nan.
_HIDDEN = -1e30


def _logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled logits in float32."""
    if q.is_cuda:
        return torch.bmm(q, k.mT, out_dtype=torch.float32) * scale
    return torch.bmm(q.float(), k.float().mT) * scale


def _hidden(num_queries: int, num_keys: int, first_row: int, offset: int, like: Any) -> Any:
    """Whether query ``first_row + i`` must not see key j."""
    rows = torch.arange(first_row, first_row + num_queries, device=like.device)
    return torch.arange(num_keys, device=like.device) > rows[:, None] + offset


def forward_block(
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    scale1: float,
    scale2: float,
    hidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """kl, lse1 and lse2 of a block of query rows, textbook style."""
    s1, s2 = _logits(q1, k1, scale1), _logits(q2, k2, scale2)
    if hidden is not None:
        s1, s2 = s1.masked_fill(hidden, _HIDDEN), s2.masked_fill(hidden, _HIDDEN)
    lse1, lse2 = s1.logsumexp(-1), s2.logsumexp(-1)
    log1, log2 = s1 - lse1[..., None], s2 - lse2[..., None]
    return (log1.exp() * (log1 - log2)).sum(-1), lse1, lse2


def logit_gradient(
    dkl: torch.Tensor,
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale1: float,
    scale2: float,
    hidden: torch.Tensor | None,
    setting: int,
) -> torch.Tensor:
    """Gradient of the logits of the trained side, in the dtype of the inputs."""
    kl, lse1, lse2 = state
    s1, s2 = _logits(q1, k1, scale1), _logits(q2, k2, scale2)
    if hidden is not None:
        s1, s2 = s1.masked_fill(hidden, _HIDDEN), s2.masked_fill(hidden, _HIDDEN)
    p1 = (s1 - lse1[..., None]).exp()
    if setting == 1:
        ds = (s2 - lse2[..., None]).exp() - p1
    else:
        ds = p1 * (s1 - s2 - (kl - lse2 + lse1)[..., None])
    return (ds * dkl[..., None]).to(q1.dtype)


def _forward_whole(case: Case, block: Callable[..., Any]) -> Callable[[], Outputs]:
    workload = case.workload
    offset = workload.num_keys - workload.num_queries

    def call() -> Outputs:
        hidden = None
        if workload.causal:
            hidden = _hidden(workload.num_queries, workload.num_keys, 0, offset, case.q1)
        outputs: Outputs = block(*case.inputs, case.scale1, case.scale2, hidden)
        return outputs

    return call


def _chunks(case: Case) -> list[tuple[slice, slice, Any]]:
    """Query rows, the keys that any of them sees, and what is hidden of these."""
    workload = case.workload
    offset = workload.num_keys - workload.num_queries
    chunks = []
    for start in range(0, workload.num_queries, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, workload.num_queries)
        num_keys, hidden = workload.num_keys, None
        if workload.causal:
            num_keys = min(num_keys, stop + offset)
            hidden = _hidden(stop - start, num_keys, start, offset, case.q1)
        chunks.append((slice(start, stop), slice(0, num_keys), hidden))
    return chunks


def _forward_chunked(case: Case) -> Outputs:
    parts = [
        forward_block(
            case.q1[:, rows],
            case.k1[:, keys],
            case.q2[:, rows],
            case.k2[:, keys],
            case.scale1,
            case.scale2,
            hidden,
        )
        for rows, keys, hidden in _chunks(case)
    ]
    return tuple(torch.cat(column, dim=1) for column in zip(*parts, strict=True))


def _backward_chunked(case: Case, state: tuple[Any, Any, Any]) -> Outputs:
    q_t, k_t, scale_t = case.trained
    dq = torch.empty_like(q_t)
    dk = torch.zeros_like(k_t, dtype=torch.float32)
    for rows, keys, hidden in _chunks(case):
        ds = logit_gradient(
            case.dkl[:, rows],
            case.q1[:, rows],
            case.k1[:, keys],
            case.q2[:, rows],
            case.k2[:, keys],
            (state[0][:, rows], state[1][:, rows], state[2][:, rows]),
            case.scale1,
            case.scale2,
            hidden,
            case.workload.setting,
        )
        dq[:, rows] = torch.bmm(ds, k_t[:, keys]) * scale_t
        dk[:, keys] += torch.bmm(ds.mT, q_t[:, rows])
    return dq, (dk * scale_t).to(k_t.dtype)


def _backward_whole(case: Case, state: tuple[Any, Any, Any], gradient: Any) -> Outputs:
    q_t, k_t, scale_t = case.trained
    workload = case.workload
    hidden = None
    if workload.causal:
        offset = workload.num_keys - workload.num_queries
        hidden = _hidden(workload.num_queries, workload.num_keys, 0, offset, case.q1)
    ds = gradient(case.dkl, *case.inputs, state, case.scale1, case.scale2, hidden, workload.setting)
    return torch.bmm(ds, k_t) * scale_t, torch.bmm(ds.mT, q_t) * scale_t


def _require(case: Case) -> None:
    if case.workload.group > 1:
        raise SkipError("shared keys are left out of this peer")
    if case.workload.causal and case.workload.num_queries > case.workload.num_keys:
        raise SkipError("rows without keys are left out of this peer")


def forward(name: str, case: Case) -> Contender:
    """The forward of ``eager``, ``compile`` or ``chunked``."""
    _require(case)
    if name == "kept":
        raise SkipError("kept distributions are of the backward")
    if name == "chunked":

        def call() -> Outputs:
            return _forward_chunked(case)

    else:
        call = _forward_whole(
            case, torch.compile(forward_block) if name == "compile" else forward_block
        )
    return Contender(
        name=f"torch {name}",
        call=call,
        check=case.check_forward,
        tolerances=case.tolerances_forward,
        work=case.forward_work,
        detail=lambda: f"{CHUNK_ROWS} rows" if name == "chunked" else "",
    )


def kept_backward(
    dkl: torch.Tensor, q: torch.Tensor, k: torch.Tensor, p1: torch.Tensor, p2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ2 and dK2 before their scale, from distributions that a forward has left in memory."""
    ds = ((p2.float() - p1.float()) * dkl[..., None]).to(q.dtype)
    return torch.bmm(ds, k), torch.bmm(ds.mT, q)


def _kept(case: Case) -> Contender:
    """Both distributions in the dtype of the inputs, as a forward under autocast would keep them;
    writing them, which a forward of this package need not, is not counted."""
    if case.workload.setting != 1 or case.workload.causal:
        raise SkipError("kept distributions are measured in Setting 1 without a mask")
    rows = case.workload.num_queries
    p1, p2 = (
        torch.empty(
            case.workload.heads, rows, case.workload.num_keys, dtype=q.dtype, device=q.device
        )
        for q in (case.q1, case.q2)
    )
    for p, q, k, scale in (
        (p1, case.q1, case.k1, case.scale1),
        (p2, case.q2, case.k2, case.scale2),
    ):
        for head in range(case.workload.heads):
            p[head] = _logits(q[head, None], k[head, None], scale)[0].softmax(-1).to(q.dtype)
    gradient = torch.compile(kept_backward, dynamic=False)
    # The scale goes to dkl, so that it costs nothing.
    dkl = case.dkl * case.scale2
    return Contender(
        name="torch compile, P1 and P2 kept",
        call=lambda: gradient(dkl, case.q2, case.k2, p1, p2),
        check=case.check_backward,
        tolerances=case.tolerances_backward,
        work=case.backward_work,
    )


def backward(name: str, case: Case) -> Contender:
    """The backward of ``eager``, ``compile``, ``chunked`` or ``kept``."""
    _require(case)
    if name == "kept":
        return _kept(case)
    state: Any = _forward_chunked(case)
    gradient = torch.compile(logit_gradient) if name == "compile" else logit_gradient

    def call() -> Outputs:
        if name == "chunked":
            return _backward_chunked(case, state)
        return _backward_whole(case, state, gradient)

    return Contender(
        name=f"torch {name}",
        call=call,
        check=case.check_backward,
        tolerances=case.tolerances_backward,
        work=case.backward_work,
        detail=lambda: f"{CHUNK_ROWS} rows" if name == "chunked" else "",
    )

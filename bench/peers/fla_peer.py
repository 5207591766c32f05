"""The fused KL divergence of flash-linear-attention (``fla-core``), a head at a time.

It is made for the logits of a language model, the keys being the vocabulary: they are computed in
the dtype of the inputs, a few thousand rows at a time, and the loss is one mean over all rows. So a
head's loss is the mean of its KL, every row has the same upstream gradient, there is no mask, the
teacher has no gradient, and what is timed as the backward contains the forward. The scale is
multiplied into the queries beforehand.
"""

from __future__ import annotations

import torch
from fla.modules.fused_kl_div import FusedKLDivLoss

from ..case import Case
from ..contender import Contender, Errors, Outputs, SkipError

# Its logits have 8 or 11 significant bits.
KL_TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3}


def _require(case: Case) -> None:
    workload = case.workload
    if workload.causal:
        raise SkipError("it has no mask")
    if workload.group > 1:
        raise SkipError("shared keys are left out of this peer")
    if workload.setting != 1:
        raise SkipError("it has no gradient of the first side")


def _scaled(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.q1 * case.scale1, case.q2 * case.scale2


def forward(name: str, case: Case) -> Contender:
    """The mean KL of each head."""
    _require(case)
    q1, q2 = _scaled(case)
    loss = FusedKLDivLoss()

    def call() -> Outputs:
        with torch.no_grad():
            heads = zip(q2, q1, case.k2, case.k1, strict=True)
            return (torch.stack([loss(*head) for head in heads]),)

    def check(outputs: Outputs) -> Errors:
        expected = torch.stack([case.mean_kl(head) for head in case.heads])
        ours = outputs[0][case.heads].double()
        return {"mean kl": float((ours - expected).norm() / expected.norm())}

    return Contender(
        name=name,
        call=call,
        check=check,
        tolerances={"mean kl": KL_TOLERANCES[case.workload.dtype]},
        work=case.forward_work,
        detail=lambda: "a loop over heads, one mean each",
    )


def backward(name: str, case: Case) -> Contender:
    """dQ2 and dK2 for the same upstream gradient in every row, together with the forward."""
    _require(case)
    q1, q2 = _scaled(case)
    loss = FusedKLDivLoss()
    leaves = [
        (q.requires_grad_(), k.detach().requires_grad_())
        for q, k in zip(q2.detach(), case.k2, strict=True)
    ]

    def call() -> Outputs:
        gradients = [
            torch.autograd.grad(loss(q, teacher_q, k, teacher_k), (q, k))
            for (q, k), teacher_q, teacher_k in zip(leaves, q1, case.k1, strict=True)
        ]
        dq, dk = (torch.stack(column) for column in zip(*gradients, strict=True))
        return dq * case.scale2, dk

    mean = case.changed(dkl=torch.full_like(case.dkl, 1 / case.workload.num_queries))
    return Contender(
        name=name,
        call=call,
        check=mean.check_backward,
        tolerances=case.tolerances_backward,
        work=case.backward_work,
        detail=lambda: "forward and backward, one dkl for all rows",
    )

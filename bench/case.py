"""The data of one workload on a device, and its float64 reference on sampled rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from .contender import Errors, Outputs, Work
from .workloads import Workload

KL_TOLERANCE = 1e-4
# The logit gradients go through the matrix units in the dtype of the inputs.
GRADIENT_TOLERANCES = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5, "tf32": 5e-3}
NUM_SAMPLED_HEADS = 2
NUM_SAMPLED_ROWS = 256
# Logits of one block of the reference, in float64 elements.
_BLOCK_ELEMENTS = 1 << 26

_State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Case:
    """Random inputs of a workload, and what the results must be.

    Parameters
    ----------
    workload
        The shapes.
    device
        Where the tensors lie.
    unit
        Of the rate: ``"TFLOP/s"``, or ``"TB/s"`` where memory is the limit.
    seed
        Of the inputs and of the sample.

    Attributes
    ----------
    q1, k1, q2, k2
        Normal random numbers, ``(BH, N, D)``, contiguous; fewer heads of keys where they are
        shared.
    dkl
        Upstream gradient, float32 ``(BH, N_Q)``.
    scale1, scale2
        ``D ** -0.5``.
    state
        What a forward returned whose sampled rows were right; None for none. A backward starts from
        it, and the reference of dK takes its statistics and the logits of the sampled keys alone.
    """

    def __init__(
        self, workload: Workload, device: str = "cuda", *, unit: str = "TFLOP/s", seed: int = 0
    ) -> None:
        self.workload = workload
        self.unit = unit
        self.device = torch.device(device)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        dtype = getattr(torch, workload.dtype)

        def normal(heads: int, length: int, head_dim: int) -> torch.Tensor:
            shape = (heads, length, head_dim)
            return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

        self.q1 = normal(workload.heads, workload.num_queries, workload.head_dim1)
        self.k1 = normal(workload.key_heads, workload.num_keys, workload.head_dim1)
        self.q2 = normal(workload.heads, workload.num_queries, workload.head_dim2)
        self.k2 = normal(workload.key_heads, workload.num_keys, workload.head_dim2)
        self.dkl = torch.randn(
            workload.heads, workload.num_queries, device=self.device, generator=generator
        )
        self.scale1 = workload.head_dim1**-0.5
        self.scale2 = workload.head_dim2**-0.5
        self.state: Any = None
        self.heads = sorted({0, workload.heads - 1})[:NUM_SAMPLED_HEADS]
        self.key_heads = sorted({head // workload.group for head in self.heads})
        self.rows = self._sample(workload.num_queries, seed + 1)
        self.keys = self._sample(workload.num_keys, seed + 2)

    def _sample(self, length: int, seed: int) -> torch.Tensor:
        """Sorted indices: both ends, and others at random."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(length, generator=generator)[:NUM_SAMPLED_ROWS]
        ends = torch.tensor([0, length - 1])
        return torch.cat([chosen, ends]).unique().to(self.device)

    def changed(self, **attributes: object) -> Case:
        """The same case but for some attributes, what follows from them not yet computed."""
        other = copy.copy(self)
        for name in ("_forward_reference", "_backward_reference", "_packed", "mask"):
            other.__dict__.pop(name, None)
        for name, value in attributes.items():
            setattr(other, name, value)
        return other

    def output_shapes(self, direction: str) -> Sequence[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of what a ``"forward"`` or a ``"backward"`` of this package returns."""
        if direction == "forward":
            return [(self.dkl.shape, torch.float32)] * 3
        q_t, k_t, _ = self.trained
        if self.workload.lengths:
            q_t, k_t = q_t.transpose(0, 1), k_t.transpose(0, 1)
        return [(q_t.shape, q_t.dtype), (k_t.shape, k_t.dtype)]

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q1, k1, q2, k2; of packed sequences ``(N, BH, D)``."""
        return self._packed if self.workload.lengths else (self.q1, self.k1, self.q2, self.k2)

    @cached_property
    def _packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        q1, k1, q2, k2 = (
            x.transpose(0, 1).contiguous() for x in (self.q1, self.k1, self.q2, self.k2)
        )
        return q1, k1, q2, k2

    @cached_property
    def mask(self) -> dict[str, Any]:
        """What ``attention_kl`` takes of the mask and of packed sequences."""
        lengths = self.workload.lengths
        if not lengths:
            return self.workload.mask
        ends = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
        longest = max(lengths)
        return {
            **self.workload.mask,
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

    @property
    def trained(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """q, k and scale of the side that gets gradients."""
        if self.workload.setting == 1:
            return self.q2, self.k2, self.scale2
        return self.q1, self.k1, self.scale1

    @property
    def wrt(self) -> tuple[str, str]:
        """Names of the inputs that get gradients."""
        return ("q2", "k2") if self.workload.setting == 1 else ("q1", "k1")

    @property
    def forward_work(self) -> Work:
        """What a forward counts for."""
        if self.unit == "TB/s":
            return Work(float(self.workload.forward_bytes), self.unit)
        return Work(self.workload.forward_flops, self.unit)

    @property
    def backward_work(self) -> Work:
        """What a backward counts for: four products a pair, or bytes."""
        if self.unit == "TB/s":
            return Work(float(self.workload.backward_bytes), self.unit)
        return Work(self.workload.backward_flops, "TFLOP/s")

    @property
    def tolerances_forward(self) -> Errors:
        """Largest norm-relative errors of a right forward."""
        # Of kl three digits are left of inputs that are rounded to tf32.
        of_kl = 10 * KL_TOLERANCE if self.workload.precision == "tf32" else KL_TOLERANCE
        return {"kl": of_kl, "lse1": KL_TOLERANCE, "lse2": KL_TOLERANCE}

    @property
    def tolerances_backward(self) -> Errors:
        """Largest norm-relative errors of a right backward."""
        tolerance = GRADIENT_TOLERANCES[self.workload.precision or self.workload.dtype]
        return {"dq": tolerance, "dk": tolerance}

    def check_forward(self, outputs: Outputs) -> Errors:
        """Errors of kl and, where given, lse1 and lse2 on the sampled rows of the sampled heads."""
        reference = self._forward_reference
        errors = {}
        for name, output, expected in zip(("kl", "lse1", "lse2"), outputs, reference, strict=False):
            ours = output.view(self.workload.heads, -1)[self.heads][:, self.rows]
            errors[name] = _error(ours, expected, output)
        return errors

    def mean_kl(self, head: int) -> torch.Tensor:
        """Mean of kl over all rows of a head."""
        rows = torch.arange(self.workload.num_queries, device=self.device)
        return torch.cat([kl for kl, _, _ in self._states(head, rows)]).mean()

    def check_backward(self, outputs: Outputs) -> Errors:
        """Errors of dQ on the sampled rows and of dK on the sampled keys of the sampled heads."""
        dq, dk = (x.transpose(0, 1) if self.workload.lengths else x for x in outputs)
        dq_reference, dk_reference = self._backward_reference
        return {
            "dq": _error(dq[self.heads][:, self.rows], dq_reference, dq),
            "dk": _error(dk[self.key_heads][:, self.keys], dk_reference, dk),
        }

    @cached_property
    def _forward_reference(self) -> _State:
        states = [
            [torch.cat(parts) for parts in zip(*self._states(head, self.rows), strict=True)]
            for head in self.heads
        ]
        kl, lse1, lse2 = (torch.stack(parts) for parts in zip(*states, strict=True))
        return kl, lse1, lse2

    @cached_property
    def _backward_reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        dq = [self._dq(head) for head in self.heads]
        dk = [self._dk(key_head) for key_head in self.key_heads]
        return torch.stack(dq), torch.stack(dk)

    def _blocks(self, rows: torch.Tensor, num_keys: int) -> Iterator[torch.Tensor]:
        yield from rows.split(max(1, _BLOCK_ELEMENTS // num_keys))

    def _logits(
        self, head: int, rows: torch.Tensor, keys: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both logit matrices of some rows over some or all keys, -inf where the mask hides one."""
        key_head = head // self.workload.group
        if keys is None:
            keys = torch.arange(self.workload.num_keys, device=self.device)
            k1, k2 = self.k1[key_head], self.k2[key_head]
        else:
            k1, k2 = self.k1[key_head, keys], self.k2[key_head, keys]
        s1 = self.q1[head, rows].double() @ k1.double().T * self.scale1
        s2 = self.q2[head, rows].double() @ k2.double().T * self.scale2
        if (bound := self.workload.softcap) is not None:
            s1, s2 = bound * (s1 / bound).tanh(), bound * (s2 / bound).tanh()
        if self.workload.causal:
            last = rows + self.workload.num_keys - self.workload.num_queries
            hidden = keys > last[:, None]
            if self.workload.window is not None:
                hidden |= keys < last[:, None] - self.workload.window
            s1.masked_fill_(hidden, -math.inf)
            s2.masked_fill_(hidden, -math.inf)
        if self.workload.lengths:
            ends = torch.tensor(self.workload.lengths, device=self.device).cumsum(0)
            sequences = torch.bucketize(rows, ends, right=True)
            hidden = torch.bucketize(keys, ends, right=True) != sequences[:, None]
            s1.masked_fill_(hidden, -math.inf)
            s2.masked_fill_(hidden, -math.inf)
        return s1, s2

    def _states(self, head: int, rows: torch.Tensor) -> Iterator[_State]:
        for block in self._blocks(rows, self.workload.num_keys):
            s1, s2 = self._logits(head, block)
            yield _statistics(s1, s2)

    def _dq(self, head: int) -> torch.Tensor:
        """dQ of the sampled rows of one head."""
        _, k_t, scale_t = self.trained
        keys = k_t[head // self.workload.group].double()
        blocks = self._blocks(self.rows, self.workload.num_keys)
        return torch.cat([self._logit_gradient(head, rows) @ keys for rows in blocks]) * scale_t

    def _dk(self, key_head: int) -> torch.Tensor:
        """dK of the sampled keys of one head of keys, summed over the heads that share it."""
        q_t, k_t, scale_t = self.trained
        group = self.workload.group
        all_rows = torch.arange(self.workload.num_queries, device=self.device)
        dk = torch.zeros(len(self.keys), k_t.shape[2], dtype=torch.float64, device=self.device)
        num_keys = self.workload.num_keys if self.state is None else len(self.keys)
        for head in range(key_head * group, (key_head + 1) * group):
            for rows in self._blocks(all_rows, num_keys):
                if self.state is None:
                    ds = self._logit_gradient(head, rows)[:, self.keys]
                else:
                    whole = (self.state.kl, self.state.lse1, self.state.lse2)
                    state = tuple(x[head, rows].double() for x in whole)
                    ds = self._logit_gradient(head, rows, self.keys, state)
                dk += ds.T @ q_t[head, rows].double()
        return dk * scale_t

    def _logit_gradient(
        self,
        head: int,
        rows: torch.Tensor,
        keys: torch.Tensor | None = None,
        state: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        s1, s2 = self._logits(head, rows, keys)
        kl, lse1, lse2 = _statistics(s1, s2) if state is None else state
        p1 = (s1 - lse1[:, None]).exp().nan_to_num_(0.0)  # a row without keys has no probability
        if self.workload.setting == 1:
            ds = (s2 - lse2[:, None]).exp().nan_to_num_(0.0) - p1
        else:
            delta = (kl - lse2 + lse1)[:, None]
            ds = torch.where(p1 > 0, p1 * (s1 - s2 - delta), 0.0)
        if (bound := self.workload.softcap) is not None:
            logits = (s2 if self.workload.setting == 1 else s1).clamp(min=-bound)  # masked ones
            ds = ds * (1 - (logits / bound) ** 2)
        return ds * self.dkl[head, rows].double()[:, None]


def _statistics(s1: torch.Tensor, s2: torch.Tensor) -> _State:
    """kl, lse1 and lse2 of rows of logits."""
    lse1, lse2 = s1.logsumexp(-1), s2.logsumexp(-1)
    log1, log2 = s1 - lse1[:, None], s2 - lse2[:, None]
    terms = torch.where(s1 > -math.inf, log1.exp() * (log1 - log2), 0.0)
    return terms.sum(-1), lse1, lse2


def _error(ours: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor) -> float:
    """norm(ours - reference) / norm(reference), absolute where that is 0; NaN if any output is NaN.

    Both must be infinite in the same places: the lse of a row without keys is -inf.
    """
    infinite = reference.isinf()
    if bool(whole.isnan().any()) or not torch.equal(ours.double()[infinite], reference[infinite]):
        return math.nan
    difference = float((ours.double() - reference)[~infinite].norm())
    norm = float(reference[~infinite].norm())
    return difference / norm if norm else difference

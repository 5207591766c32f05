"""The whole problem in PyTorch, on the device: in float64, and by the textbook formula in float32.

The latter is that of ``streamkl_cupy/audit.py``, which computes on the CPU and would take minutes
for a table; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

OUTPUTS = ("kl", "lse1", "lse2", "dq1", "dk1", "dq2", "dk2")
# Significant bits of the dtypes whose logit gradients are rounded before the products.
_SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11}
# Logits of one block, over all heads.
_BLOCK_ELEMENTS = 1 << 26

Solution = dict[str, torch.Tensor]


def solve(
    inputs: Sequence[torch.Tensor],
    dkl: torch.Tensor,
    scales: tuple[float, float],
    *,
    exact: bool,
    softcap: float | None = None,
    allowed: torch.Tensor | None = None,
    given: Sequence[torch.Tensor | None] = (None, None),
) -> Solution:
    """kl, both log-sum-exps, the four gradients and the entropies, one block of rows after another.

    Parameters
    ----------
    inputs
        q1, k1, q2, k2, each ``(H, N, D)``.
    dkl
        Upstream gradient, ``(H, N_Q)``.
    scales
        Of the logits of either side.
    exact
        True for float64. False for the textbook formula in float32, whose logit gradients are
        rounded to the mantissa of the inputs and whose gradients are of their dtype.
    softcap
        Bound of the logits of both sides.
    allowed
        Which keys each query sees, bool ``(N_Q, N_K)``; None for all. Rows that see none have a kl
        of 0, log-sum-exps of minus infinity and no gradients.
    given
        Log-sum-exps of either side from outside, ``(H, N_Q)``: constants in the place of its own.

    Returns
    -------
    dict
        A tensor for each of ``OUTPUTS``, and the ``"entropy"`` of P1 and its ``"cross_entropy"``
        with P2.
    """
    dtype = torch.float64 if exact else torch.float32
    q1, k1, q2, k2 = (x.to(dtype) for x in inputs)
    heads, num_queries, _ = q1.shape
    of_rows = ("kl", "lse1", "lse2", "entropy", "cross_entropy")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in (*of_rows, "q1", "q2")}
    dk = {"1": torch.zeros_like(k1), "2": torch.zeros_like(k2)}
    step = max(1, _BLOCK_ELEMENTS // (heads * k1.shape[1]))
    for start in range(0, num_queries, step):
        rows = slice(start, start + step)
        s1, s2 = q1[:, rows] @ k1.mT * scales[0], q2[:, rows] @ k2.mT * scales[1]
        slopes: dict[str, torch.Tensor | float] = {"1": 1.0, "2": 1.0}
        if softcap is not None:
            t1, t2 = (s1 / softcap).tanh(), (s2 / softcap).tanh()
            s1, s2, slopes = softcap * t1, softcap * t2, {"1": 1 - t1 * t1, "2": 1 - t2 * t2}
        hidden = None if allowed is None else ~allowed[rows]
        if hidden is not None:
            s1, s2 = s1.masked_fill(hidden, -math.inf), s2.masked_fill(hidden, -math.inf)

        def visible(x: torch.Tensor, hidden: torch.Tensor | None = hidden) -> torch.Tensor:
            return x if hidden is None else x.masked_fill(hidden, 0)

        log_p1, log_p2 = s1.log_softmax(-1), s2.log_softmax(-1)
        for name, s, log_p, outer in (
            ("lse1", s1, log_p1, given[0]),
            ("lse2", s2, log_p2, given[1]),
        ):
            # What was taken from the largest logit; where none is visible, minus infinity.
            largest = s.amax(-1)
            lse = torch.where(largest.isinf(), largest, largest - log_p.amax(-1))
            parts[name].append(lse if outer is None else outer[:, rows].to(dtype))
        own2 = visible(log_p2.exp())
        if given[0] is not None:
            log_p1 = s1 - given[0][:, rows, None].to(dtype)
        if given[1] is not None:
            log_p2 = s2 - given[1][:, rows, None].to(dtype)
        p1, ratio = visible(log_p1.exp()), visible(log_p1 - log_p2)
        kl = (p1 * ratio).sum(-1)
        parts["kl"].append(kl)
        parts["entropy"].append(-(p1 * visible(log_p1)).sum(-1))
        parts["cross_entropy"].append(-(p1 * visible(log_p2)).sum(-1))
        # A given log-sum-exp is a constant.
        of_row1 = kl[..., None] if given[0] is None else -1.0
        mass1 = 1.0 if given[0] is None else p1.sum(-1, keepdim=True)
        ds2 = mass1 * own2 - p1 if given[1] is None else -p1
        upstream = dkl[:, rows, None].to(dtype)
        for side, q, k, ds in (("1", q1, k1, p1 * (ratio - of_row1)), ("2", q2, k2, ds2)):
            weighted = ds * upstream * slopes[side]
            if not exact:
                weighted = round_mantissa(weighted, inputs[0].dtype)
            parts["q" + side].append(weighted @ k)
            dk[side] += weighted.mT @ q[:, rows]
    solution = {name: torch.cat(parts[name], dim=1) for name in of_rows}
    for side, scale in zip("12", scales, strict=True):
        solution["dq" + side] = torch.cat(parts["q" + side], dim=1) * scale
        solution["dk" + side] = dk[side] * scale
    if exact:
        return solution
    return {n: x.to(inputs[0].dtype) if n.startswith("d") else x for n, x in solution.items()}


def round_mantissa(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 rounded to the significant bits of a dtype, to nearest even, whatever the exponent.

    Examples
    --------
    >>> round_mantissa(torch.tensor([1.0 + 2**-8, 3e-42]), torch.bfloat16)[0].item()
    1.0
    """
    if dtype not in _SIGNIFICANT_BITS:
        return x
    dropped = 24 - _SIGNIFICANT_BITS[dtype]
    bits = x.contiguous().view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    rounded = ((bits + half) & -(1 << dropped)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """`streamkl_cupy.audit.error` of tensors on a device: norm-relative, and where the reference
    is 0 the root mean square."""
    finite = reference.isfinite()
    expected, got = reference[finite], ours.double()[finite]
    if not bool(got.isfinite().all()):
        return math.inf
    size, difference = float(expected.norm()), float((got - expected).norm())
    return difference / (size if size > 0 else math.sqrt(max(1, expected.numel())))


def root_mean_square(x: torch.Tensor) -> float:
    """Of all elements."""
    return float(x.double().square().mean().sqrt())


def moved(k: torch.Tensor, kl: float, seed: int) -> torch.Tensor:
    """Keys beside `k` in its own dtype, whose logits differ so that KL comes to about `kl`.

    With normal queries and the default scale a logit changes by as much as a key element does, and
    KL is half of the variance of that change. So a share of the elements moves by a few steps of
    the dtype, one step as long as that is enough: the distance is no result of rounding.

    Parameters
    ----------
    k
        bfloat16 or float16.
    kl
        Wanted mean over the rows.
    seed
        Of which elements move, and where to.
    """
    generator = torch.Generator(device=k.device).manual_seed(seed)
    # The step of the dtype at each element: a unit in the last place.
    exponent = torch.frexp(k.float())[1]
    step = torch.ldexp(
        torch.ones_like(k, dtype=torch.float32), exponent - _SIGNIFICANT_BITS[k.dtype]
    )
    variance = 2 * kl / float(step.double().square().mean())
    num_steps = max(1, math.ceil(math.sqrt(variance)))
    draws = torch.rand(k.shape, device=k.device, generator=generator)
    share = variance / num_steps**2
    signs = (draws < share / 2).float() - ((draws >= share / 2) & (draws < share)).float()
    return (k.float() + signs * num_steps * step).to(k.dtype)

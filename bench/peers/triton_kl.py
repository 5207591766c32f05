"""A plain Triton writing of attention KL: the peer of the kernels of this package.

The forward is Algorithm 1 of StreamKL (arXiv 2606.20005): one pass over the keys that keeps five
scalars a row, with the logits in base 2. The backward comes in the two classical shapes: one kernel
for dQ and one for dK (3 + 3 products, no atomics), or one kernel that keeps dK and adds dQ with
float32 atomics (4 products).

Nothing here is tuned beyond a short list of tiles: plain ``tl.dot``, no block pointers, no warp
specialisation. What it asks for: contiguous ``(BH, N, D)`` tensors, head dims that are powers of
two from 16 up, positive scales, fewer than 65536 heads.

    s_t = scale_t * <q_t, k_t>        P_t = exp(s_t - lse_t)        delta = kl - lse2 + lse1
    Setting 1 (P2 trained): ds2 = g * (P2 - P1)
    Setting 2 (P1 trained): ds1 = g * P1 * ((s1 - s2) - delta)
    dq_t = scale_t * ds_t k_t         dk_t = scale_t * ds_t^T q_t

Causal masks are aligned to the bottom right: query i sees key j iff ``j <= i + N_K - N_Q``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from ..contender import SkipError

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# A masked logit lies far below an unset maximum, so that it adds nothing to a row that has seen no
# key yet; both are finite, so that no inf - inf arises.
MASKED = tl.constexpr(-1.0e30)
UNSET = tl.constexpr(-1.0e20)


@triton.jit
def _load_rows(base, rows, num_rows, D: tl.constexpr, GUARD: tl.constexpr):
    """Rows of a contiguous (num_rows, D) matrix; zeros past the end when guarded."""
    pointers = base + rows[:, None] * D + tl.arange(0, D)[None, :]
    if GUARD:
        return tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
    return tl.load(pointers)


@triton.jit
def _forward_tile(
    q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2, m1, l1, m2, l2, acc,
    D1: tl.constexpr, D2: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the five scalars of each row."""
    keys = start + tl.arange(0, BLOCK_K)
    k1 = _load_rows(k1_base, keys, num_keys, D1, MASK)
    s1 = tl.dot(q1, tl.trans(k1))
    k2 = _load_rows(k2_base, keys, num_keys, D2, MASK)
    s2 = tl.dot(q2, tl.trans(k2))
    if MASK:
        allowed = keys[None, :] < num_keys
        if CAUSAL:
            allowed = allowed & (keys[None, :] <= rows[:, None] + offset)
        s1 = tl.where(allowed, s1, MASKED)
        s2 = tl.where(allowed, s2, MASKED)
    # The scales are positive, so the maximum of the scaled logits is the scaled maximum, and the
    # scaling itself folds into the subtraction.
    new_m1 = tl.maximum(m1, tl.max(s1, 1) * scale1)
    new_m2 = tl.maximum(m2, tl.max(s2, 1) * scale2)
    y1 = s1 * scale1 - new_m1[:, None]
    y2 = s2 * scale2 - new_m2[:, None]
    e1 = tl.exp2(y1)
    e2 = tl.exp2(y2)
    shrink1 = tl.exp2(m1 - new_m1)
    shrink2 = tl.exp2(m2 - new_m2)
    acc = shrink1 * (acc + l1 * ((m1 - new_m1) - (m2 - new_m2))) + tl.sum(e1 * (y1 - y2), 1)
    l1 = shrink1 * l1 + tl.sum(e1, 1)
    l2 = shrink2 * l2 + tl.sum(e2, 1)
    return new_m1, l1, new_m2, l2, acc


@triton.jit
def forward_kernel(
    q1_base, k1_base, q2_base, k2_base, kl_base, lse1_base, lse2_base,
    num_queries, num_keys, scale1, scale2,
    D1: tl.constexpr, D2: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """kl, lse1 and lse2 (nats) of one tile of query rows; scales come in base 2."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest rows first
    head = tl.program_id(1).to(tl.int64)
    q1_base += head * num_queries * D1
    q2_base += head * num_queries * D2
    k1_base += head * num_keys * D1
    k2_base += head * num_keys * D2

    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q1 = _load_rows(q1_base, rows, num_queries, D1, not EVEN_Q)
    q2 = _load_rows(q2_base, rows, num_queries, D2, not EVEN_Q)
    m1 = tl.full([BLOCK_Q], UNSET, tl.float32)
    m2 = tl.full([BLOCK_Q], UNSET, tl.float32)
    l1 = tl.zeros([BLOCK_Q], tl.float32)
    l2 = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q], tl.float32)

    # Keys [0, full) are seen by every row of the tile, keys [full, end) by some.
    offset = num_keys - num_queries
    if CAUSAL:
        full = tl.minimum(num_keys, tl.maximum(0, tile * BLOCK_Q + 1 + offset))
        end = tl.minimum(num_keys, tl.maximum(0, (tile + 1) * BLOCK_Q + offset))
    else:
        full = num_keys
        end = num_keys
    full = full // BLOCK_K * BLOCK_K
    for start in range(0, full, BLOCK_K):
        m1, l1, m2, l2, acc = _forward_tile(
            q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2,
            m1, l1, m2, l2, acc, D1, D2, BLOCK_K, CAUSAL, False,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        for start in range(full, end, BLOCK_K):
            m1, l1, m2, l2, acc = _forward_tile(
                q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2,
                m1, l1, m2, l2, acc, D1, D2, BLOCK_K, CAUSAL, True,
            )  # fmt: skip

    some = l1 > 0.0
    kl = tl.where(some, LN2 * (acc / l1 + tl.log2(l2) - tl.log2(l1)), 0.0)
    lse1 = tl.where(some, LN2 * (m1 + tl.log2(l1)), float("-inf"))
    lse2 = tl.where(some, LN2 * (m2 + tl.log2(l2)), float("-inf"))
    in_range = rows < num_queries
    out = head * num_queries + rows
    tl.store(kl_base + out, kl, mask=in_range)
    tl.store(lse1_base + out, lse1, mask=in_range)
    tl.store(lse2_base + out, lse2, mask=in_range)


@triton.jit
def _load_statistics(kl_base, lse1_base, lse2_base, dkl_base, rows, num_queries):
    """lse1 and lse2 in base 2, delta in nats and g; a row past the end gets P = 0 and g = 0."""
    inside = rows < num_queries
    lse1 = tl.load(lse1_base + rows, mask=inside, other=float("inf"))
    lse2 = tl.load(lse2_base + rows, mask=inside, other=float("inf"))
    kl = tl.load(kl_base + rows, mask=inside, other=0.0)
    g = tl.load(dkl_base + rows, mask=inside, other=0.0)
    delta = tl.where(inside, kl - lse2 + lse1, 0.0)
    return lse1 * LOG2E, lse2 * LOG2E, delta, g


@triton.jit
def _logit_gradient(s1, s2, lse1, lse2, delta, g, SETTING: tl.constexpr):
    """g * dKL/ds of the trained side from logits in base 2; statistics broadcast against them."""
    p1 = tl.exp2(s1 - lse1)
    if SETTING == 1:
        return g * (tl.exp2(s2 - lse2) - p1)
    return g * p1 * ((s1 - s2) * LN2 - delta)


@triton.jit
def _dq_tile(
    q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2,
    lse1, lse2, delta, g, dq,
    D1: tl.constexpr, D2: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    SETTING: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the share of one tile of keys to dQ of the trained side (not yet scaled)."""
    keys = start + tl.arange(0, BLOCK_K)
    k1 = _load_rows(k1_base, keys, num_keys, D1, MASK)
    k2 = _load_rows(k2_base, keys, num_keys, D2, MASK)
    s1 = tl.dot(q1, tl.trans(k1)) * scale1
    s2 = tl.dot(q2, tl.trans(k2)) * scale2
    ds = _logit_gradient(s1, s2, lse1[:, None], lse2[:, None], delta[:, None], g[:, None], SETTING)
    if MASK:
        allowed = keys[None, :] < num_keys
        if CAUSAL:
            allowed = allowed & (keys[None, :] <= rows[:, None] + offset)
        ds = tl.where(allowed, ds, 0.0)
    return tl.dot(ds.to(k2.dtype), k2 if SETTING == 1 else k1, dq)


@triton.jit
def dq_kernel(
    q1_base, k1_base, q2_base, k2_base, kl_base, lse1_base, lse2_base, dkl_base, dq_base,
    num_queries, num_keys, scale1, scale2, out_scale,
    D1: tl.constexpr, D2: tl.constexpr, DT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, SETTING: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """dQ of the trained side for one tile of query rows."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    head = tl.program_id(1).to(tl.int64)
    q1_base += head * num_queries * D1
    q2_base += head * num_queries * D2
    k1_base += head * num_keys * D1
    k2_base += head * num_keys * D2
    dq_base += head * num_queries * DT
    row_base = head * num_queries

    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q1 = _load_rows(q1_base, rows, num_queries, D1, not EVEN_Q)
    q2 = _load_rows(q2_base, rows, num_queries, D2, not EVEN_Q)
    lse1, lse2, delta, g = _load_statistics(
        kl_base + row_base, lse1_base + row_base, lse2_base + row_base, dkl_base + row_base,
        rows, num_queries,
    )  # fmt: skip
    dq = tl.zeros([BLOCK_Q, DT], tl.float32)

    offset = num_keys - num_queries
    if CAUSAL:
        full = tl.minimum(num_keys, tl.maximum(0, tile * BLOCK_Q + 1 + offset))
        end = tl.minimum(num_keys, tl.maximum(0, (tile + 1) * BLOCK_Q + offset))
    else:
        full = num_keys
        end = num_keys
    full = full // BLOCK_K * BLOCK_K
    for start in range(0, full, BLOCK_K):
        dq = _dq_tile(
            q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2,
            lse1, lse2, delta, g, dq, D1, D2, BLOCK_K, CAUSAL, SETTING, False,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        for start in range(full, end, BLOCK_K):
            dq = _dq_tile(
                q1, q2, k1_base, k2_base, start, rows, num_keys, offset, scale1, scale2,
                lse1, lse2, delta, g, dq, D1, D2, BLOCK_K, CAUSAL, SETTING, True,
            )  # fmt: skip

    pointers = dq_base + rows[:, None] * DT + tl.arange(0, DT)[None, :]
    value = (dq * out_scale).to(dq_base.dtype.element_ty)
    tl.store(pointers, value, mask=rows[:, None] < num_queries)


@triton.jit
def _dk_tile(
    k1, k2, q1_base, q2_base, kl_base, lse1_base, lse2_base, dkl_base, dq_base,
    start, keys, num_queries, num_keys, offset, scale1, scale2, out_scale, dk,
    D1: tl.constexpr, D2: tl.constexpr, DT: tl.constexpr, BLOCK_Q: tl.constexpr,
    CAUSAL: tl.constexpr, SETTING: tl.constexpr, FUSED: tl.constexpr,
    EVEN_Q: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the share of one tile of query rows to dK; when fused, add the tile's dQ to memory too.

    The logits are held transposed, one row a key, so that dK needs no transpose of them.
    """
    rows = start + tl.arange(0, BLOCK_Q)
    q1 = _load_rows(q1_base, rows, num_queries, D1, not EVEN_Q)
    q2 = _load_rows(q2_base, rows, num_queries, D2, not EVEN_Q)
    lse1, lse2, delta, g = _load_statistics(
        kl_base, lse1_base, lse2_base, dkl_base, rows, num_queries
    )
    s1 = tl.dot(k1, tl.trans(q1)) * scale1
    s2 = tl.dot(k2, tl.trans(q2)) * scale2
    ds = _logit_gradient(s1, s2, lse1[None, :], lse2[None, :], delta[None, :], g[None, :], SETTING)
    if MASK:
        allowed = keys[:, None] < num_keys
        if CAUSAL:
            allowed = allowed & (keys[:, None] <= rows[None, :] + offset)
        ds = tl.where(allowed, ds, 0.0)
    ds = ds.to(k2.dtype)
    dk = tl.dot(ds, q2 if SETTING == 1 else q1, dk)
    if FUSED:
        dq = tl.dot(tl.trans(ds), k2 if SETTING == 1 else k1)
        pointers = dq_base + rows[:, None] * DT + tl.arange(0, DT)[None, :]
        inside = rows[:, None] < num_queries
        tl.atomic_add(pointers, dq * out_scale, mask=inside, sem="relaxed")
    return dk


@triton.jit
def dk_kernel(
    q1_base, k1_base, q2_base, k2_base, kl_base, lse1_base, lse2_base, dkl_base, dq_base, dk_base,
    num_queries, num_keys, scale1, scale2, out_scale,
    D1: tl.constexpr, D2: tl.constexpr, DT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, SETTING: tl.constexpr, FUSED: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """dK of the trained side for one tile of keys; when fused, dQ by float32 atomics as well."""
    tile = tl.program_id(0)  # causal: the first keys are seen by the most rows, and come first
    head = tl.program_id(1).to(tl.int64)
    q1_base += head * num_queries * D1
    q2_base += head * num_queries * D2
    k1_base += head * num_keys * D1
    k2_base += head * num_keys * D2
    dq_base += head * num_queries * DT
    dk_base += head * num_keys * DT
    kl_base += head * num_queries
    lse1_base += head * num_queries
    lse2_base += head * num_queries
    dkl_base += head * num_queries

    keys = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    k1 = _load_rows(k1_base, keys, num_keys, D1, not EVEN_K)
    k2 = _load_rows(k2_base, keys, num_keys, D2, not EVEN_K)
    dk = tl.zeros([BLOCK_K, DT], tl.float32)

    # Rows [first, full) see some keys of the tile, rows [full, num_queries) see all of them.
    offset = num_keys - num_queries
    if CAUSAL:
        first = tl.maximum(0, tile * BLOCK_K - offset) // BLOCK_Q * BLOCK_Q
        full = tl.cdiv(tl.maximum(0, (tile + 1) * BLOCK_K - 1 - offset), BLOCK_Q) * BLOCK_Q
        full = tl.minimum(full, tl.cdiv(num_queries, BLOCK_Q) * BLOCK_Q)
        for start in range(first, full, BLOCK_Q):
            dk = _dk_tile(
                k1, k2, q1_base, q2_base, kl_base, lse1_base, lse2_base, dkl_base, dq_base,
                start, keys, num_queries, num_keys, offset, scale1, scale2, out_scale, dk,
                D1, D2, DT, BLOCK_Q, CAUSAL, SETTING, FUSED, EVEN_Q, True,
            )  # fmt: skip
    else:
        full = 0
    for start in range(full, num_queries, BLOCK_Q):
        dk = _dk_tile(
            k1, k2, q1_base, q2_base, kl_base, lse1_base, lse2_base, dkl_base, dq_base,
            start, keys, num_queries, num_keys, offset, scale1, scale2, out_scale, dk,
            D1, D2, DT, BLOCK_Q, CAUSAL, SETTING, FUSED, EVEN_Q, not EVEN_K,
        )  # fmt: skip

    pointers = dk_base + keys[:, None] * DT + tl.arange(0, DT)[None, :]
    value = (dk * out_scale).to(dk_base.dtype.element_ty)
    tl.store(pointers, value, mask=keys[:, None] < num_keys)


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options of one kernel."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"q{self.block_q}_k{self.block_k}_w{self.num_warps}_s{self.num_stages}"


FORWARD_CONFIGS = (
    Config(128, 64, 8, 3),
    Config(128, 64, 8, 2),
    Config(128, 128, 8, 2),
    Config(64, 64, 4, 3),
    Config(64, 64, 4, 2),
    Config(64, 128, 4, 2),
)
SMALL_Q_CONFIGS = (Config(16, 64, 4, 4), Config(16, 128, 4, 3), Config(16, 64, 4, 3))
DQ_CONFIGS = (Config(128, 64, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2))
DK_CONFIGS = (Config(64, 128, 8, 2), Config(64, 128, 8, 3), Config(64, 64, 4, 2))
FUSED_CONFIGS = (Config(64, 128, 8, 2), Config(64, 64, 4, 2), Config(32, 128, 8, 2))

Launch = Callable[[Config, bool], Any]
_chosen: dict[tuple[object, ...], Config] = {}
_latest: dict[str, Config] = {}


def latest_config(kernel: str) -> Config:
    """The tiles of the last tuned call of ``"forward"``, ``"dq"``, ``"dk"`` or ``"fused"``."""
    return _latest[kernel]


def _tuned(key: tuple[object, ...], configs: Sequence[Config], launch: Launch) -> Config:
    """The fastest of ``configs``, found once a key; those that the card cannot hold fall out.

    The key begins with the name of the kernel. ``launch(config, only_compile)`` compiles, or
    compiles and runs.
    """
    if key not in _chosen:
        workers = min(len(configs), os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool):
            for config in configs:
                launch(config, True)
        times: dict[Config, float] = {}
        for config in configs:
            try:
                times[config] = triton.testing.do_bench(
                    lambda config=config: launch(config, False),
                    warmup=5,
                    rep=40,
                    return_mode="median",
                )
            except OutOfResources:
                continue
        if not times:
            raise SkipError(f"no tile of {key[0]} fits this card at these head dims")
        _chosen[key] = min(times, key=times.__getitem__)
    _latest[str(key[0])] = _chosen[key]
    return _chosen[key]


# Tiles that are the fastest at this length are so beyond it; tuning there takes seconds a tile.
TUNING_LENGTH = 16384


def _tuning_shape(*inputs: torch.Tensor) -> tuple[int, int, int, int, int]:
    heads, num_queries, num_keys, d1, d2 = _shape(*inputs)
    return heads, min(num_queries, TUNING_LENGTH), min(num_keys, TUNING_LENGTH), d1, d2


def _shape(q1: torch.Tensor, k1: torch.Tensor, q2: torch.Tensor) -> tuple[int, int, int, int, int]:
    heads, num_queries, d1 = q1.shape
    return heads, num_queries, k1.shape[1], d1, q2.shape[2]


def forward(
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    *,
    causal: bool,
    scale1: float,
    scale2: float,
    config: Config | None = None,
    only_compile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL(P1 || P2) of every query row, and both log-sum-exps.

    Parameters
    ----------
    q1, k1, q2, k2
        Contiguous ``(BH, N_Q, D1) (BH, N_K, D1) (BH, N_Q, D2) (BH, N_K, D2)``, bfloat16 or float16.
    causal
        Mask aligned to the bottom right.
    scale1, scale2
        Positive logit scales.
    config
        Tiles to use; the default tunes over a short list at the first call of a shape (lengths
        beyond 16384 count as that).
    only_compile
        With tiles given: compile and compute nothing.

    Returns
    -------
    kl, lse1, lse2
        float32 ``(BH, N_Q)``, in nats.
    """
    heads, num_queries, *_ = _shape(q1, k1, q2)
    kl, lse1, lse2 = (
        torch.empty(heads, num_queries, dtype=torch.float32, device=q1.device) for _ in range(3)
    )
    inputs, outputs = (q1, k1, q2, k2), (kl, lse1, lse2)

    def launch(config: Config, only_compile: bool) -> None:
        parts = _forward_launch(inputs, outputs, causal, scale1, scale2, config)
        _run(forward_kernel, *parts, only_compile)

    if config is None:
        key = ("forward", *_tuning_shape(q1, k1, q2), q1.dtype, causal)
        config = _tuned(key, SMALL_Q_CONFIGS if num_queries <= 16 else FORWARD_CONFIGS, launch)
    launch(config, only_compile)
    return kl, lse1, lse2


def prepared_forward(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    causal: bool,
    scale1: float,
    scale2: float,
    config: Config,
) -> Callable[[], object]:
    """The launch of :func:`forward` alone, everything before it done once, here.

    Parameters
    ----------
    inputs
        q1, k1, q2, k2 as in :func:`forward`.
    outputs
        kl, lse1, lse2, to be written to.
    causal, scale1, scale2
        As in :func:`forward`.
    config
        Tiles to use.
    """
    grid, arguments, options = _forward_launch(inputs, outputs, causal, scale1, scale2, config)
    return lambda: forward_kernel[grid](*arguments, **options)


def _forward_launch(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    causal: bool,
    scale1: float,
    scale2: float,
    config: Config,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and options of the forward kernel."""
    heads, num_queries, num_keys, d1, d2 = _shape(*inputs[:3])
    grid = (triton.cdiv(num_queries, config.block_q), heads)
    scales = (scale1 * LOG2E.value, scale2 * LOG2E.value)
    options = {
        "D1": d1,
        "D2": d2,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": causal,
        "EVEN_Q": num_queries % config.block_q == 0,
        "EVEN_K": num_keys % config.block_k == 0,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return grid, (*inputs, *outputs, num_queries, num_keys, *scales), options


def _run(
    kernel: Any, grid: tuple[int, int], arguments: Any, options: Any, only_compile: bool
) -> None:
    if only_compile:
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


def backward(
    dkl: torch.Tensor,
    q1: torch.Tensor,
    k1: torch.Tensor,
    q2: torch.Tensor,
    k2: torch.Tensor,
    kl: torch.Tensor,
    lse1: torch.Tensor,
    lse2: torch.Tensor,
    *,
    setting: int,
    fused: bool,
    causal: bool,
    scale1: float,
    scale2: float,
    configs: tuple[Config, Config] | None = None,
    only_compile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ and dK of the trained side.

    Parameters
    ----------
    dkl
        Upstream gradient, contiguous float32 ``(BH, N_Q)``.
    q1, k1, q2, k2
        As in :func:`forward`.
    kl, lse1, lse2
        What :func:`forward` returned.
    setting
        1: P2 is trained (dQ2, dK2). 2: P1 is trained (dQ1, dK1).
    fused
        One kernel with float32 atomics for dQ, instead of a kernel each for dQ and dK.
    causal, scale1, scale2
        As in :func:`forward`.
    configs
        Tiles of the dQ and of the dK kernel (the fused kernel takes the second); the default tunes.
    only_compile
        With tiles given: compile and compute nothing.

    Returns
    -------
    dq, dk
        Of the shape and dtype of ``q_t`` and ``k_t``.
    """
    heads, num_queries, num_keys, d1, d2 = _shape(q1, k1, q2)
    q_t, k_t, scale_t = (q2, k2, scale2) if setting == 1 else (q1, k1, scale1)
    dk = torch.empty_like(k_t)
    dq = torch.empty_like(q_t, dtype=torch.float32 if fused else q_t.dtype)
    inputs = (q1, k1, q2, k2, kl, lse1, lse2, dkl)
    scalars = (num_queries, num_keys, scale1 * LOG2E.value, scale2 * LOG2E.value, scale_t)

    def options(config: Config) -> dict[str, Any]:
        return {
            "D1": d1,
            "D2": d2,
            "DT": q_t.shape[2],
            "BLOCK_Q": config.block_q,
            "BLOCK_K": config.block_k,
            "CAUSAL": causal,
            "SETTING": setting,
            "EVEN_Q": num_queries % config.block_q == 0,
            "EVEN_K": num_keys % config.block_k == 0,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def launch_dq(config: Config, only_compile: bool) -> None:
        grid = (triton.cdiv(num_queries, config.block_q), heads)
        _run(dq_kernel, grid, (*inputs, dq, *scalars), options(config), only_compile)

    def launch_dk(config: Config, only_compile: bool) -> None:
        grid = (triton.cdiv(num_keys, config.block_k), heads)
        values = options(config) | {"FUSED": fused}
        _run(dk_kernel, grid, (*inputs, dq, dk, *scalars), values, only_compile)

    if configs is None:
        key = (*_tuning_shape(q1, k1, q2), q1.dtype, causal, setting)
        if fused:
            dk_config = _tuned(("fused", *key), FUSED_CONFIGS, launch_dk)
        else:
            dq_config = _tuned(("dq", *key), DQ_CONFIGS, launch_dq)
            dk_config = _tuned(("dk", *key), DK_CONFIGS, launch_dk)
    else:
        dq_config, dk_config = configs
    if fused:
        dq.zero_()
    else:
        launch_dq(dq_config, only_compile)
    launch_dk(dk_config, only_compile)
    return dq.to(q_t.dtype), dk

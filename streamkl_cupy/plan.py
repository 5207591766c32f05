"""Plan: which kernels run for a problem on a card, in which tiles, splits and grids.

The only heuristics of the package. Pure Python: a `DeviceFacts` and a `Problem` go in, a plan comes
out, and the same plan comes out every time. ``launch.py`` carries it out without a choice of its
own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

from streamkl_cupy.problem import Problem

BUCKETS = (32, 64, 96, 128, 192, 256)
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16"}
STATE_FIELDS = 5  # m1 l1 m2 l2 acc
FLOAT_BYTES = 4
ROW_STATISTICS_BYTES = 16
WORKSPACE_ALIGNMENT = 256
TILE_ALIGNMENT = 128
# What reduce_splits and backward_prepare/finish are compiled for.
REDUCE_ROWS_PER_BLOCK = 4
PREPARE_THREADS = 256
FINISH_THREADS = 256

# Multiprocessors and shared memory per block of a card of each architecture, to plan for one that
# is not there.
TYPICAL_CARDS = {
    "sm_80": (108, 166_912),
    "sm_86": (84, 101_376),
    "sm_87": (16, 166_912),
    "sm_89": (142, 101_376),
    "sm_90a": (132, 232_448),
    "sm_100": (148, 232_448),
    "sm_120": (170, 101_376),
}
# Of one multiprocessor there is a little more than one block may have; 1 KB of each block is the
# system's.
RESERVED_BYTES = 1024
# The key-stationary kernels keep a few positions in static shared memory, which counts against the
# same limit.
STATIC_BYTES = 64

Value: TypeAlias = int | bool | str
Template: TypeAlias = tuple[tuple[str, Value], ...]


Tile = TypeVar("Tile", "ForwardTile", "BackwardTile")

FORWARD_KERNELS = ("forward_sm80", "forward_sm90")
BACKWARD_KERNELS = (
    "backward_fused_sm80",
    "backward_dq_sm80",
    "backward_dk_sm80",
    "backward_fused_sm90",
    "backward_dq_sm90",
    "backward_dk_sm90",
)


class PlanError(ValueError):
    """No kernel fits the problem on this card, or an override asks for what does not exist."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What plans depend on of a card.

    The architecture as NVRTC names it, multiprocessors, and bytes of shared memory per block.
    """

    arch: str
    num_sms: int
    shared_memory_per_block: int


def device_facts(arch: str) -> DeviceFacts:
    """A typical card of an architecture, for planning without one.

    Raises
    ------
    PlanError
        The architecture is not known.
    """
    if arch not in TYPICAL_CARDS:
        raise PlanError(f"arch: expected one of {', '.join(TYPICAL_CARDS)}; got {arch!r}")
    return DeviceFacts(arch, *TYPICAL_CARDS[arch])


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One launch: the kernel, its template arguments in order, and its extent.

    The kernel is the stem of its file. ``boxes`` counts the rows of queries and of keys that the
    copy engine brings at a time; None for a kernel that does not use it.
    """

    kernel: str
    template: Template
    grid: int
    block: int
    shared_memory: int
    boxes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """How a block of ``forward_sm80`` is cut: template arguments by the names they have there."""

    row_tiles: int
    num_warps_q: int
    num_warps_k: int
    block_k: int
    chunk_k: int
    num_stages: int
    queries_in_registers: bool

    @property
    def stationary_rows(self) -> int:
        return 16 * self.row_tiles * self.num_warps_q

    @property
    def threads(self) -> int:
        return 32 * self.num_warps_q * self.num_warps_k

    @property
    def blocks_per_sm(self) -> int:
        """What the kernel's launch bounds ask for."""
        return 2 if self.num_warps_q * self.num_warps_k <= 4 else 1

    def shared_memory(self, dim1: int, dim2: int) -> int:
        queries = self.stationary_rows * (dim1 + dim2) * 2
        ring = self.num_stages * self.block_k * (dim1 + dim2) * 2
        tiles = max(queries, ring) if self.queries_in_registers else queries + ring
        states = (
            self.num_warps_k * self.stationary_rows * STATE_FIELDS * FLOAT_BYTES
            if self.num_warps_k > 1
            else 0
        )
        return max(tiles, states)


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """How a block of ``forward_sm90`` is cut: template arguments by the names they have there."""

    num_consumers: int
    block_k: int
    num_stages: int
    queries_in_registers: bool

    @property
    def stationary_rows(self) -> int:
        return 64 * self.num_consumers

    @property
    def threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    def fits(self, dim1: int, dim2: int, shared_memory: int) -> bool:
        if self.shared_memory(dim1, dim2) > shared_memory:
            return False
        if not self.queries_in_registers:
            return True
        # Queries on their way to registers take one stage a side.
        row1, row2 = _panel_row_bytes(dim1), _panel_row_bytes(dim2)
        stage = self.block_k * (row1 + row2)
        return self.stationary_rows * max(row1, row2) <= stage

    def shared_memory(self, dim1: int, dim2: int) -> int:
        row = _panel_row_bytes(dim1) + _panel_row_bytes(dim2)
        queries = 0 if self.queries_in_registers else self.stationary_rows * row
        barriers = 8 * (2 * self.num_stages + 1)
        return queries + self.num_stages * self.block_k * row + barriers


def _panel_row_bytes(dim: int) -> int:
    """Of a row in panels of 64 columns."""
    return _ceil_div(dim, 64) * 128


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """How a block of a backward kernel is cut.

    ``row_tiles`` tiles of 16 stationary rows a warp; ``block_cols`` streamed rows a stage, taken
    ``chunk_cols`` at a time.
    """

    row_tiles: int
    num_warps: int
    block_cols: int
    chunk_cols: int
    num_stages: int

    @property
    def stationary_rows(self) -> int:
        return 16 * self.row_tiles * self.num_warps

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def shared_memory(self, kernel: str, dim1: int, dim2: int) -> int:
        pair = (dim1 + dim2) * 2
        tiles = self.stationary_rows * pair + self.num_stages * self.block_cols * pair
        # Statistics and dkl of the queries of a tile.
        row = ROW_STATISTICS_BYTES + FLOAT_BYTES
        if kernel == "backward_dq_sm80":
            return tiles + _round_up(self.stationary_rows * row, TILE_ALIGNMENT)
        total = tiles + self.num_stages * _round_up(self.block_cols * row, TILE_ALIGNMENT)
        if kernel == "backward_fused_sm80":
            # The tile of dS^T.
            total += self.stationary_rows * _round_up(self.block_cols, 32) * 2
        return total


# Queries in a tile of ``backward_fused_sm90``, and what they bring along besides themselves.
FUSED_BLOCK_Q = 64
FUSED_ROWS_BYTES = FUSED_BLOCK_Q * ROW_STATISTICS_BYTES
# Its dQ on the way to global memory: four warps, buffers of 16 rows and 32 columns.
FUSED_SUM_BYTES = 4 * 3 * 16 * 32 * FLOAT_BYTES
MOST_BARRIER_BYTES = 256
# What the separate kernels multiply by instead of a tile, and the walk of a block of keys.
PAIR_ZEROS_BYTES = 1024
PAIR_WALK_BYTES = 32


@dataclass(frozen=True, slots=True)
class BackwardWarpgroupTile:
    """How a block of a Hopper backward kernel is cut: template arguments by the names they have
    there.

    ``num_consumers`` warpgroups of 64 stationary rows; ``num_stages`` tiles of streamed rows;
    ``num_buffers`` tiles of dS^T on their way to dQ; ``register_steps`` steps of 16 columns of the
    stationary operands, side 1's first, that live in registers.
    """

    num_consumers: int
    num_stages: int
    num_buffers: int
    register_steps: int

    @property
    def stationary_rows(self) -> int:
        return 64 * self.num_consumers

    @property
    def threads(self) -> int:
        return 128 * (self.num_consumers + 2)

    @property
    def boxes(self) -> tuple[int, int]:
        return FUSED_BLOCK_Q, self.stationary_rows

    def shared_memory(self, dim1: int, dim2: int) -> int:
        row = _panel_row_bytes(dim1) + _panel_row_bytes(dim2)
        stage = FUSED_BLOCK_Q * row + FUSED_ROWS_BYTES
        gradients = self.stationary_rows * FUSED_BLOCK_Q * 2
        return (
            self.stationary_rows * row
            + self.num_stages * stage
            + self.num_buffers * gradients
            + FUSED_SUM_BYTES
            + MOST_BARRIER_BYTES
        )


@dataclass(frozen=True, slots=True)
class PairWarpgroupTile:
    """How a block of ``backward_dq_sm90`` or ``backward_dk_sm90`` is cut: template arguments by
    the names they have there.

    ``num_consumers`` warpgroups of 64 stationary rows; ``block_cols`` streamed rows in a tile, and
    stages of such tiles of the fixed side and of the side that gets gradients; of each side's
    stationary operand, steps of 16 columns that live in registers.
    """

    num_consumers: int
    block_cols: int
    fixed_stages: int
    trained_stages: int
    fixed_steps: int
    trained_steps: int

    @property
    def stationary_rows(self) -> int:
        return 64 * self.num_consumers

    @property
    def threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    def boxes(self, kernel: str) -> tuple[int, int]:
        rows, cols = self.stationary_rows, self.block_cols
        return (rows, cols) if kernel == "backward_dq_sm90" else (cols, rows)

    def shared_memory(self, kernel: str, fixed: int, trained: int) -> int:
        """Of bytes, for the head dimensions of the fixed side and of the other one."""
        fixed_row, trained_row = _panel_row_bytes(fixed), _panel_row_bytes(trained)
        tiles = self.fixed_stages * fixed_row + self.trained_stages * trained_row
        total = self.stationary_rows * (fixed_row + trained_row) + self.block_cols * tiles
        total += PAIR_ZEROS_BYTES + 16 * (self.fixed_stages + self.trained_stages + 1)
        if kernel == "backward_dk_sm90":
            statistics = self.block_cols * ROW_STATISTICS_BYTES
            total += self.trained_stages * statistics + PAIR_WALK_BYTES
        return total


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The forward, and ``reduce_splits`` where blocks share a row's keys."""

    name: str
    arch: str
    kernels: tuple[KernelPlan, ...]
    tile: ForwardTile | WarpgroupTile
    num_query_tiles: int
    num_splits: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class SidePlan:
    """The gradients of one side. ``dq`` and ``dk`` say which; a fused kernel gives both."""

    side: int
    prepare: KernelPlan | None
    fused: KernelPlan | None
    finish: KernelPlan | None
    dq: KernelPlan | None
    dk: KernelPlan | None
    dq_blocks: int
    key_blocks: int
    scratch_bytes: int

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        steps = (self.prepare, self.fused, self.finish, self.dq, self.dk)
        return tuple(step for step in steps if step is not None)

    @property
    def generation(self) -> str:
        """``sm90`` where Hopper's kernels run, ``sm80`` where the portable ones do."""
        return "sm90" if any(kernel.boxes for kernel in self.kernels) else "sm80"


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The backward: one `SidePlan` per side, one after the other in the same workspace."""

    name: str
    arch: str
    sides: tuple[SidePlan, ...]
    max_dkl_offset: int
    scratch_offset: int
    workspace_bytes: int

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return tuple(kernel for side in self.sides for kernel in side.kernels)


# -------------------------------------------------------------------------------------------------
# Overrides, for benchmarks and ablations


@dataclass(frozen=True, slots=True)
class _Override:
    num_splits: int | None = None
    forward_kernel: str | None = None
    forward_tile: ForwardTile | WarpgroupTile | None = None
    backward_kernel: str | None = None
    backward_tile: BackwardTile | BackwardWarpgroupTile | PairWarpgroupTile | None = None


_NO_OVERRIDE = _Override()
_override: contextvars.ContextVar[_Override] = contextvars.ContextVar(
    "streamkl_override", default=_NO_OVERRIDE
)


@contextlib.contextmanager
def override(**choices: Any) -> Iterator[None]:
    """Make plans differently inside a ``with`` block: what benchmarks compare choices with.

    Parameters
    ----------
    num_splits : int
        Number of parts the keys are split into in the forward; 1 turns splitting off.
    forward_kernel : str
    forward_tile : ForwardTile or WarpgroupTile
        Of the kernel whose tile it is.
    backward_kernel : str
        Any kernel of the generation to use, as in ``STREAMKL_FORCE``.
    backward_tile : BackwardTile, BackwardWarpgroupTile or PairWarpgroupTile
        Of the generation whose tile it is; Hopper's fused and separate kernels have their own.

    Examples
    --------
    >>> with override(num_splits=1):
    ...     pass
    """
    known = {field.name for field in fields(_Override)}
    if unknown := set(choices) - known:
        raise PlanError(f"override: expected some of {sorted(known)}; got {sorted(unknown)}")
    token = _override.set(replace(_override.get(), **choices))
    try:
        yield
    finally:
        _override.reset(token)


def current_override() -> object:
    """The override in force, hashable: whoever keeps plans must keep them by it, too."""
    return _override.get()


# -------------------------------------------------------------------------------------------------
# Forward


def forward(problem: Problem, device: DeviceFacts, *, force: str | None = None) -> ForwardPlan:
    """Plan the forward.

    Parameters
    ----------
    problem
        What to compute.
    device
        The card.
    force
        The kernel to use; None lets the plan choose.

    Raises
    ------
    PlanError
        ``force`` names no kernel, or no tile fits the card.
    """
    return _forward(problem, device, _forced(force, FORWARD_KERNELS), _override.get())


def _forced(force: str | None, kernels: tuple[str, ...]) -> str | None:
    """`force` if it is one of `kernels`; None if it is another kernel that can be forced."""
    known = (*FORWARD_KERNELS, *BACKWARD_KERNELS)
    if force is not None and force not in known:
        raise PlanError(
            f"STREAMKL_FORCE: expected one of {', '.join(known)}; got {force!r}. "
            "Unset it to let the plan choose"
        )
    return force if force in kernels else None


@functools.lru_cache(maxsize=4096)
def _forward(
    problem: Problem, device: DeviceFacts, force: str | None, choice: _Override
) -> ForwardPlan:
    dim1, dim2 = bucket(problem.head_dim1), bucket(problem.head_dim2)
    kernel = force or choice.forward_kernel or forward_kernel(problem, device)
    if isinstance(choice.forward_tile, WarpgroupTile):
        kernel = "forward_sm90"
    elif choice.forward_tile is not None:
        kernel = "forward_sm80"
    tile: ForwardTile | WarpgroupTile
    if kernel == "forward_sm90":
        if reason := why_not_sm90(problem, device):
            raise PlanError(f"forward_sm90: {reason}. Unset STREAMKL_FORCE to let the plan choose")
        wide = choice.forward_tile or warpgroup_tile(dim1, dim2, problem.causal, device)
        assert isinstance(wide, WarpgroupTile)
        template, resident, tile = (warpgroup_template(problem.dtype, dim1, dim2, wide), 1, wide)
    else:
        narrow = choice.forward_tile or forward_tile(dim1, dim2, problem.num_queries, device)
        assert isinstance(narrow, ForwardTile)
        template = forward_template(problem.dtype, dim1, dim2, narrow, problem.aligned)
        smem = narrow.shared_memory(dim1, dim2)
        fitting = (device.shared_memory_per_block + RESERVED_BYTES) // (smem + RESERVED_BYTES)
        resident, tile = max(1, min(narrow.blocks_per_sm, fitting)), narrow
    num_tiles = _ceil_div(problem.num_queries, tile.stationary_rows)
    blocks = problem.batch * problem.num_heads * num_tiles
    if choice.num_splits is not None:
        num_splits = min(choice.num_splits, max(1, _ceil_div(problem.num_keys, tile.block_k)))
    else:
        max_splits = max(1, problem.num_keys // max(tile.block_k, MIN_KEYS_PER_SPLIT))
        num_splits = choose_splits(blocks, max_splits, device.num_sms * resident)
    kernels = []
    if blocks > 0:
        smem = tile.shared_memory(dim1, dim2)
        boxes = (tile.stationary_rows, tile.block_k) if kernel == "forward_sm90" else None
        grid = blocks * num_splits
        kernels.append(KernelPlan(kernel, template, grid, tile.threads, smem, boxes))
        if num_splits > 1:
            grid = _ceil_div(problem.num_rows, REDUCE_ROWS_PER_BLOCK)
            kernels.append(KernelPlan("reduce_splits", (), grid, 32 * REDUCE_ROWS_PER_BLOCK, 0))
    workspace = STATE_FIELDS * FLOAT_BYTES * num_splits * problem.num_rows if num_splits > 1 else 0
    name = (
        f"{kernel}_{ELEMENTS[problem.dtype]}_d{dim1}x{dim2}"
        f"_q{tile.stationary_rows}_k{tile.block_k}_s{tile.num_stages}"
        f"{'' if problem.aligned else '_guarded'}{f'_split{num_splits}' if num_splits > 1 else ''}"
    )
    return ForwardPlan(name, device.arch, tuple(kernels), tile, num_tiles, num_splits, workspace)


def forward_kernel(problem: Problem, device: DeviceFacts) -> str:
    """Hopper's kernel where it can run and the queries fill its tiles."""
    few = problem.num_queries <= FEW_QUERIES
    return "forward_sm80" if few or why_not_sm90(problem, device) else "forward_sm90"


def why_not_sm90(problem: Problem, device: DeviceFacts) -> str:
    """Why ``forward_sm90`` cannot run; empty if it can."""
    if device.arch != "sm_90a":
        return f"expected a card of compute capability 9.0; got {device.arch}"
    if not problem.aligned:
        return "expected addresses and strides that are multiples of 16 bytes"
    sizes = (problem.num_queries, problem.num_keys, problem.num_queries, problem.num_keys)
    tensors = (problem.q1, problem.k1, problem.q2, problem.k2)
    if any(size > 1 and tensor.row == 0 for size, tensor in zip(sizes, tensors, strict=True)):
        return "expected rows that do not all lie at one address"
    if problem.num_keys == 0:
        return "expected at least one key"
    return ""


def warpgroup_tile(dim1: int, dim2: int, causal: bool, device: DeviceFacts) -> WarpgroupTile:
    """Choose the tile of a pair of buckets; see `warpgroup_tiles`."""
    for tile in warpgroup_tiles(dim1, dim2, causal):
        if tile.fits(dim1, dim2, device.shared_memory_per_block):
            return tile
    raise PlanError(
        f"forward_sm90: no tile for head dims {dim1} and {dim2} fits "
        f"{device.shared_memory_per_block} bytes of shared memory"
    )


def warpgroup_tiles(dim1: int, dim2: int, causal: bool) -> Iterator[WarpgroupTile]:
    """Tiles for a pair of buckets, the fastest first.

    Three consumers of 64 rows, as many stages as fit. Past head dimensions of 256 in all their
    queries do not fit beside two stages: two consumers, whose queries live in registers.
    """
    for stages in (5, 4, 3, 2):
        yield WarpgroupTile(3, 128, stages, False)
    if dim1 + dim2 <= 320:
        yield WarpgroupTile(2, 128, 2, True)
    if causal:
        yield WarpgroupTile(2, 64, 3, True)
    for stages in (3, 2):
        yield WarpgroupTile(2, 80, stages, True)
        yield WarpgroupTile(2, 80, stages, False)


def warpgroup_template(dtype: str, dim1: int, dim2: int, tile: WarpgroupTile) -> Template:
    """Template arguments of ``forward_sm90``."""
    return (
        ("Element", ELEMENTS[dtype]),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kNumConsumers", tile.num_consumers),
        ("kBlockK", tile.block_k),
        ("kNumStages", tile.num_stages),
        ("kQueriesInRegisters", tile.queries_in_registers),
    )


# So many query rows are bound by reading the keys.
FEW_QUERIES = 64


def forward_tile(dim1: int, dim2: int, num_queries: int, device: DeviceFacts) -> ForwardTile:
    """Choose the tile of a pair of buckets; see `forward_tiles`."""
    tiles = forward_tiles(dim1, dim2, num_queries)
    sizes = [tile.shared_memory(dim1, dim2) for tile in tiles]
    if num_queries <= FEW_QUERIES:
        # Bound by memory: what counts is bytes under way, and the list is in that order.
        for tile, size in zip(tiles, sizes, strict=True):
            if size <= device.shared_memory_per_block:
                return tile
    return _best_that_fits("forward_sm80", (dim1, dim2), tiles, sizes, device)


def forward_tiles(dim1: int, dim2: int, num_queries: int) -> tuple[ForwardTile, ...]:
    """Tiles for a pair of buckets, the fastest first, as ``python -m bench tune`` measured them on
    an H200.

    Few queries take tiles whose warps share the keys, so that a block is bound by memory and not by
    one warp's products. Many queries take 32 rows a warp, which halves the shared memory traffic of
    the keys; past head dimensions of 256 in all, 16 rows a warp with the queries in registers, so
    that two blocks still fit.
    """
    total = dim1 + dim2
    if num_queries <= 16:
        return (
            ForwardTile(1, 1, 4, 128, 32, 2, True),
            ForwardTile(1, 1, 4, 64, 16, 2, True),
            ForwardTile(1, 1, 2, 32, 16, 2, True),
        )
    if num_queries <= FEW_QUERIES:
        return (ForwardTile(2, 2, 2, 64, 32, 2, False), ForwardTile(1, 4, 1, 32, 32, 2, True))
    if total <= 128:
        return (ForwardTile(2, 4, 1, 64, 64, 2, True),)
    if total <= 256:
        return (ForwardTile(2, 4, 1, 32, 32, 2, False), ForwardTile(2, 4, 1, 32, 16, 2, True))
    return (ForwardTile(1, 4, 1, 32, 32, 2, True), ForwardTile(1, 4, 1, 16, 16, 2, True))


def forward_template(
    dtype: str, dim1: int, dim2: int, tile: ForwardTile, aligned: bool
) -> Template:
    """Template arguments of ``forward_sm80``."""
    return (
        ("Element", ELEMENTS[dtype]),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kRowTiles", tile.row_tiles),
        ("kNumWarpsQ", tile.num_warps_q),
        ("kNumWarpsK", tile.num_warps_k),
        ("kBlockK", tile.block_k),
        ("kChunkK", tile.chunk_k),
        ("kNumStages", tile.num_stages),
        ("kQueriesInRegisters", tile.queries_in_registers),
        ("kIsAligned", aligned),
    )


# A split of fewer keys costs more to merge than it saves.
MIN_KEYS_PER_SPLIT = 256
# A split adds its start, its end and its part of the merge: about this share of the whole.
SPLIT_OVERHEAD = 0.01


def choose_splits(blocks: int, max_splits: int, resident: int) -> int:
    """How many parts the keys are split into when ``resident`` blocks run at a time.

    The time is that of the last wave: ``ceil(blocks * w / resident) / w`` times that of one unsplit
    block. Many waves even themselves out and are left alone.
    """
    if blocks == 0 or blocks >= 4 * resident:
        return 1
    limit = min(max_splits, _ceil_div(4 * resident, blocks))

    def cost(splits: int) -> float:
        waves = blocks * splits / resident
        return math.ceil(waves) / splits * (1 + SPLIT_OVERHEAD * waves)

    best = min(range(1, limit + 1), key=cost)
    # Splitting must pay for its second kernel.
    return best if cost(best) < 0.9 * cost(1) else 1


# -------------------------------------------------------------------------------------------------
# Backward


def backward(
    problem: Problem,
    device: DeviceFacts,
    wrt: tuple[str, ...],
    *,
    strategy: str = "auto",
    deterministic: bool = False,
    force: str | None = None,
) -> BackwardPlan:
    """Plan the backward.

    Parameters
    ----------
    problem
        What to compute.
    device
        The card.
    wrt
        The inputs whose gradients are wanted, any non-empty subset of ``q1 k1 q2 k2``.
    strategy
        ``"fused"``: one kernel gives dQ and dK of a side where both are wanted. ``"separate"``: a
        kernel each.
        ``"auto"``: the faster one.
    deterministic
        Only kernels whose sums have a fixed order.
    force
        A kernel whose generation, the portable one or Hopper's, all kernels have to be of; None
        lets the plan choose.

    Raises
    ------
    PlanError
        ``force`` names no kernel or one that cannot run, or no tile fits the card.
    """
    forced, choice = _forced(force, BACKWARD_KERNELS), _override.get()
    return _backward(problem, device, tuple(sorted(wrt)), strategy, deterministic, forced, choice)


@functools.lru_cache(maxsize=4096)
def _backward(
    problem: Problem,
    device: DeviceFacts,
    wrt: tuple[str, ...],
    strategy: str,
    deterministic: bool,
    force: str | None,
    choice: _Override,
) -> BackwardPlan:
    sides = tuple(
        _side(
            problem,
            device,
            side,
            f"q{side}" in wrt,
            f"k{side}" in wrt,
            strategy,
            deterministic,
            force,
            choice,
        )
        for side in (2, 1)
        if f"q{side}" in wrt or f"k{side}" in wrt
    )
    max_dkl_offset = _round_up(ROW_STATISTICS_BYTES * problem.num_rows, WORKSPACE_ALIGNMENT)
    scratch_offset = max_dkl_offset + (WORKSPACE_ALIGNMENT if problem.dtype == "float16" else 0)
    workspace = scratch_offset + max(side.scratch_bytes for side in sides)
    dims = f"d{bucket(problem.head_dim1)}x{bucket(problem.head_dim2)}"
    parts = [
        f"{'fused' if side.fused else 'separate'}{side.side}"
        f"{'_dq' if f'q{side.side}' in wrt else ''}{'_dk' if f'k{side.side}' in wrt else ''}"
        f"_{side.generation}"
        for side in sides
    ]
    guarded = "" if problem.aligned else "_guarded"
    name = f"backward_{'_'.join(parts)}_{ELEMENTS[problem.dtype]}_{dims}{guarded}"
    return BackwardPlan(name, device.arch, sides, max_dkl_offset, scratch_offset, workspace)


def _side(
    problem: Problem,
    device: DeviceFacts,
    side: int,
    wants_dq: bool,
    wants_dk: bool,
    strategy: str,
    deterministic: bool,
    force: str | None,
    choice: _Override,
) -> SidePlan:
    dim1, dim2 = bucket(problem.head_dim1), bucket(problem.head_dim2)
    trained = dim1 if side == 1 else dim2
    heads = problem.batch * problem.num_heads
    key_heads = problem.batch * (problem.num_key_heads1 if side == 1 else problem.num_key_heads2)

    def kernel(
        job: str, num_rows: int, num_heads: int, has_dk: bool = True
    ) -> tuple[KernelPlan | None, int]:
        name = backward_kernel(job, problem, device, side, force, choice)
        tile = choice.backward_tile
        boxes = None
        if name in PAIR_KERNELS:
            if not isinstance(tile, PairWarpgroupTile):
                tile = pair_warpgroup_tile(name, dim1, dim2, side, device)
            assert tile is not None
            template = pair_warpgroup_template(name, problem.dtype, side, dim1, dim2, tile)
            fixed = dim2 if side == 1 else dim1
            boxes, smem = tile.boxes(name), tile.shared_memory(name, fixed, trained)
        elif name == "backward_fused_sm90":
            if not isinstance(tile, BackwardWarpgroupTile):
                tile = backward_warpgroup_tile(dim1, dim2, side, device)
            assert tile is not None
            template = backward_warpgroup_template(problem.dtype, side, dim1, dim2, tile, has_dk)
            boxes, smem = tile.boxes, tile.shared_memory(dim1, dim2)
        else:
            if not isinstance(tile, BackwardTile):
                tile = backward_tile(name, dim1, dim2, side, device)
            template = backward_template(
                name, problem.dtype, side, dim1, dim2, tile, problem.aligned, has_dk
            )
            smem = tile.shared_memory(name, dim1, dim2)
        num_blocks = _ceil_div(num_rows, tile.stationary_rows)
        if num_blocks * num_heads == 0:
            return None, 0
        grid = num_blocks * num_heads
        return KernelPlan(name, template, grid, tile.threads, smem, boxes), num_blocks

    fused = finish = dq = dk = None
    dq_blocks = key_blocks = scratch = 0
    if wants_dq:
        dq, dq_blocks = kernel("dq", problem.num_queries, heads)
    if wants_dk:
        dk, key_blocks = kernel("dk", problem.num_keys, key_heads)
    if wants_dq and not deterministic and problem.num_rows > 0 and problem.num_keys > 0:
        candidate, fused_blocks = kernel("fused", problem.num_keys, key_heads, has_dk=wants_dk)
        if use_fused(strategy, device, candidate, dq, dk):
            fused, key_blocks, dq, dk, dq_blocks = (candidate, fused_blocks, None, None, 0)
            row_tiles = _ceil_div(problem.num_queries, 16)
            scratch = heads * row_tiles * 16 * trained * FLOAT_BYTES
            grid = heads * _ceil_div(row_tiles * trained // 8 * 32, FINISH_THREADS)
            template: Template = (("Element", ELEMENTS[problem.dtype]), ("kHeadDim", trained))
            finish = KernelPlan("backward_finish", template, grid, FINISH_THREADS, 0)
    prepare = None
    if problem.num_rows > 0:
        weighted = any(step is not None and step.boxes is not None for step in (fused, dq, dk))
        grid = _ceil_div(problem.num_rows, PREPARE_THREADS)
        template = (("kSide", side), ("kIsWeighted", weighted))
        prepare = KernelPlan("backward_prepare", template, grid, PREPARE_THREADS, 0)
    return SidePlan(side, prepare, fused, finish, dq, dk, dq_blocks, key_blocks, scratch)


def backward_kernel(
    job: str,
    problem: Problem,
    device: DeviceFacts,
    side: int,
    force: str | None = None,
    choice: _Override = _NO_OVERRIDE,
) -> str:
    """The kernel of a job, ``fused``, ``dq`` or ``dk``: Hopper's where it can run.

    Its rule is `why_not_sm90`, at least one query, and a tile of the head dimensions that fits.
    """
    portable, hopper = f"backward_{job}_sm80", f"backward_{job}_sm90"
    asked = force or choice.backward_kernel
    if choice.backward_tile is not None:
        asked = portable if isinstance(choice.backward_tile, BackwardTile) else hopper
    if asked is not None and asked.endswith("sm80"):
        return portable
    reason = why_not_sm90(problem, device)
    if not reason and problem.num_queries == 0:
        reason = "expected at least one query"
    dim1, dim2 = bucket(problem.head_dim1), bucket(problem.head_dim2)
    if not reason and not has_hopper_tile(hopper, dim1, dim2, side, device):
        reason = f"expected head dimensions whose tile fits; got {dim1} and {dim2}"
    if reason and asked == hopper:
        raise PlanError(f"{hopper}: {reason}. Unset STREAMKL_FORCE to let the plan choose")
    return portable if reason else hopper


def use_fused(
    strategy: str,
    device: DeviceFacts,
    fused: KernelPlan | None,
    dq: KernelPlan | None,
    dk: KernelPlan | None,
) -> bool:
    """Whether the fused kernel takes the place of the separate ones.

    Where both gradients are wanted it does four products instead of six and wins, unless Hopper's
    kernels would have to make way for the portable one, whenever its
    blocks of keys fill the card. Where only dQ is wanted it wins only if there are too few blocks
    of queries to fill the card.
    """
    if fused is None or strategy == "separate":
        return False
    if strategy == "fused" and dk is not None:
        return True
    if fused.boxes is None and any(step is not None and step.boxes for step in (dq, dk)):
        return False
    fills = fused.grid >= device.num_sms
    if dk is not None:
        return fills
    return fills and dq is not None and 2 * dq.grid < device.num_sms


def backward_tile(
    kernel: str, dim1: int, dim2: int, side: int, device: DeviceFacts
) -> BackwardTile:
    """Choose the tile of a kernel and a pair of buckets; see `backward_tiles`."""
    tiles = backward_tiles(kernel, dim1, dim2, side)
    sizes = [tile.shared_memory(kernel, dim1, dim2) + STATIC_BYTES for tile in tiles]
    return _best_that_fits(kernel, (dim1, dim2), tiles, sizes, device)


def backward_tiles(kernel: str, dim1: int, dim2: int, side: int) -> tuple[BackwardTile, ...]:
    """Tiles for a pair of buckets, the fastest first.

    As many rows a warp as its accumulators leave registers for.
    """
    trained = dim1 if side == 1 else dim2
    large = (BackwardTile(2, 4, 48, 48, 2),) if trained <= 64 and dim1 + dim2 <= 128 else ()
    medium = (BackwardTile(2, 4, 32, 32, 2),) if trained <= 128 and dim1 + dim2 <= 256 else ()
    # The fused kernel's dQ needs registers, too, and more of them in fewer warps.
    crowded = kernel == "backward_fused_sm80" and trained > 192
    small = () if crowded else (BackwardTile(1, 4, 32, 32, 2),)
    return (
        *large,
        *medium,
        *small,
        BackwardTile(1, 8, 32, 32, 2),
        BackwardTile(1, 4, 16, 16, 2),
        BackwardTile(1, 2, 16, 16, 2),
    )


def has_hopper_tile(kernel: str, dim1: int, dim2: int, side: int, device: DeviceFacts) -> bool:
    """Whether a Hopper kernel has a tile for a pair of buckets."""
    if kernel == "backward_fused_sm90":
        return backward_warpgroup_tile(dim1, dim2, side, device) is not None
    return pair_warpgroup_tile(kernel, dim1, dim2, side, device) is not None


def backward_warpgroup_tile(
    dim1: int, dim2: int, side: int, device: DeviceFacts
) -> BackwardWarpgroupTile | None:
    """Choose the tile of ``backward_fused_sm90``; None if there is none for these dimensions."""
    for tile in backward_warpgroup_tiles(dim1, dim2, side):
        if tile.shared_memory(dim1, dim2) <= device.shared_memory_per_block:
            return tile
    return None


def backward_warpgroup_tiles(dim1: int, dim2: int, side: int) -> Iterator[BackwardWarpgroupTile]:
    """Tiles for a pair of buckets, the fastest first.

    Accumulators of more than 128 columns leave no registers for the logits: there the fused kernel
    has no tile.
    """
    trained = dim1 if side == 1 else dim2
    if trained > 128:
        return
    steps = 4
    for num_stages, num_buffers in ((3, 2), (2, 2), (2, 1)):
        yield BackwardWarpgroupTile(2, num_stages, num_buffers, steps)


def backward_warpgroup_template(
    dtype: str,
    side: int,
    dim1: int,
    dim2: int,
    tile: BackwardWarpgroupTile,
    has_dk: bool = True,
) -> Template:
    """Template arguments of ``backward_fused_sm90``."""
    return (
        ("Element", ELEMENTS[dtype]),
        ("kSide", side),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kNumConsumers", tile.num_consumers),
        ("kNumStages", tile.num_stages),
        ("kNumBuffers", tile.num_buffers),
        ("kRegisterSteps", tile.register_steps),
        ("kHasDk", has_dk),
    )


# Hopper's kernels that have a fixed order of sums.
PAIR_KERNELS = ("backward_dq_sm90", "backward_dk_sm90")
# A consumer's registers, and what it needs of them besides tiles and sums.
CONSUMER_REGISTERS = 240
SPARE_REGISTERS = {"backward_dq_sm90": 32, "backward_dk_sm90": 48}


def pair_warpgroup_tile(
    kernel: str, dim1: int, dim2: int, side: int, device: DeviceFacts
) -> PairWarpgroupTile | None:
    """Choose the tile of a separate Hopper kernel; None if none fits the card."""
    fixed, trained = (dim2, dim1) if side == 1 else (dim1, dim2)
    for tile in pair_warpgroup_tiles(kernel, fixed, trained):
        if tile.shared_memory(kernel, fixed, trained) <= device.shared_memory_per_block:
            return tile
    return None


def pair_warpgroup_tiles(kernel: str, fixed: int, trained: int) -> Iterator[PairWarpgroupTile]:
    """Tiles for the buckets of the two sides, the fastest first.

    Two consumers; the widest tiles whose logits and gradients leave room for the sums, as many
    stages as fit, and the rest of the registers for the stationary operands.
    """
    registers = CONSUMER_REGISTERS - SPARE_REGISTERS[kernel]
    for block_cols in (64, 48, 32):
        left = registers - trained // 2 - block_cols - block_cols // 4
        if left < 0:
            continue
        fixed_steps = min(left // 4, fixed // 16)
        trained_steps = min(left // 4 - fixed_steps, trained // 16)
        for fixed_stages, trained_stages in ((4, 4), (3, 4), (3, 3), (2, 3)):
            yield PairWarpgroupTile(
                2, block_cols, fixed_stages, trained_stages, fixed_steps, trained_steps
            )


def pair_warpgroup_template(
    kernel: str, dtype: str, side: int, dim1: int, dim2: int, tile: PairWarpgroupTile
) -> Template:
    """Template arguments of a separate Hopper kernel."""
    streamed = "K" if kernel == "backward_dq_sm90" else "Q"
    return (
        ("Element", ELEMENTS[dtype]),
        ("kSide", side),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kNumConsumers", tile.num_consumers),
        (f"kBlock{streamed}", tile.block_cols),
        ("kFixedStages", tile.fixed_stages),
        ("kTrainedStages", tile.trained_stages),
        ("kFixedSteps", tile.fixed_steps),
        ("kTrainedSteps", tile.trained_steps),
    )


def _best_that_fits(
    kernel: str,
    dims: tuple[int, int],
    tiles: tuple[Tile, ...],
    sizes: list[int],
    device: DeviceFacts,
) -> Tile:
    """The tile that keeps the most stationary rows on a multiprocessor; the first of equals.

    Two blocks hide each other's waits (more are not counted), and rows share what is streamed past
    them.
    """
    limit = device.shared_memory_per_block
    fitting = {tile: size for tile, size in zip(tiles, sizes, strict=True) if size <= limit}
    if not fitting:
        raise PlanError(f"{kernel}: no tile for head dims {dims} fits {limit} bytes of memory")

    def resident_rows(tile: Tile) -> int:
        num_blocks = (limit + RESERVED_BYTES) // (fitting[tile] + RESERVED_BYTES)
        return min(2, num_blocks) * tile.stationary_rows

    return max(fitting, key=resident_rows)


def backward_template(
    kernel: str,
    dtype: str,
    side: int,
    dim1: int,
    dim2: int,
    tile: BackwardTile,
    aligned: bool,
    has_dk: bool = True,
) -> Template:
    """Template arguments of a backward kernel."""
    head: Template = (
        ("Element", ELEMENTS[dtype]),
        ("kSide", side),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kRowTiles", tile.row_tiles),
        ("kNumWarps", tile.num_warps),
    )
    tail: Template = (("kNumStages", tile.num_stages), ("kIsAligned", aligned))
    if kernel == "backward_fused_sm80":
        stages, is_aligned = tail
        return (*head, ("kBlockQ", tile.block_cols), stages, ("kHasDk", has_dk), is_aligned)
    streamed = "K" if kernel == "backward_dq_sm80" else "Q"
    return (
        *head,
        (f"kBlock{streamed}", tile.block_cols),
        (f"kChunk{streamed}", tile.chunk_cols),
        *tail,
    )


# -------------------------------------------------------------------------------------------------
# What exists


QUERY_CLASSES = (1, FEW_QUERIES, 4096)  # one length for each kind of forward tile
# Pairs of unequal head dims that the benchmarks name.
UNEQUAL_PAIRS = ((192, 64), (128, 32))
FULLY_DECLARED = ("sm_80", "sm_90a")
SAMPLE_SIZE = 24

Specialisation: TypeAlias = tuple[str, Template]


def specialisations(arch: str) -> tuple[Specialisation, ...]:
    """Everything that a plan can return on a card of this architecture, each once."""
    pairs = [(dim1, dim2) for dim1 in BUCKETS for dim2 in BUCKETS]
    return _specialisations(arch, pairs, without_dk=pairs)


def declared(arch: str) -> tuple[Specialisation, ...]:
    """The specialisations that the tests compile.

    For sm_80 and sm_90a every kernel, dtype, side and equal pair of head dims and the unequal pairs
    that the benchmarks name; for others a sample of all, the same every time.
    """
    if arch in FULLY_DECLARED:
        pairs = [(dim, dim) for dim in BUCKETS] + list(UNEQUAL_PAIRS)
        found = _specialisations(arch, pairs, without_dk=[(128, 128)])
        return tuple(one for one in found if ("kIsAligned", False) not in one[1])
    everything = specialisations(arch)
    return tuple(random.Random(arch).sample(everything, min(SAMPLE_SIZE, len(everything))))


def _specialisations(
    arch: str, pairs: list[tuple[int, int]], without_dk: list[tuple[int, int]]
) -> tuple[Specialisation, ...]:
    device = device_facts(arch)
    found: dict[Specialisation, None] = {("reduce_splits", ()): None}
    for side in (1, 2):
        for weighted in (True, False) if arch == "sm_90a" else (False,):
            found["backward_prepare", (("kSide", side), ("kIsWeighted", weighted))] = None
    for dtype, element in ELEMENTS.items():
        for dim1, dim2 in pairs:
            for dim in (dim1, dim2):
                found["backward_finish", (("Element", element), ("kHeadDim", dim))] = None
            for aligned in (True, False):
                for num_queries in QUERY_CLASSES:
                    tile = forward_tile(dim1, dim2, num_queries, device)
                    found["forward_sm80", forward_template(dtype, dim1, dim2, tile, aligned)] = None
                for causal in (True, False) if arch == "sm_90a" else ():
                    wide = warpgroup_tile(dim1, dim2, causal, device)
                    found["forward_sm90", warpgroup_template(dtype, dim1, dim2, wide)] = None
                for kernel, side in itertools.product(BACKWARD_KERNELS, (1, 2)):
                    only_dq = "fused" in kernel and (dim1, dim2) in without_dk
                    for has_dk in (True, False) if only_dq else (True,):
                        if kernel.endswith("sm80"):
                            cut = backward_tile(kernel, dim1, dim2, side, device)
                            template = backward_template(
                                kernel, dtype, side, dim1, dim2, cut, aligned, has_dk
                            )
                        elif arch != "sm_90a":
                            continue
                        elif kernel in PAIR_KERNELS:
                            pair = pair_warpgroup_tile(kernel, dim1, dim2, side, device)
                            if pair is None:
                                continue
                            template = pair_warpgroup_template(
                                kernel, dtype, side, dim1, dim2, pair
                            )
                        else:
                            fit = backward_warpgroup_tile(dim1, dim2, side, device)
                            if fit is None:
                                continue
                            template = backward_warpgroup_template(
                                dtype, side, dim1, dim2, fit, has_dk
                            )
                        found[kernel, template] = None
    return tuple(found)


def bucket(head_dim: int) -> int:
    """The padded head dimension that a kernel is compiled for."""
    return next(size for size in BUCKETS if size >= head_dim)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(size: int, step: int) -> int:
    return _ceil_div(size, step) * step

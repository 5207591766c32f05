"""Tiles: how the blocks of each kernel are cut, what they need, and how the sources name it.

Of each kernel with tiles: a class, whose fields are template arguments; the tiles of a pair of head
dims, the fastest first; the one that a plan takes of those that fit; and all template arguments.
Pure Python, and of a card only its `limit`: the bytes of shared memory that a block may have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

BUCKETS = (32, 64, 96, 128, 192, 256)
# What kernels multiply (`Problem.arithmetic`), by its name in the sources.
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32"}
# Elements of 4 bytes: only forward_sm80 and the portable pair of the backward take them.
WIDE = ("float32", "tf32")
ENTROPY_STATE_FIELDS = 6  # and moment1
FLOAT_BYTES = 4
ROW_STATISTICS_BYTES = 16
TILE_ALIGNMENT = 128
# The mask that needs no kernels of its own, as Problem.kernel_mask names it.
PLAIN = "kPlain"
# Of one multiprocessor there is a little more than one block may have; 1 KB of each block is the
# system's.
RESERVED_BYTES = 1024
# The key-stationary kernels keep a few positions in static shared memory, which counts against the
# same limit.
STATIC_BYTES = 64

Value: TypeAlias = int | bool | str
Template: TypeAlias = tuple[tuple[str, Value], ...]


class PlanError(ValueError):
    """No kernel fits the problem on this card, or an override asks for what does not exist."""


def bucket(head_dim: int) -> int:
    """The padded head dimension that a kernel is compiled for."""
    return next(size for size in BUCKETS if size >= head_dim)


def padded(dim: int, arithmetic: str) -> int:
    """A bucket in units of 16 bits, which the tiles of the portable kernels count in."""
    return 2 * dim if arithmetic in WIDE else dim


def fixed_and_trained(dim1: int, dim2: int, side: int) -> tuple[int, int]:
    """The head dims of the other side and of the side that gets gradients."""
    return (dim2, dim1) if side == 1 else (dim1, dim2)


def _panel_row_bytes(dim: int) -> int:
    """Of a row in panels of 64 columns."""
    return ceil_div(dim, 64) * 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, step: int) -> int:
    return ceil_div(size, step) * step


# -------------------------------------------------------------------------------------------------
# forward_sm80

# So many query rows are bound by reading the keys.
FEW_QUERIES = 64


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
            self.num_warps_k * self.stationary_rows * ENTROPY_STATE_FIELDS * FLOAT_BYTES
            if self.num_warps_k > 1
            else 0
        )
        return max(tiles, states)


def forward_tile(
    dim1: int,
    dim2: int,
    num_rows: int,
    mask: str,
    limit: int,
    has_entropy: bool = False,
    has_softcap: bool = False,
    arithmetic: str = "bfloat16",
) -> ForwardTile:
    """Choose the tile of a pair of buckets; see `forward_tiles`."""
    tiles = forward_tiles(dim1, dim2, num_rows, mask, has_entropy, has_softcap, arithmetic)
    widths = padded(dim1, arithmetic), padded(dim2, arithmetic)
    sizes = [tile.shared_memory(*widths) for tile in tiles]
    if num_rows <= FEW_QUERIES:
        # Bound by memory: what counts is bytes under way, and the list is in that order.
        for tile, size in zip(tiles, sizes, strict=True):
            if size <= limit:
                return tile
    return _best_that_fits("forward_sm80", (dim1, dim2), tiles, sizes, limit)


def forward_tiles(
    dim1: int,
    dim2: int,
    num_rows: int,
    mask: str,
    has_entropy: bool = False,
    has_softcap: bool = False,
    arithmetic: str = "bfloat16",
) -> tuple[ForwardTile, ...]:
    """Tiles for a pair of buckets and so many rows, the fastest first.

    Few rows take tiles whose warps share the keys, so that a block is bound by memory and not by
    one warp's products. Many queries take 32 rows a warp, which halves the shared memory traffic of
    the keys; past head dimensions of 256 in all, 16 rows a warp with the queries in registers, so
    that two blocks still fit. Masks with a beginning need a few registers more. Elements of 4 bytes
    leave their queries in shared memory.
    """
    if arithmetic in WIDE:
        return _wide_forward_tiles(dim1 + dim2, num_rows)
    total = dim1 + dim2
    if num_rows <= 16:
        # Past 384, guarded loads of packed heads leave no registers for queries beside a mask's.
        is_roomy = mask == PLAIN or total <= 384
        return (
            ForwardTile(1, 1, 4, 128, 32, 2, True),
            ForwardTile(1, 1, 4, 64, 16, 2, is_roomy),
            ForwardTile(1, 1, 2, 32, 16, 2, True),
        )
    if num_rows <= FEW_QUERIES:
        return (ForwardTile(2, 2, 2, 64, 32, 2, False), ForwardTile(1, 4, 1, 32, 32, 2, True))
    if total <= 128:
        # A window's two ends, one sum a row more, or a tanh spill beside 64 columns of logits.
        chunk_k = 32 if mask != PLAIN or has_entropy or has_softcap else 64
        return (ForwardTile(2, 4, 1, 64, chunk_k, 2, True),)
    if total <= 256:
        return (ForwardTile(2, 4, 1, 32, 32, 2, False), ForwardTile(2, 4, 1, 32, 16, 2, True))
    return (ForwardTile(1, 4, 1, 32, 32, 2, True), ForwardTile(1, 4, 1, 16, 16, 2, True))


def _wide_forward_tiles(total: int, num_rows: int) -> tuple[ForwardTile, ...]:
    if num_rows <= 16:
        tiles = [
            ForwardTile(1, 1, 4, 128, 32, 2, False),
            ForwardTile(1, 1, 4, 64, 16, 2, False),
        ]
        # Past 384 its guarded loads spill.
        tiles += [ForwardTile(1, 1, 2, 32, 16, 2, False)] * (total <= 384)
    elif num_rows <= FEW_QUERIES:
        tiles = [ForwardTile(2, 2, 2, 64, 32, 2, False), ForwardTile(1, 4, 1, 32, 32, 2, False)]
    else:
        tiles = [ForwardTile(2, 4, 1, 32, 32, 2, False), ForwardTile(1, 4, 1, 32, 32, 2, False)]
    narrow = [ForwardTile(1, warps, 1, 16, 16, 2, False) for warps in (4, 2, 1)]
    return (*tiles, *narrow)


def forward_template(
    dtype: str,
    dim1: int,
    dim2: int,
    tile: ForwardTile,
    aligned: bool,
    is_packed: bool,
    mask: str,
    has_entropy: bool = False,
    has_softcap: bool = False,
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
        ("kIsPacked", is_packed),
        ("kMask", mask),
        ("kHasEntropy", has_entropy),
        ("kHasSoftcap", has_softcap),
    )


# -------------------------------------------------------------------------------------------------
# forward_sm90

# Rows of the narrowest tile of forward_sm90, the only one that wide head dims have.
WARPGROUP_ROWS = 128


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

    def box_rows(self, heads: int) -> int:
        """Queries that the copy engine brings at a time: those of a consumer, or of a whole tile
        where heads are packed into it."""
        return 64 if heads == 1 else self.stationary_rows // heads

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
        barriers = 8 * (2 * self.num_stages + self.num_consumers)
        return queries + self.num_stages * self.block_k * row + barriers


def warpgroup_tiles(
    dim1: int,
    dim2: int,
    is_packed: bool,
    has_entropy: bool = False,
    has_softcap: bool = False,
) -> Iterator[WarpgroupTile]:
    """Tiles for a pair of buckets, those that keep a multiprocessor busiest first.

    Three consumers of 64 rows, as many stages as fit; two for grids that three would leave uneven.
    Past head dimensions of 256 in all their queries do not fit beside two stages: two consumers,
    whose queries live in registers.
    """
    if dim1 + dim2 <= 256:
        # Beside the places of packed rows three consumers spill the tanh of softcaps.
        for consumers in (2,) if is_packed and has_softcap else (3, 2):
            stages = 5 if dim1 + dim2 <= 128 else 3 if dim1 + dim2 <= 192 else 2
            yield WarpgroupTile(consumers, 128, stages, False)
    elif dim1 + dim2 <= 320 and not has_entropy:  # whose sum spills beside such a tile
        yield WarpgroupTile(2, 128, 2, True)
    elif is_packed:
        yield WarpgroupTile(2, 64, 3, True)
    else:
        yield WarpgroupTile(2, 80, 2, True)
    yield WarpgroupTile(2, 80, 2, False)
    yield WarpgroupTile(2, 64, 2, False)


def warpgroup_grid(dim1: int, dim2: int, limit: int) -> Iterator[WarpgroupTile]:
    """Tiles of ``forward_sm90`` around those that `warpgroup_tiles` lists, each with the most
    stages that fit, up to four."""
    for consumers, block_k, resident in itertools.product((3, 2), (64, 96, 128), (False, True)):
        sized = (WarpgroupTile(consumers, block_k, stages, resident) for stages in (4, 3, 2))
        yield from itertools.islice((tile for tile in sized if tile.fits(dim1, dim2, limit)), 1)


def warpgroup_template(
    dtype: str,
    dim1: int,
    dim2: int,
    tile: WarpgroupTile,
    is_packed: bool,
    mask: str,
    has_entropy: bool = False,
    has_softcap: bool = False,
) -> Template:
    """Template arguments of ``forward_sm90``."""
    return (
        ("Element", ELEMENTS[dtype]),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kNumConsumers", tile.num_consumers),
        ("kBlockK", tile.block_k),
        ("kNumStages", tile.num_stages),
        ("kQueriesInRegisters", tile.queries_in_registers),
        ("kIsPacked", is_packed),
        ("kMask", mask),
        ("kHasEntropy", has_entropy),
        ("kHasSoftcap", has_softcap),
    )


# -------------------------------------------------------------------------------------------------
# backward_fused_sm80, backward_dq_sm80, backward_dk_sm80


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
            return tiles + round_up(self.stationary_rows * row, TILE_ALIGNMENT)
        total = tiles + self.num_stages * round_up(self.block_cols * row, TILE_ALIGNMENT)
        if kernel == "backward_fused_sm80":
            # The tile of dS^T.
            total += self.stationary_rows * round_up(self.block_cols, 32) * 2
        return total


def backward_tile(
    kernel: str,
    dim1: int,
    dim2: int,
    side: int,
    limit: int,
    aligned: bool,
    mask: str,
    has_softcap: bool,
    arithmetic: str = "bfloat16",
) -> BackwardTile:
    """Choose the tile of a kernel and a pair of buckets; see `backward_tiles`."""
    tiles = backward_tiles(kernel, dim1, dim2, side, aligned, mask, has_softcap, arithmetic)
    widths = padded(dim1, arithmetic), padded(dim2, arithmetic)
    sizes = [tile.shared_memory(kernel, *widths) + STATIC_BYTES for tile in tiles]
    return _best_that_fits(kernel, (dim1, dim2), tiles, sizes, limit)


def backward_tiles(
    kernel: str,
    dim1: int,
    dim2: int,
    side: int,
    aligned: bool,
    mask: str,
    has_softcap: bool,
    arithmetic: str = "bfloat16",
) -> tuple[BackwardTile, ...]:
    """Tiles for a pair of buckets, the fastest first.

    As many rows a warp as its accumulators leave registers for, and what else needs them: guarded
    loads where addresses or strides are not aligned, masks, and softcaps.
    """
    _, trained = fixed_and_trained(dim1, dim2, side)
    if arithmetic in WIDE:
        # Sums of 128 columns leave few registers for dS in parts.
        is_roomy = (
            aligned and mask == PLAIN and (arithmetic == "tf32" or kernel == "backward_dk_sm80")
        )
        chunk = 32 if trained <= 96 or is_roomy else 16
        is_plain = aligned and mask == PLAIN and not has_softcap
        return _wide_backward_tiles(dim1 + dim2, trained, chunk, is_plain)
    large = (BackwardTile(2, 4, 48, 48, 2),) if trained <= 64 and dim1 + dim2 <= 128 else ()
    if kernel == "backward_dk_sm80" and not aligned and mask == "kRagged":
        large = ()
    medium = (BackwardTile(2, 4, 32, 32, 2),) if trained <= 128 and dim1 + dim2 <= 256 else ()
    is_plain = aligned and mask == PLAIN and not has_softcap
    if kernel == "backward_dq_sm80" and not is_plain and dim1 + dim2 > 128:
        medium = ()
    if kernel == "backward_fused_sm80" and mask == "kRagged" and dim1 + dim2 > 128:
        medium = ()
    if has_softcap and mask != PLAIN:
        large, medium = (), ()
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


def _wide_backward_tiles(
    total: int, trained: int, chunk: int, is_plain: bool
) -> tuple[BackwardTile, ...]:
    """Those of elements of 4 bytes: eight warps where they fit, as one waits for its splits."""
    tiles = [BackwardTile(1, warps, 16, 16, 2) for warps in (4, 2, 1)]
    if trained <= (192 if is_plain else 128):
        tiles.insert(0, BackwardTile(1, 4, 32, 32 if trained <= 96 else 16, 2))
    if trained <= 128:
        tiles.insert(0, BackwardTile(1, 8, 32, chunk, 2))
    if trained <= 64 and total <= 128:
        tiles.insert(0, BackwardTile(2, 4, 32, 16, 2))
    return tuple(tiles)


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
# backward_fused_sm90

# Queries in a tile of ``backward_fused_sm90``, and what they bring along besides themselves.
FUSED_BLOCK_Q = 64
FUSED_ROWS_BYTES = FUSED_BLOCK_Q * ROW_STATISTICS_BYTES
# Its dQ of up to so many columns goes to global memory by way of four warps' buffers of 16 rows and
# 32 columns; of more, and in a fixed order, straight from registers.
FUSED_STAGED_DIM = 64
FUSED_SUM_BYTES = 4 * 3 * 16 * 32 * FLOAT_BYTES
MOST_BARRIER_BYTES = 256
# Registers of a consumer that softcaps need beside what fits without them: all of these for the
# separate kernels, half of them for the fused one, whose operands take 4 a step.
REGISTERS_OF_SOFTCAP = 16


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

    def shared_memory(self, dim1: int, dim2: int, side: int, is_ordered: bool = False) -> int:
        row = _panel_row_bytes(dim1) + _panel_row_bytes(dim2)
        stage = FUSED_BLOCK_Q * row + FUSED_ROWS_BYTES
        gradients = self.stationary_rows * FUSED_BLOCK_Q * 2
        is_staged = (dim1 if side == 1 else dim2) <= FUSED_STAGED_DIM and not is_ordered
        return (
            self.stationary_rows * row
            + self.num_stages * stage
            + self.num_buffers * gradients
            + (FUSED_SUM_BYTES if is_staged else 0)
            + MOST_BARRIER_BYTES
        )


def backward_warpgroup_tile(
    dim1: int, dim2: int, side: int, limit: int, has_softcap: bool = False
) -> BackwardWarpgroupTile | None:
    """Choose the tile of ``backward_fused_sm90``; None if there is none for these dimensions."""
    for tile in backward_warpgroup_tiles(dim1, dim2, side, has_softcap):
        if tile.shared_memory(dim1, dim2, side) <= limit:
            return tile
    return None


def backward_warpgroup_tiles(
    dim1: int, dim2: int, side: int, has_softcap: bool = False
) -> Iterator[BackwardWarpgroupTile]:
    """Tiles for a pair of buckets, the fastest first.

    What the sums of dK leave of the registers goes to the stationary operands; sums of more than
    128 columns leave none for the logits: there the fused kernel has no tile. The other side may
    have any head dimension that leaves two stages, or else one buffer. Side 1 is the fastest with
    as many stages as fit, side 2 with two, 6 % at head dimensions of 128 and 64.
    """
    _, trained = fixed_and_trained(dim1, dim2, side)
    if trained > 128:
        return
    spare = (128 if dim1 + dim2 > 256 else 192) - trained
    steps = min(spare // 8, 12, (dim1 + dim2) // 16)
    if has_softcap:
        steps = max(0, steps - REGISTERS_OF_SOFTCAP // 8)
    shallow = ((2, 1), (2, 2)) if dim1 == dim2 else ((2, 2), (2, 1))
    deep = ((5, 2), (4, 2), (3, 2))
    for num_stages, num_buffers in (*shallow, *deep) if side == 2 else (*deep, (2, 2), (2, 1)):
        yield BackwardWarpgroupTile(2, num_stages, num_buffers, steps)


def backward_warpgroup_template(
    dtype: str,
    side: int,
    dim1: int,
    dim2: int,
    tile: BackwardWarpgroupTile,
    has_dk: bool = True,
    is_ordered: bool = False,
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
        ("kIsOrdered", is_ordered),
    )


# -------------------------------------------------------------------------------------------------
# backward_few_sm90

# Keys in a tile of ``backward_few_sm90``, and warpgroups that take them in turn.
FEW_BLOCK_K = 64
FEW_CONSUMERS = 2
# Rows that a tile of backward_few_sm90 may have.
FEW_ROWS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class FewTile:
    """How a block of ``backward_few_sm90`` is cut: template arguments by the names they have there.

    ``rows`` rows for the queries of the heads that share a key head; ``num_stages`` tiles of
    ``FEW_BLOCK_K`` keys.
    """

    rows: int
    num_stages: int

    @property
    def stationary_rows(self) -> int:
        return self.rows

    @property
    def threads(self) -> int:
        return 128 * (FEW_CONSUMERS + 1)

    def boxes(self, heads: int) -> tuple[int, int]:
        return self.rows // heads, FEW_BLOCK_K

    def shared_memory(self, dim1: int, dim2: int) -> int:
        row = _panel_row_bytes(dim1) + _panel_row_bytes(dim2)
        # dS of a consumer and its rows' statistics, a warp's part of dK on its way.
        gradients = FEW_CONSUMERS * self.rows * (2 * FEW_BLOCK_K + ROW_STATISTICS_BYTES)
        lines = 4 * FEW_CONSUMERS * 16 * 128
        barriers = 16 * (self.num_stages + 1) + 4 * FEW_CONSUMERS
        stages = self.num_stages * FEW_BLOCK_K * row
        return self.rows * row + stages + gradients + lines + barriers


def few_tiles(dim1: int, dim2: int, side: int) -> Iterator[FewTile]:
    """Tiles for a pair of buckets, those of fewer rows first, and of them those of more stages.

    Sums of more than 128 columns leave no registers for more than 16 rows.
    """
    _, trained = fixed_and_trained(dim1, dim2, side)
    for rows, num_stages in itertools.product(FEW_ROWS, (8, 6, 4, 2)):
        if rows <= 16 or trained <= 128:
            yield FewTile(rows, num_stages)


def few_template(
    dtype: str,
    side: int,
    dim1: int,
    dim2: int,
    tile: FewTile,
    has_dq: bool = True,
    has_dk: bool = True,
    has_softcap: bool = False,
) -> Template:
    """Template arguments of ``backward_few_sm90``."""
    return (
        ("Element", ELEMENTS[dtype]),
        ("kSide", side),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        ("kRows", tile.rows),
        ("kNumStages", tile.num_stages),
        ("kHasDq", has_dq),
        ("kHasDk", has_dk),
        ("kHasSoftcap", has_softcap),
    )


# -------------------------------------------------------------------------------------------------
# backward_dq_sm90, backward_dk_sm90

# Hopper's kernels that have a fixed order of sums.
PAIR_KERNELS = ("backward_dq_sm90", "backward_dk_sm90")
# A consumer's registers, and what it needs of them besides tiles and sums: in dK's kernel more of
# them where the sums are wide.
CONSUMER_REGISTERS = 240
SPARE_REGISTERS, SPARE_REGISTERS_OF_WIDE_DK = 32, 48
REGISTERS_OF_TABLE = 8
# More steps in registers were slower: what they take, the exponentials lack.
MOST_STEPS = 12
# What the separate kernels multiply by instead of a tile, and the walk of a block of keys.
PAIR_ZEROS_BYTES = 2048
PAIR_WALK_BYTES = 32


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


def pair_warpgroup_tile(
    kernel: str,
    dim1: int,
    dim2: int,
    side: int,
    limit: int,
    mask: str = PLAIN,
    has_softcap: bool = False,
) -> PairWarpgroupTile | None:
    """Choose the tile of a separate Hopper kernel; None if none fits the card."""
    fixed, trained = fixed_and_trained(dim1, dim2, side)
    for tile in pair_warpgroup_tiles(kernel, fixed, trained, mask, has_softcap):
        if tile.shared_memory(kernel, fixed, trained) <= limit:
            return tile
    return None


def pair_warpgroup_tiles(
    kernel: str, fixed: int, trained: int, mask: str = PLAIN, has_softcap: bool = False
) -> Iterator[PairWarpgroupTile]:
    """Tiles for the buckets of the two sides, the fastest first.

    Two consumers; the widest tiles whose logits and gradients leave room for the sums, as many
    stages as fit, and the rest of the registers for the stationary operands, less those that find
    the way to the table of a ragged batch.
    """
    is_wide_dk = kernel == "backward_dk_sm90" and trained > 128
    registers = CONSUMER_REGISTERS - (SPARE_REGISTERS_OF_WIDE_DK if is_wide_dk else SPARE_REGISTERS)
    if has_softcap:
        registers -= REGISTERS_OF_SOFTCAP
    if mask == "kRagged" and trained > 192:
        registers -= REGISTERS_OF_TABLE
    for block_cols in (64, 48, 32):
        left = registers - trained // 2 - block_cols - block_cols // 4
        if left < 0:
            continue
        steps = min(left // 4, MOST_STEPS)
        fixed_steps = min(steps, fixed // 16)
        trained_steps = min(steps - fixed_steps, trained // 16)
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


def has_hopper_tile(kernel: str, dim1: int, dim2: int, side: int, limit: int) -> bool:
    """Whether a Hopper kernel has a tile for a pair of buckets."""
    if kernel == "backward_fused_sm90":
        return backward_warpgroup_tile(dim1, dim2, side, limit) is not None
    return pair_warpgroup_tile(kernel, dim1, dim2, side, limit) is not None


# -------------------------------------------------------------------------------------------------
# backward_dq_both_sm90, backward_dk_both_sm90

# Hopper's kernels of both sides.
BOTH_KERNELS = ("backward_dq_both_sm90", "backward_dk_both_sm90")
# Stationary rows of a block of the kernels of both sides: two consumers of 64.
BOTH_ROWS = 128


@dataclass(frozen=True, slots=True)
class BothWarpgroupTile:
    """How a block of ``backward_dq_both_sm90`` or ``backward_dk_both_sm90`` is cut: template
    arguments by the names they have there.

    Two warpgroups of 64 stationary rows; ``block_cols`` streamed rows in a tile, and stages of such
    tiles of both sides; of each side's stationary operand, steps of 16 columns that live in
    registers; whether the logits of a tile come before the third products of the tile before.
    """

    block_cols: int
    num_stages: int
    steps1: int
    steps2: int
    logits_first: bool

    @property
    def stationary_rows(self) -> int:
        return BOTH_ROWS

    @property
    def threads(self) -> int:
        return 128 * 3

    def boxes(self, kernel: str) -> tuple[int, int]:
        rows, cols = self.stationary_rows, self.block_cols
        return (rows, cols) if kernel == "backward_dq_both_sm90" else (cols, rows)

    def shared_memory(self, kernel: str, dim1: int, dim2: int) -> int:
        row = _panel_row_bytes(dim1) + _panel_row_bytes(dim2)
        total = (self.stationary_rows + self.num_stages * self.block_cols) * row
        total += PAIR_ZEROS_BYTES + 16 * (self.num_stages + 1)
        if kernel == "backward_dk_both_sm90":
            statistics = 2 * self.block_cols * ROW_STATISTICS_BYTES
            total += self.num_stages * statistics + PAIR_WALK_BYTES
        return total


def both_warpgroup_tile(kernel: str, dim1: int, dim2: int, limit: int) -> BothWarpgroupTile | None:
    """Choose the tile of a kernel of both sides; None if none fits the card."""
    for tile in both_warpgroup_tiles(kernel, dim1, dim2):
        if tile.shared_memory(kernel, dim1, dim2) <= limit:
            return tile
    return None


def both_warpgroup_tiles(kernel: str, dim1: int, dim2: int) -> Iterator[BothWarpgroupTile]:
    """Tiles for a pair of buckets, the fastest first.

    Sums of more than 256 columns in all leave no registers for the logits. Those of more than 192
    leave some for the logits of both sides beside the gradients of the tile before if the tile is
    narrow: the faster way for dQ. What is left goes to the stationary operands.
    """
    total = dim1 + dim2
    if total > 256:
        return
    is_dq = kernel == "backward_dq_both_sm90"
    logits_first = is_dq or total <= 192
    block_cols = 48 if is_dq and total > 192 else 64
    steps = 8 if total <= 128 else 0 if not is_dq and total <= 192 else 2
    steps1 = min(steps // 4 * 2, dim1 // 16)
    steps2 = min(steps - steps1, dim2 // 16)
    for num_stages in (6, 5, 4, 3, 2):
        yield BothWarpgroupTile(block_cols, num_stages, steps1, steps2, logits_first)


def both_warpgroup_template(
    kernel: str, dtype: str, dim1: int, dim2: int, tile: BothWarpgroupTile
) -> Template:
    """Template arguments of a kernel of both sides."""
    streamed = "K" if kernel == "backward_dq_both_sm90" else "Q"
    return (
        ("Element", ELEMENTS[dtype]),
        ("kHeadDim1", dim1),
        ("kHeadDim2", dim2),
        (f"kBlock{streamed}", tile.block_cols),
        ("kNumStages", tile.num_stages),
        ("kSteps1", tile.steps1),
        ("kSteps2", tile.steps2),
        ("kLogitsFirst", tile.logits_first),
    )


# -------------------------------------------------------------------------------------------------
# Of several

AnyBackwardTile: TypeAlias = (
    BackwardTile | BackwardWarpgroupTile | FewTile | PairWarpgroupTile | BothWarpgroupTile
)
AnyTile: TypeAlias = ForwardTile | WarpgroupTile | AnyBackwardTile
Tile = TypeVar("Tile", "ForwardTile", "BackwardTile")


def _best_that_fits(
    kernel: str,
    dims: tuple[int, int],
    tiles: tuple[Tile, ...],
    sizes: list[int],
    limit: int,
) -> Tile:
    """The tile that keeps the most stationary rows on a multiprocessor; the first of equals.

    Two blocks hide each other's waits (more are not counted), and rows share what is streamed past
    them.
    """
    fitting = {tile: size for tile, size in zip(tiles, sizes, strict=True) if size <= limit}
    if not fitting:
        raise PlanError(f"{kernel}: no tile for head dims {dims} fits {limit} bytes of memory")

    def resident_rows(tile: Tile) -> int:
        num_blocks = (limit + RESERVED_BYTES) // (fitting[tile] + RESERVED_BYTES)
        return min(2, num_blocks) * tile.stationary_rows

    return max(fitting, key=resident_rows)

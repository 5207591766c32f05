"""Plan: which kernels run for a problem on a card, in which tiles, splits and grids.

The only heuristics of the package. Pure Python: a `DeviceFacts` and a `Problem` go in, a plan comes
out, and the same plan comes out every time. ``launch.py`` carries it out without a choice of its
own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from streamkl_cupy.problem import NO_WINDOW, Problem, message
from streamkl_cupy.tiling import (
    BOTH_ROWS,
    ELEMENTS,
    ENTROPY_STATE_FIELDS,
    FEW_BLOCK_K,
    FEW_QUERIES,
    FEW_ROWS,
    FLOAT_BYTES,
    FUSED_BLOCK_Q,
    PAIR_KERNELS,
    PLAIN,
    RESERVED_BYTES,
    ROW_STATISTICS_BYTES,
    WARPGROUP_ROWS,
    WIDE,
    AnyBackwardTile,
    BackwardTile,
    BackwardWarpgroupTile,
    BothWarpgroupTile,
    FewTile,
    ForwardTile,
    PairWarpgroupTile,
    PlanError,
    Template,
    WarpgroupTile,
    backward_template,
    backward_tile,
    backward_warpgroup_template,
    backward_warpgroup_tile,
    both_warpgroup_template,
    both_warpgroup_tile,
    bucket,
    ceil_div,
    few_template,
    few_tiles,
    fixed_and_trained,
    forward_template,
    forward_tile,
    has_hopper_tile,
    padded,
    pair_warpgroup_template,
    pair_warpgroup_tile,
    round_up,
    warpgroup_template,
    warpgroup_tiles,
)

STATE_FIELDS = 5  # m1 l1 m2 l2 acc
COUNT_BYTES = 4  # a count for each tile of dQ
INTERVAL_BYTES = 8  # of the table of a ragged batch: begin and end
OWN_LSE_BYTES = 16  # of a row, beside a given one: lse1, lse2 and their low parts
WORKSPACE_ALIGNMENT = 256
# What reduce_splits and backward_prepare/finish are compiled for.
REDUCE_THREADS = 128
PREPARE_THREADS = 256
FINISH_THREADS = 256
MERGE_THREADS = 256
REPLACE_THREADS = 256
TABLE_THREADS = 256
# States that a launch of merge_states takes.
MERGED_AT_ONCE = 8

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

FORWARD_KERNELS = ("forward_sm80", "forward_sm90")
BACKWARD_KERNELS = (
    "backward_fused_sm80",
    "backward_dq_sm80",
    "backward_dk_sm80",
    "backward_few_sm90",
    "backward_fused_sm90",
    "backward_dq_sm90",
    "backward_dk_sm90",
    "backward_dq_both_sm90",
    "backward_dk_both_sm90",
)


# What there is for elements of 4 bytes.
PORTABLE_PAIR = ("backward_dq_sm80", "backward_dk_sm80")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What plans depend on of a card.

    The architecture as NVRTC names it, multiprocessors, bytes of shared memory per block, and what
    ``streamkl-cupy tune`` has measured on it (see ``choices.py``).
    """

    arch: str
    num_sms: int
    shared_memory_per_block: int
    tuned: tuple[TunedChoice, ...] = ()


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
class ForwardPlan:
    """The forward, ``reduce_splits`` where blocks share a row's keys, and ``replace_lse`` where a
    log-sum-exp is given, which then finds the rows' own in the workspace."""

    name: str
    arch: str
    kernels: tuple[KernelPlan, ...]
    tile: ForwardTile | WarpgroupTile
    heads_per_tile: int
    num_query_tiles: int
    num_splits: int
    workspace_bytes: int
    has_entropy: bool = False
    table_offset: int = 0
    given: tuple[str, ...] = ()
    own_offset: int = 0

    @property
    def queries_per_tile(self) -> int:
        return self.tile.stationary_rows // self.heads_per_tile


@dataclass(frozen=True, slots=True)
class SidePlan:
    """The gradients of one side. ``dq`` and ``dk`` say which; a fused kernel gives both, an ordered
    one in a fixed order of sums.

    What a `BothPlan` gives is not among them, but ``prepare`` also serves that.
    """

    side: int
    prepare: KernelPlan | None
    fused: KernelPlan | None
    finish: KernelPlan | None
    dq: KernelPlan | None
    dk: KernelPlan | None
    dq_blocks: int
    key_blocks: int
    scratch_bytes: int
    heads_per_tile: int = 1  # whose queries a tile of backward_few_sm90 holds
    statistics_offset: int = 0  # of its row statistics in the workspace
    counts_offset: int | None = None  # in the scratch, of what an ordered kernel counts
    num_interleaved: int = 1  # key heads that alternate in its launch

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        steps = (self.prepare, self.fused, self.finish, self.dq, self.dk)
        return tuple(step for step in steps if step is not None)

    @property
    def generation(self) -> str:
        """``sm90`` where Hopper's kernels run, ``sm80`` where the portable ones do."""
        return "sm90" if any(kernel.boxes for kernel in self.kernels) else "sm80"

    @property
    def strategy(self) -> str:
        """``fused``, ``ordered`` or ``separate``."""
        if self.fused is None:
            return "separate"
        return "fused" if self.counts_offset is None else "ordered"


@dataclass(frozen=True, slots=True)
class BothPlan:
    """Gradients of both sides in one pass: ``dq`` those of the queries, ``dk`` of the keys."""

    dq: KernelPlan | None
    dk: KernelPlan | None
    dq_blocks: int
    key_blocks: int

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return tuple(step for step in (self.dq, self.dk) if step is not None)


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The backward: one `SidePlan` per side, one after the other in the same workspace, and behind
    them what both sides have in one pass, out of the row statistics of both."""

    name: str
    arch: str
    sides: tuple[SidePlan, ...]
    max_dkl_offset: int
    scratch_offset: int
    workspace_bytes: int
    given: tuple[str, ...] = ()
    weighted_dkl_offset: int = 0
    both: BothPlan | None = None
    table: KernelPlan | None = None
    table_offset: int = 0

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        first = () if self.table is None else (self.table,)
        of_both = () if self.both is None else self.both.kernels
        return (*first, *(kernel for side in self.sides for kernel in side.kernels), *of_both)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The merge of states: launches one after the other, of which each but the first takes the
    result of the one before as its first state.

    ``takes`` holds the first of the caller's states that each launch takes, and the one past its
    last.
    """

    name: str
    arch: str
    kernels: tuple[KernelPlan, ...]
    takes: tuple[tuple[int, int], ...]
    workspace_bytes: int = 0


# -------------------------------------------------------------------------------------------------
# Overrides, for benchmarks and ablations


@dataclass(frozen=True, slots=True)
class Choice:
    """What a plan may do one way or another; None and a kernel without a tile leave it to the plan.

    Attributes
    ----------
    num_splits
        Number of parts the keys are split into in the forward; 1 turns splitting off.
    forward_kernel, forward_tile
        The forward's kernel, and the tile of the kernel whose tile it is.
    strategy
        ``"fused"`` or ``"separate"``, where the caller asked for ``"auto"``.
    backward_kernel
        A backward kernel; one of the portable ones keeps Hopper's out of the whole call.
    backward_tiles
        Pairs of a backward kernel and its tile.
    both
        Whether gradients of both sides come from one pass, where they can.
    """

    num_splits: int | None = None
    forward_kernel: str | None = None
    forward_tile: ForwardTile | WarpgroupTile | None = None
    strategy: str | None = None
    backward_kernel: str | None = None
    backward_tiles: tuple[tuple[str, AnyBackwardTile], ...] = ()
    both: bool | None = None


NO_CHOICE = Choice()
_override: contextvars.ContextVar[Choice] = contextvars.ContextVar(
    "streamkl_override", default=NO_CHOICE
)


@contextlib.contextmanager
def override(**choices: Any) -> Iterator[None]:
    """Make plans differently inside a ``with`` block: what measurements compare choices with.

    Parameters
    ----------
    **choices
        Fields of `Choice`; ``backward_tiles`` may be a mapping from kernels to tiles. They come
        before what was tuned on the card, and after what the caller of a function asked for.

    Examples
    --------
    >>> with override(num_splits=1):
    ...     pass
    """
    known = {field.name for field in fields(Choice)}
    if unknown := set(choices) - known:
        raise PlanError(f"override: expected some of {sorted(known)}; got {sorted(unknown)}")
    if isinstance(tiles := choices.get("backward_tiles"), Mapping):
        choices["backward_tiles"] = tuple(tiles.items())
    token = _override.set(replace(_override.get(), **choices))
    try:
        yield
    finally:
        _override.reset(token)


def current_override() -> object:
    """The override in force, hashable: whoever keeps plans must keep them by it, too. None without
    one, which is looked up the fastest."""
    choice = _override.get()
    return None if choice is NO_CHOICE else choice


# -------------------------------------------------------------------------------------------------
# Forward


def forward(
    problem: Problem,
    device: DeviceFacts,
    *,
    force: str | None = None,
    given: tuple[str, ...] = (),
    has_entropy: bool = False,
) -> ForwardPlan:
    """Plan the forward.

    Parameters
    ----------
    problem
        What to compute.
    device
        The card.
    force
        The kernel to use; None lets the plan choose.
    given
        Which of ``"lse1"`` and ``"lse2"`` are given.
    has_entropy
        Whether the entropy of P1 is wanted, too.

    Raises
    ------
    PlanError
        ``force`` names no kernel, or no tile fits the card.
    """
    forced, choice = _forced(force, FORWARD_KERNELS), _override.get()
    is_free = forced is None and choice.forward_kernel is None and choice.forward_tile is None
    if is_free and not has_entropy:  # the entropy's sum may not fit beside a tuned tile
        choice = _with_tuned_forward(choice, problem, device)
    chosen = forward_by(problem, device, forced, choice, has_entropy)
    return _with_given(chosen, problem, given) if given else chosen


def _with_given(chosen: ForwardPlan, problem: Problem, given: tuple[str, ...]) -> ForwardPlan:
    """The same, and ``replace_lse`` behind it."""
    own_offset = round_up(chosen.workspace_bytes, WORKSPACE_ALIGNMENT)
    grid = ceil_div(problem.num_rows, REPLACE_THREADS)
    replacing = (KernelPlan("replace_lse", (), grid, REPLACE_THREADS, 0),) if grid else ()
    return replace(
        chosen,
        name="_".join((chosen.name, "given", *given)),
        kernels=chosen.kernels + replacing,
        workspace_bytes=own_offset + OWN_LSE_BYTES * problem.num_rows,
        given=given,
        own_offset=own_offset,
    )


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
def forward_by(
    problem: Problem,
    device: DeviceFacts,
    force: str | None,
    choice: Choice,
    has_entropy: bool = False,
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
        assert not isinstance(choice.forward_tile, ForwardTile)
        tile, num_splits = warpgroup_tile(problem, device, choice, has_entropy)
        heads = heads_per_tile(problem, tile.stationary_rows)
        template = warpgroup_template(
            problem.dtype,
            dim1,
            dim2,
            tile,
            heads > 1,
            problem.kernel_mask,
            has_entropy,
            problem.has_softcap,
        )
        smem = tile.shared_memory(dim1, dim2)
    else:
        arithmetic = problem.arithmetic
        heads = heads_per_tile(problem, FEW_QUERIES // max(1, problem.num_queries))
        rows = min(problem.num_queries * heads, most_rows(problem))
        narrow = choice.forward_tile or forward_tile(
            dim1,
            dim2,
            rows,
            problem.kernel_mask,
            device.shared_memory_per_block,
            has_entropy,
            problem.has_softcap,
            arithmetic,
        )
        assert isinstance(narrow, ForwardTile)
        heads = heads_per_tile(problem, min(heads, narrow.stationary_rows))
        aligned = problem.aligned
        template = forward_template(
            arithmetic,
            dim1,
            dim2,
            narrow,
            aligned,
            heads > 1,
            problem.kernel_mask,
            has_entropy,
            problem.has_softcap,
        )
        smem = narrow.shared_memory(padded(dim1, arithmetic), padded(dim2, arithmetic))
        fitting = (device.shared_memory_per_block + RESERVED_BYTES) // (smem + RESERVED_BYTES)
        resident, tile = max(1, min(narrow.blocks_per_sm, fitting)), narrow
        blocks = num_blocks(problem, tile, heads)
        num_splits = choice.num_splits or choose_splits(
            blocks, max_splits(problem, tile, heads), device.num_sms * resident
        )
    visited = keys_of_tile(problem, tile.stationary_rows // heads)
    num_splits = min(num_splits, max(1, ceil_div(visited, tile.block_k)))
    blocks = num_blocks(problem, tile, heads)
    kernels = []
    table = key_table(problem, has_keys=False)
    if blocks > 0:
        if table is not None:
            kernels.append(table)
        boxes = None
        if kernel == "forward_sm90":
            assert isinstance(tile, WarpgroupTile)
            boxes = (tile.box_rows(heads), tile.block_k)
        grid = blocks * num_splits
        kernels.append(KernelPlan(kernel, template, grid, tile.threads, smem, boxes))
        if num_splits > 1:
            kernels.append(reduce_splits(problem, num_splits, has_entropy))
    partial_bytes = (ENTROPY_STATE_FIELDS if has_entropy else STATE_FIELDS) * FLOAT_BYTES
    workspace = partial_bytes * num_splits * problem.num_rows if num_splits > 1 else 0
    table_offset = round_up(workspace, WORKSPACE_ALIGNMENT)
    if table is not None:
        workspace = table_offset + table_bytes(problem, has_keys=False)
    name = (
        f"{kernel}_{ELEMENTS[problem.arithmetic]}_d{dim1}x{dim2}"
        f"_q{tile.stationary_rows}_k{tile.block_k}_s{tile.num_stages}"
        f"{'' if problem.aligned else '_guarded'}{f'_pack{heads}' if heads > 1 else ''}"
        f"{f'_split{num_splits}' if num_splits > 1 else ''}{_mask_suffix(problem)}"
        f"{'_entropy' if has_entropy else ''}{_softcap_suffix(problem)}"
    )
    num_tiles = ceil_div(problem.num_queries, tile.stationary_rows // heads)
    return ForwardPlan(
        name,
        device.arch,
        tuple(kernels),
        tile,
        heads,
        num_tiles,
        num_splits,
        workspace,
        has_entropy,
        table_offset,
    )


def forward_kernel(problem: Problem, device: DeviceFacts) -> str:
    """Hopper's kernel where it can run and the queries fill its tiles."""
    rows = problem.num_queries * heads_per_tile(problem, FEW_QUERIES)
    rows = min(rows, most_rows(problem))
    return (
        "forward_sm80" if rows <= FEW_QUERIES or why_not_sm90(problem, device) else "forward_sm90"
    )


def key_table(problem: Problem, has_keys: bool) -> KernelPlan | None:
    """What the queries of a ragged batch see and, for the backward, what sees its keys."""
    if problem.ragged is None:
        return None
    num_intervals = table_bytes(problem, has_keys) // INTERVAL_BYTES
    grid = ceil_div(num_intervals, TABLE_THREADS)
    return KernelPlan("key_table", (), grid, TABLE_THREADS, 0) if grid else None


def table_bytes(problem: Problem, has_keys: bool) -> int:
    length = problem.num_queries + (problem.num_keys if has_keys else 0)
    return INTERVAL_BYTES * problem.batch * length


def heads_per_tile(problem: Problem, limit: int) -> int:
    """How many heads, at most ``limit``, share a tile of rows: few queries of heads that share
    their keys on both sides are packed, so that the keys are read once."""
    shared = math.gcd(problem.group1, problem.group2)
    # A tensor map has no packs of heads that all lie at one address.
    is_expanded = problem.num_heads > 1 and 0 in (problem.q1.head, problem.q2.head)
    if problem.num_queries > FEW_QUERIES or is_expanded:
        return 1
    return max(
        heads for heads in range(1, shared + 1) if shared % heads == 0 and heads <= max(1, limit)
    )


def num_blocks(problem: Problem, tile: ForwardTile | WarpgroupTile, heads: int) -> int:
    """Blocks of the forward, if the keys are not split."""
    num_tiles = ceil_div(problem.num_queries, tile.stationary_rows // heads)
    return problem.batch * problem.num_heads // heads * num_tiles


def most_rows(problem: Problem) -> int:
    """The rows of packed sequences that are worth a tile: tiles of more would only hold more of
    them, each with keys of its own."""
    if problem.ragged is None or not problem.ragged.is_packed:
        return problem.num_queries * problem.num_heads
    return max(1, problem.ragged.max_queries)


def max_splits(problem: Problem, tile: ForwardTile | WarpgroupTile, heads: int) -> int:
    visited = keys_of_tile(problem, tile.stationary_rows // heads)
    return max(1, visited // max(tile.block_k, MIN_KEYS_PER_SPLIT))


def keys_of_tile(problem: Problem, num_queries: int) -> int:
    """The most keys that a tile of so many queries visits: those that any of its queries sees."""
    if problem.ragged is not None:
        return _keys_of_ragged_tile(problem, num_queries)
    if problem.mask != "window":
        return problem.num_keys
    begin_lag, end_lag = problem.lags
    # All queries together see no more than from the first one's first to the last one's last.
    last = problem.num_queries - 1
    first, stop = (max(0, min(problem.num_keys, x)) for x in (-begin_lag, last + 1 - end_lag))
    rows = min(num_queries, problem.num_queries)
    return max(0, min(stop - first, begin_lag - end_lag + rows))


def _keys_of_ragged_tile(problem: Problem, num_queries: int) -> int:
    """As if every sequence were as long as it may be."""
    ragged = problem.ragged
    assert ragged is not None
    queries, most = problem.num_queries, problem.num_keys
    if ragged.is_packed:
        queries, most = min(queries, ragged.max_queries), min(most, ragged.max_keys)
    left, right = problem.window
    right = 0 if problem.causal else right
    if left is not None and right is not None:
        most = min(most, left + right + min(num_queries, queries))
    num_sequences = ceil_div(num_queries, max(1, queries)) if ragged.is_packed else 1
    return min(problem.num_keys, num_sequences * most)


def mean_keys(problem: Problem, num_queries: int) -> float:
    """How many keys a tile of so many queries visits, in the mean over the tiles."""
    if problem.mask == "full":
        return problem.num_keys
    if problem.ragged is not None:
        most = keys_of_tile(problem, num_queries)
        is_half = problem.causal and problem.window[0] is None and problem.q_offset is None
        return most / 2 if is_half else most
    if problem.mask == "causal" and problem.q_offset is None and problem.window[1] is None:
        return problem.num_keys - min(problem.num_queries, problem.num_keys) / 2
    begin_lag, end_lag = problem.lags
    most = problem.num_keys
    firsts = range(0, problem.num_queries, num_queries)
    # A sample of the tiles is enough where there are many.
    firsts = firsts[:: max(1, len(firsts) // 256)]
    visited = 0
    for first in firsts:
        last = min(first + num_queries, problem.num_queries) - 1
        begin, end = max(0, min(most, first - begin_lag)), max(0, min(most, last + 1 - end_lag))
        visited += max(0, end - begin)
    return visited / max(1, len(firsts))


def _mask_suffix(problem: Problem) -> str:
    return "" if problem.mask == "full" else f"_{problem.mask}"


def _softcap_suffix(problem: Problem) -> str:
    return "_softcap" if problem.has_softcap else ""


def reduce_splits(problem: Problem, num_splits: int, has_entropy: bool = False) -> KernelPlan:
    """A row of few splits takes few lanes."""
    lanes = min(32, 1 << (num_splits - 1).bit_length())
    grid = ceil_div(problem.num_rows, REDUCE_THREADS // lanes)
    template: Template = (("kLanesPerRow", lanes), ("kHasEntropy", has_entropy))
    return KernelPlan("reduce_splits", template, grid, REDUCE_THREADS, 0)


def why_not_sm90(problem: Problem, device: DeviceFacts) -> str:
    """Why ``forward_sm90`` cannot run; empty if it can."""
    if device.arch != "sm_90a":
        return f"expected a card of compute capability 9.0; got {device.arch}"
    if problem.arithmetic in WIDE:
        return f"expected bfloat16 or float16 inputs; got {problem.dtype}"
    if not problem.aligned:
        return "expected addresses and strides that are multiples of 16 bytes"
    sizes = (problem.num_queries, problem.num_keys, problem.num_queries, problem.num_keys)
    tensors = (problem.q1, problem.k1, problem.q2, problem.k2)
    if any(size > 1 and tensor.row == 0 for size, tensor in zip(sizes, tensors, strict=True)):
        return "expected rows that do not all lie at one address"
    if problem.num_keys == 0:
        return "expected at least one key"
    return ""


def warpgroup_tile(
    problem: Problem,
    device: DeviceFacts,
    choice: Choice = NO_CHOICE,
    has_entropy: bool = False,
) -> tuple[WarpgroupTile, int]:
    """Choose a tile of `warpgroup_tiles` and into how many parts the keys are split: what takes the
    least time by `warpgroup_time`; the first of equals."""
    dims = bucket(problem.head_dim1), bucket(problem.head_dim2)
    is_packed = heads_per_tile(problem, WARPGROUP_ROWS) > 1
    listed = warpgroup_tiles(*dims, is_packed, has_entropy, problem.has_softcap)
    tiles = [tile for tile in listed if tile.fits(*dims, device.shared_memory_per_block)]
    if choice.forward_tile is not None:
        tiles = [cast(WarpgroupTile, choice.forward_tile)]
    if not tiles:
        raise PlanError(
            f"forward_sm90: no tile for head dims {dims[0]} and {dims[1]} fits "
            f"{device.shared_memory_per_block} bytes of shared memory"
        )
    times = {}
    for tile in tiles:
        blocks = num_blocks(problem, tile, heads_per_tile(problem, tile.stationary_rows))
        # As many splits as so many waves of blocks have room for. Beyond sixteen blocks a
        # multiprocessor there is little left to even out.
        most = max_splits(problem, tile, heads_per_tile(problem, tile.stationary_rows))
        waves = range(1, 17 if blocks else 1)
        found = {1, *(min(most, max(1, wave * device.num_sms // blocks)) for wave in waves)}
        for splits in (choice.num_splits,) if choice.num_splits else sorted(found):
            times[tile, splits] = warpgroup_time(problem, device, tile, splits)
    return min(times, key=lambda tile_and_splits: times[tile_and_splits])


# Measured on an H200 in units of the time that a block of three consumers takes for 128 keys
# (2.65 us at head dims of 128): the start and the end of a block, the merge of splits, and the
# part of that time that fewer consumers need, which keep the multiprocessor less busy.
BLOCK_OVERHEAD = 2.7
MERGE_OVERHEAD = 0.5
TIME_OF_CONSUMERS = {1: 0.56, 2: 0.74, 3: 1.0}


def warpgroup_time(
    problem: Problem, device: DeviceFacts, tile: WarpgroupTile, num_splits: int
) -> float:
    """What the forward would take, in the unit above.

    Of equal blocks the last wave counts. Blocks that a mask makes unequal, the heavy ones
    first, even out as far as the longest lets them; the shortest over the longest says how equal
    they are.
    """
    heads = heads_per_tile(problem, tile.stationary_rows)
    blocks = num_blocks(problem, tile, heads) * num_splits
    # Products take a time that goes with the head dims, exponentials one that does not.
    width = max(0.75, (bucket(problem.head_dim1) + bucket(problem.head_dim2)) / 256)
    step = TIME_OF_CONSUMERS[tile.num_consumers] * tile.block_k / 128
    overhead = BLOCK_OVERHEAD / width

    def of_block(num_keys: float) -> float:
        return overhead + step * math.ceil(num_keys / tile.block_k / num_splits)

    most = keys_of_tile(problem, tile.stationary_rows // heads)
    longest = of_block(most)
    time = ceil_div(blocks, device.num_sms) * longest
    if problem.mask != "full":
        mean = mean_keys(problem, tile.stationary_rows // heads)
        evened_out = max(longest, blocks * of_block(mean) / device.num_sms)
        # The shortest is as far below the mean as the longest is above.
        equality = of_block(max(0, 2 * mean - most)) / longest
        time = equality * time + (1 - equality) * evened_out
    return time + (MERGE_OVERHEAD / width if num_splits > 1 else 0)


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
    limit = min(max_splits, ceil_div(4 * resident, blocks))

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
    given: tuple[str, ...] = (),
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
        kernel each, or on Hopper one for dQ and one for dK of both sides, see `use_both`.
        ``"auto"``: the faster one.
    deterministic
        Only kernels whose sums have a fixed order: the separate ones, and Hopper's fused one where
        its blocks add one after the other.
    force
        A kernel whose generation, the portable one or Hopper's, all kernels have to be of; None
        lets the plan choose.
    given
        Which of ``"lse1"`` and ``"lse2"`` were given to the forward.

    Raises
    ------
    PlanError
        ``force`` names no kernel or one that cannot run, or no tile fits the card.
    """
    forced, choice = _forced(force, BACKWARD_KERNELS), _override.get()
    names = tuple(sorted(wrt))
    if given:  # which gives each side statistics of its own
        choice = replace(choice, both=False)
    chosen = backward_by(problem, device, names, strategy, deterministic, forced, choice)
    if not given:
        return chosen
    # dkl times the mass of P1.
    offset = round_up(chosen.workspace_bytes, WORKSPACE_ALIGNMENT)
    return replace(
        chosen,
        name="_".join((chosen.name, "given", *given)),
        workspace_bytes=offset + FLOAT_BYTES * problem.num_rows,
        given=given,
        weighted_dkl_offset=offset,
    )


@functools.lru_cache(maxsize=4096)
def backward_by(
    problem: Problem,
    device: DeviceFacts,
    wrt: tuple[str, ...],
    strategy: str,
    deterministic: bool,
    force: str | None,
    choice: Choice,
) -> BackwardPlan:
    def sides_of(wanted: tuple[str, ...], both: BothPlan | None = None) -> tuple[SidePlan, ...]:
        """Plans of the sides that `wrt` names, for the gradients that are wanted of them."""
        return tuple(
            _side(
                problem,
                device,
                side,
                f"q{side}" in wanted,
                f"k{side}" in wanted,
                strategy if both is None else "separate",
                deterministic or both is not None,
                force,
                choice,
                serves_both=both is not None,
            )
            for side in (2, 1)
            if f"q{side}" in wrt or f"k{side}" in wrt
        )

    sides, both = sides_of(wrt), _both(problem, device, wrt, force, choice)
    left = wrt
    if both is not None:
        left = tuple(name for name in wrt if (both.dq if name[0] == "q" else both.dk) is None)
        asked = (choice.strategy or strategy) if strategy == "auto" else strategy
        if use_both(both, len(left), sides, problem, device, asked, choice):
            sides = sides_of(left, both)
        else:
            left, both = wrt, None
    statistics_bytes = ROW_STATISTICS_BYTES * problem.num_rows
    if both is not None:
        statistics_bytes *= 2
    max_dkl_offset = round_up(statistics_bytes, WORKSPACE_ALIGNMENT)
    scratch_offset = max_dkl_offset + (WORKSPACE_ALIGNMENT if problem.dtype == "float16" else 0)
    workspace = scratch_offset + max(side.scratch_bytes for side in sides)
    table_offset = round_up(workspace, WORKSPACE_ALIGNMENT)
    table = key_table(problem, has_keys=True)
    if table is not None:
        workspace = table_offset + table_bytes(problem, has_keys=True)
    dims = f"d{bucket(problem.head_dim1)}x{bucket(problem.head_dim2)}"
    parts = []
    if both is not None:
        parts.append(f"both{'_dq' if both.dq else ''}{'_dk' if both.dk else ''}_sm90")
    parts += [
        f"{side.strategy}{side.side}"
        f"{'_dq' if f'q{side.side}' in left else ''}{'_dk' if f'k{side.side}' in left else ''}"
        f"_{side.generation}"
        for side in sides
        if f"q{side.side}" in left or f"k{side.side}" in left
    ]
    guarded = "" if problem.aligned else "_guarded"
    mask = _mask_suffix(problem) + _softcap_suffix(problem)
    name = f"backward_{'_'.join(parts)}_{ELEMENTS[problem.arithmetic]}_{dims}{guarded}{mask}"
    return BackwardPlan(
        name,
        device.arch,
        sides,
        max_dkl_offset,
        scratch_offset,
        workspace,
        both=both,
        table=table,
        table_offset=table_offset,
    )


def _both(
    problem: Problem,
    device: DeviceFacts,
    wrt: tuple[str, ...],
    force: str | None,
    choice: Choice,
) -> BothPlan | None:
    """What of the wanted gradients both sides could have in one pass; None if nothing."""
    asked = force or choice.backward_kernel
    if choice.both is False or (asked is not None and asked.endswith("sm80")):
        return None
    dims = bucket(problem.head_dim1), bucket(problem.head_dim2)
    tiles = dict(choice.backward_tiles)

    def kernel(rows: str, num_rows: int, num_heads: int) -> tuple[KernelPlan | None, int]:
        name = f"backward_d{rows}_both_sm90"
        if not {f"{rows}1", f"{rows}2"} <= {*wrt}:
            return None, 0
        if reason := why_not_both(name, problem, device):
            if asked == name:
                raise PlanError(f"{name}: {reason}. Unset STREAMKL_FORCE to let the plan choose")
            return None, 0
        tile = tiles.get(name)
        if not isinstance(tile, BothWarpgroupTile):
            tile = both_warpgroup_tile(name, *dims, device.shared_memory_per_block)
        assert tile is not None
        num_blocks = ceil_div(num_rows, tile.stationary_rows)
        made = KernelPlan(
            name,
            both_warpgroup_template(name, problem.dtype, *dims, tile),
            num_blocks * num_heads,
            tile.threads,
            tile.shared_memory(name, *dims),
            tile.boxes(name),
        )
        return made, num_blocks

    dq, dq_blocks = kernel("q", problem.num_queries, problem.batch * problem.num_heads)
    dk, key_blocks = kernel("k", problem.num_keys, problem.batch * problem.num_key_heads1)
    return BothPlan(dq, dk, dq_blocks, key_blocks) if dq or dk else None


def why_not_both(kernel: str, problem: Problem, device: DeviceFacts) -> str:
    """Why a kernel of both sides cannot run; empty if it can."""
    if reason := why_not_sm90(problem, device):
        return reason
    if problem.num_rows == 0:
        return "expected at least one query"
    if problem.kernel_mask != PLAIN:
        return "expected no window, no query offset and no lengths"
    if problem.has_softcap:
        return "expected no softcap"
    if kernel == "backward_dk_both_sm90" and problem.group1 != problem.group2:
        return (
            "expected the same groups of heads on both sides; got "
            f"{problem.group1} and {problem.group2}"
        )
    dims = bucket(problem.head_dim1), bucket(problem.head_dim2)
    if both_warpgroup_tile(kernel, *dims, device.shared_memory_per_block) is None:
        return f"expected head dimensions whose tile fits; got {dims[0]} and {dims[1]}"
    return ""


def use_both(
    both: BothPlan,
    num_left: int,
    sides: tuple[SidePlan, ...],
    problem: Problem,
    device: DeviceFacts,
    strategy: str,
    choice: Choice,
) -> bool:
    """Whether one pass for both sides takes the place of one for each, beside as many separate
    kernels as gradients are left.

    In the place of the separate kernels of Hopper it always does: four products instead of six, and
    the exponentials once. In that of the fused ones where it adds no products (all four gradients
    take eight either way) and blocks of queries fill the card, which the fused kernel does with
    blocks of keys. Measured on an H200 at 0.84 to 0.98 of the fused kernels' time where a head
    dimension is 96 or more, 0.99 to 1.01 at 32 and 64; with 64 blocks of queries on 16K keys 1.15.
    """
    if choice.both is not None:
        return choice.both
    named, replaced, products = dict(choice.backward_tiles), [], 0
    for side in sides:
        for step, instead in ((side.fused, both), (side.dq, both.dq), (side.dk, both.dk)):
            if step is not None:
                products += 4 if step is side.fused else 3
                replaced += [step] if instead is not None else []
    if any(step.kernel in named for step in replaced):
        return False
    if all(step.kernel in PAIR_KERNELS for step in replaced):
        return True
    could = (*PAIR_KERNELS, "backward_fused_sm90")
    if strategy != "auto" or any(step.kernel not in could for step in replaced):
        return False
    if 4 * len(both.kernels) + 3 * num_left > products:
        return False
    query_blocks = problem.batch * problem.num_heads * ceil_div(problem.num_queries, BOTH_ROWS)
    return 4 * query_blocks >= 3 * device.num_sms or problem.num_queries >= problem.num_keys


def _side(
    problem: Problem,
    device: DeviceFacts,
    side: int,
    wants_dq: bool,
    wants_dk: bool,
    strategy: str,
    deterministic: bool,
    force: str | None,
    choice: Choice,
    serves_both: bool = False,
) -> SidePlan:
    if force is None:
        choice = _with_tuned_backward(
            choice, problem, device, side, wants_dq, wants_dk, deterministic
        )
    if strategy == "auto" and choice.strategy is not None:
        strategy = choice.strategy
    tiles, arithmetic = dict(choice.backward_tiles), problem.arithmetic
    limit = device.shared_memory_per_block
    if arithmetic in WIDE and strategy == "fused":
        expected, remedy = (
            f'"auto" or "separate" with {problem.dtype} inputs on a GPU',
            "leave it out",
        )
        raise PlanError(message("strategy", expected, repr(strategy), remedy))
    dim1, dim2 = bucket(problem.head_dim1), bucket(problem.head_dim2)
    _, trained = fixed_and_trained(dim1, dim2, side)
    heads = problem.batch * problem.num_heads
    key_heads = problem.batch * (problem.num_key_heads1 if side == 1 else problem.num_key_heads2)

    def kernel(
        job: str, num_rows: int, num_heads: int, has_dk: bool = True, has_dq: bool = True
    ) -> tuple[KernelPlan | None, int]:
        name = backward_kernel(
            job, problem, device, side, force, choice, has_dq, has_dk, deterministic
        )
        tile = tiles.get(name)
        boxes = None
        if name in PAIR_KERNELS:
            if not isinstance(tile, PairWarpgroupTile):
                tile = pair_warpgroup_tile(
                    name, dim1, dim2, side, limit, problem.kernel_mask, problem.has_softcap
                )
            assert tile is not None
            template = pair_warpgroup_template(name, problem.dtype, side, dim1, dim2, tile)
            boxes = tile.boxes(name)
            smem = tile.shared_memory(name, *fixed_and_trained(dim1, dim2, side))
        elif name == "backward_few_sm90":
            if not isinstance(tile, FewTile) or tile.rows < few_rows(problem, side):
                tile = few_tile(problem, side, device)
            assert tile is not None
            num_tiles = ceil_div(num_rows, FEW_BLOCK_K) * num_heads
            few = few_template(
                problem.dtype, side, dim1, dim2, tile, has_dq, has_dk, problem.has_softcap
            )
            smem, boxes = tile.shared_memory(dim1, dim2), tile.boxes(heads_per_key(problem, side))
            grid = min(device.num_sms, num_tiles)
            return KernelPlan(name, few, grid, tile.threads, smem, boxes), num_tiles
        elif name == "backward_fused_sm90":
            if not isinstance(tile, BackwardWarpgroupTile):
                tile = backward_warpgroup_tile(dim1, dim2, side, limit, problem.has_softcap)
            assert tile is not None
            template = backward_warpgroup_template(
                problem.dtype, side, dim1, dim2, tile, has_dk, deterministic
            )
            boxes, smem = tile.boxes, tile.shared_memory(dim1, dim2, side, deterministic)
        else:
            if not isinstance(tile, BackwardTile):
                aligned, mask = problem.aligned, problem.kernel_mask
                tile = backward_tile(
                    name, dim1, dim2, side, limit, aligned, mask, problem.has_softcap, arithmetic
                )
            template = backward_template(
                name, arithmetic, side, dim1, dim2, tile, problem.aligned, has_dk
            )
            smem = tile.shared_memory(name, padded(dim1, arithmetic), padded(dim2, arithmetic))
        template = (
            *template,
            ("kMask", problem.kernel_mask),
            ("kHasSoftcap", problem.has_softcap),
        )
        num_blocks = ceil_div(num_rows, tile.stationary_rows)
        if num_blocks * num_heads == 0:
            return None, 0
        grid = num_blocks * num_heads
        return KernelPlan(name, template, grid, tile.threads, smem, boxes), num_blocks

    fused = finish = dq = dk = None
    dq_blocks = key_blocks = scratch = 0
    heads_per_tile, counts_offset, num_interleaved = 1, None, 1
    if wants_dq:
        dq, dq_blocks = kernel("dq", problem.num_queries, heads)
    if wants_dk:
        dk, key_blocks = kernel("dk", problem.num_keys, key_heads)
    has_fused = arithmetic not in WIDE and problem.num_rows > 0 and problem.num_keys > 0
    if deterministic:
        of = (problem, device, side, force, choice)
        has_fused = has_fused and wants_dq and wants_dk and not why_not_ordered(*of)
    if has_fused:
        candidate, num_blocks = kernel("fused", problem.num_keys, key_heads, wants_dk, wants_dq)
        alternating = interleaved(problem, side, num_blocks, device) if deterministic else 1
        hides_order = not deterministic or (
            alternating >= _heads_that_hide_order(problem, side, device)
        )
        if use_fused(strategy, problem.num_queries, device, candidate, dq, dk, hides_order):
            assert candidate is not None
            if candidate.kernel == "backward_few_sm90":
                heads_per_tile = heads_per_key(problem, side)
            dq, dk, dq_blocks, key_blocks = None, None, 0, num_blocks
            if wants_dq:
                fused = candidate
            else:
                dk = candidate
        if fused is not None:
            num_tiles = heads // heads_per_tile
            row_tiles = ceil_div(problem.num_queries * heads_per_tile, 16)
            scratch = num_tiles * row_tiles * 16 * trained * FLOAT_BYTES
            if deterministic:
                counts_offset, num_interleaved = scratch, alternating
                scratch += heads * ceil_div(problem.num_queries, FUSED_BLOCK_Q) * COUNT_BYTES
            grid = num_tiles * ceil_div(row_tiles * trained // 8 * 32, FINISH_THREADS)
            template: Template = (("Element", ELEMENTS[problem.dtype]), ("kHeadDim", trained))
            finish = KernelPlan("backward_finish", template, grid, FINISH_THREADS, 0)
    if dq is not None and dk is not None and (dq.boxes is None) != (dk.boxes is None):
        # They read the same row statistics, which are weighted by dkl for Hopper's alone.
        raise PlanError(
            f"backward_tiles: expected tiles of one generation for dQ and dK of side {side}; got "
            f"{dq.kernel} and {dk.kernel}. Give tiles of both, or none of the other"
        )
    prepare = None
    if problem.num_rows > 0:
        weighted = serves_both or any(
            step is not None and step.boxes is not None for step in (fused, dq, dk)
        )
        grid = ceil_div(problem.num_rows, PREPARE_THREADS)
        template = (("kSide", side), ("kIsWeighted", weighted))
        prepare = KernelPlan("backward_prepare", template, grid, PREPARE_THREADS, 0)
    # Those of side 2 come first.
    offset = ROW_STATISTICS_BYTES * problem.num_rows if serves_both and side == 1 else 0
    return SidePlan(
        side,
        prepare,
        fused,
        finish,
        dq,
        dk,
        dq_blocks,
        key_blocks,
        scratch,
        heads_per_tile,
        offset,
        counts_offset,
        num_interleaved,
    )


def backward_kernel(
    job: str,
    problem: Problem,
    device: DeviceFacts,
    side: int,
    force: str | None = None,
    choice: Choice = NO_CHOICE,
    has_dq: bool = True,
    has_dk: bool = True,
    deterministic: bool = False,
) -> str:
    """The kernel of a job, ``fused``, ``dq`` or ``dk``: Hopper's where it can run.

    Its rule is `why_not_sm90`, at least one query, and a tile of the head dimensions that fits.
    Queries so few that the time is that of reading the keys go to ``backward_few_sm90`` in place of
    the fused kernel, see `why_not_few` and `few_pays`; where it does not take them, those of one
    tile of the portable fused kernel go to that one, of which two blocks share a multiprocessor:
    while one waits for its keys the other multiplies. Of fused kernels only Hopper's has a fixed
    order of sums, see `why_not_ordered`.
    """
    few = "backward_few_sm90"
    portable, hopper = f"backward_{job}_sm80", f"backward_{job}_sm90"
    asked = force or choice.backward_kernel
    given = dict(choice.backward_tiles)
    if job == "fused" and few in given:
        asked = few
    elif hopper in given or portable in given:
        asked = hopper if hopper in given else portable
    if job == "fused" and asked in (None, few) and not deterministic:
        why = why_not_few(problem, device, side)
        if asked == few and why:
            raise PlanError(f"{few}: {why}. Unset STREAMKL_FORCE to let the plan choose")
        if asked == few or (not why and few_pays(problem, device, side, has_dq, has_dk)):
            return few
    if asked is not None and asked.endswith("sm80"):
        return portable
    reason = why_not_sm90(problem, device)
    if not reason and problem.num_queries == 0:
        reason = "expected at least one query"
    dim1, dim2 = bucket(problem.head_dim1), bucket(problem.head_dim2)
    if not reason and not has_hopper_tile(hopper, dim1, dim2, side, device.shared_memory_per_block):
        reason = f"expected head dimensions whose tile fits; got {dim1} and {dim2}"
    if reason and asked == hopper:
        raise PlanError(f"{hopper}: {reason}. Unset STREAMKL_FORCE to let the plan choose")
    are_few = job == "fused" and asked is None and problem.num_queries <= FEW_FUSED_QUERIES
    return portable if reason or (are_few and not deterministic) else hopper


FEW_FUSED_QUERIES = 16


def why_not_few(problem: Problem, device: DeviceFacts, side: int) -> str:
    """Why ``backward_few_sm90`` cannot take the gradients of a side; empty if it can."""
    if reason := why_not_sm90(problem, device):
        return reason
    if problem.num_queries == 0:
        return "expected at least one query"
    if problem.kernel_mask != PLAIN:
        return (
            "expected no window, no query offset and no lengths on the device, whose keys it would "
            "all read"
        )
    heads = heads_per_key(problem, side)
    other = problem.group2 if side == 1 else problem.group1
    if other % heads:
        return (
            f"expected heads that share a key head of side {side} to share one of the other side; "
            f"got groups of {heads} and {other}"
        )
    # A tensor map has no packs of heads that all lie at one address.
    if heads > 1 and 0 in (problem.q1.head, problem.q2.head):
        return "expected queries of heads that do not all lie at one address"
    if few_tile(problem, side, device) is None:
        return (
            f"expected at most {FEW_ROWS[-1]} rows of queries to a key head and head dimensions "
            f"whose tile fits; got {few_rows(problem, side)} rows, {problem.head_dim1} and "
            f"{problem.head_dim2}"
        )
    return ""


# With dQ alone, where blocks of queries leave half the card idle: as many tiles of keys as outweigh
# the sum of dQ at the end. Measured on an H200: 0.8 to 0.9 at 4 tiles, 1.0 to 1.1 at 8.
FEWEST_TILES_OF_DQ = 8


def few_pays(
    problem: Problem, device: DeviceFacts, side: int, has_dq: bool = True, has_dk: bool = True
) -> bool:
    """Whether ``backward_few_sm90`` is faster than the kernels in whose place it would run.

    They read the keys once for each of the heads that share them, and add up dK in more steps.
    """
    if heads_per_key(problem, side) > 1 or has_dk:
        return True
    tiles = ceil_div(problem.num_keys, FEW_BLOCK_K)
    return 2 * problem.batch * problem.num_heads < device.num_sms and tiles >= FEWEST_TILES_OF_DQ


def heads_per_key(problem: Problem, side: int) -> int:
    """Query heads that share a key head of a side."""
    return problem.group1 if side == 1 else problem.group2


def few_rows(problem: Problem, side: int) -> int:
    """Rows that the queries of the heads of a key head take in a tile of ``backward_few_sm90``."""
    return heads_per_key(problem, side) * problem.num_queries


def few_tile(problem: Problem, side: int, device: DeviceFacts) -> FewTile | None:
    """Choose the tile of ``backward_few_sm90``; None if there is none for these rows and head
    dimensions."""
    dims = bucket(problem.head_dim1), bucket(problem.head_dim2)
    for tile in few_tiles(*dims, side):
        fits = tile.shared_memory(*dims) <= device.shared_memory_per_block
        if fits and tile.rows >= few_rows(problem, side):
            return tile
    return None


def use_fused(
    strategy: str,
    num_queries: int,
    device: DeviceFacts,
    fused: KernelPlan | None,
    dq: KernelPlan | None,
    dk: KernelPlan | None,
    hides_order: bool = True,
) -> bool:
    """Whether the fused kernel takes the place of the separate ones.

    Where both gradients are wanted it does four products instead of six and wins whenever its
    blocks of keys fill the card (three quarters of it for Hopper's), unless Hopper's kernels would
    have to make way for the portable one (with few queries that is the faster one). Where only dQ
    is wanted it wins only if there are too few blocks of queries to fill the card. Of the kernel of
    few queries `few_pays` has decided, dK alone included. An ordered one also has to have more to
    do than to wait for each other (`hides_order`).
    """
    if fused is None or strategy == "separate":
        return False
    if fused.kernel == "backward_few_sm90":
        return True
    if dq is None:
        return False
    if strategy == "fused" and dk is not None:
        return True
    if not hides_order:
        return False
    is_hopper = any(step is not None and step.boxes is not None for step in (dq, dk))
    if is_hopper and fused.boxes is None and num_queries > FEW_FUSED_QUERIES:
        return False
    fills = fused.grid >= device.num_sms
    if dk is not None:
        # Hopper's pair takes 1.14 times as long on equal grids, half of it for dK, whose grid is
        # that of the fused kernel; dQ may have the whole card.
        return 4 * fused.grid >= 3 * device.num_sms if fused.boxes is not None else fills
    return fills and dq is not None and 2 * dq.grid < device.num_sms


def why_not_ordered(
    problem: Problem, device: DeviceFacts, side: int, force: str | None, choice: Choice
) -> str:
    """Why no fused kernel of a fixed order of sums can run; empty if one can.

    It is Hopper's, whose blocks add to a tile of dQ one after the other. Tiles of a ragged batch
    may overlap, so there blocks cannot be counted.
    """
    if problem.kernel_mask == "kRagged":
        return "expected neither a padded batch nor packed sequences"
    try:
        name = backward_kernel("fused", problem, device, side, force, choice, deterministic=True)
    except PlanError as error:  # the separate kernels stand in
        return str(error)
    return "" if name == "backward_fused_sm90" else f"expected backward_fused_sm90; got {name}"


# From the sum of one block in a tile to that of the next, in times of a tile: an estimate.
FOLLOW_TIME = 0.5
# Blocks of one head that run at once follow each other at that distance; so many lose little.
FEW_FOLLOWERS = 16
# An order that suits the cache is worth more where so many blocks come on a multiprocessor.
MANY_ROUNDS = 8


def interleaved(problem: Problem, side: int, num_blocks: int, device: DeviceFacts) -> int:
    """How many key heads alternate in the launch of an ordered kernel of `num_blocks` a head.

    At the start, and with a causal mask at each new head, all blocks begin at one tile, so each
    waits for those before it; the more heads, the fewer those are. Without a mask and in a long
    launch that is less than what neighbours in one head gain from finding queries in the cache,
    5 % at 16K: there heads alternate only as far as their blocks do not fill the card. Measured on
    an H200; causal, 16K and 32 heads, 1 2 4 8 16 of them: 9.65, 9.26, 8.96, 8.88 and 9.02 ms.

    Returns
    -------
    int
        The number next to it, by ratio, that divides that of all heads, of those that are enough
        for `_heads_that_hide_order` if there is one.
    """
    key_heads = problem.batch * (problem.num_key_heads1 if side == 1 else problem.num_key_heads2)
    least = _heads_that_hide_order(problem, side, device)
    best = max(device.num_sms // num_blocks, 1, least)
    is_full = problem.kernel_mask == PLAIN and not problem.causal
    if not is_full or key_heads * num_blocks < MANY_ROUNDS * device.num_sms:
        best = max(best, device.num_sms // FEW_FOLLOWERS)
    small = [n for n in range(1, math.isqrt(key_heads) + 1) if key_heads % n == 0]
    possible = [*small, *(key_heads // n for n in small)]
    enough = [n for n in possible if n >= least] or possible
    return min(enough, key=lambda n: max(n / best, best / n))


def _heads_that_hide_order(problem: Problem, side: int, device: DeviceFacts) -> int:
    """How many heads have to be in flight so that the card is busy while all blocks of a head pass
    a tile, one after the other."""
    tiles = ceil_div(problem.num_queries, FUSED_BLOCK_Q)
    return math.ceil(device.num_sms * FOLLOW_TIME / (tiles * heads_per_key(problem, side)))


# -------------------------------------------------------------------------------------------------
# States


def merge(num_rows: int, num_states: int, device: DeviceFacts) -> MergePlan:
    """Plan the merge of states.

    Examples
    --------
    >>> merge(1000, 20, device_facts("sm_80")).takes
    ((0, 8), (8, 15), (15, 20))
    """
    takes = [(0, min(num_states, MERGED_AT_ONCE))]
    while (first := takes[-1][1]) < num_states:
        takes.append((first, min(num_states, first + MERGED_AT_ONCE - 1)))
    grid = ceil_div(num_rows, MERGE_THREADS)
    kernel = KernelPlan("merge_states", (), grid, MERGE_THREADS, 0)
    kernels = (kernel,) * len(takes) if num_rows else ()
    return MergePlan(f"merge_states_{num_states}", device.arch, kernels, tuple(takes))


# -------------------------------------------------------------------------------------------------
# What was measured


@dataclass(frozen=True, slots=True)
class ProblemClass:
    """Problems that are taken to be alike: what is fastest for one of them is used for all.

    Attributes
    ----------
    dtype, head_dim1, head_dim2
        The dtype of the inputs, or tf32; the head dims padded to their buckets, as the kernels are
        compiled for them.
    heads, queries, keys
        Classes of batch times heads and of the lengths, as `length_class` counts them.
    causal, group1, group2
        As in `Problem`.
    wrt
        The gradients of one side; empty for the forward.
    deterministic
        Of the backward.
    """

    dtype: str
    head_dim1: int
    head_dim2: int
    heads: int
    queries: int
    keys: int
    causal: bool
    group1: int
    group2: int
    wrt: tuple[str, ...] = ()
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """What was fastest for a shape (batch times heads, queries, keys) of a class."""

    problem_class: ProblemClass
    shape: tuple[int, int, int]
    choice: Choice


def length_class(length: int) -> int:
    """The exponent of the next power of two: 65 to 128 are one class.

    Examples
    --------
    >>> [length_class(length) for length in (0, 1, 2, 64, 65, 128)]
    [0, 0, 1, 6, 7, 7]
    """
    return max(0, length - 1).bit_length()


def problem_class(
    problem: Problem, wrt: tuple[str, ...] = (), deterministic: bool = False
) -> ProblemClass:
    """The class of a problem, for the forward or for the gradients of one side."""
    heads, queries, keys = map(length_class, shape_of(problem))
    return ProblemClass(
        dtype=problem.arithmetic,
        head_dim1=bucket(problem.head_dim1),
        head_dim2=bucket(problem.head_dim2),
        heads=heads,
        queries=queries,
        keys=keys,
        causal=problem.causal,
        group1=problem.group1,
        group2=problem.group2,
        wrt=tuple(sorted(wrt)),
        deterministic=deterministic,
    )


def shape_of(problem: Problem) -> tuple[int, int, int]:
    """Batch times heads, queries, keys."""
    return problem.batch * problem.num_heads, problem.num_queries, problem.num_keys


def _tuned(problem: Problem, device: DeviceFacts, of: ProblemClass) -> Choice:
    """What was measured for this very shape, or else for one of its class."""
    # Nothing is measured with rows off 16 bytes, whose loads are guarded, with other masks or with
    # softcaps.
    is_plain = problem.window == NO_WINDOW and problem.q_offset is None and problem.ragged is None
    is_measured = problem.aligned and is_plain and not problem.has_softcap
    alike = [one for one in device.tuned if one.problem_class == of] if is_measured else []
    for one in alike:
        if one.shape == shape_of(problem):
            return one.choice
    # How often keys are split depends on the exact number of blocks.
    return replace(alike[0].choice, num_splits=None) if alike else NO_CHOICE


def _with_tuned_forward(choice: Choice, problem: Problem, device: DeviceFacts) -> Choice:
    tuned = _tuned(problem, device, problem_class(problem)) if device.tuned else NO_CHOICE
    if tuned.forward_kernel == "forward_sm90" and why_not_sm90(problem, device):
        return choice
    return replace(
        choice,
        forward_kernel=tuned.forward_kernel,
        forward_tile=tuned.forward_tile,
        num_splits=tuned.num_splits if choice.num_splits is None else choice.num_splits,
    )


_NO_BACKWARD_CHOICE: dict[str, Any] = {
    "strategy": None,
    "backward_kernel": None,
    "backward_tiles": (),
}


def _with_tuned_backward(
    choice: Choice,
    problem: Problem,
    device: DeviceFacts,
    side: int,
    wants_dq: bool,
    wants_dk: bool,
    deterministic: bool,
) -> Choice:
    if not device.tuned or choice != replace(choice, **_NO_BACKWARD_CHOICE):
        return choice
    wrt = (f"q{side}",) * wants_dq + (f"k{side}",) * wants_dk
    tuned = _tuned(problem, device, problem_class(problem, wrt, deterministic))
    kernels = [kernel for kernel, _ in tuned.backward_tiles]
    if any(kernel.endswith("sm90") for kernel in kernels) and why_not_sm90(problem, device):
        return choice
    if "backward_few_sm90" in kernels and why_not_few(problem, device, side):
        return choice
    return replace(
        choice,
        strategy=tuned.strategy,
        backward_kernel=tuned.backward_kernel,
        backward_tiles=tuned.backward_tiles,
    )


# Stands for its generation, see `Choice`.
PORTABLE = "backward_dq_sm80"

"""What plans can come to: candidates to measure for a problem, specialisations to compile.

``tune.py`` measures the former; the tests compile and check the latter, on machines without a card.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias, cast

from streamkl_cupy.plan import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    NO_CHOICE,
    PORTABLE,
    PORTABLE_PAIR,
    BackwardPlan,
    Choice,
    DeviceFacts,
    ForwardPlan,
    backward_by,
    device_facts,
    few_rows,
    forward_by,
    heads_per_tile,
    max_splits,
    num_blocks,
    why_not_sm90,
)
from streamkl_cupy.problem import Problem
from streamkl_cupy.tiling import (
    BOTH_KERNELS,
    BUCKETS,
    ELEMENTS,
    FEW_QUERIES,
    PAIR_KERNELS,
    PLAIN,
    STATIC_BYTES,
    WARPGROUP_ROWS,
    WIDE,
    AnyTile,
    FewTile,
    Template,
    backward_template,
    backward_tile,
    backward_tiles,
    backward_warpgroup_template,
    backward_warpgroup_tile,
    backward_warpgroup_tiles,
    both_warpgroup_template,
    both_warpgroup_tile,
    both_warpgroup_tiles,
    bucket,
    few_template,
    few_tiles,
    fixed_and_trained,
    forward_template,
    forward_tile,
    forward_tiles,
    padded,
    pair_warpgroup_template,
    pair_warpgroup_tile,
    pair_warpgroup_tiles,
    warpgroup_grid,
    warpgroup_template,
    warpgroup_tiles,
)


def few_of_each_size(dim1: int, dim2: int, side: int, device: DeviceFacts) -> tuple[FewTile, ...]:
    """The tile of each number of rows that a pair of buckets has on a card."""
    found: dict[int, FewTile] = {}
    for tile in few_tiles(dim1, dim2, side) if device.arch == "sm_90a" else ():
        if tile.shared_memory(dim1, dim2) <= device.shared_memory_per_block:
            found.setdefault(tile.rows, tile)
    return tuple(found.values())


def tile_candidates(
    kernel: str, problem: Problem, device: DeviceFacts, side: int = 0
) -> tuple[AnyTile, ...]:
    """Every tile of a kernel that fits the card, not only the one that the plan takes.

    A sweep compiles them first: one that spills registers is no candidate.

    Parameters
    ----------
    kernel
        One that has tiles.
    problem, device
        What to compute, and where.
    side
        Of a backward kernel.
    """
    dims = bucket(problem.head_dim1), bucket(problem.head_dim2)
    arithmetic, limit = problem.arithmetic, device.shared_memory_per_block
    if arithmetic in WIDE and kernel not in ("forward_sm80", *PORTABLE_PAIR):
        return ()
    widths = padded(dims[0], arithmetic), padded(dims[1], arithmetic)
    if kernel == "forward_sm80":
        few = dict.fromkeys(
            tile
            for rows in ROW_CLASSES
            for tile in forward_tiles(
                *dims,
                rows,
                problem.kernel_mask,
                has_softcap=problem.has_softcap,
                arithmetic=arithmetic,
            )
        )
        return tuple(tile for tile in few if tile.shared_memory(*widths) <= limit)
    if kernel == "forward_sm90":
        is_packed = heads_per_tile(problem, WARPGROUP_ROWS) > 1
        listed = warpgroup_tiles(*dims, is_packed, has_softcap=problem.has_softcap)
        wide = dict.fromkeys((*listed, *warpgroup_grid(*dims, limit)))
        return tuple(tile for tile in wide if tile.fits(*dims, limit))
    if kernel in PAIR_KERNELS:
        fixed, trained = fixed_and_trained(*dims, side)
        pair = pair_warpgroup_tiles(
            kernel, fixed, trained, problem.kernel_mask, problem.has_softcap
        )
        return tuple(tile for tile in pair if tile.shared_memory(kernel, fixed, trained) <= limit)
    if kernel in BOTH_KERNELS:
        both = both_warpgroup_tiles(kernel, *dims)
        return tuple(tile for tile in both if tile.shared_memory(kernel, *dims) <= limit)
    if kernel == "backward_few_sm90":
        num_rows = few_rows(problem, side)
        wide_enough = (tile for tile in few_tiles(*dims, side) if tile.rows >= num_rows)
        return tuple(tile for tile in wide_enough if tile.shared_memory(*dims) <= limit)
    if kernel == "backward_fused_sm90":
        cut = backward_warpgroup_tiles(*dims, side, problem.has_softcap)
        return tuple(tile for tile in cut if tile.shared_memory(*dims, side) <= limit)
    aligned, mask = problem.aligned, problem.kernel_mask
    cuts = backward_tiles(kernel, *dims, side, aligned, mask, problem.has_softcap, arithmetic)
    return tuple(
        tile for tile in cuts if tile.shared_memory(kernel, *widths) + STATIC_BYTES <= limit
    )


def forward_candidates(problem: Problem, device: DeviceFacts) -> dict[ForwardPlan, Choice]:
    """Different plans of a forward, each with the choice that leads to it whatever was tuned; the
    plan's own first.

    Every kernel and tile, each with the keys whole, split as the plan would, and split so that the
    blocks fill the multiprocessors one to four times.
    """
    device = replace(device, tuned=())
    own = forward_by(problem, device, None, NO_CHOICE)
    kernel = own.kernels[0].kernel if own.kernels else None
    found = {own: Choice(own.num_splits, kernel, own.tile)}
    for kernel in FORWARD_KERNELS:
        if kernel == "forward_sm90" and why_not_sm90(problem, device):
            continue
        for tile in tile_candidates(kernel, problem, device):
            choice = Choice(forward_kernel=kernel, forward_tile=cast(Any, tile))
            free = forward_by(problem, device, None, choice)
            blocks = num_blocks(problem, free.tile, free.heads_per_tile)
            waves = [times * device.num_sms // max(1, blocks) for times in (1, 2, 3, 4)]
            for splits in dict.fromkeys((free.num_splits, 1, *waves)):
                if 1 <= splits <= max_splits(problem, free.tile, free.heads_per_tile):
                    split = replace(choice, num_splits=splits)
                    found.setdefault(forward_by(problem, device, None, split), split)
    return found


def backward_candidates(
    problem: Problem, device: DeviceFacts, wrt: tuple[str, ...], *, deterministic: bool = False
) -> dict[BackwardPlan, Choice]:
    """Different plans of the gradients of one side, with the choices that lead to them; the plan's
    own first.

    Both strategies, by the plan's kernels and by the portable ones, and in each the tiles of one
    kernel at a time: those of two kernels can be measured apart and put together.
    """
    device, wrt = replace(device, tuned=()), tuple(sorted(wrt))

    def planned(choice: Choice) -> BackwardPlan:
        return backward_by(problem, device, wrt, "auto", deterministic, None, choice)

    own = planned(NO_CHOICE)
    is_fused = any(side.fused is not None for side in own.sides)
    found = {own: Choice(strategy="fused" if is_fused else "separate")}
    strategies = ("separate",) if problem.arithmetic in WIDE else ("separate", "fused")
    for strategy, generation in itertools.product(strategies, (None, PORTABLE)):
        base = Choice(strategy=strategy, backward_kernel=generation)
        found.setdefault(planned(base), base)
        for side in planned(base).sides:
            for kernel in (side.fused, side.dq, side.dk):
                if kernel is None:
                    continue
                for tile in tile_candidates(kernel.kernel, problem, device, side.side):
                    cut = replace(base, backward_tiles=((kernel.kernel, cast(Any, tile)),))
                    found.setdefault(planned(cut), cut)
    return found


# -------------------------------------------------------------------------------------------------
# What exists


# As Problem.kernel_mask names them.
MASKS = (PLAIN, "kWindow", "kRagged")
ROW_CLASSES = (1, FEW_QUERIES, 4096)  # so many rows for each kind of tile of forward_sm80
# Pairs of unequal head dims that the benchmarks name.
UNEQUAL_PAIRS = ((192, 64), (128, 32))
FULLY_DECLARED = ("sm_80", "sm_90a")
SAMPLE_SIZE = 24

Specialisation: TypeAlias = tuple[str, Template]


OF_FINISHED_ROWS: tuple[Specialisation, ...] = (("merge_states", ()), ("replace_lse", ()))


def specialisations(arch: str) -> tuple[Specialisation, ...]:
    """Everything that a plan can return on a card of this architecture, each once."""
    pairs = [(dim1, dim2) for dim1 in BUCKETS for dim2 in BUCKETS]
    of_elements = dict.fromkeys(ELEMENTS, pairs)
    return _specialisations(arch, of_elements, in_full=pairs, masked=pairs, capped=pairs)


def declared(arch: str) -> tuple[Specialisation, ...]:
    """The specialisations that the tests compile.

    For sm_80 and sm_90a every kernel, dtype, side and equal pair of head dims and the unequal pairs
    that the benchmarks name, for elements of 4 bytes fewer; windows, ragged batches, entropies and
    softcaps for the most common pair, one at a time, for elements of 2 bytes; for others a sample
    of all, the same every time.
    """
    if arch in FULLY_DECLARED:
        pairs = [(dim, dim) for dim in BUCKETS] + list(UNEQUAL_PAIRS)
        of_elements = dict.fromkeys(ELEMENTS, pairs)
        # Their loops are the same for all head dims but for the sums of gradients.
        of_elements |= {"float32": [(64, 64), (128, 128), (256, 256)], "tf32": [(128, 128)]}
        full = [(128, 128)]
        found = _specialisations(arch, of_elements, in_full=full, masked=full, capped=full)
        found = tuple(one for one in found if ("kIsAligned", False) not in one[1])
        return tuple(one for one in found if _is_declared(dict(one[1])))
    # A warp alone with float32 sums of 192 columns, on cards of 99 KB, spills a few bytes.
    everything = [
        (kernel, template)
        for kernel, template in specialisations(arch)
        if _is_declared(dict(template)) and ("kNumWarps", 1) not in template
    ]
    return tuple(random.Random(arch).sample(everything, min(SAMPLE_SIZE, len(everything))))


def _is_declared(template: dict[str, Any]) -> bool:
    has_mask = template.get("kMask", PLAIN) != PLAIN
    added = (has_mask, template.get("kHasEntropy", False), template.get("kHasSoftcap", False))
    most = 0 if template.get("Element") in map(ELEMENTS.get, WIDE) else 1
    return added.count(True) <= most


def _specialisations(
    arch: str,
    of_elements: dict[str, list[tuple[int, int]]],
    in_full: list[tuple[int, int]],
    masked: list[tuple[int, int]],
    capped: list[tuple[int, int]],
) -> tuple[Specialisation, ...]:
    """Those of some pairs of head dims of each element; of `in_full` also dQ without dK and the
    entropy."""
    device = device_facts(arch)
    limit = device.shared_memory_per_block
    found: dict[Specialisation, None] = dict.fromkeys((*OF_FINISHED_ROWS, ("key_table", ())))
    for side in (1, 2):
        for weighted in (True, False) if arch == "sm_90a" else (False,):
            found["backward_prepare", (("kSide", side), ("kIsWeighted", weighted))] = None
    for dtype, pairs in of_elements.items():
        element = ELEMENTS[dtype]
        for dim1, dim2 in pairs:
            for dim in (dim1, dim2) if dtype not in WIDE else ():
                found["backward_finish", (("Element", element), ("kHeadDim", dim))] = None
            masks = MASKS if (dim1, dim2) in masked else MASKS[:1]
            entropies = (False, True) if (dim1, dim2) in in_full else (False,)
            bounds = (False, True) if (dim1, dim2) in capped else (False,)
            for aligned, mask, has_softcap in itertools.product((True, False), masks, bounds):
                for has_entropy in entropies:
                    for kernel, template, _ in forward_kernels(
                        dtype, dim1, dim2, aligned, mask, device, has_entropy, has_softcap
                    ):
                        found[kernel, template] = None
                has_both = arch == "sm_90a" and dtype not in WIDE and mask == PLAIN
                for kernel in BOTH_KERNELS if has_both else ():
                    both = both_warpgroup_tile(kernel, dim1, dim2, limit)
                    if both is not None:
                        template = both_warpgroup_template(kernel, dtype, dim1, dim2, both)
                        found[kernel, template] = None
                of_a_side = [kernel for kernel in BACKWARD_KERNELS if kernel not in BOTH_KERNELS]
                backward_kernels = PORTABLE_PAIR if dtype in WIDE else of_a_side
                for kernel, side in itertools.product(backward_kernels, (1, 2)):
                    if kernel == "backward_few_sm90":
                        alone = ((True, False), (False, True)) * ((dim1, dim2) in in_full)
                        for few in few_of_each_size(dim1, dim2, side, device):
                            for has_dq, has_dk in ((True, True), *alone):
                                template = few_template(
                                    dtype, side, dim1, dim2, few, has_dq, has_dk, has_softcap
                                )
                                found[kernel, template] = None
                        continue
                    sums = [(True, False)]  # dK, and whether those of dQ are ordered
                    if "fused" in kernel and (dim1, dim2) in in_full:
                        sums.append((False, False))
                    if kernel == "backward_fused_sm90" and mask != "kRagged":
                        sums.append((True, True))
                    for has_dk, is_ordered in sums:
                        if kernel.endswith("sm80"):
                            cut = backward_tile(
                                kernel, dim1, dim2, side, limit, aligned, mask, has_softcap, dtype
                            )
                            template = backward_template(
                                kernel, dtype, side, dim1, dim2, cut, aligned, has_dk
                            )
                        elif arch != "sm_90a":
                            continue
                        elif kernel in PAIR_KERNELS:
                            pair = pair_warpgroup_tile(
                                kernel, dim1, dim2, side, limit, mask, has_softcap
                            )
                            if pair is None:
                                continue
                            template = pair_warpgroup_template(
                                kernel, dtype, side, dim1, dim2, pair
                            )
                        else:
                            fit = backward_warpgroup_tile(dim1, dim2, side, limit, has_softcap)
                            if fit is None:
                                continue
                            template = backward_warpgroup_template(
                                dtype, side, dim1, dim2, fit, has_dk, is_ordered
                            )
                        tail = (("kMask", mask), ("kHasSoftcap", has_softcap))
                        found[kernel, (*template, *tail)] = None
    return tuple(found)


def forward_kernels(
    dtype: str,
    dim1: int,
    dim2: int,
    aligned: bool,
    mask: str,
    device: DeviceFacts,
    has_entropy: bool = False,
    has_softcap: bool = False,
) -> Iterator[tuple[str, Template, int]]:
    """Every kernel that the forward of a pair of buckets can take: its template arguments and its
    bytes of shared memory."""
    limit = device.shared_memory_per_block
    for num_rows, is_packed in itertools.product(ROW_CLASSES, (False, True)):
        if not (is_packed and num_rows > FEW_QUERIES):  # only few queries are packed
            tile = forward_tile(dim1, dim2, num_rows, mask, limit, has_entropy, has_softcap, dtype)
            template = forward_template(
                dtype, dim1, dim2, tile, aligned, is_packed, mask, has_entropy, has_softcap
            )
            widths = padded(dim1, dtype), padded(dim2, dtype)
            yield "forward_sm80", template, tile.shared_memory(*widths)
    has_hopper = device.arch == "sm_90a" and aligned and dtype not in WIDE
    for is_packed in (False, True) if has_hopper else ():
        for wide in warpgroup_tiles(dim1, dim2, is_packed, has_entropy, has_softcap):
            if wide.fits(dim1, dim2, limit):
                template = warpgroup_template(
                    dtype, dim1, dim2, wide, is_packed, mask, has_entropy, has_softcap
                )
                yield "forward_sm90", template, wide.shared_memory(dim1, dim2)
    for lanes in (2, 4, 8, 16, 32):
        yield "reduce_splits", (("kLanesPerRow", lanes), ("kHasEntropy", has_entropy)), 0

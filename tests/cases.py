"""Named inputs that broke others, as NumPy arrays: what every implementation has to get right.

A test takes its cases by group and its random numbers from the ``rng`` fixture::

    @pytest.mark.parametrize("case", select("lengths", "scale"), ids=str)
    def test_something(case, rng):
        inputs = case.inputs(rng, "bfloat16")      # q1 k1 q2 k2 in bfloat16, dkl in float32
        ... case.options                           # causal=, scale1=, scale2=, layout=

Nothing here touches the package or an array library other than NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
Build = Callable[[np.random.Generator], Arrays]

INPUTS = ("q1", "k1", "q2", "k2")
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One named problem.

    Attributes
    ----------
    name
        Unique, fit for a pytest id: ``"lengths_17x129_causal"``.
    group
        The class of inputs that it belongs to, one of `GROUPS`.
    build
        Draws ``q1 k1 q2 k2 dkl`` as float32 arrays, in the layout that `options` names.
    options
        The keyword arguments of ``attention_kl`` that are not the defaults.
    """

    name: str
    group: str
    build: Build
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self, rng: np.random.Generator, dtype: str) -> Arrays:
        """The arrays of `build`, all but the upstream gradient cast to `dtype`."""
        arrays = self.build(rng)
        return {n: x.astype(DTYPES[dtype]) if n in INPUTS else x for n, x in arrays.items()}

    def __str__(self) -> str:
        return self.name


# Logits of one head that are too few: errors of so few numbers vary.
FEW_LOGITS = 2048


def enough_draws(case: Case, rng: np.random.Generator, dtype: str) -> Arrays:
    """The inputs of a case, several draws as a batch where one draw has few numbers.

    So do large logits, where P1 is one key alone but in a row of a hundred, and only such rows have
    gradients of side 1: in a draw without any, of norms of 1e-23, float32 has no digit to compare.
    """
    first = case.inputs(rng, dtype)
    logits = first["q1"].shape[-2] * first["k1"].shape[-2]
    if case.group != "big_logits" and (case.group != "lengths" or logits >= FEW_LOGITS):
        return first
    draws = [first, *(case.inputs(rng, dtype) for _ in range(15))]
    return {name: np.concatenate([draw[name] for draw in draws]) for name in first}


def draw(
    rng: np.random.Generator,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads1: int | None = None,
    key_heads2: int | None = None,
    num_queries: int = 70,
    num_keys: int = 70,
    head_dim1: int = 64,
    head_dim2: int | None = None,
) -> Arrays:
    """Normally distributed ``q1 k1 q2 k2 dkl``, float32, layout bhnd: logits of about 1."""
    head_dim2 = head_dim1 if head_dim2 is None else head_dim2
    key_heads1 = heads if key_heads1 is None else key_heads1
    key_heads2 = heads if key_heads2 is None else key_heads2
    shapes = {
        "q1": (batch, heads, num_queries, head_dim1),
        "k1": (batch, key_heads1, num_keys, head_dim1),
        "q2": (batch, heads, num_queries, head_dim2),
        "k2": (batch, key_heads2, num_keys, head_dim2),
        "dkl": (batch, heads, num_queries),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def plain(**shape: int) -> Build:
    """Build that only draws."""
    return lambda rng: draw(rng, **shape)


def changed(change: Callable[[Arrays], None], **shape: int) -> Build:
    """Build that draws and then lets `change` edit the arrays in place."""

    def build(rng: np.random.Generator) -> Arrays:
        arrays = draw(rng, **shape)
        change(arrays)
        return arrays

    return build


def scaled(factors: Mapping[str, float], **shape: int) -> Build:
    """Build that multiplies some of the inputs by a factor."""

    def change(arrays: Arrays) -> None:
        for name, factor in factors.items():
            arrays[name] *= np.float32(factor)

    return changed(change, **shape)


def _lengths() -> Iterator[Case]:
    lengths = (1, 2, 17, 127, 129, 1000)
    for num_queries, num_keys, causal in itertools.product(lengths, lengths, (False, True)):
        name = f"lengths_{num_queries}x{num_keys}" + "_causal" * causal
        build = plain(num_queries=num_queries, num_keys=num_keys)
        yield Case(name, "lengths", build, {"causal": causal})
    # So many keys for so few queries that only a split over the keys can fill a card.
    for num_queries, causal in itertools.product((1, 5), (False, True)):
        name = f"lengths_{num_queries}x20000" + "_causal" * causal
        build = plain(num_queries=num_queries, num_keys=20000)
        yield Case(name, "lengths", build, {"causal": causal})


def _head_dims() -> Iterator[Case]:
    equal = [(d, d) for d in (8, 24, 40, 64, 96, 128, 192, 256)]
    unequal = [(64, 128), (128, 64), (8, 256), (256, 8), (40, 96), (192, 24)]
    for d1, d2 in equal + unequal:
        build = plain(head_dim1=d1, head_dim2=d2, num_queries=131, num_keys=150)
        yield Case(f"head_dims_{d1}_{d2}", "head_dims", build, {"causal": d1 != d2})


def _student_underflow() -> Iterator[Case]:
    # Logits of standard deviation 50: the teacher has mass where P2 < e^-104.
    for causal in (False, True):
        name = "student_underflow" + "_causal" * causal
        build = scaled({"q1": 50, "q2": 50}, num_queries=150, num_keys=200)
        yield Case(name, "student_underflow", build, {"causal": causal})
    build = scaled({"q2": 50}, num_queries=150, num_keys=200)
    yield Case("student_underflow_flat_teacher", "student_underflow", build)


def _big_logits() -> Iterator[Case]:
    for size, causal in itertools.product((1e3, 1e4), (False, True)):
        name = f"big_logits_{size:.0e}".replace("+0", "") + "_causal" * causal
        # dk1 grows with the square of the logits, and has to stay below 65504 in float16.
        factors = {"q1": size, "q2": size, "dkl": size**-2}
        build = scaled(factors, num_queries=90, num_keys=130)
        yield Case(name, "big_logits", build, {"causal": causal})
    # Raw products of about 80 000, which float16 cannot hold, brought back by the scale.
    build = scaled(dict.fromkeys(INPUTS, 100), num_queries=90, num_keys=130)
    scales = {"scale1": 2e-5, "scale2": 3e-5}
    yield Case("big_logits_raw_product_past_65504", "big_logits", build, scales)


def _no_keys() -> Iterator[Case]:
    for num_queries, num_keys in ((2, 1), (129, 17), (1000, 127), (300, 1)):
        name = f"no_keys_{num_queries}x{num_keys}"
        build = plain(num_queries=num_queries, num_keys=num_keys)
        yield Case(name, "no_keys", build, {"causal": True})
    build = plain(batch=2, num_queries=200, num_keys=60, heads=4, key_heads1=1, key_heads2=2)
    yield Case("no_keys_grouped", "no_keys", build, {"causal": True})


def _zero_sizes() -> Iterator[Case]:
    sizes = {
        "no_batch": {"batch": 0},
        "no_queries": {"num_queries": 0},
        "no_keys": {"num_keys": 0},
        "nothing": {"batch": 0, "num_queries": 0, "num_keys": 0},
        "no_queries_grouped": {"num_queries": 0, "heads": 4, "key_heads1": 1, "key_heads2": 2},
    }
    for (name, shape), causal in itertools.product(sizes.items(), (False, True)):
        full_name = f"zero_sizes_{name}" + "_causal" * causal
        yield Case(full_name, "zero_sizes", plain(**shape), {"causal": causal})


def _few_keys() -> Iterator[Case]:
    build = plain(num_queries=65536, num_keys=64, heads=1)
    yield Case("few_keys_65536x64", "few_keys", build)


def _grouped() -> Iterator[Case]:
    groups = {
        "64_to_1": {"heads": 64, "key_heads1": 1, "key_heads2": 1, "num_queries": 33},
        "8_to_2_and_4": {"heads": 8, "key_heads1": 2, "key_heads2": 4, "batch": 2},
        "6_to_6_and_1": {"heads": 6, "key_heads1": 6, "key_heads2": 1},
        "6_to_1_and_3": {"heads": 6, "key_heads1": 1, "key_heads2": 3, "num_queries": 1},
    }
    for (name, shape), causal in itertools.product(groups.items(), (False, True)):
        full_name = f"grouped_{name}" + "_causal" * causal
        yield Case(full_name, "grouped", plain(**shape), {"causal": causal})


def _scale() -> Iterator[Case]:
    scales = {
        "zero_teacher": {"scale1": 0.0},
        "zero_student": {"scale2": 0.0},
        "zero_both": {"scale1": 0.0, "scale2": 0.0},
        "negative_teacher": {"scale1": -0.125},
        "negative_student": {"scale2": -0.3},
        "negative_both": {"scale1": -0.1, "scale2": -0.2},
        "opposite": {"scale1": 0.125, "scale2": -0.125},
    }
    for name, options in scales.items():
        yield Case(f"scale_{name}", "scale", plain(num_queries=130), options)
    yield Case("scale_negative_causal", "scale", plain(), {"scale2": -0.3, "causal": True})


def _shift(arrays: Arrays, side: str, keys: slice, logit: float) -> None:
    """Add `logit` to the logits of some keys, exactly, through the last component."""
    # In bfloat16 80 is exact, and so is logit / 10 for multiples of 10 up to 2560.
    scale = arrays["q" + side].shape[-1] ** -0.5
    arrays["q" + side][..., -1] = 80
    arrays["k" + side][..., -1] = 0
    arrays["k" + side][..., keys, -1] = logit / (80 * scale)


def _offset() -> Iterator[Case]:
    def on(*sides: str) -> Build:
        def change(arrays: Arrays) -> None:
            for side in sides:
                _shift(arrays, side, slice(None), 1000)

        return changed(change, num_queries=130, num_keys=140)

    yield Case("offset_teacher", "offset", on("1"))
    yield Case("offset_student", "offset", on("2"))
    yield Case("offset_both", "offset", on("1", "2"))


def _no_mass() -> Iterator[Case]:
    def without(teacher: slice | None, student: slice | None) -> Build:
        def change(arrays: Arrays) -> None:
            for side, keys in (("1", teacher), ("2", student)):
                if keys is not None:
                    _shift(arrays, side, keys, -1000)

        return changed(change, num_queries=130, num_keys=140)

    first, second = slice(None, 70), slice(70, None)
    yield Case("no_mass_teacher", "no_mass", without(first, None))
    yield Case("no_mass_student", "no_mass", without(None, first))
    yield Case("no_mass_disjoint", "no_mass", without(first, second))
    yield Case("no_mass_same", "no_mass", without(first, first))


def _duplicates() -> Iterator[Case]:
    def first_row_everywhere(names: str) -> Build:
        def change(arrays: Arrays) -> None:
            for name in names.split():
                arrays[name][...] = arrays[name][..., :1, :]

        return changed(change, num_queries=150, num_keys=140)

    def same_sides(arrays: Arrays) -> None:
        arrays["q2"], arrays["k2"] = arrays["q1"].copy(), arrays["k1"].copy()

    yield Case("duplicates_queries", "duplicates", first_row_everywhere("q1 q2"))
    yield Case("duplicates_keys", "duplicates", first_row_everywhere("k1 k2"))
    yield Case("duplicates_everything", "duplicates", first_row_everywhere("q1 k1 q2 k2"))
    for causal in (False, True):
        name = "duplicates_sides" + "_causal" * causal
        build = changed(same_sides, num_queries=150, num_keys=140)
        yield Case(name, "duplicates", build, {"causal": causal})


def _upstream() -> Iterator[Case]:
    def zeros(arrays: Arrays) -> None:
        arrays["dkl"][...] = 0

    def mean(arrays: Arrays) -> None:
        arrays["dkl"][...] = 1 / arrays["dkl"].size

    def tiny(arrays: Arrays) -> None:
        arrays["dkl"] *= np.float32(1e-7)

    def huge(arrays: Arrays) -> None:
        arrays["dkl"] *= np.float32(1e3)

    def one_row(arrays: Arrays) -> None:
        arrays["dkl"][..., 1:] = 0

    def expanded(arrays: Arrays) -> None:
        arrays["dkl"] = np.broadcast_to(np.float32(0.37), arrays["dkl"].shape)

    def strided(arrays: Arrays) -> None:
        padded = np.zeros((*arrays["dkl"].shape[::-1], 3), np.float32)
        view = padded[..., 1].T
        view[...] = arrays["dkl"]
        arrays["dkl"] = view

    for change in (zeros, mean, tiny, huge, one_row, expanded, strided):
        build = changed(change, batch=2, num_queries=130)
        yield Case(f"upstream_{change.__name__}", "upstream", build)


def _layout() -> Iterator[Case]:
    def swapped(**shape: int) -> Build:
        def change(arrays: Arrays) -> None:
            for name, array in arrays.items():
                arrays[name] = np.ascontiguousarray(array.swapaxes(1, 2))

        return changed(change, **shape)

    def of_rank(rank: int, **shape: int) -> Build:
        def change(arrays: Arrays) -> None:
            for name, array in arrays.items():
                arrays[name] = array[(0,) * (4 - rank)]

        return changed(change, **shape)

    for causal in (False, True):
        options = {"layout": "bnhd", "causal": causal}
        build = swapped(batch=2, heads=3, num_queries=90)
        yield Case("layout_bnhd" + "_causal" * causal, "layout", build, options)
    build = swapped(batch=2, heads=6, key_heads1=2, key_heads2=3, num_queries=50)
    yield Case("layout_bnhd_grouped", "layout", build, {"layout": "bnhd"})
    yield Case("layout_rank3", "layout", of_rank(3, heads=4, key_heads2=2))
    yield Case("layout_rank3_bnhd", "layout", of_rank(3, num_queries=50), {"layout": "bnhd"})
    yield Case("layout_rank2", "layout", of_rank(2, num_queries=50), {"causal": True})


def _nonfinite() -> Iterator[Case]:
    values = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf}

    def at(name: str, row: int, value: float, **shape: int) -> Build:
        def change(arrays: Arrays) -> None:
            array = arrays[name] if name == "dkl" else arrays[name][..., 3]
            array[0, 0, row] = value

        return changed(change, **shape)

    names = (*INPUTS, "dkl")
    for name, (word, value), causal in itertools.product(names, values.items(), (False, True)):
        full_name = f"nonfinite_{name}_{word}" + "_causal" * causal
        build = at(name, 40, value, num_queries=150, num_keys=170)
        yield Case(full_name, "nonfinite", build, {"causal": causal})
    # Query 5 sees no key, so nothing may become non-finite.
    for name in ("q1", "q2", "dkl"):
        build = at(name, 5, np.nan, num_queries=150, num_keys=60)
        yield Case(f"nonfinite_{name}_without_keys", "nonfinite", build, {"causal": True})
    # Key heads shared by several query heads: all of these see the NaN, the other groups do not.
    build = at("k2", 40, np.nan, heads=4, key_heads1=1, key_heads2=2)
    yield Case("nonfinite_grouped", "nonfinite", build, {"causal": True})

    def only_minus_inf(arrays: Arrays) -> None:
        arrays["q1"][0, 0, :, 3] = 1
        arrays["k1"][0, 0, :, 3] = -np.inf

    build = changed(only_minus_inf)
    yield Case("nonfinite_only_minus_inf", "nonfinite", build)


def _windows() -> Iterator[Case]:
    square, wide, tall = (
        {"num_queries": num_queries, "num_keys": num_keys}
        for num_queries, num_keys in ((300, 300), (150, 500), (400, 170))
    )
    masks: dict[str, tuple[Mapping[str, int], dict[str, Any]]] = {
        "left": (square, {"window": (40, None)}),
        "right": (square, {"window": (-1, 40)}),
        "both": (wide, {"window": (100, 70)}),
        "causal": (wide, {"causal": True, "window": (130, 99)}),
        "own_key": (square, {"window": (0, 0)}),
        # Queries before the first key, and behind the last.
        "before": (tall, {"causal": True, "window": (64, None)}),
        "behind": (tall, {"window": (64, 10), "q_offset": 0}),
        "chunk": (wide, {"causal": True, "q_offset": 200}),
        "chunk_window": (wide, {"causal": True, "window": (63, 0), "q_offset": 200}),
        "chunk_before": (square, {"window": (200, 3), "q_offset": -170}),
        "chunk_behind": (square, {"window": (150, None), "q_offset": 333}),
        "far_before": (square, {"causal": True, "q_offset": -(2**40)}),
        "far_behind": (square, {"window": (5, 5), "q_offset": 2**40}),
        "far_and_wide": (square, {"window": (2**40, 0), "q_offset": 2**40}),
        "few": ({"num_queries": 3, "num_keys": 2000}, {"window": (700, 0)}),
        "few_in_the_middle": ({"num_queries": 20, "num_keys": 2000}, {"window": (300, 300)}),
    }
    masks["few_in_the_middle"][1]["q_offset"] = 900
    for name, (shape, options) in masks.items():
        yield Case(f"windows_{name}", "windows", plain(**shape), options)
    heads = {"heads": 6, "key_heads1": 3, "key_heads2": 2}
    yield Case("windows_grouped", "windows", plain(**heads, **wide), {"window": (100, 7)})
    packed = {"heads": 8, "key_heads1": 1, "key_heads2": 1, "num_queries": 5, "num_keys": 900}
    yield Case("windows_packed", "windows", plain(**packed), {"window": (200, 0)})

    def at(name: str, row: int, **shape: int) -> Build:
        def change(arrays: Arrays) -> None:
            arrays[name][0, 0, row] = np.nan

        return changed(change, **shape)

    # Some rows see it, and others next to them do not.
    for name in INPUTS:
        options = {"window": (50, 20)}
        yield Case(f"nonfinite_{name}_window", "nonfinite", at(name, 140, **square), options)
    # Nobody sees it.
    for name, row in (("q1", 350), ("q2", 390), ("dkl", 399)):
        options = {"window": (64, 10), "q_offset": 0}
        yield Case(f"nonfinite_{name}_behind", "nonfinite", at(name, row, **tall), options)
    for name in ("k1", "k2"):
        options = {"window": (64, 0), "q_offset": 100}
        yield Case(f"nonfinite_{name}_unseen", "nonfinite", at(name, 450, **wide), options)


CASES: tuple[Case, ...] = (
    *_lengths(),
    *_head_dims(),
    *_student_underflow(),
    *_big_logits(),
    *_no_keys(),
    *_zero_sizes(),
    *_few_keys(),
    *_grouped(),
    *_scale(),
    *_offset(),
    *_no_mass(),
    *_duplicates(),
    *_upstream(),
    *_layout(),
    *_nonfinite(),
    *_windows(),
)
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES))


def select(*groups: str) -> list[Case]:
    """The cases of these groups, in order; all cases when none is named."""
    unknown = set(groups) - set(GROUPS)
    if unknown:
        raise ValueError(f"groups: expected some of {GROUPS}, got {sorted(unknown)}")
    return [case for case in CASES if not groups or case.group in groups]

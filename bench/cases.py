"""Which problems each command measures, who takes part, and what must be reached. Pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from streamkl_cupy.timing import LEAST_ROUNDS

from .bars import NOISE, Bar
from .workloads import LENGTHS, LONG, LONGEST, MEMORY, SMALL_Q, SQUARE, Workload, masks, shrunk

TRITON_BACKWARD = ("triton, separate", "triton, fused")
FUSED, SEPARATE, AUTO = "ours, fused", "ours, separate", "ours"
PORTABLE, WHOLE, UNSHARED = "ours, portable", "ours, no split", "ours, keys not shared"
PORTABLE_FUSED, PORTABLE_SEPARATE = "ours, portable, fused", "ours, portable, separate"
DETERMINISTIC = "ours, deterministic"
# Stands for an entry for each other number of splits that the tuner would try.
SPLITS = "ours, splits"
# Of the rate without a window: its time is at most 15 % above its share of the work.
LEAST_SHARE_OF_WINDOW = 0.87
# Of the rate of one sequence.
LEAST_SHARE_OF_PACKED = 0.90
PACKED_LENGTHS = (24576, 16384, 12288, 6144, 4096, 2048)
# Of the cases whose rounds are many and short.
SHARING_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Spec:
    """One case of a command.

    Attributes
    ----------
    label
        The case, for its rows.
    workload
        The problem.
    ours, peers
        Names of entries, in the order of the table.
    bars
        What must be reached.
    unit
        Of the rates.
    yardstick
        The entry that rates are put in relation to; empty if it does not take part.
    headline
        Whether the README shows it.
    rounds
        None for those of the command.
    interpolated
        Least share of the rate between those of square problems of the same lengths; None where it
        is a square problem itself.
    calls
        Where a call takes seconds: how often each entry is called, all of it timed and the last
        checked. None for interleaved rounds.
    """

    label: str
    workload: Workload
    ours: tuple[str, ...]
    peers: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    unit: str = "TFLOP/s"
    yardstick: str = ""
    headline: bool = False
    rounds: int | None = None
    interpolated: float | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem whose accuracy is measured: two heads, as many keys as queries, unmasked.

    Attributes
    ----------
    kind
        ``"logits"``: two sides that have nothing to do with each other. ``"near"``: the keys of
        side 2 are those of side 1, moved until KL is about `kl`. ``"equal"``: both sides the same.
        ``"packed"``: as logits, of packed sequences of unequal lengths.
    dtype, head_dim, length
        Of the inputs.
    logit_scale
        Standard deviation of the logits.
    kl
        What it is to be between near sides.
    softcap
        Bound of the logits of both sides.
    headline
        Whether the README shows it.
    """

    kind: str
    dtype: str
    head_dim: int
    length: int
    logit_scale: float = 1.0
    kl: float | None = None
    headline: bool = False
    softcap: float | None = None

    @property
    def label(self) -> str:
        """For instance ``bfloat16, d = 128, N = 1024, logits 10``."""
        what = {
            "logits": f"logits {self.logit_scale:g}",
            "near": f"KL about {self.kl}",
            "equal": "equal sides",
            "packed": "packed sequences",
        }[self.kind]
        what += "" if self.softcap is None else f", softcap {self.softcap:g}"
        return f"{self.dtype}, d = {self.head_dim}, N = {self.length}, {what}"


def _beside(entry: str, least: float | None, peer: str, title: str) -> Bar:
    return Bar(entry, (peer,), title, least)


def forward() -> tuple[Spec, ...]:
    """Square problems at each head dim, two head dims, small grids, one very long."""
    specs = []
    for causal, share in ((False, 0.95), (True, 0.96)):
        for length in (16384, 65536):
            main = length == SQUARE.num_keys
            peers = ("triton", "cudnn", *(("flash",) if main else ()), "cublas")
            peers += ("chunked",) if main and not causal else ()
            specs.append(
                Spec(
                    _label("d = 128", length, causal),
                    replace(SQUARE, num_queries=length, num_keys=length, causal=causal),
                    (AUTO, PORTABLE) if main else (AUTO,),
                    peers,
                    (
                        _beside(AUTO, share, "cudnn", "cuDNN attention"),
                        _beside(AUTO, 1.45, "triton", "Triton"),
                    ),
                    yardstick="cublas",
                    headline=main,
                )
            )
    for dim, causal, share, times in (
        (64, False, 0.80, 1.3),
        (256, False, 0.97, None),
        (256, True, 0.95, None),
    ):
        bars = [_beside(AUTO, share, "cudnn", "cuDNN attention")]
        if times is not None:
            bars.append(_beside(AUTO, times, "triton", "Triton"))
        specs.append(
            Spec(
                _label(f"d = {dim}", SQUARE.num_keys, causal),
                replace(SQUARE, head_dim1=dim, head_dim2=dim, causal=causal),
                (AUTO,),
                ("cudnn",) if times is None else ("triton", "cudnn"),
                tuple(bars),
            )
        )
    specs += _unequal((AUTO,), 0.9)
    for length in (4096, 1024):
        specs.append(
            Spec(
                f"BH = 16, N = {length}",
                replace(SQUARE, heads=16, num_queries=length, num_keys=length),
                (AUTO,),
                ("triton",),
                (_beside(AUTO, 1.0, "triton", "Triton"),),
            )
        )
    specs.append(Spec("8 heads share keys", replace(SQUARE, group=8), (AUTO,)))
    specs.append(_windowed("d = 128", LEAST_SHARE_OF_WINDOW))
    specs.append(Spec("d = 128, N = 16K, softcap 50", replace(SQUARE, softcap=50.0), (AUTO,)))
    specs.append(_packed("d = 128", LEAST_SHARE_OF_PACKED))
    specs += _float32()
    specs.append(Spec("BH = 8, N = 512K, causal", LONGEST, (AUTO,)))
    return tuple(specs)


def _float32() -> list[Spec]:
    """float32 in both ways of multiplying it, each beside cuBLAS in the same way."""
    shape = replace(SQUARE, num_queries=8192, num_keys=8192, dtype="float32")
    return [
        Spec(
            f"{precision}, N = 8K",
            replace(shape, precision=precision),
            (AUTO,),
            (f"cublas, {precision}",),
            headline=True,
        )
        for precision in ("float32", "tf32")
    ]


def backward() -> tuple[Spec, ...]:
    """Both settings at each head dim, two head dims, kept distributions, few queries."""
    specs = []
    for setting, causal, share in (
        (1, False, 0.98),
        (1, True, 0.99),
        (2, False, 0.96),
        (2, True, 0.98),
    ):
        bars = [
            _beside(FUSED, share, "cudnn", "cuDNN attention"),
            _beside(DETERMINISTIC, 0.80, "cudnn", "cuDNN attention"),
            _beside(SEPARATE, 0.80, "cudnn", "cuDNN attention"),
        ]
        if setting == 1:
            bars.append(Bar(FUSED, TRITON_BACKWARD, "Triton", 1.65))
        specs.append(
            Spec(
                _label(f"Setting {setting}, d = 128", SQUARE.num_keys, causal),
                replace(SQUARE, causal=causal, setting=setting),
                (FUSED, DETERMINISTIC, SEPARATE),
                ("triton", "cudnn", "flash", "cublas") if setting == 1 else ("cudnn", "cublas"),
                tuple(bars),
                yardstick="cublas",
                headline=setting == 1,
            )
        )
    specs.append(
        Spec(
            "d = 64",
            replace(SQUARE, head_dim1=64, head_dim2=64),
            (FUSED, DETERMINISTIC),
            ("cudnn",),
            (_beside(FUSED, 0.93, "cudnn", "cuDNN attention"),),
        )
    )
    specs.append(
        Spec(
            "d = 256",
            replace(SQUARE, head_dim1=256, head_dim2=256),
            (AUTO, FUSED),
            ("cublas",),
            (_beside(AUTO, 0.75, "cublas", "cuBLAS"),),
            yardstick="cublas",
        )
    )
    specs.append(Spec("d = 32", replace(SQUARE, head_dim1=32, head_dim2=32), (FUSED,)))
    specs.append(Spec("8 heads share keys", replace(SQUARE, group=8), (FUSED,)))
    specs += _unequal((FUSED,), 0.85)
    for length in (4096, 8192, 16384):
        specs.append(
            Spec(
                f"BH = 16, N = {length}",
                replace(SQUARE, heads=16, num_queries=length, num_keys=length),
                (AUTO, DETERMINISTIC),
                ("kept",),
                (_beside(AUTO, 1.0, "kept", "torch.compile with P1 and P2 kept"),),
            )
        )
    for num_queries in (1, 16):
        specs.append(
            Spec(
                f"BH = 16, N_Q = {num_queries}, N_K = 128K",
                replace(SMALL_Q, num_queries=num_queries),
                (AUTO, SEPARATE),
                ("copy",),
                (_beside(AUTO, 0.65, "copy", "copy bandwidth"),),
                unit="TB/s",
                yardstick="copy",
            )
        )
    for setting, causal in itertools.product((1, 2), (False, True)):
        shape = replace(SQUARE, num_queries=65536, num_keys=65536, causal=causal, setting=setting)
        label = _label(f"Setting {setting}, d = 128", 65536, causal)
        specs.append(Spec(label, shape, (AUTO,), calls=LEAST_ROUNDS))
    specs.append(_windowed("Setting 1, d = 128", LEAST_SHARE_OF_WINDOW))
    for setting in (1, 2):
        shape = replace(SQUARE, setting=setting, softcap=50.0)
        specs.append(Spec(f"Setting {setting}, d = 128, N = 16K, softcap 50", shape, (AUTO,)))
    specs.append(_packed("Setting 1, d = 128", LEAST_SHARE_OF_PACKED))
    specs += _float32()
    return tuple(specs)


def small_q() -> tuple[Spec, ...]:
    """Few queries on many keys, beside the bandwidth; and more of them, split and whole."""
    specs = []
    bar = _beside(AUTO, 0.88, "read", "read-only bandwidth")
    for num_queries, entries, peers in (
        (1, (AUTO, WHOLE, UNSHARED), ("triton", "eager", "copy", "read")),
        (16, (AUTO, WHOLE), ("triton", "read")),
        (64, (AUTO, WHOLE), ("read",)),
    ):
        specs.append(
            Spec(
                f"N_Q = {num_queries}",
                replace(SMALL_Q, num_queries=num_queries),
                entries,
                peers,
                (replace(bar, least=None) if num_queries > 16 else bar,),
                unit="TB/s",
                yardstick="read",
            )
        )
    specs.append(
        Spec(
            "N_Q = 1, 8 heads share keys",
            replace(SMALL_Q, heads=8 * SMALL_Q.heads, group=8),
            (AUTO,),
            ("read",),
            (bar,),
            unit="TB/s",
            yardstick="read",
        )
    )
    for num_queries, num_keys in ((32, 131072), (1, 65536), (1, 262144), (1, 524288)):
        specs.append(
            Spec(
                f"N_Q = {num_queries}, N_K = {num_keys // 1024}K",
                replace(SMALL_Q, num_queries=num_queries, num_keys=num_keys),
                (AUTO, WHOLE),
                ("read",),
                unit="TB/s",
                yardstick="read",
                rounds=SHARING_ROUNDS,
            )
        )
    for num_queries in (65, 128, 256, 512, 1024, 2048):
        specs.append(
            Spec(
                f"N_Q = {num_queries}, N_K = 64K",
                replace(SMALL_Q, num_queries=num_queries, num_keys=65536),
                (AUTO, WHOLE, SPLITS),
                bars=(Bar(AUTO, (WHOLE, SPLITS), "the best number of splits", 1.0 - NOISE),),
                rounds=SHARING_ROUNDS,
            )
        )
    return tuple(specs)


def lengths() -> tuple[Spec, ...]:
    """Both directions over the length of the context; the longest by ourselves and briefly."""
    specs = []
    for length in (2**power for power in range(12, 20)):
        for shape in masks(replace(LENGTHS, num_queries=length, num_keys=length), "both"):
            calls = None if length < LONG else 1 if length > 2 * LONG else 2
            specs.append(
                Spec(
                    _label("d = 128", length, shape.causal),
                    shape,
                    (AUTO,),
                    ("triton",) if length <= LONG else (),
                    rounds=SHARING_ROUNDS,
                    calls=calls,
                )
            )
    return tuple(specs)


def peers() -> tuple[Spec, ...]:
    """Every peer, at a length where all of them fit into the card; `kept` is of the backward."""
    shape = replace(SQUARE, heads=16, num_queries=8192, num_keys=8192)
    names = ("triton", "fla", "compile", "eager", "chunked", "kept", "cudnn", "flash", "cublas")
    return tuple(
        Spec(
            _label("d = 128", one.num_keys, one.causal),
            one,
            (AUTO,),
            names,
            yardstick="cublas",
            rounds=SHARING_ROUNDS,
        )
        for one in masks(shape, "both")
    )


def ablation_forward() -> tuple[Spec, ...]:
    """Keys split or whole; Hopper's kernel or the portable one."""
    specs = [
        Spec(
            f"split keys, N_Q = {num_queries}, N_K = 128K",
            replace(SMALL_Q, num_queries=num_queries),
            (AUTO, WHOLE),
            bars=(Bar(AUTO, (WHOLE,), "keys whole"),),
            unit="TB/s",
        )
        for num_queries in (1, 16, 64)
    ]
    for dim, causal in ((64, False), (128, False), (128, True), (256, False)):
        specs.append(
            Spec(
                _label(f"kernel, d = {dim}", SQUARE.num_keys, causal),
                replace(SQUARE, head_dim1=dim, head_dim2=dim, causal=causal),
                (AUTO, PORTABLE),
                bars=(Bar(AUTO, (PORTABLE,), "the portable kernel"),),
            )
        )
    return tuple(replace(spec, rounds=SHARING_ROUNDS) for spec in specs)


def ablation_backward() -> tuple[Spec, ...]:
    """Fused or separate, Hopper's kernels or the portable ones, reproducible or not."""
    specs = [
        Spec(
            f"fused, N_Q = {num_queries}, N_K = 128K",
            replace(SMALL_Q, num_queries=num_queries),
            (FUSED, SEPARATE),
            bars=(Bar(FUSED, (SEPARATE,), "separate kernels"),),
            unit="TB/s",
        )
        for num_queries in (1, 16, 64)
    ]
    for setting, causal in itertools.product((1, 2), (False, True)):
        specs.append(
            Spec(
                _label(f"fused and kernel, Setting {setting}", SQUARE.num_keys, causal),
                replace(SQUARE, setting=setting, causal=causal),
                (FUSED, SEPARATE, PORTABLE_FUSED, PORTABLE_SEPARATE),
                bars=(
                    Bar(FUSED, (SEPARATE,), "separate kernels"),
                    Bar(FUSED, (PORTABLE_FUSED,), "the portable kernel"),
                    Bar(SEPARATE, (PORTABLE_SEPARATE,), "the portable kernels"),
                ),
            )
        )
    for shape, unit in ((SQUARE, "TFLOP/s"), (replace(SMALL_Q, num_queries=16), "TB/s")):
        specs.append(
            Spec(
                f"deterministic, N_Q = {shape.num_queries}",
                shape,
                (AUTO, DETERMINISTIC),
                bars=(Bar(DETERMINISTIC, (AUTO,), "any order of sums"),),
                unit=unit,
            )
        )
    return tuple(replace(spec, rounds=SHARING_ROUNDS) for spec in specs)


def memory() -> tuple[Spec, ...]:
    """Lengths, few queries on split keys, and the longest, where only peers that stop at once run.

    `calls` is 1 where a call takes so long that the one whose memory is measured is the first.
    """
    names = ("triton", "chunked", "eager", "compile")
    specs = [
        Spec(
            f"N = {length // 1024}K",
            replace(MEMORY, num_queries=length, num_keys=length),
            (AUTO, SEPARATE, FUSED),
            names,
            calls=1 if length > SQUARE.num_keys else None,
        )
        for length in (1024, 4096, 8192, 16384, 32768, 65536)
    ]
    few = replace(SMALL_Q, num_queries=16)
    specs.append(Spec("N_Q = 16, N_K = 128K", few, (AUTO, SEPARATE, FUSED)))
    for length in (262144, 524288):
        shape = replace(MEMORY, num_queries=length, num_keys=length, causal=True)
        label = f"N = {length // 1024}K, causal"
        specs.append(Spec(label, shape, (AUTO, SEPARATE, FUSED), calls=1))
    # In full masks, whose first block of rows is as large as any.
    last = specs[-1].workload
    specs.append(Spec("N = 512K", replace(last, causal=False), (), ("chunked",), calls=1))
    return tuple(specs)


def accuracy() -> tuple[Cell, ...]:
    """Logits of every size, then sides that are near each other, then the same."""
    headline = ("bfloat16", 128, 16384)
    cells = [
        Cell("logits", "float32", 128, 4096, scale, headline=scale == 1.0) for scale in (1.0, 100.0)
    ]
    cells += [
        Cell("logits", dtype, dim, length, scale, headline=(dtype, dim, length) == headline)
        for dtype, dim, length, scale in itertools.product(
            ("bfloat16", "float16"), (64, 128, 256), (1024, 16384), (1.0, 10.0, 100.0, 1000.0)
        )
    ]
    for dtype in ("bfloat16", "float16"):
        cells += [
            Cell("near", dtype, 128, 4096, kl=10.0**-power, headline=dtype == "bfloat16")
            for power in range(2, 9)
        ]
        cells += [
            Cell("equal", dtype, dim, 4096, headline=(dtype, dim) == ("bfloat16", 128))
            for dim in (64, 128, 256)
        ]
        # Most logits near zero, about the bound and far above it.
        cells += [
            Cell("logits", dtype, 128, 4096, size, softcap=bound)
            for size, bound in ((1.0, 50.0), (10.0, 10.0), (100.0, 30.0))
        ]
        cells.append(Cell("packed", dtype, 128, 4096))
    return tuple(cells)


def quick_cells(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Short ones, one head dim, of each kind the first and the last of a dtype."""
    some = [
        replace(cell, length=256)
        for cell in cells
        if cell.head_dim == 64
        or cell.kind == "packed"
        or (cell.kind == "near" and cell.kl in (1e-2, 1e-8))
    ]
    return tuple(dict.fromkeys(some))


def tune_forward() -> tuple[Spec, ...]:
    """One problem for each kind of plan; lengths at which a sweep takes seconds."""
    base = replace(SQUARE, num_queries=8192, num_keys=8192)
    shapes = [
        *masks(base, "both"),
        replace(base, head_dim1=64, head_dim2=64),
        *masks(replace(base, head_dim1=256, head_dim2=256), "both"),
        replace(base, head_dim1=192, head_dim2=64),
        replace(base, head_dim1=128, head_dim2=32),
        *(replace(base, heads=16, num_queries=n, num_keys=n) for n in (1024, 4096)),
        *(replace(SMALL_Q, num_queries=n) for n in (1, 16)),
        *(replace(SMALL_Q, num_queries=n, num_keys=65536) for n in (128, 1024)),
    ]
    return tuple(Spec(shape.name, shape, (AUTO,)) for shape in shapes)


def tune_backward() -> tuple[Spec, ...]:
    """One problem for each kind of plan; the deterministic ones once by themselves."""
    base = replace(SQUARE, num_queries=8192, num_keys=8192)
    shapes = [
        *masks(base, "both"),
        replace(base, setting=2),
        replace(base, head_dim1=64, head_dim2=64),
        replace(base, head_dim1=256, head_dim2=256),
        replace(base, head_dim1=192, head_dim2=64),
        replace(base, heads=16, num_queries=1024, num_keys=1024),
        *(replace(SMALL_Q, num_queries=n) for n in (1, 16)),
    ]
    specs = [Spec(f"{shape.name}, Setting {shape.setting}", shape, (AUTO,)) for shape in shapes]
    fixed = Spec(f"{base.name}, Setting 1, deterministic", base, (DETERMINISTIC,))
    return (*specs, fixed)


def quick(specs: Iterable[Spec]) -> tuple[Spec, ...]:
    """The same cases on small problems, without bars, which mean nothing there."""
    small = [
        replace(spec, workload=shrunk(spec.workload), bars=(), interpolated=None, rounds=None)
        for spec in specs
    ]
    # Lengths that have become the same are one case.
    distinct = {(s.workload, s.ours, s.peers, s.unit, s.calls is None): s for s in reversed(small)}
    return tuple(reversed(distinct.values()))


def _unequal(entries: tuple[str, ...], least: float) -> list[Spec]:
    return [
        Spec(
            f"d1 = {dim1}, d2 = {dim2}",
            replace(SQUARE, head_dim1=dim1, head_dim2=dim2),
            entries,
            interpolated=least,
        )
        for dim1, dim2 in ((192, 64), (128, 32))
    ]


def _windowed(what: str, least: float) -> Spec:
    """A window of 4096 keys in 64K, held against the rate of the causal problem around it."""
    shape = replace(SQUARE, num_queries=65536, num_keys=65536, causal=True, window=4095)
    return Spec(f"{what}, N = 64K, window of 4K", shape, (AUTO,), interpolated=least)


def _packed(what: str, least: float) -> Spec:
    """Packed sequences of 64K tokens, held against the rate of one causal sequence of as many."""
    total = sum(PACKED_LENGTHS)
    shape = replace(SQUARE, num_queries=total, num_keys=total, causal=True, lengths=PACKED_LENGTHS)
    label = f"{what}, {len(PACKED_LENGTHS)} packed sequences of 2K to 24K, causal"
    return Spec(label, shape, (AUTO,), interpolated=least)


def _label(what: str, length: int, causal: bool) -> str:
    return f"{what}, N = {length // 1024}K, {'causal' if causal else 'full'}"

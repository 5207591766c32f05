"""Which problems each command measures, who takes part, and what must be reached. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .bars import NOISE, Bar
from .workloads import LONGEST, SMALL_Q, SQUARE, Workload, masks, shrunk

TRITON_BACKWARD = ("triton, separate", "triton, fused")
FUSED, SEPARATE, AUTO = "ours, fused", "ours, separate", "ours"
PORTABLE, WHOLE, UNSHARED = "ours, portable", "ours, no split", "ours, keys not shared"
# Stands for an entry for each other number of splits that the tuner would try.
SPLITS = "ours, splits"
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


def _beside(entry: str, least: float | None, peer: str, title: str) -> Bar:
    return Bar(entry, (peer,), title, least)


def forward() -> tuple[Spec, ...]:
    """Square problems at each head dim, two head dims, small grids, one very long."""
    specs = []
    for causal, share in ((False, 0.95), (True, 0.96)):
        for length in (16384, 65536):
            main = length == SQUARE.num_keys
            peers = ("triton", "cudnn", "cublas", *(("chunked",) if main and not causal else ()))
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
    specs.append(Spec("BH = 8, N = 512K, causal", LONGEST, (AUTO,)))
    return tuple(specs)


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
            _beside(SEPARATE, 0.80, "cudnn", "cuDNN attention"),
        ]
        if setting == 1:
            bars.append(Bar(FUSED, TRITON_BACKWARD, "Triton", 1.65))
        specs.append(
            Spec(
                _label(f"Setting {setting}, d = 128", SQUARE.num_keys, causal),
                replace(SQUARE, causal=causal, setting=setting),
                (FUSED, SEPARATE),
                ("triton", "cudnn", "cublas") if setting == 1 else ("cudnn", "cublas"),
                tuple(bars),
                yardstick="cublas",
                headline=setting == 1,
            )
        )
    specs.append(
        Spec(
            "d = 64",
            replace(SQUARE, head_dim1=64, head_dim2=64),
            (FUSED,),
            ("cudnn",),
            (_beside(FUSED, 0.93, "cudnn", "cuDNN attention"),),
        )
    )
    specs.append(
        Spec(
            "d = 256",
            replace(SQUARE, head_dim1=256, head_dim2=256),
            (FUSED, SEPARATE),
            ("cublas",),
            (_beside(FUSED, 0.75, "cublas", "cuBLAS"),),
            yardstick="cublas",
        )
    )
    specs.append(Spec("d = 32", replace(SQUARE, head_dim1=32, head_dim2=32), (FUSED,)))
    specs += _unequal((FUSED,), 0.85)
    for length in (4096, 8192, 16384):
        specs.append(
            Spec(
                f"BH = 16, N = {length}",
                replace(SQUARE, heads=16, num_queries=length, num_keys=length),
                (AUTO,),
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
    """One problem for each kind of plan; the deterministic pair once by itself."""
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
    pair = Spec(f"{base.name}, Setting 1, deterministic", base, (SEPARATE,))
    return (*specs, pair)


def quick(specs: Iterable[Spec]) -> tuple[Spec, ...]:
    """The same cases on small problems, without bars, which mean nothing there."""
    return tuple(
        replace(spec, workload=shrunk(spec.workload), bars=(), interpolated=None, rounds=None)
        for spec in specs
    )


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


def _label(what: str, length: int, causal: bool) -> str:
    return f"{what}, N = {length // 1024}K, {'causal' if causal else 'full'}"

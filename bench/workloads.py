"""What is measured: the shapes, and how their operations and bytes are counted. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
STATISTIC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One problem, its batch and heads taken together.

    Attributes
    ----------
    heads
        Batch times heads.
    num_queries, num_keys, head_dim1, head_dim2
        Lengths and head dims of the two sides.
    dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    causal
        Mask aligned to the bottom right.
    setting
        1: P2 is trained, the backward gives dQ2 and dK2. 2: P1 is trained, dQ1 and dK1.
    group
        Query heads that share a key head, on both sides.
    window
        With `causal`: how many keys before its own a query sees. None for all.
    softcap
        Bound of the logits of both sides. None for none.
    lengths
        Those of packed sequences, which add up to both lengths. Empty for one.
    precision
        Of float32 inputs, as ``attention_kl`` takes it.
    """

    heads: int
    num_queries: int
    num_keys: int
    head_dim1: int
    head_dim2: int
    dtype: str = "bfloat16"
    causal: bool = False
    setting: int = 1
    group: int = 1
    window: int | None = None
    softcap: float | None = None
    lengths: tuple[int, ...] = ()
    precision: str | None = None

    def __post_init__(self) -> None:
        sizes = {
            "heads": self.heads,
            "num_queries": self.num_queries,
            "num_keys": self.num_keys,
            "head_dim1": self.head_dim1,
            "head_dim2": self.head_dim2,
            "group": self.group,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected a whole number from 1 up, got {size}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        if self.setting not in (1, 2):
            raise ValueError(
                f"setting: expected 1 (P2 trained) or 2 (P1 trained), got {self.setting}"
            )
        if self.window is not None and not (self.causal and self.num_queries == self.num_keys):
            raise ValueError("window: expected a causal square, got another problem")
        if self.lengths and not self.num_queries == self.num_keys == sum(self.lengths):
            raise ValueError("lengths: expected a square of their sum, got another problem")
        if self.heads % self.group:
            raise ValueError(
                f"group: expected a divisor of the {self.heads} heads, got {self.group}"
            )

    @property
    def name(self) -> str:
        """For instance ``bh32_q16384_k16384_d128x128_bf16_causal``."""
        mask = (f"_group{self.group}" if self.group > 1 else "") + "_causal" * self.causal
        mask += "" if self.window is None else f"_window{self.window}"
        dtype = self.precision or SHORT_DTYPES[self.dtype]
        mask += "" if self.softcap is None else f"_softcap{self.softcap:g}"
        mask += f"_packed{len(self.lengths)}" if self.lengths else ""
        return (
            f"bh{self.heads}_q{self.num_queries}_k{self.num_keys}"
            f"_d{self.head_dim1}x{self.head_dim2}_{dtype}{mask}"
        )

    @property
    def key_heads(self) -> int:
        """Heads of the keys."""
        return self.heads // self.group

    @property
    def trained_dim(self) -> int:
        """Head dim of the side that gets gradients."""
        return self.head_dim2 if self.setting == 1 else self.head_dim1

    @property
    def num_rows(self) -> int:
        """Query rows of all heads."""
        return self.heads * self.num_queries

    @property
    def pairs(self) -> float:
        """Pairs (query, key) that count as work, over all heads.

        A causal square counts as half of the full one, by custom; a causal rectangle counts the
        pairs that its mask allows, and so does a window.
        """
        if self.lengths:
            share = 0.5 if self.causal else 1.0
            return sum(self.heads * length * length * share for length in self.lengths)
        if self.window is not None:
            seen = min(self.window + 1, self.num_keys)  # by all but the first rows
            return float(self.heads * (self.num_queries * seen - seen * (seen - 1) // 2))
        if not self.causal:
            return float(self.num_rows * self.num_keys)
        if self.num_queries == self.num_keys:
            return self.num_rows * self.num_keys / 2
        # Row i sees i + 1 + N_K - N_Q keys, where that is positive.
        last = self.num_keys
        seeing = min(self.num_queries, last)
        return float(self.heads * (seeing * last - seeing * (seeing - 1) // 2))

    @property
    def mask(self) -> dict[str, Any]:
        """What ``attention_kl`` takes of it."""
        window = {} if self.window is None else {"window": (self.window, None)}
        precision = {} if self.precision is None else {"precision": self.precision}
        return {"causal": self.causal, **window, **precision}

    @property
    def softcaps(self) -> dict[str, Any]:
        """Likewise."""
        return {} if self.softcap is None else {"softcap1": self.softcap, "softcap2": self.softcap}

    @property
    def forward_flops(self) -> float:
        """Two products a pair: ``4 * BH * N_Q * N_K * d`` where both head dims are d."""
        return 2 * self.pairs * (self.head_dim1 + self.head_dim2)

    @property
    def backward_flops(self) -> float:
        """Four products a pair (s1, s2, dQ, dK): ``8 * BH * N_Q * N_K * d`` at equal head dims.

        The same count holds for separate kernels, which do six.
        """
        return 2 * self.pairs * (self.head_dim1 + self.head_dim2 + 2 * self.trained_dim)

    @property
    def forward_dim(self) -> float:
        """Head dim of the square problem whose forward does as many operations."""
        return (self.head_dim1 + self.head_dim2) / 2

    @property
    def backward_dim(self) -> float:
        """The same for the backward."""
        return (self.head_dim1 + self.head_dim2 + 2 * self.trained_dim) / 4

    @property
    def attention_forward_flops(self) -> float:
        """The two products of softmax attention with the head dim of side 1."""
        return 4 * self.pairs * self.head_dim1

    @property
    def attention_backward_flops(self) -> float:
        """The five products of the backward of softmax attention."""
        return 10 * self.pairs * self.head_dim1

    @property
    def input_bytes(self) -> int:
        """q1, k1, q2 and k2 together; keys that heads share count once."""
        columns = self.head_dim1 + self.head_dim2
        return (self.num_rows + self.key_heads * self.num_keys) * columns * ITEM_BYTES[self.dtype]

    @property
    def forward_bytes(self) -> int:
        """The least that the forward moves: inputs read once, kl, lse1 and lse2 written once."""
        return self.input_bytes + 3 * STATISTIC_BYTES * self.num_rows

    @property
    def backward_bytes(self) -> int:
        """The least that the backward moves: inputs, statistics and dkl read once, dQ and dK
        written once."""
        gradients = self.num_rows + self.key_heads * self.num_keys
        written = gradients * self.trained_dim * ITEM_BYTES[self.dtype]
        return self.input_bytes + written + 4 * STATISTIC_BYTES * self.num_rows

    @property
    def logits_bytes(self) -> int:
        """Both logit matrices in float32, which a materialising program keeps."""
        return 2 * 4 * self.num_rows * self.num_keys


def masks(workload: Workload, which: str) -> tuple[Workload, ...]:
    """The workload under the masks that ``which`` names: ``"full"``, ``"causal"`` or ``"both"``.

    Examples
    --------
    >>> [w.causal for w in masks(Workload(1, 8, 8, 16, 16), "both")]
    [False, True]
    """
    chosen = {"full": (False,), "causal": (True,), "both": (False, True)}[which]
    return tuple(replace(workload, causal=causal) for causal in chosen)


def shrunk(workload: Workload) -> Workload:
    """A small problem of the same kind, which only shows that everything runs.

    Examples
    --------
    >>> shrunk(Workload(32, 16384, 16384, 128, 64)).name
    'bh8_q1024_k1024_d128x64_bf16'
    """
    most_keys = 16384 if workload.num_queries < 64 else 1024
    num_keys = min(workload.num_keys, most_keys)
    return replace(
        workload,
        heads=min(workload.heads, 8 * workload.group),
        num_queries=min(workload.num_queries, num_keys),
        num_keys=num_keys,
        window=None if workload.window is None else min(workload.window, num_keys // 4),
        lengths=_cut(workload.lengths, num_keys),
    )


def _cut(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Lengths in the same proportions that add up to `most`."""
    if not lengths:
        return ()
    shares = [length * most // sum(lengths) for length in lengths]
    return (most - sum(shares[1:]), *shares[1:])


# Defaults of each command, and what the cases of `cases.py` are made of.
SQUARE = Workload(32, 16384, 16384, 128, 128)
SMALL_Q = Workload(16, 1, 131072, 128, 128)
OVERHEAD = Workload(4, 128, 128, 64, 64)
MEMORY = Workload(16, 16384, 16384, 128, 128)
LENGTHS = Workload(16, 4096, 4096, 128, 128)
# Where calls take seconds.
LONG = 131072
LONGEST = Workload(8, 524288, 524288, 128, 128, causal=True)

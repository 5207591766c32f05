"""What the kernels are measured against; each peer is checked before it is timed.

A peer is a name. `forward_entries` and `backward_entries` turn names into entries; one whose
library is not installed, or that cannot do the workload, raises `SkipError` when it is made, and
the table says so by name. Importing this package imports none of those libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..contender import Contender, Entry, SkipError

# Name of a peer: the module of this package that holds it, and the library it needs.
_MODULES = {
    "triton": ("triton_peer", "triton"),
    "fla": ("fla_peer", "fla"),
    "eager": ("torch_peers", "torch"),
    "compile": ("torch_peers", "torch"),
    "chunked": ("torch_peers", "torch"),
    "kept": ("torch_peers", "torch"),
    "cublas": ("yardsticks", "torch"),
    "cublas, float32": ("yardsticks", "torch"),
    "cublas, tf32": ("yardsticks", "torch"),
    "cudnn": ("yardsticks", "torch"),
    "flash": ("yardsticks", "torch"),
    "copy": ("yardsticks", "torch"),
    "read": ("yardsticks", "torch"),
}
PEERS = tuple(_MODULES)
# Begin the names of rows that do not compute the KL divergence: softmax attention, which a rate may
# be compared with, and ceilings, which nothing passes.
ATTENTION = {"cudnn": "cuDNN attention", "flash": "FlashAttention-2"}
CEILINGS = ("cuBLAS", "copy", "read only")


def load(name: str) -> ModuleType:
    """The module of a peer.

    Raises
    ------
    ValueError
        If there is no peer of that name.
    SkipError
        If its library is not installed.
    """
    if name not in _MODULES:
        raise ValueError(f"peers: expected names out of {', '.join(PEERS)}, got {name!r}")
    module, library = _MODULES[name]
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise SkipError(f"{library} is not installed") from error
    return importlib.import_module(f".{module}", __name__)


def forward_entries(names: Sequence[str], case: Any) -> list[Entry]:
    """Entries of the forward of a case (of a yardstick: of the forward of attention)."""
    return [Entry(name, _maker(name, "forward", case)) for name in names]


def backward_entries(names: Sequence[str], case: Any) -> list[Entry]:
    """Entries of the backward of a case; the Triton peer enters twice, separate and fused."""
    entries = []
    for name in names:
        if name == "triton":
            for kind in ("separate", "fused"):
                entries.append(Entry(f"{name}, {kind}", _maker(name, f"backward_{kind}", case)))
        else:
            entries.append(Entry(name, _maker(name, "backward", case)))
    return entries


def _maker(name: str, function: str, case: Any) -> Any:
    def make() -> Contender:
        contender: Contender = getattr(load(name), function)(name, case)
        return contender

    return make

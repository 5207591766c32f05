"""What ``streamkl-cupy tune`` has measured on a card, on disk: one JSON file a card.

The file lies beside the compiled kernels, under the rules of that directory (of this user alone,
written by a rename). It holds for one card, one set of kernel sources and one version of the
package; a file of others, one that cannot be read, and one that asks for a tile that is no
candidate are ignored as a whole, with one warning. Plans get what it holds as part of their
`plan.DeviceFacts`, once a process and card.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkl_cupy import __version__, catalogue, env, jit, plan, tiling
from streamkl_cupy.problem import INPUTS, STRATEGIES, Problem, contiguous

FORMAT = 1
_REMEDY = (
    "run streamkl-cupy tune again, remove the file, or set STREAMKL_CHOICES=0 to ignore it quietly"
)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says.

    Attributes
    ----------
    path
        Where it lies, or would lie; None where it is turned off.
    tuned
        What plans take from it; the latest first.
    problem
        Why nothing is taken from it; empty if there is no reason, and if there is no file.
    """

    path: Path | None
    tuned: tuple[plan.TunedChoice, ...] = ()
    problem: str = ""


def load(card: str, facts: plan.DeviceFacts) -> tuple[plan.TunedChoice, ...]:
    """What plans of a card take from its file; a warning if it has one that cannot be used.

    Parameters
    ----------
    card
        Its name.
    facts
        Of the card.
    """
    contents = read(card, facts)
    if contents.problem:
        warnings.warn(
            f"streamkl_cupy: ignoring the tuned choices in {contents.path}: {contents.problem}; "
            f"{_REMEDY}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return contents.tuned


def read(card: str, facts: plan.DeviceFacts) -> Contents:
    """The file of a card, checked.

    Raises
    ------
    ValueError
        If ``STREAMKL_CHOICES`` is malformed.
    """
    wanted = env.choices()
    if wanted is False:
        return Contents(None)
    name = file_name(card, facts.arch)
    try:
        found = jit.read_beside(name) if wanted is True else (wanted, wanted.read_bytes())
    except FileNotFoundError:
        found = None
    except (OSError, jit.CacheError) as error:
        return Contents(_path(wanted, name), problem=str(error))
    if found is None:
        return Contents(_path(wanted, name))
    path, content = found
    try:
        return Contents(path, _parse(json.loads(content), card, facts))
    except _UnusableError as error:
        return Contents(path, problem=str(error))
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"it is damaged ({type(error).__name__}: {error})"
        return Contents(path, problem=reason)


def store(card: str, facts: plan.DeviceFacts, measured: Iterable[plan.TunedChoice]) -> Path:
    """Put what was measured into the file of a card, in front of what it holds for other shapes.

    Parameters
    ----------
    card, facts
        The card.
    measured
        What was fastest. Where that is the plan's own choice (`plan.NO_CHOICE`), what the file
        holds for the shape is taken out.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    ValueError
        If ``STREAMKL_CHOICES`` turns choices off, or is malformed.
    OSError, jit.CacheError
        If the file cannot be written.
    """
    wanted = env.choices()
    if wanted is False:
        raise ValueError(
            "STREAMKL_CHOICES: expected a place to keep choices in, got one of the words that turn "
            "them off; unset it to tune."
        )
    measured = list(measured)
    replaced = {(one.problem_class, one.shape) for one in measured}
    kept = [
        one for one in read(card, facts).tuned if (one.problem_class, one.shape) not in replaced
    ]
    entries = [one for one in measured if one.choice != plan.NO_CHOICE] + kept
    content = {
        **_identity(card, facts.arch),
        "entries": [dataclasses.asdict(one) for one in entries],
    }
    encoded = (json.dumps(content, indent=1) + "\n").encode()
    if wanted is True:
        return jit.write_beside(file_name(card, facts.arch), encoded)
    jit.replace_file(wanted, encoded)
    return wanted


def file_name(card: str, arch: str) -> str:
    """Of the file of a card.

    Examples
    --------
    >>> file_name("NVIDIA H200", "sm_90a")
    'choices-nvidia_h200-sm_90a.json'
    """
    return f"choices-{re.sub('[^a-z0-9]+', '_', card.lower())}-{arch}.json"


def problem_of(tuned: plan.TunedChoice) -> Problem:
    """A problem of a class, in the shape that was measured, contiguous and aligned."""
    of = tuned.problem_class
    heads, num_queries, num_keys = tuned.shape
    is_wide = of.dtype in tiling.WIDE
    return contiguous(
        "float32" if is_wide else of.dtype,
        precision=of.dtype if is_wide else None,
        batch=1,
        num_heads=heads,
        num_key_heads1=heads // of.group1,
        num_key_heads2=heads // of.group2,
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim1=of.head_dim1,
        head_dim2=of.head_dim2,
        causal=of.causal,
    )


class _UnusableError(Exception):
    """A file that is whole, and not for here and now."""


def _path(wanted: Path | bool, name: str) -> Path:
    return wanted if isinstance(wanted, Path) else jit.beside(name)


def _identity(card: str, arch: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "card": card,
        "arch": arch,
        "sources": jit.source_digest(),
        "version": __version__,
    }


def _parse(content: Any, card: str, facts: plan.DeviceFacts) -> tuple[plan.TunedChoice, ...]:
    if not isinstance(content, dict):
        raise TypeError(f"expected an object, got {type(content).__name__}")
    for key, expected in _identity(card, facts.arch).items():
        if content.get(key) != expected:
            # A digest in full says no more.
            here, there = (str(value)[:32] for value in (expected, content.get(key)))
            raise _UnusableError(f"it was measured with {key} {there}, and here it is {here}")
    return tuple(_entry(entry, facts) for entry in content["entries"])


def _entry(entry: Mapping[str, Any], facts: plan.DeviceFacts) -> plan.TunedChoice:
    of = dict(entry["problem_class"])
    if of["dtype"] not in tiling.ELEMENTS or not set(of["wrt"]) <= set(INPUTS):
        raise ValueError(f"unknown dtype or gradients in {of}")
    heads, num_queries, num_keys = map(int, entry["shape"])
    tuned = plan.TunedChoice(
        plan.ProblemClass(**of | {"wrt": tuple(of["wrt"])}),
        (heads, num_queries, num_keys),
        plan.NO_CHOICE,
    )
    problem = problem_of(tuned)
    if plan.problem_class(problem, tuned.problem_class.wrt, of["deterministic"]) != (
        tuned.problem_class
    ):
        raise ValueError(f"shape {tuned.shape} is not of its class")
    return dataclasses.replace(
        tuned, choice=_choice(entry["choice"], problem, facts, tuned.problem_class.wrt)
    )


def _choice(
    fields: Mapping[str, Any], problem: Problem, facts: plan.DeviceFacts, wrt: tuple[str, ...]
) -> plan.Choice:
    """A choice whose tiles are candidates, which also says of which type they are."""

    def tile(kernel: str, cut: Mapping[str, Any], side: int = 0) -> Any:
        for candidate in catalogue.tile_candidates(kernel, problem, facts, side):
            if dataclasses.asdict(candidate) == cut:
                return candidate
        raise ValueError(f"{kernel} has no tile {cut}")

    kernel, num_splits, strategy = (
        fields[name] for name in ("forward_kernel", "num_splits", "strategy")
    )
    if kernel is not None and kernel not in plan.FORWARD_KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}")
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}")
    if num_splits is not None and not 1 <= num_splits <= max(1, problem.num_keys):
        raise ValueError(f"{num_splits} splits of {problem.num_keys} keys")
    generation = fields["backward_kernel"]
    if generation is not None and generation not in plan.BACKWARD_KERNELS:
        raise ValueError(f"unknown kernel {generation!r}")
    cuts = {}
    for name, cut in fields["backward_tiles"]:
        if name not in plan.BACKWARD_KERNELS or not wrt:
            raise ValueError(f"unknown kernel {name!r}")
        cuts[name] = tile(name, cut, side=int(wrt[0][1]))
    return plan.Choice(
        num_splits=num_splits,
        forward_kernel=kernel,
        forward_tile=None if kernel is None else tile(kernel, fields["forward_tile"]),
        strategy=strategy,
        backward_kernel=generation,
        backward_tiles=tuple(cuts.items()),
    )

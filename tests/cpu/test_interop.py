"""Tensors of torch that are recognised: like earlier ones in all that a call depends on.

Tensors on the CPU stand for some on a card, of which only the key says where they lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from streamkl_cupy import interop
from streamkl_cupy.interop import Group

torch = pytest.importorskip("torch")

NAMES = ("q1", "k1")
CARD = 3


def pair() -> tuple[Any, Any]:
    return torch.zeros(4, 6, 8, dtype=torch.bfloat16), torch.zeros(4, 6, 8, dtype=torch.bfloat16)


def remembering(values: tuple[Any, ...]) -> Any:
    """A library that has seen the values, as if they lay on a card."""
    library = interop._Torch(torch)
    arrays = tuple(library.take(name, value) for name, value in zip(NAMES, values, strict=True))
    keys = tuple((*array.key[:3], CARD, array.key[4]) for array in arrays)
    pointers = tuple(array.pointer for array in arrays)
    library.remember(NAMES, Group(library, keys, pointers, arrays))
    return library


def test_others_like_them_are_recognised_at_their_own_addresses() -> None:
    library = remembering(pair())
    found = []
    for _ in range(2):
        values = pair()
        group = library.recognise(NAMES, values)
        assert group is not None
        assert group.pointers == tuple(value.data_ptr() for value in values)
        assert group.arrays == ()
        assert [key[3] for key in group.keys] == [CARD, CARD]
        found.append(group)
    # What is looked up by the keys is found without a comparison.
    assert found[0].keys is found[1].keys
    # A new address of the same tensor object.
    before = group.pointers
    values[1].data = pair()[1]
    group = library.recognise(NAMES, values)
    assert group.pointers[0] == before[0]
    assert group.pointers[1] == values[1].data_ptr() != before[1]


def unaligned(value: Any) -> Any:
    memory = torch.zeros(value.numel() + 1, dtype=value.dtype)
    return memory[1:].view(value.shape)


def without_memory(value: Any) -> Any:
    value.untyped_storage().resize_(0)
    return value


class Subclass(torch.Tensor):  # type: ignore[misc]
    pass


DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "strides": lambda value: torch.zeros(6, 4, 8, dtype=value.dtype).transpose(0, 1),
    "expanded": lambda value: value[:1].expand(4, 6, 8),
    "length": lambda value: value[:, :5],
    "rank": lambda value: value[0],
    "dtype": lambda value: value.view(torch.float16),
    "device": lambda value: torch.zeros_like(value, device="meta"),
    "address": unaligned,
    "no_memory": without_memory,
    "requires_grad": lambda value: value.requires_grad_(),
    "negated": torch._neg_view,
    "sparse": lambda value: value.to_sparse(),
    "subclass": lambda value: value.as_subclass(Subclass),
    "parameter": lambda value: torch.nn.Parameter(value, requires_grad=False),
    "list": lambda value: value.tolist(),
    "none": lambda value: None,
}


# The first value tells the library, so that it is a tensor.
CASES = [(0, name) for name in DIFFERENT if name not in ("list", "none")]
CASES += [(1, name) for name in DIFFERENT]


@pytest.mark.parametrize(("position", "name"), CASES)
def test_any_difference_is_noticed(position: int, name: str) -> None:
    library = remembering(pair())
    values = list(pair())
    values[position] = DIFFERENT[name](values[position])
    assert library.recognise(NAMES, tuple(values)) is None


def test_names_count() -> None:
    # Messages and checks differ between inputs and rows of the same shape.
    assert remembering(pair()).recognise(("k1", "q1"), pair()) is None


def test_what_needs_a_closer_look_is_not_remembered() -> None:
    first, second = pair()
    for value in (unaligned(first), first.clone().requires_grad_()):
        with torch.no_grad():
            library = remembering((value, second))
            assert library.recognise(NAMES, (value, second)) is None
    library = interop._Torch(torch)
    arrays = tuple(library.take(name, value) for name, value in zip(NAMES, pair(), strict=True))
    keys, pointers = tuple(a.key for a in arrays), tuple(a.pointer for a in arrays)
    library.remember(NAMES, Group(library, keys, pointers, arrays))
    assert library.recognise(NAMES, pair()) is None  # on the CPU, views are needed


def test_tangents_and_transforms() -> None:
    library = remembering(pair())
    with torch.autograd.forward_ad.dual_level():
        assert library.recognise(NAMES, pair()) is None
    assert library.recognise(NAMES, pair()) is not None

    def inside(value: Any) -> Any:
        assert library.recognise(NAMES, (value, value)) is None
        return value

    torch.func.vmap(inside)(torch.zeros(2, 4, 6, 8, dtype=torch.bfloat16))


def test_nothing_is_kept_alive() -> None:
    values = pair()
    library = remembering(values)
    references = [weakref.ref(value) for value in values]
    del values
    assert [reference() for reference in references] == [None, None]
    assert library.recognise(NAMES, pair()) is not None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_REMEMBERED", 2)
    library = interop._Torch(torch)
    for length in range(1, 6):
        value = torch.zeros(length, 8, dtype=torch.bfloat16)
        array = library.take("q1", value)
        key = (*array.key[:3], CARD, array.key[4])
        library.remember(("q1",), Group(library, (key,), (array.pointer,), (array,)))
        assert library.recognise(("q1",), (value,)) is not None
        assert len(library._seen) <= 2

"""Events made from their types alone, so that a new type is covered on the day it is added."""

import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import msgspec
from hypothesis import strategies as st

from lifecycle.core.events import Event

INT64 = st.integers(-(2**63), 2**63 - 1)


def members(union: Any) -> Iterator[Any]:
    """The types a union stands for; a type that is no union stands for itself."""
    if typing.get_origin(union) in (typing.Union, types.UnionType):
        for member in typing.get_args(union):
            yield from members(member)
    else:
        yield union


EVENT_TYPES: tuple[type[Any], ...] = tuple(members(Event))


def tag(event_type: type[Any]) -> str:
    """Recorded name of an event type."""
    return str(event_type.__struct_config__.tag)


def strategy(of: Any) -> st.SearchStrategy[Any]:
    """Values of a field type: every member of a union, every length, every default and non-default."""
    simple: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        int: lambda: INT64,
        float: lambda: st.floats(allow_nan=False),
        str: lambda: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        bytes: lambda: st.binary(max_size=100),
        type(None): st.none,
    }
    if of in simple:
        return simple[of]()
    if len(options := list(members(of))) > 1:
        return st.one_of([strategy(option) for option in options])
    if typing.get_origin(of) is tuple:
        arguments = typing.get_args(of)
        if arguments[-1] is Ellipsis:
            return st.lists(strategy(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*map(strategy, arguments))
    if isinstance(of, type) and issubclass(of, Enum):
        return st.sampled_from(of)
    hints = typing.get_type_hints(of)
    fields = {field.name: field for field in msgspec.structs.fields(of)}
    required = {n: strategy(hints[n]) for n, f in fields.items() if f.required}
    optional = {n: strategy(hints[n]) for n, f in fields.items() if not f.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: of(**values))


def full(of: Any, seed: int = 1) -> Any:
    """One value of a type with every field set, always the same."""
    simple: dict[Any, Any] = {
        bool: True,
        int: seed,
        float: seed + 0.5,
        str: f"text {seed}",
        bytes: bytes([seed % 256]) * 32,
    }
    if of in simple:
        return simple[of]
    if len(options := [option for option in members(of) if option is not type(None)]) > 1 or options != [of]:
        return full(options[0], seed)
    if typing.get_origin(of) is tuple:
        arguments = [a for a in typing.get_args(of) if a is not Ellipsis]
        return tuple(full(a, seed + i) for i, a in enumerate(arguments))
    if issubclass(of, Enum):
        return list(of)[-1]
    hints = typing.get_type_hints(of)
    names = [field.name for field in msgspec.structs.fields(of)]
    return of(**{name: full(hints[name], seed + i) for i, name in enumerate(names)})


def least(of: Any) -> Any:
    """One value of a type with only its required fields set, always the same."""
    hints = typing.get_type_hints(of)
    fields = [field for field in msgspec.structs.fields(of) if field.required]
    return of(**{field.name: full(hints[field.name], i) for i, field in enumerate(fields, start=1)})

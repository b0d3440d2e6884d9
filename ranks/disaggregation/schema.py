"""Dataclasses as msgpack, by a closed schema: what is read is what was written, or is refused by name.

A dataclass is a map of its fields by their names, in their order. Fields are integers of 64 bits, text,
bytes, booleans, other such dataclasses, and tuples of one of these. There is one way to write a value,
and bytes that are another way are refused.
"""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgpack

from ...errors import UsageError
from .refusal import Refusal, Refused

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Return a dataclass as bytes. Raises `UsageError` for what its fields cannot hold."""
    try:
        packed: bytes = msgpack.packb(_plain(value, type(value)))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"a {type(value).__name__} cannot be written: {error}") from error
    return packed


def unpack(kind: type[T], data: bytes) -> T:
    """Return the dataclass that `pack` wrote; raises `Refused` for anything else."""
    try:
        plain = msgpack.unpackb(data, strict_map_key=True)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise Refused(Refusal.MALFORMED, f"{len(data)} bytes are no msgpack: {error}") from error
    value = cast("T", _read(plain, kind, kind.__name__))
    if pack(value) != data:
        raise Refused(Refusal.MALFORMED, f"a {kind.__name__} is not written as this version does")
    return value


@cache
def _fields_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _plain(value: Any, hint: Any) -> Any:
    """Return a value as msgpack has it; `TypeError` if it is not of the type of its field."""
    if is_dataclass(hint):
        if type(value) is not hint:
            raise TypeError(f"{type(value).__name__} in place of {_name(hint)}")
        named = _fields_of(cast("type", hint))
        return {name: _plain(getattr(value, name), each) for name, each in named.items()}
    if get_origin(hint) is tuple:
        parts = cast("tuple[Any, ...]", value)
        if type(value) is not tuple:
            raise TypeError(f"{type(value).__name__} in place of a tuple")
        return [_plain(each, get_args(hint)[0]) for each in parts]
    if type(value) is not hint:
        raise TypeError(f"{type(value).__name__} in place of {_name(hint)}")
    return value


def _read(plain: Any, hint: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _read_fields(plain, cast("type", hint), where)
    if get_origin(hint) is tuple:
        _require(plain, list, where)
        (each_hint, _) = get_args(hint)
        return tuple(_read(each, each_hint, f"{where}[{at}]") for at, each in enumerate(plain))
    _require(plain, hint, where)
    return plain


def _read_fields(plain: Any, kind: type, where: str) -> Any:
    _require(plain, dict, where)
    hints = _fields_of(kind)
    for name in plain:
        if name not in hints:
            raise Refused(
                Refusal.UNKNOWN_FIELD, f"{where} has the unknown field {str(name)[:40]!r}"
            )
    for name in hints:
        if name not in plain:
            raise Refused(Refusal.MISSING_FIELD, f"{where} lacks the field {name!r}")
    read = {name: _read(plain[name], hint, f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**read)
    except UsageError as error:
        raise Refused(Refusal.OUT_OF_BOUNDS, f"{where}: {error}") from error


def _require(plain: Any, kind: type, where: str) -> None:
    if type(plain) is not kind:
        raise Refused(
            Refusal.WRONG_TYPE, f"{where} is of type {type(plain).__name__}, must be {_name(kind)}"
        )


def _name(kind: Any) -> str:
    return "a list" if kind is list else "a map" if kind is dict else str(kind.__name__)

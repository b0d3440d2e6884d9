"""The bytes that pass between the processes of a group: effects, verdicts, progress, and their parts.

msgpack of a closed list of types, each under a tag that never changes its meaning. What is read is the
value that was written, of the same type down to the last field; whatever else stands in the bytes is
refused. Nothing is pickled (rule R11).
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from ...coordinator import (
    ballot,
    collective,
    expectations,
    operation,
    proposal,
    stop_policy,
    verdict,
)
from ...errors import WireError
from ...page_format import page_layout
from . import config, dispatch, effects, model_description, notices, orders, outside
from . import replica_config as settings

BYTES_MAX = 1 << 28
"""The most bytes of one value. The orders of a verdict name ten thousands of keys, not millions."""

_DEPTH_MAX = 16
_PLAIN = frozenset((int, float, bool, str, bytes, NoneType))

TYPES: dict[int, type] = {
    0: tuple,
    1: frozenset,
    8: operation.Kind,
    9: operation.Phase,
    10: operation.Outcome,
    11: operation.Queue,
    12: proposal.Readiness,
    13: notices.Tier,
    14: notices.Cause,
    15: notices.Why,
    16: proposal.Change,
    20: expectations.Seated,
    21: expectations.Unseated,
    22: expectations.Queued,
    23: expectations.Settled,
    24: expectations.Forgotten,
    30: orders.ObjectTransfer,
    31: orders.CopyTransfer,
    32: orders.Need,
    33: orders.LookUp,
    34: orders.Fetch,
    35: orders.Put,
    36: orders.CopyToHost,
    37: orders.CopyToDevice,
    38: orders.Fork,
    39: orders.Fence,
    40: orders.Cancel,
    41: orders.AttachStore,
    42: orders.DetachStore,
    43: orders.Serve,
    50: effects.Effects,
    51: effects.Decision,
    60: notices.Stored,
    61: notices.Removed,
    62: notices.Hit,
    63: notices.Missed,
    64: notices.Lacking,
    65: notices.Finished,
    66: notices.NotBegun,
    67: notices.Quarantined,
    68: notices.StoreChanged,
    69: notices.Reset,
    80: ballot.Answered,
    81: ballot.Landed,
    82: ballot.Capped,
    83: ballot.Expired,
    84: ballot.Ended,
    85: ballot.Quiesced,
    86: ballot.QuiesceExpired,
    90: verdict.Found,
    91: verdict.Arrived,
    92: verdict.Watermark,
    93: verdict.Proposed,
    94: verdict.Verdict,
    100: dispatch.Expect,
    101: dispatch.CarryOut,
    102: dispatch.Prepare,
    103: dispatch.GiveUp,
    104: dispatch.Rest,
    105: dispatch.Vote,
    106: dispatch.Dispatch,
    107: dispatch.Opened,
    108: config.CacheConfig,
    109: config.WritePolicy,
    110: config.Bounds,
    111: config.Timeouts,
    112: config.SlidingWindow,
    113: config.Recurrent,
    114: config.NamespaceLimit,
    115: config.Eviction,
    116: stop_policy.StopPolicy,
    117: stop_policy.StopRule,
    118: collective.Transport,
    119: outside.Peers,
    120: outside.Control,
    121: page_layout.Column,
    122: page_layout.PageLayout,
    123: settings.ReplicaConfig,
    124: settings.ComponentSettings,
    125: model_description.ModelDescription,
    126: model_description.KeptState,
}
"""The types by tag. One that is dropped leaves its tag unused; one whose fields change meaning gets
another tag."""

_PLURAL = (0, 1)
"""The tags of what has any number of parts."""

_TAGS = {kind: tag for tag, kind in TYPES.items()}


def field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or named tuple; none of anything else."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    names: tuple[str, ...] = getattr(kind, "_fields", ())
    return names


_FIELDS: dict[type, dict[str, Any]] = {
    kind: {name: get_type_hints(kind)[name] for name in field_names(kind)} for kind in _TAGS
}
"""By type: its fields in order, and what each may hold."""


def encode(value: object) -> bytes:
    """Return a value as bytes. Raises `WireError` for a type that is not listed, or too much of it."""
    try:
        data: bytes = _pack((value,))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a message for another process cannot be written: {error}") from error
    if len(data) > BYTES_MAX:
        raise WireError(f"a message of {len(data)} bytes, must be at most {BYTES_MAX}")
    return data


def decode(data: bytes) -> Any:
    """Return the value that was written. Raises `WireError` for bytes that `encode` never gave."""
    if len(data) > BYTES_MAX:
        raise WireError(f"a message of {len(data)} bytes, must be at most {BYTES_MAX}")
    try:
        (value,) = _Reader().parts(data)
    except (TypeError, ValueError, LookupError, msgpack.UnpackException) as error:
        raise WireError(f"a message of {len(data)} bytes cannot be read: {error}") from error
    return value


def _pack(parts: "tuple[object, ...] | list[object]") -> bytes:
    """Return parts, of types that are listed, as one array."""
    for each in parts:
        _require_listed(each)
    return msgpack.packb(list(parts), strict_types=True, default=_extension)


def _extension(value: object) -> msgpack.ExtType:
    tag = _TAGS.get(type(value))
    if tag is None:
        raise OverflowError(f"{value} has more than 64 bits")
    if isinstance(value, Enum):
        parts: list[Any] = [value.value]
    elif tag in _PLURAL:
        elements = cast("Iterable[Any]", value)
        parts = sorted(elements) if TYPES[tag] is frozenset else list(elements)
    else:
        parts = [getattr(value, name) for name in _FIELDS[TYPES[tag]]]
    return msgpack.ExtType(tag, _pack(parts))


class _Reader:
    """Reads one value, whose depth is bounded: each level is a call."""

    def __init__(self) -> None:
        self._depth = 0

    def parts(self, data: bytes) -> list[Any]:
        """Return the parts that `_pack` was given."""
        parts: list[Any] = msgpack.unpackb(data, ext_hook=self._value)
        if type(parts) is not list:
            raise TypeError("it does not begin with an array")
        for each in parts:
            _require_listed(each)
        return parts

    def _value(self, tag: int, data: bytes) -> Any:
        kind: Any = TYPES[tag]
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise ValueError(f"it is nested more than {_DEPTH_MAX} deep")
        parts = self.parts(data)
        self._depth -= 1
        if tag in _PLURAL:
            return kind(parts)
        if issubclass(kind, Enum):
            return kind(*parts)
        named = dict(zip(_FIELDS[kind], parts, strict=True))
        for name, hint in _FIELDS[kind].items():
            if not _fits(named[name], hint):
                raise TypeError(
                    f"{name} of {kind.__name__} is of type {type(named[name]).__name__}"
                )
        return kind(**named)


def _require_listed(value: object) -> None:
    if type(value) not in _PLAIN and type(value) not in _TAGS:
        raise TypeError(f"type {type(value).__name__} is not one that may leave a process")


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of the type that a field is annotated with, and so are its elements."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Union or origin is UnionType:
        return any(_fits(value, each) for each in arguments)
    if origin is tuple or origin is frozenset:
        parts: Iterable[Any] = value
        return type(value) is origin and all(_fits(each, arguments[0]) for each in parts)
    if hint is str:
        # A setting may be one of a list of texts, or another text.
        return type(value) is str or isinstance(value, StrEnum)
    return type(value) is hint or (hint is float and type(value) is int)

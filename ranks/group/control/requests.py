"""The requests of an operator: what they are, as JSON and as bytes, and what a rank does for each.

A request is a map with `ask`, its kind, and the fields of that kind.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Final, cast, get_type_hints

import msgpack

from ....errors import UsageError
from ...protocol.config import ANY_NAMESPACE, NamespaceLimit
from ...replica.tree.tokens import as_token_bytes
from ..member.arguments import as_count, require_text
from ..member.messages import CONTROL_MAGIC
from ..member.rank_cache import RankCache

LEVELS: Final = ("debug", "info", "warning", "error")
_NAMED_MAX: Final = 8
"""How many namespaces are named to whoever has asked for one that is not there."""

Answer = Mapping[str, object]
"""What became of a request, as JSON has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest(ABC):
    """What every rank carries out in the same step."""

    ask: ClassVar[str]
    """The name of its kind."""

    @abstractmethod
    def carry_out(self, cache: RankCache) -> "Answer | Future[None]":
        """Do it on this rank, and return what became of it, or where that will be told.

        Raises `UsageError` or `ConfigError`, the same on every rank, for what cannot be done.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin(ControlRequest):
    """Keep what is cached of a prompt; see `RankCache.pin`."""

    ask: ClassVar[str] = "pin"
    name: str
    tokens: list[int]
    namespace: str = ""
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("name is '', must name the pin")
        as_token_bytes(self.tokens)

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        kept = cache.pin(self.name, self.tokens, self.namespace, ttl_s=self.ttl_s)
        return {"tokens": kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin(ControlRequest):
    """Let go of what a pin keeps."""

    ask: ClassVar[str] = "unpin"
    name: str

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        return {"was_pinned": cache.unpin(self.name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(ControlRequest):
    """Evict what nobody holds of a namespace, or of all where it is null; see `RankCache.drop`."""

    ask: ClassVar[str] = "drop"
    namespace: str | None

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        known = _known(cache)
        if self.namespace is not None and self.namespace not in known:
            there = ", ".join(repr(each) for each in sorted(known)[:_NAMED_MAX])
            more = f", and {len(known) - _NAMED_MAX} more" if len(known) > _NAMED_MAX else ""
            raise UsageError(
                f"nothing is cached of namespace {self.namespace!r}; there is {there or 'none'}{more}"
            )
        return cache.drop(self.namespace)._asdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(ControlRequest):
    """Give a namespace another limit; without any bound it has none. See `RankCache.limit`."""

    ask: ClassVar[str] = "limit"
    namespace: str
    device_pages: int | None = None
    host_pages: int | None = None
    ttl_s: float | None = None

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        cache.limit(NamespaceLimit(**asdict(self)))
        known = self.namespace == ANY_NAMESPACE or self.namespace in _known(cache)
        return {"is_known": known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(ControlRequest):
    """Use a store from now on; see `RankCache.attach_store`."""

    ask: ClassVar[str] = "attach"
    store: str

    def carry_out(self, cache: RankCache) -> "Future[None]":
        """See `ControlRequest`."""
        return cache.attach_store(self.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(ControlRequest):
    """Use the store no more; see `RankCache.detach_store`."""

    ask: ClassVar[str] = "detach"

    def carry_out(self, cache: RankCache) -> "Future[None]":
        """See `ControlRequest`."""
        return cache.detach_store()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(ControlRequest):
    """Serve nothing of other weights any more; see `RankCache.reset`."""

    ask: ClassVar[str] = "weights"
    version: str

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        cache.reset(self.version)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush(ControlRequest):
    """Wait for what is in flight. This tells what is, in one step, for whoever waits."""

    ask: ClassVar[str] = "flush"

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        return {"in_flight": list(cache.inspection.in_flight)}


@dataclass(frozen=True, slots=True, kw_only=True)
class List(ControlRequest):
    """Tell what each namespace keeps, which limits and pins there are, and how the store is."""

    ask: ClassVar[str] = "list"

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        seen, page_tokens = cache.inspection, cache.config.layout.page_tokens
        return {
            "namespaces": _namespaces(cache),
            "limits": [asdict(each) for each in seen.prefixes.residence.limits.given],
            "pins": {
                name: {
                    "namespace": pin.node.place.namespace,
                    "tokens": pin.node.end * page_tokens,
                }
                for name, pin in seen.pins.items()
            },
            "store": cache.store_state().value,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLevel(ControlRequest):
    """Log from this level on, on every rank."""

    ask: ClassVar[str] = "log-level"
    level: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level is {self.level!r}, must be one of {', '.join(LEVELS)}")

    def carry_out(self, cache: RankCache) -> Answer:
        """See `ControlRequest`."""
        del cache
        log = logging.getLogger("lockstep")
        if not log.hasHandlers():
            # Python's own handler of last resort leaves out what is less than a warning.
            log.addHandler(logging.StreamHandler())
        log.setLevel(self.level.upper())
        return {}


KINDS: Final[Mapping[str, type[ControlRequest]]] = {
    each.ask: each
    for each in (List, Pin, Unpin, Drop, Limit, Flush, Attach, Detach, Weights, LogLevel)
}


def request_of(asked: object) -> ControlRequest:
    """Return the request that JSON stands for; `UsageError` names what is wrong with it."""
    if not isinstance(asked, dict):
        raise UsageError("a request is a map with `ask` and the fields of what is asked")
    named: dict[str, Any] = {
        str(name): each for name, each in cast("dict[object, object]", asked).items()
    }
    ask = named.pop("ask", None)
    kind = KINDS.get(str(ask))
    if kind is None:
        raise UsageError(f"ask is {ask!r:.80}, must be stats, or one of {', '.join(KINDS)}")
    hints, needed = _fields_of(kind)
    for name, value in named.items():
        if name not in hints:
            raise UsageError(f"{ask} has no field {name!r}; it has {', '.join(hints) or 'none'}")
        _require(f"{ask}: {name}", value, hints[name])
    missing = needed - named.keys()
    if missing:
        raise UsageError(f"{ask} needs {', '.join(sorted(missing))}")
    return kind(**named)


def asked_by(request: ControlRequest) -> dict[str, object]:
    """Return a request as JSON has it."""
    return {"ask": request.ask, **asdict(request)}


def pack(ticket: bytes, request: ControlRequest) -> bytes:
    """Return the message that a request is; `ticket` is what its answer is told under."""
    packed: bytes = msgpack.packb([ticket, asked_by(request)])
    return CONTROL_MAGIC + packed


def unpack(content: bytes) -> tuple[bytes, ControlRequest]:
    """Return ticket and request of a message that `pack` has written."""
    ticket, asked = msgpack.unpackb(content[len(CONTROL_MAGIC) :])
    return ticket, request_of(asked)


def _known(cache: RankCache) -> set[str]:
    """Return the namespaces of which something is cached or requested."""
    return {root.place.namespace for root in cache.inspection.prefixes.tree.roots.values()}


def _namespaces(cache: RankCache) -> dict[str, dict[str, int]]:
    """Return the pages of full attention that each namespace has on device and host."""
    tree = cache.inspection.prefixes.tree
    kept: dict[str, dict[str, int]] = {}
    for root in tree.roots.values():
        # Each reset begins new trees; what is held of the old ones stays beside them.
        pages = kept.setdefault(root.place.namespace, {"device_pages": 0, "host_pages": 0})
        for node in tree.nodes([root]):
            for name, (run, *_) in zip(pages, node.values, strict=True):
                pages[name] += 0 if run is None else len(run)
    return kept


@cache
def _fields_of(kind: type[ControlRequest]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a kind's fields, and the names of those that must be given."""
    hints = get_type_hints(kind)
    named = fields(kind)
    needed = frozenset(each.name for each in named if each.default is MISSING)
    return {each.name: hints[each.name] for each in named}, needed


def _require(what: str, value: object, hint: Any) -> None:
    """Raise `UsageError` for a value that is not what a field takes, or that no message can hold."""
    if hint == list[int]:
        if not isinstance(value, list) or not {*map(type, cast("list[object]", value))} <= {int}:
            raise UsageError(f"{what} must be a list of integers")
        return
    kinds: tuple[type, ...] = hint.__args__ if isinstance(hint, UnionType) else (hint,)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        words = " or ".join(_WORDS[each] for each in kinds)
        raise UsageError(f"{what} is {value!r:.80}, must be {words}")
    if isinstance(value, str):
        require_text(value, what)
    elif isinstance(value, int):
        as_count(value, what)


_WORDS: Final[Mapping[type, str]] = {
    str: "text",
    int: "an integer",
    float: "a number",
    type(None): "null",
}

"""Control requests: their schema as JSON and bytes, and their execution on a rank.

A control request is a map with its kind in `ask` and the fields of that kind.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, cast, get_args

import msgspec

from ....coordinator.codec import Codec
from ....errors import UsageError, WireError
from ...protocol.config import ANY_NAMESPACE, NamespaceLimit
from ...replica.tree.tokens import as_token_bytes
from ..member.rank_cache import RankCache

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

_NAMED_MAX: Final = 8
"""Maximum number of existing namespaces listed in the error about an unknown namespace."""

Answer = Mapping[str, object]
"""Result of a control request as a map of JSON values."""


class ControlRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="ask",
    tag=lambda name: name.lower(),
):
    """A control request, which every rank executes in the same step.

    Each kind has `carry_out`, which executes the control request on this rank and returns the result or
    a future of the result. If the control request cannot be executed, `carry_out` raises `UsageError`
    or `ConfigError` on every rank.
    """

    @property
    def ask(self) -> str:
        """The name of the control request's kind."""
        return str(self.__struct_config__.tag)


class Pin(ControlRequest, frozen=True):
    """Pin the cached pages of a prompt; see `RankCache.pin`."""

    name: Name
    tokens: list[int]
    namespace: str = ""
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        as_token_bytes(self.tokens)

    def carry_out(self, cache: RankCache) -> Answer:
        kept = cache.pin(self.name, self.tokens, self.namespace, ttl_s=self.ttl_s)
        return {"tokens": kept}


class Unpin(ControlRequest, frozen=True):
    """Remove a pin."""

    name: Name

    def carry_out(self, cache: RankCache) -> Answer:
        return {"was_pinned": cache.unpin(self.name)}


class Drop(ControlRequest, frozen=True):
    """Evict unused pages of one namespace, or of all namespaces if None; see `RankCache.drop`."""

    namespace: str | None

    def carry_out(self, cache: RankCache) -> Answer:
        known = _known(cache)
        if self.namespace is not None and self.namespace not in known:
            there = ", ".join(repr(each) for each in sorted(known)[:_NAMED_MAX])
            more = f", and {len(known) - _NAMED_MAX} more" if len(known) > _NAMED_MAX else ""
            raise UsageError(
                f"nothing is cached for namespace {self.namespace!r}; cached: {there or 'none'}{more}"
            )
        return cache.drop(self.namespace)._asdict()


class Limit(ControlRequest, frozen=True):
    """Replace a namespace's quota and time to live; remove them if no bound is given.

    See `RankCache.limit`.
    """

    namespace: str
    device_pages: int | None = None
    host_pages: int | None = None
    ttl_s: float | None = None

    def carry_out(self, cache: RankCache) -> Answer:
        cache.limit(NamespaceLimit(**msgspec.structs.asdict(self)))
        known = self.namespace == ANY_NAMESPACE or self.namespace in _known(cache)
        return {"is_known": known}


class Attach(ControlRequest, frozen=True):
    """Attach a store; see `RankCache.attach_store`."""

    store: str

    def carry_out(self, cache: RankCache) -> "Future[None]":
        return cache.attach_store(self.store)


class Detach(ControlRequest, frozen=True):
    """Detach the store; see `RankCache.detach_store`."""

    def carry_out(self, cache: RankCache) -> "Future[None]":
        return cache.detach_store()


class Weights(ControlRequest, frozen=True):
    """Make pages computed with earlier weights unmatchable; see `RankCache.reset`."""

    version: Name

    def carry_out(self, cache: RankCache) -> Answer:
        cache.reset(self.version)
        return {}


class Flush(ControlRequest, frozen=True):
    """Retry failed backups and persists; return a map of what is not written yet.

    The map has the ids of the operations in flight, and the numbers of unwritten pages by cause. The
    call does not wait. `ControlReplies` repeats it until the operations have finished.
    """

    def carry_out(self, cache: RankCache) -> Answer:
        cache.write_out()
        seen = cache.inspection
        return {
            "in_flight": [each for each in seen.in_flight if seen.works(each)],
            "unwritten": {cause.value: pages for cause, pages in seen.unwritten.items()},
        }


class List(ControlRequest, frozen=True):
    """Return the page counts of each namespace, the limits, the pins and the store's state."""

    def carry_out(self, cache: RankCache) -> Answer:
        seen, page_tokens = cache.inspection, cache.config.layout.page_tokens
        return {
            "namespaces": _namespaces(cache),
            "limits": [asdict(each) for each in seen.prefixes.allocator.limits.given],
            "pins": {
                name: {
                    "namespace": pin.node.place.namespace,
                    "tokens": pin.node.end * page_tokens,
                }
                for name, pin in seen.pins.items()
            },
            "store": cache.store_state().value,
        }


class LogLevel(ControlRequest, frozen=True, tag="log-level"):
    """Set the log level in every process of the group."""

    level: Literal["debug", "info", "warning", "error"]

    def carry_out(self, cache: RankCache) -> Answer:
        cache.log_from(self.level)
        return {}


AnyRequest = List | Pin | Unpin | Drop | Limit | Flush | Attach | Detach | Weights | LogLevel
KINDS: Final = tuple(sorted(str(each.__struct_config__.tag) for each in get_args(AnyRequest)))
"""The kinds of control requests that every rank executes. `stats` is not included, because rank 0
answers it alone."""
REQUESTS: Final[Codec[tuple[bytes, AnyRequest]]] = Codec(tuple[bytes, AnyRequest])
"""Codec of (ticket, control request). The ticket is a random id by which rank 0 finds the waiting
client."""


def request_of(parsed: object) -> AnyRequest:
    """Parse a control request from JSON values; raise a `UsageError` that names the invalid part."""
    ask = cast("dict[str, Any]", parsed).get("ask") if isinstance(parsed, dict) else None
    if ask not in KINDS:
        raise UsageError(
            f"a request is a map in which `ask` is stats, or one of {', '.join(KINDS)}; it is"
            f" {ask!r:.80}"
        )
    try:
        request: AnyRequest = msgspec.convert(parsed, AnyRequest)
        REQUESTS.encode((b"", request))
    except (msgspec.ValidationError, WireError) as error:
        raise UsageError(f"{ask}: {error}") from None
    return request


def _known(cache: RankCache) -> set[str]:
    """Return the namespaces that have cached pages or requests."""
    return {root.place.namespace for root in cache.inspection.prefixes.tree.roots.values()}


def _namespaces(cache: RankCache) -> dict[str, dict[str, int]]:
    """Return each namespace's counts of full-attention pages: `device_pages` and `host_pages`."""
    tree = cache.inspection.prefixes.tree
    kept: dict[str, dict[str, int]] = {}
    for root in tree.roots.values():
        # Add up the pages of all trees of a namespace. A reset starts a new tree, and the old tree
        # exists as long as requests hold its pages.
        pages = kept.setdefault(root.place.namespace, {"device_pages": 0, "host_pages": 0})
        for node in tree.nodes([root]):
            for name, (run, *_) in zip(pages, node.values, strict=True):
                pages[name] += 0 if run is None else len(run)
    return kept

"""Backups of device pages that SGLang's tree holds: the tree keeps them until all ranks have them.

A lock on the path is what keeps them, so SGLang needs no fence. Only a request that is retracted gives
its pages away at once: what it has computed is copied before that. A backup that host memory has no
room for keeps its lock and is tried again, for as long as it gets further every `PATIENCE_S`; together
these locks keep at most one in `SHARE` of the device's tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from .engine.contract import Lock
from .pools.slots import Pages

PATIENCE_S = 10.0
"""A backup that has come no further for so long, in agreed time, is given up."""
SHARE = 8
"""Backups that wait for room keep at most one in so many of the device's tokens."""
TRIES_MAX = 4
"""So many are tried in one step."""


@dataclass(slots=True, eq=False)
class _Awaiting:
    """A backup that host memory has no room for yet."""

    tokens: bytes
    device_pages: Mapping[str, Pages]
    namespace: str
    until_ms: int


@dataclass(slots=True)
class LentBackups:
    """The backups that have not ended on every rank, with what they keep."""

    host: HostCache
    unlock: Callable[[Lock], object]
    device_tokens: int
    """How many tokens the device has room for."""
    retracted: int = 0
    """How many requests had their pages copied before they were given away."""
    _kept: dict[str, Lock] = field(default_factory=dict[str, Lock])
    _awaiting: dict[str, _Awaiting] = field(default_factory=dict[str, _Awaiting])
    """Those of them that wait for room."""
    _given: int = 0

    def __contains__(self, name: str) -> bool:
        """Say whether a backup has not ended on every rank."""
        return name in self._kept

    def __len__(self) -> int:
        """Return how many have not ended."""
        return len(self._kept)

    def keep(
        self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str, lock: Lock
    ) -> None:
        """Copy what of a prefix is not on the host; `lock` keeps its pages until that is over."""
        name = self._begin(tokens, device_pages, namespace)
        self._kept[name] = lock
        if self.host.awaits_room(name) and self._may_await(tokens):
            until_ms = self._until_ms()
            self._awaiting[name] = _Awaiting(tokens, device_pages, namespace, until_ms)
        else:
            self._end(name)

    def save(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str | None:
        """Copy what of a prefix is not on the host, and return when its pages may be overwritten.

        Returns the name of the backup that the other ranks have to end too, or None.
        """
        self.retracted += 1
        name = self._begin(tokens, device_pages, namespace)
        self.host.begin_backups()
        self.host.keep_off(name)
        if self.host.release(name):
            return None
        self._kept[name] = None
        return name

    def collect(self) -> None:
        """Let go of the pages whose backups have ended on every rank; go on with those that wait."""
        for name in self.host.collect_freed():
            self.unlock(self._kept.pop(name))
        if self._awaiting:
            self._try_again()

    def give_up(self) -> None:
        """Let go of the pages of backups that wait for room."""
        for name in list(self._awaiting):
            self._end(name)

    def finish(self) -> None:
        """Go on with those that wait for room as long as that helps, before the cache is closed."""
        host = self.host

        def over() -> bool:
            self.collect()
            host.begin_backups()
            due = any(map(host.backup_is_due, self._awaiting))
            return not (self._awaiting and (host.inspection.in_flight or due))

        host.step_until(over, host.config.timeouts.flush_s)

    def drop(self) -> None:
        """Forget what is kept: the tree that it was kept in is gone."""
        self._kept = dict.fromkeys(self._kept)

    def _may_await(self, tokens: bytes) -> bool:
        kept = sum(len(each.tokens) for each in self._awaiting.values()) + len(tokens)
        return kept * SHARE <= self.device_tokens * TOKEN_BYTES

    def _until_ms(self) -> int:
        return self.host.inspection.agreed_ms + int(PATIENCE_S * 1000)

    def _try_again(self) -> None:
        host, tries, now_ms = self.host, 0, self.host.inspection.agreed_ms
        for name, each in list(self._awaiting.items()):
            if tries < TRIES_MAX and host.backup_is_due(name):
                tries += 1
                before = host.copies(name)
                host.back_up(name, each.tokens, each.device_pages, each.namespace)
                if host.copies(name) != before:
                    each.until_ms = self._until_ms()
            if not host.awaits_room(name) or now_ms > each.until_ms:
                self._end(name)

    def _end(self, name: str) -> None:
        """Let go of a backup's pages once its copies have ended."""
        self._awaiting.pop(name, None)
        if self.host.release(name):
            self.unlock(self._kept.pop(name))

    def _begin(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str:
        self._given += 1
        name = f"b{self._given}"
        self.host.back_up(name, tokens, device_pages, namespace)
        return name

"""Backups of device pages that SGLang's tree holds: the tree keeps them until all ranks have them.

A lock on the path is what keeps them, so SGLang needs no fence. Only a request that is retracted gives
its pages away at once: what it has computed is copied before that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...ranks.host_cache import HostCache
from .contract import Lock
from .pools.slots import Pages


@dataclass(slots=True)
class BackupCounts:
    """How much was offered."""

    backups: int = 0
    tokens: int = 0
    retracted: int = 0
    """Requests whose pages were copied before they were given away."""


@dataclass(slots=True)
class LentBackups:
    """The backups that have not ended on every rank, with what they keep."""

    host: HostCache
    unlock: Callable[[Lock], object]
    counts: BackupCounts = field(default_factory=BackupCounts)
    _kept: dict[str, Lock] = field(default_factory=dict[str, Lock])
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
        if self.host.release(name):
            self.unlock(lock)
        else:
            self._kept[name] = lock

    def save(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str | None:
        """Copy what of a prefix is not on the host, and return when its pages may be overwritten.

        Returns the name of the backup that the other ranks have to end too, or None.
        """
        self.counts.retracted += 1
        name = self._begin(tokens, device_pages, namespace)
        self.host.begin_backups()
        self.host.keep_off(name)
        if self.host.release(name):
            return None
        self._kept[name] = None
        return name

    def collect(self) -> None:
        """Let go of the pages whose backups have ended on every rank."""
        for name in self.host.collect_freed():
            self.unlock(self._kept.pop(name))

    def drop(self) -> None:
        """Forget what is kept: the tree that it was kept in is gone."""
        self._kept = dict.fromkeys(self._kept)

    def state(self) -> dict[str, int]:
        """Return how many backups there were and are."""
        return {
            "backups": self.counts.backups,
            "backed_up_tokens": self.counts.tokens,
            "retracted": self.counts.retracted,
            "keeping": len(self),
        }

    def _begin(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str:
        self._given += 1
        name = f"b{self._given}"
        self.counts.backups += 1
        self.counts.tokens += self.host.back_up(name, tokens, device_pages, namespace)
        return name

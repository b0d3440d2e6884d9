"""Pending backups of device pages: SGLang's tree keeps the pages until all ranks have copied them.

A lock on the tree path keeps a backup's pages, so SGLang need not wait for copies. SGLang frees the
pages of a retracted request at once, so Lockstep copies these pages before the retraction. If host
memory has no free pages for a backup, the backup keeps its lock and is retried. A backup is given up
after `PATIENCE_S` without progress. Together, backups that wait for host memory lock at most 1/`SHARE`
of the device's tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from .engine.contract import Lock
from .pools.slots import Pages

PATIENCE_S = 10.0
"""A backup that waits for host memory is given up after this many seconds of agreed time without
progress."""
SHARE = 8
"""Backups that wait for host memory lock at most 1/SHARE of the device's tokens."""
TRIES_MAX = 4
"""Maximum number of backups that are retried in one step."""


@dataclass(slots=True, eq=False)
class _Awaiting:
    """A backup that waits until host memory has free pages for it."""

    tokens: bytes
    device_pages: Mapping[str, Pages]
    namespace: str
    until_ms: int


@dataclass(slots=True)
class PendingTreeBackups:
    """Backups that have not completed on every rank, each with the lock that keeps its device pages."""

    host: HostCache
    unlock: Callable[[Lock], object]
    device_tokens: int
    """Capacity of the device pool, in tokens."""
    retracted: int = 0
    """Number of retracted requests whose computed tokens were copied to host memory before SGLang freed
    their slots."""
    _kept: dict[str, Lock] = field(default_factory=dict[str, Lock])
    _awaiting: dict[str, _Awaiting] = field(default_factory=dict[str, _Awaiting])
    """The pending backups that wait for host memory, by name."""
    _given: int = 0

    def __contains__(self, name: str) -> bool:
        """Return whether the backup of this name is pending: not every rank has completed it."""
        return name in self._kept

    def __len__(self) -> int:
        """Return the number of pending backups."""
        return len(self._kept)

    def keep(
        self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str, lock: Lock
    ) -> None:
        """Back up the pages of a prefix that are not on the host; `lock` keeps them on the device."""
        name = self._begin(tokens, device_pages, namespace)
        self._kept[name] = lock
        if self.host.waits_for_host_pages(name) and self._may_await(tokens):
            until_ms = self._until_ms()
            self._awaiting[name] = _Awaiting(tokens, device_pages, namespace, until_ms)
        else:
            self._end(name)

    def save(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str | None:
        """Back up the pages of a prefix that are not on the host, and wait for this rank's copies.

        After this call, SGLang may overwrite the device slots on this rank. Returns the backup's name
        if other ranks have not completed it, else None.
        """
        self.retracted += 1
        name = self._begin(tokens, device_pages, namespace)
        self.host.begin_backups()
        self.host.wait_for_copies(name)
        if self.host.release(name):
            return None
        self._kept[name] = None
        return name

    def collect(self) -> None:
        """Unlock pages of backups that all ranks completed; retry backups that wait for host memory."""
        for name in self.host.collect_freed():
            self.unlock(self._kept.pop(name))
        if self._awaiting:
            self._try_again()

    def give_up(self) -> None:
        """Give up all backups that wait for host memory; unlock their pages once no copy reads them."""
        for name in list(self._awaiting):
            self._end(name)

    def finish(self) -> None:
        """Retry backups that wait for host memory until no retry succeeds; called before closing."""
        host = self.host

        def over() -> bool:
            self.collect()
            host.begin_backups()
            due = any(map(host.backup_is_due, self._awaiting))
            return not (self._awaiting and (host.inspection.in_flight or due))

        host.step_until(over, host.config.timeouts.flush_s)

    def drop(self) -> None:
        """Forget all locks, because SGLang has emptied the tree whose nodes they lock."""
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
            if not host.waits_for_host_pages(name) or now_ms > each.until_ms:
                self._end(name)

    def _end(self, name: str) -> None:
        """End a backup. Unlock its pages now, or later in `collect` if copies still read them."""
        self._awaiting.pop(name, None)
        if self.host.release(name):
            self.unlock(self._kept.pop(name))

    def _begin(self, tokens: bytes, device_pages: Mapping[str, Pages], namespace: str) -> str:
        self._given += 1
        name = f"b{self._given}"
        self.host.back_up(name, tokens, device_pages, namespace)
        return name

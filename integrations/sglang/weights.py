"""Versions of SGLang's weights: only KV of the current weights can match (rule R16).

Every namespace has the name of its weights: a version or a digest. Pages of named weights are kept
in host memory and storage, and match again if the same weights are loaded again. Weights without a
name could be any weights. KV computed with them matches until the next update and is not written to
storage. An update to or from weights without a name discards the host pages; storage keeps its
objects.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ...ranks.group.host_cache import HostCache
from .identity.kv_identity import Update
from .namespaces import Namespaces

_log = logging.getLogger(__name__)


class WeightsUpdate(Enum):
    """Result of a weight update on this rank."""

    ALL = "applied"
    NOTHING = "not applied"
    PERHAPS = "unknown"


@dataclass(slots=True)
class _Session:
    """A weight-update session of SGLang: weights arrive in parts, and are complete when it ends."""

    versions: set[str] = field(default_factory=set[str])
    is_known: bool = True

    @property
    def version(self) -> str | None:
        """The name under which all parts of the weights were sent; None without such a name."""
        return min(self.versions) if self.is_known and len(self.versions) == 1 else None


@dataclass(slots=True)
class WeightsVersions:
    """Follows one engine's weight updates. Every rank makes the same calls in the same step.

    In every method, the argument `holds_nothing` says whether the device holds no KV at the time of the
    call.
    """

    host: HostCache
    namespaces: Namespaces
    initial: str
    """The name of the weights at startup: the user's version or a digest of the weight files."""
    name: Callable[[Update], str | None]
    """Function that returns the name of the weights of an update; None if they have no name."""
    _name: str | None = ""
    """The part of namespaces that identifies the current weights: "" for the startup weights, None for
    weights without a name."""
    _tree_is_stale: bool = False
    """Whether SGLang's device tree may have KV of other weights than the current ones."""
    _session: _Session | None = None
    _cleared: int = 0

    @property
    def may_cache(self) -> bool:
        """Whether KV may be cached.

        Caching stops during a weight-update session, and while the device has KV of previous weights.
        """
        return self._session is None and not self._tree_is_stale

    def changed(self, taken: WeightsUpdate, update: Update, *, holds_nothing: bool) -> None:
        """Record a weight update's result; the next round fails if the ranks' results differ."""
        self.host.digest_facts("result of a weight update is", taken.value)
        if taken is WeightsUpdate.NOTHING:
            return
        if self._session is None:
            self._become(self.name(update) if taken is WeightsUpdate.ALL else None, holds_nothing)
            return
        self._session.is_known &= taken is WeightsUpdate.ALL
        if update.version is not None:
            self._session.versions.add(update.version)

    def begin_session(self) -> None:
        """Stop caching until the session ends, because parts of the weights change until then."""
        self._session = _Session()

    def end_session(self, *, holds_nothing: bool) -> None:
        """End a weight-update session, and set the name of the weights after it.

        The weights get no name if the session gives the name of the previous weights, because one
        name would then stand for different weights. Weights that another process wrote in place have
        no name either.
        """
        session, self._session = self._session or _Session(), None
        name = None if session.version is None else self.name(Update(session.version))
        self._become(None if self._part(name) == self._name else name, holds_nothing)

    def tree_is_new(self) -> None:
        """Record that SGLang has emptied its device tree."""
        self._tree_is_stale = False

    def clear(self) -> None:
        """Start new namespaces, so that no page that is now in host memory or storage matches again."""
        self._cleared += 1
        life = self.host.inspection.config.life.hex()
        self.namespaces.cleared = f"{life} {self._cleared}"

    def _become(self, name: str | None, holds_nothing: bool) -> None:
        self._tree_is_stale = not holds_nothing
        self.host.digest_facts("weights become", name)
        if name is None or self._name is None:
            self.host.reset(name)
        self._name = self._part(name)
        self.namespaces.weights = self._name or ""
        if self.host.rank == 0:
            self._log_update(name)

    def _part(self, name: str | None) -> str | None:
        """Return the part of namespaces for the weights `name`; "" for the startup weights."""
        return "" if name == self.initial else name

    def _log_update(self, name: str | None) -> None:
        if name is None:
            _log.warning(
                "the new weights have no name, so their KV is not written to storage; give a"
                " weight_version with the update"
            )
        if self._tree_is_stale:
            _log.warning(
                "SGLang's tree still has KV of other weights, so Lockstep caches nothing until the tree"
                " is flushed; give flush_cache with the update"
            )

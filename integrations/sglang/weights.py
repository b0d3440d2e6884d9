"""Versions of the weights: what was computed with others is neither found nor written (rule R16).

A version that has a name is a part of every namespace, so its pages stay in host memory and storage and
are found when it comes back. Weights without a name could be any: what is computed with them is found
until the next update, and is not written to storage. An update to such weights gives up what host
memory has of the versions before; storage keeps what it has.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ...ranks.group.host_cache import HostCache
from .identity.kv_identity import Update
from .namespaces import Namespaces

_log = logging.getLogger(__name__)


class Taken(Enum):
    """What an update has done on this rank."""

    ALL = "all"
    NOTHING = "nothing: the weights are those of before"
    PERHAPS = "nobody knows what of it"


@dataclass(slots=True)
class _Session:
    """A session of updates: the weights come in parts, and are whole when it ends."""

    versions: set[str] = field(default_factory=set[str])
    is_known: bool = True

    @property
    def version(self) -> str | None:
        """The one name that the parts were sent under."""
        return min(self.versions) if self.is_known and len(self.versions) == 1 else None


@dataclass(slots=True)
class WeightsVersions:
    """Follows the updates of one engine's weights. Every rank calls it in the same step.

    `holds_nothing` says whether the device has no KV at all at that moment.
    """

    host: HostCache
    namespaces: Namespaces
    initial: str
    """The name of the weights of the start."""
    name: Callable[[Update], str | None]
    """Returns the name of weights that were taken; None if they have none."""
    _name: str | None = ""
    """Today's weights as a part of namespaces; empty for those of the start."""
    _tree_is_stale: bool = False
    """Whether the engine's tree may have KV of other weights than those of now."""
    _session: _Session | None = None
    _cleared: int = 0

    @property
    def may_cache(self) -> bool:
        """Whether all KV on the device is of weights that are whole, and those of now."""
        return self._session is None and not self._tree_is_stale

    def changed(self, taken: Taken, update: Update, *, holds_nothing: bool) -> None:
        """Take note of how an update has ended; ranks that differ in it end by name."""
        self.host.witness("of new weights was taken", taken.value)
        if taken is Taken.NOTHING:
            return
        if self._session is None:
            self._become(self.name(update) if taken is Taken.ALL else None, holds_nothing)
            return
        self._session.is_known &= taken is Taken.ALL
        if update.version is not None:
            self._session.versions.add(update.version)

    def begin_session(self) -> None:
        """Cache nothing from now on, since any part of the weights may change at any time."""
        self._session = _Session()

    def end_session(self, *, holds_nothing: bool) -> None:
        """Name what the session has brought.

        A name that the weights had before it would stand for both, so it names neither. Weights that
        another process wrote in the place of the old ones have none.
        """
        session, self._session = self._session or _Session(), None
        name = None if session.version is None else self.name(Update(session.version))
        self._become(None if self._part(name) == self._name else name, holds_nothing)

    def tree_is_new(self) -> None:
        """Take note that the engine has emptied its tree."""
        self._tree_is_stale = False

    def clear(self) -> None:
        """Let nobody find what is in host memory and storage now."""
        self._cleared += 1
        life = self.host.inspection.config.life.hex()
        self.namespaces.cleared = f"{life} {self._cleared}"

    def _become(self, name: str | None, holds_nothing: bool) -> None:
        self._tree_is_stale = not holds_nothing
        self.host.witness("weights become", name)
        if name is None or self._name is None:
            self.host.reset(name)
        self._name = self._part(name)
        self.namespaces.weights = self._name or ""
        if self.host.rank == 0:
            self._tell(name)

    def _part(self, name: str | None) -> str | None:
        """Return what weights are in namespaces, of which those of the start are no part."""
        return "" if name == self.initial else name

    def _tell(self, name: str | None) -> None:
        if name is None:
            _log.warning(
                "nobody can name the new weights: what is computed with them is not stored; a"
                " weight_version with the update names them"
            )
        if self._tree_is_stale:
            _log.warning(
                "SGLang has kept KV of other weights, so nothing is cached below its tree until it is"
                " flushed; flush_cache with the update does so"
            )

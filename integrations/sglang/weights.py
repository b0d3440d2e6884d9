"""Versions of the weights: what was computed with others is neither found nor written (rule R16).

A version that has a name is a part of every namespace, so its pages stay in host memory and storage and
are found when it comes back. Weights without a name could be any: what is computed with them is found
until the next update, and is not written to storage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...ranks.host_cache import HostCache
from .namespaces import Namespaces


@dataclass(slots=True)
class WeightsVersions:
    """Follows the updates of one engine's weights. Every rank calls it in the same step."""

    host: HostCache
    namespaces: Namespaces
    initial: str
    """The name of the weights of the start."""
    name: Callable[[str | None, str | None, str | None], str | None]
    """Returns a name, from the user's version, the path of files, and how these are read."""
    tree_is_stale: bool = False
    """Whether the engine's tree may have KV of other weights than those of now."""
    _named: bool = True
    _cleared: int = 0

    def change(self, version: str | None, path: str | None, load_format: str | None) -> None:
        """Let nobody find what was computed before, unless it was with the weights that come now."""
        self._become(self.name(version, path, load_format))

    def changed(self, *, well: bool) -> None:
        """Take note of how the update has ended on this rank.

        One that has not ended well leaves weights that nobody can name.
        """
        self.host.witness("new weights were taken", well)
        if not well:
            self._become(None)

    def tree_is_new(self) -> None:
        """Take note that the engine has emptied its tree."""
        self.tree_is_stale = False

    def clear(self) -> None:
        """Let nobody find what is in host memory and storage now."""
        self._cleared += 1
        life = self.host.inspection.config.life.hex()
        self.namespaces.cleared = f"{life} {self._cleared}"

    def _become(self, name: str | None) -> None:
        self.tree_is_stale = True
        self.host.witness("weights become", name)
        self.namespaces.weights = "" if name in {None, self.initial} else name or ""
        if name is None or not self._named:
            self.host.reset(name)
        self._named = name is not None

"""Identity of LoRA adapters in page keys: a digest of their files, or a version given by the user.

Engines share the pages of plain adapters (`plain_adapters.py`). How an engine applies any other adapter
depends on the engine and its options, so both are part of that adapter's identity.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .plain_adapters import is_plain
from .weights import FileDigests, weights_digest


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter as the engine loaded it: its name, its files and the engine's identifiers for it."""

    name: str
    path: str | None
    """Path of the adapter's weights; None if they were not loaded from files."""
    kept_under: tuple[str | int, ...]
    """Names or ids that identify the weights in the engine, and the KV computed with them."""
    form: str = ""
    """How the files are read, if the engine can read the same files in several ways."""


class AdapterWeights:
    """Identifies adapters by their weights. All calls come from one thread.

    `versions` maps adapter names to user-given versions. The files of other adapters are checked on
    every call, and read again if they have changed.

    An engine keeps weights and KV under a name or id even if the files change. If the weights behind a
    name change while the engine runs, requests with that name are no longer cached.
    """

    def __init__(
        self,
        digests: FileDigests,
        versions: Mapping[str, str],
        *,
        engine: str,
        shares: bool = True,
        where: str,
        anew: str,
        log: logging.Logger,
    ) -> None:
        """Set where users give versions (`where`), and how to restore caching after a change (`anew`).

        `engine` includes all options that may change how an adapter is applied. With `shares`, the
        engine applies plain adapters as every other engine does.
        """
        self._digests = digests
        self._versions = versions
        self._where = where
        self._anew = anew
        self._engine = engine
        self._shares = shares
        self._log = log
        self._applied: dict[str, str] = {}
        """Maps the identity of weights to the identity in keys, which includes the engine if needed."""
        self._known: dict[str | int, str | None] = {}
        """Maps the engine's identifiers to the identity of the weights; None if they are untrusted."""

    def identify(self, adapter: LoadedAdapter) -> str | None:
        """Return the identity of a request's adapter in keys; None if the request must not be cached.

        None means that the weights are unknown or have changed.
        """
        if not self.trusted(adapter):
            return None
        found, doubt = self._find(adapter)
        if found is not None and adapter.kept_under[0] not in self._known:
            self._log.info("adapter %r counts as %s", adapter.name, found)
        for each in adapter.kept_under:
            if self._known.setdefault(each, found) != found:
                found = None
                doubt = doubt or "its files were changed while the engine ran"
        if found is None:
            self._known |= dict.fromkeys(adapter.kept_under)
            self._log.warning(
                "requests with adapter %r are not cached: %s; %s, or set a version for the adapter in"
                " adapter_versions of %s",
                adapter.name,
                doubt,
                self._anew,
                self._where,
            )
        return found

    def trusted(self, adapter: LoadedAdapter) -> bool:
        """Return whether the weights behind the KV of this adapter are certain."""
        return all(self._known.get(each, "") is not None for each in adapter.kept_under)

    def forget(self, kept_under: str | int) -> None:
        """Forget an adapter after the engine has dropped its weights and all KV computed with them."""
        self._known.pop(kept_under, None)

    def _find(self, adapter: LoadedAdapter) -> tuple[str | None, str]:
        """Return the identity of the weights, or None and the reason why it is unknown."""
        version = self._versions.get(adapter.name)
        if version is not None:
            return self._as_applied(f"version {version} of {adapter.name}", adapter), ""
        if adapter.path is None:
            return None, "its weights did not come from files"
        try:
            path = Path(adapter.path).expanduser()
            return self._as_applied(f"files {weights_digest(path, self._digests)}", adapter), ""
        except (OSError, RuntimeError) as error:
            return None, f"its weights cannot be read ({error})"

    def _as_applied(self, weights: str, adapter: LoadedAdapter) -> str:
        """Return the identity of the weights, with the engine added unless the adapter is plain."""
        if weights not in self._applied:
            path = adapter.path
            plain = self._shares and path is not None and is_plain(Path(path).expanduser())
            self._applied[weights] = weights if plain else f"{weights} under {self._engine}"
        return self._applied[weights] + adapter.form

"""Identity of LoRA adapters in page keys: a digest of their files, or a version given by the user.

All engines apply a plain adapter in the same way (`plain_adapters.py`), so its identity in keys names
no engine. Engines may apply any other adapter differently, so its identity includes the engine and the
engine's adapter options.
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
    """The engine's names and ids for the adapter, under which it keeps the weights and their KV."""
    form: str = ""
    """Suffix of the identity that says how the engine reads the files; empty if there is one way."""


class AdapterWeights:
    """Identifies adapters by their weights. All calls come from one thread.

    `versions` maps adapter names to user-given versions. For an adapter without a version, every call
    checks whether the adapter's files have changed, and reads changed files again.

    An engine keeps weights and KV under an adapter's name or id even if the files change. If the
    weights behind a name change while the engine runs, requests with that name are no longer cached.
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
        """Set `where` (place of user-given versions) and `anew` (how to restore caching) for messages.

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
        """Maps a weights identity to the adapter's identity in page keys."""
        self._known: dict[str | int, str | None] = {}
        """Weights identity by the engine's adapter names and ids; None if the weights are unknown or
        have changed."""

    def identify(self, adapter: LoadedAdapter) -> str | None:
        """Return the identity of a request's adapter in keys; None if the request must not be cached.

        A request must not be cached if the adapter's weights are unknown or have changed.
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
        """Return whether the engine's weights for this adapter are known and have never changed."""
        return all(self._known.get(each, "") is not None for each in adapter.kept_under)

    def forget(self, kept_under: str | int) -> None:
        """Forget an adapter after the engine has dropped its weights and all KV computed with them."""
        self._known.pop(kept_under, None)

    def _find(self, adapter: LoadedAdapter) -> tuple[str | None, str]:
        """Return the weights identity and an empty reason, or None and the reason why it is unknown."""
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
        """Return the weights identity for page keys, with the engine unless the adapter is plain."""
        if weights not in self._applied:
            path = adapter.path
            plain = self._shares and path is not None and is_plain(Path(path).expanduser())
            self._applied[weights] = weights if plain else f"{weights} under {self._engine}"
        return self._applied[weights] + adapter.form

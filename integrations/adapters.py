"""Identity of LoRA adapters in page keys: a digest of their files, or a version given by the user.

All engines apply a plain adapter (see `plain_adapters.py`) in the same way, so the identity of a plain
adapter contains no engine. The identity of any other adapter contains the engine and the engine's
adapter options, because engines may apply such an adapter differently.
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
    """The engine's names and ids for this adapter. The engine uses them to find the adapter's weights
    and KV."""
    form: str = ""
    """Suffix of the adapter's identity that says how the engine reads the adapter's files; empty if the
    engine has only one way to read them."""


class AdapterWeights:
    """Identifies LoRA adapters by their weights. All calls come from one thread.

    `versions` maps adapter names to user-given versions. For an adapter without a version, every call
    checks whether the adapter's files have changed, and reads changed files again.

    An engine keeps using an adapter's loaded weights and KV even if the files change. If an adapter's
    files change while the engine runs, requests with this adapter are therefore no longer cached.
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
        """Create the object without reading a file.

        `where` names the setting that holds the versions, and `anew` says how the user can restore
        caching; both texts appear only in log messages. `engine` names the engine and all options that
        may change how it applies an adapter. `shares` is True if the engine applies plain adapters as
        every other engine does.
        """
        self._digests = digests
        self._versions = versions
        self._where = where
        self._anew = anew
        self._engine = engine
        self._shares = shares
        self._log = log
        self._applied: dict[str, str] = {}
        """Maps the identity of an adapter's weights to the adapter's identity in page keys."""
        self._known: dict[str | int, str | None] = {}
        """Maps the engine's name or id of an adapter to the adapter's identity; None if its weights are
        unknown or have changed."""

    def identify(self, adapter: LoadedAdapter) -> str | None:
        """Return an adapter's identity in page keys; None if KV computed with it must not be cached.

        KV must not be cached if the adapter's weights are unknown or have changed.
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
        """Return False if `identify` has found this adapter's weights unknown or changed, else True."""
        return all(self._known.get(each, "") is not None for each in adapter.kept_under)

    def forget(self, kept_under: str | int) -> None:
        """Forget an adapter, given by name or id, once the engine has dropped its weights and KV."""
        self._known.pop(kept_under, None)

    def _find(self, adapter: LoadedAdapter) -> tuple[str | None, str]:
        """Return (identity, "") or, if the adapter cannot be identified, (None, the reason)."""
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
        """Return an adapter's identity in page keys.

        The identity contains `weights`, the identity of the adapter's weights. If the adapter is not
        plain, its identity in page keys also contains the engine.
        """
        if weights not in self._applied:
            path = adapter.path
            plain = self._shares and path is not None and is_plain(Path(path).expanduser())
            self._applied[weights] = weights if plain else f"{weights} under {self._engine}"
        return self._applied[weights] + adapter.form

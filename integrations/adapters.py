"""What the adapters of requests are: their weights, by what their files hold or by the user's word.

Any engine can use this: it says under what it keeps an adapter and the KV that this gave. Engines share
the pages of plain adapters (`plain_adapters.py`). What an engine makes of any other one follows from
that engine and from its options, so these are part of the adapter's name.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .plain_adapters import is_plain
from .weights import FileDigests, weights_digest


@dataclass(frozen=True)
class LoadedAdapter:
    """Says what an engine was told of one adapter."""

    name: str
    path: str | None
    """Where its weights lie; None if they came in another way."""
    kept_under: tuple[str | int, ...]
    """What stands for its weights in the engine, and for the KV that these gave."""
    form: str = ""
    """How the files are read, if the same ones may be read in several ways."""


class AdapterWeights:
    """Tells adapters apart by their weights. All calls come from one thread.

    `versions` are the user's word for the weights of adapters, by name. All others are looked at with
    every call, and read where they have changed.

    An engine keeps weights, and the KV that they gave, under a name or an id, whatever becomes of the
    files. So where the weights behind one of these change while the engine runs, nobody can say which
    ones its KV comes from: it is not trusted from then on.
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
        """`where` is where users give versions, and `anew` how they have changed weights trusted.

        `engine` names the engine with all its options that may change how it applies an adapter. With
        `shares` it applies plain adapters as every other engine does.
        """
        self._digests = digests
        self._versions = versions
        self._where = where
        self._anew = anew
        self._engine = engine
        self._shares = shares
        self._log = log
        self._applied: dict[str, str] = {}
        """The name of weights with what the engine makes of them, by the name of the weights."""
        self._known: dict[str | int, str | None] = {}
        """What the weights are, by what stands for them; None if they are not to be trusted."""

    def identify(self, adapter: LoadedAdapter) -> str | None:
        """Return what the weights of a request's adapter are; None: do not cache the request."""
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
                "requests with adapter %r are not cached: %s; %s, or the adapter a version in"
                " adapter_versions of %s",
                adapter.name,
                doubt,
                self._anew,
                self._where,
            )
        return found

    def trusted(self, adapter: LoadedAdapter) -> bool:
        """Say whether nothing is known that makes it uncertain which weights its KV comes from."""
        return all(self._known.get(each, "") is not None for each in adapter.kept_under)

    def forget(self, kept_under: str | int) -> None:
        """Forget weights that the engine has given up, with all KV that they gave it."""
        self._known.pop(kept_under, None)

    def _find(self, adapter: LoadedAdapter) -> tuple[str | None, str]:
        """Return what the weights are, or None and why that is not known."""
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
        """Return the name of weights, with the engine unless all engines apply them as one function."""
        if weights not in self._applied:
            path = adapter.path
            plain = self._shares and path is not None and is_plain(Path(path).expanduser())
            self._applied[weights] = weights if plain else f"{weights} under {self._engine}"
        return self._applied[weights] + adapter.form

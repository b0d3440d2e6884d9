"""What the adapters of requests are: their weights, by what their files hold or by the user's word."""

import logging
from collections.abc import Mapping
from pathlib import Path

from ..weights import FileDigests, weights_digest
from .contract import LoraRequest
from .settings import WHERE

_log = logging.getLogger(__name__)


class Adapters:
    """Tells adapters apart by their weights. All calls come from the engine's thread.

    `versions` are the user's word for the weights of adapters, by name. All others are looked at with
    every request, and read where they have changed.

    The engine keeps an adapter that it has loaded under its id, and KV that it has computed under its
    name, whatever becomes of the files. So where the weights behind a name or an id change while the
    engine runs, nobody can say which ones its KV comes from: it is not trusted from then on.
    """

    def __init__(
        self, digests: FileDigests, versions: Mapping[str, str], *, log: logging.Logger = _log
    ) -> None:
        self._digests = digests
        self._versions = versions
        self._log = log
        self._known: dict[str | int, str | None] = {}
        """What the weights are, by name and by id; None if they are not to be trusted."""

    def identify(self, adapter: LoraRequest) -> str | None:
        """Return what the weights of a request's adapter are; None: do not cache the request."""
        if not self.trusted(adapter):
            return None
        found, doubt = self._find(adapter)
        if found is not None and adapter.lora_name not in self._known:
            self._log.info("adapter %r counts as %s", adapter.lora_name, found)
        for each in (adapter.lora_name, adapter.lora_int_id):
            if self._known.setdefault(each, found) != found:
                found = None
                doubt = doubt or "its files were changed while the engine ran"
        if found is None:
            self._known |= {adapter.lora_name: None, adapter.lora_int_id: None}
            self._log.warning(
                "requests with adapter %r are not cached: %s; give weights that change another name"
                " and id, or the adapter a version in adapter_versions of %s",
                adapter.lora_name,
                doubt,
                WHERE,
            )
        return found

    def trusted(self, adapter: LoraRequest | None) -> bool:
        """Say whether it is certain which weights a request's KV comes from."""
        return adapter is None or all(
            self._known.get(each, "") is not None
            for each in (adapter.lora_name, adapter.lora_int_id)
        )

    def _find(self, adapter: LoraRequest) -> tuple[str | None, str]:
        """Return what the weights are, or None and why that is not known."""
        # The same files are read in two ways.
        form = " 3d" if adapter.is_3d_lora_weight else ""
        version = self._versions.get(adapter.lora_name)
        if version is not None:
            return f"version {version} of {adapter.lora_name}{form}", ""
        try:
            path = Path(adapter.lora_path).expanduser()
            return f"files {weights_digest(path, self._digests)}{form}", ""
        except (OSError, RuntimeError) as error:
            return None, f"its weights cannot be read ({error})"

"""Identity of SGLang's LoRA adapters: a digest of their files, or a version given by the user.

SGLang identifies an adapter by an id. The id of an adapter in `--lora-paths` is derived from its name
and path; any other id is drawn at each load and sent to all ranks. An id is therefore not stable across
restarts and must not enter a persistent key.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from ...adapters import AdapterWeights, LoadedAdapter
from ...weights import FileDigests

_log = logging.getLogger(__name__)

FROM_TENSORS = "__tensor__"
"""The value of `lora_path` for an adapter whose weights were sent as tensors instead of files."""

ANEW = "unload it and load it again"


class LoraRef(Protocol):
    """`sglang.srt.lora.lora_registry.LoRARef`: one loaded adapter."""

    @property
    def lora_name(self) -> str | None:
        """The adapter's name, as users give it."""
        ...

    @property
    def lora_path(self) -> str | None:
        """The path from which SGLang read the adapter's weights."""
        ...


class Adapters:
    """Identifies LoRA adapters by their weights. Call it only from the scheduler's thread.

    `loaded` is SGLang's mapping of this rank's loaded adapters, by id. Each adapter is hashed once,
    because SGLang reads its files only at the load. Call `look` after every possible load, before the
    files can change.

    `versions` are the user's versions of adapter weights, by name; `where` names the setting that holds
    them. `options` is a digest of SGLang's adapter options. `shares` is True if SGLang applies all
    weights of an adapter. Only then may other engines share pages of the adapter.
    """

    def __init__(
        self,
        loaded: Mapping[str, LoraRef],
        digests: FileDigests,
        versions: Mapping[str, str],
        *,
        options: str = "",
        shares: bool = True,
        where: str,
        log: logging.Logger = _log,
    ) -> None:
        self._loaded = loaded
        self._weights = AdapterWeights(
            digests,
            versions,
            engine=f"SGLang {options}".rstrip(),
            shares=shares,
            where=where,
            anew=ANEW,
            log=log,
        )
        self._found: dict[str, str | None] = {}

    def look(self) -> Collection[str | None]:
        """Hash adapters loaded since the last call, and drop unloaded ones.

        Return the identities of the weights of all loaded adapters, in the order of their loads.
        """
        if self._found.keys() == self._loaded.keys():
            return self._found.values()
        for lora_id in self._found.keys() - self._loaded.keys():
            del self._found[lora_id]
            self._weights.forget(lora_id)
        for lora_id in self._loaded:
            if lora_id not in self._found:
                self._found[lora_id] = self._weights.identify(_as_loaded(lora_id, self._loaded))
        return self._found.values()

    def identify(self, lora_id: str) -> str | None:
        """Return the identity of an adapter's weights; None if unknown, which forbids caching."""
        self.look()
        return self._found.get(lora_id)


def without_adapter(extra_key: str | None, lora_id: str | None) -> str:
    """Return a request's extra key without the adapter id that SGLang has added to it."""
    if extra_key is None or lora_id is None:
        return extra_key or ""
    before, _, after = extra_key.rpartition(lora_id)
    return before + after


def _as_loaded(lora_id: str, loaded: Mapping[str, LoraRef]) -> LoadedAdapter:
    adapter = loaded[lora_id]
    path = None if adapter.lora_path == FROM_TENSORS else adapter.lora_path
    return LoadedAdapter(adapter.lora_name or lora_id, path, (lora_id,))

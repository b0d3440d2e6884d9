"""What SGLang's adapters are: their weights, by what their files hold or by the user's word.

SGLang knows an adapter by an id. That of an adapter of `--lora-paths` follows from its name and path;
any other one is drawn anew with each load, and all ranks are told the same. So an id says nothing of
weights in another start, and is not to be part of a key that outlives this one.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from ...adapters import AdapterWeights, LoadedAdapter
from ...weights import FileDigests

_log = logging.getLogger(__name__)

FROM_TENSORS = "__tensor__"
"""What SGLang calls the path of an adapter whose weights were sent to it."""

ANEW = "unload it and load it again"


class LoraRef(Protocol):
    """`sglang.srt.lora.lora_registry.LoRARef`: one adapter that is loaded."""

    @property
    def lora_name(self) -> str | None:
        """Return what users call it."""
        ...

    @property
    def lora_path(self) -> str | None:
        """Return where its weights were read."""
        ...


class Adapters:
    """Tells adapters apart by their weights. All calls come from the scheduler's thread.

    `loaded` is SGLang's own mapping of the adapters that this rank has loaded, by id. SGLang reads the
    files once, when it loads, and keeps the weights under that id until it unloads them. So an id is
    looked at once: call `look` as soon as adapters may have been loaded, before their files can change.

    `versions` are the user's word for the weights of adapters, by name; `where` is where users give
    them. `options` stands for all that SGLang is told of adapters. With `shares` it was told of nothing
    that could keep it from applying a whole adapter.
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
        """Read the weights of what was loaded since the last call, and forget what was unloaded.

        Return what the weights of all adapters are, in the order in which they were loaded.
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
        """Return what the weights of a request's adapter are; None: do not cache the request."""
        self.look()
        return self._found.get(lora_id)


def without_adapter(extra_key: str | None, lora_id: str | None) -> str:
    """Return a request's extra key without the id of its adapter, which SGLang has put into it."""
    if extra_key is None or lora_id is None:
        return extra_key or ""
    before, _, after = extra_key.rpartition(lora_id)
    return before + after


def _as_loaded(lora_id: str, loaded: Mapping[str, LoraRef]) -> LoadedAdapter:
    adapter = loaded[lora_id]
    path = None if adapter.lora_path == FROM_TENSORS else adapter.lora_path
    return LoadedAdapter(adapter.lora_name or lora_id, path, (lora_id,))

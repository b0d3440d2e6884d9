"""Identity of one SGLang engine's weights and adapters, at startup and after each weight update."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs

from ....errors import ConfigError
from ....page_format.page_layout import PageLayout
from ...plugin_settings import ServingSettings
from ...weights import FileDigests
from ..engine.sglang_settings import WHERE
from .adapters import Adapters
from .kv_identity import Update, adapter_options, kv_identity, weights_of
from .resolved import resolved

log = logging.getLogger(__name__)


class Identity:
    """Names the weights and adapters of one engine. Call it only from the scheduler's thread."""

    def __init__(self, settings: ServingSettings, model_config: object) -> None:
        self._folder = Path(
            settings.weight_digests or f"{envs.SGLANG_CACHE_DIR.get()}/lockstep"
        ).expanduser()
        self._versions = settings.adapter_versions
        self._resolved = resolved(model_config)
        self._digests = FileDigests(self._folder / "weights.json", log=log)
        self.weights = weights_of(self._resolved, settings.weights_version, self._digests, WHERE)
        """The name of the weights at startup: the user's version or a digest of the weight files."""
        self._share = settings.share

    def of_kv(self, layouts: Mapping[str, PageLayout]) -> str:
        """Return the part of page keys that identifies the engine; `layouts` are by pool name."""
        return kv_identity(self._resolved, self.weights, layouts, self._share)

    def of_update(self, update: Update) -> str | None:
        """Return the name of weights loaded while the engine runs; None if they have no name.

        The name is the user's version, or else a digest of the files that the weights were read from.
        """
        if update.version is not None:
            return f"version {update.version}"
        if update.path is None:
            return None
        known = str(update.load_format or self._resolved.field("model", "load_format"))
        files = self._resolved.reloaded(update.path, known)
        try:
            return weights_of(files, None, self._digests, WHERE)
        except ConfigError as error:
            log.warning("KV of the new weights is not written to storage: %s", error)
            return None

    def adapters(self, tp_worker: Any) -> Adapters:
        """Return the object that identifies the LoRA adapters loaded on this rank."""
        manager = getattr(tp_worker.model_runner, "lora_manager", None)
        loaded: Mapping[str, Any] = {} if manager is None else manager.lora_refs
        digests = FileDigests(self._folder / "adapters.json", log=log)
        return Adapters(
            loaded,
            digests,
            self._versions,
            options=adapter_options(self._resolved),
            # Share adapters only if the user lists no target modules, because SGLang may otherwise
            # ignore adapter weights of other modules.
            shares=self._resolved.field("lora", "lora_target_modules") is None,
            where=WHERE,
            log=log,
        )

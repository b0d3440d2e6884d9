"""Identity of vLLM's KV apart from the tokens; part of every page's key (rule R16).

It consists of the weights, as a digest of their files or a user-given version, and of the configuration
as `sharing.py` describes it. When the caches open, the ranks check that their identities are equal.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import MISSING

from ...page_format.page_layout import PageLayout
from ..kv_description import KvDescription, described
from ..model_weights import LoadedWeights
from ..sharing import KeyedEngineSettings, Setting, Share, kv_name, settings_in
from ..weights import FileDigests
from .connector_settings import WHERE
from .contract import EngineConfig, LoadConfig, ModelConfig
from .key_exclusions import EXCLUSIONS, RELEASES, RESOLVED

log = logging.getLogger(__name__)

PACKAGE = "vllm.config"

DUMMY = "dummy"

FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
        *("runai_streamer_sharded", "sharded_state", "pt", "npcache", "mistral"),
    }
)
"""Load formats of vLLM that read only files in the model's folder."""


def kv_identity(
    config: EngineConfig,
    weights: str,
    layouts: Mapping[str, PageLayout],
    *,
    share: Share,
    engine_version: str,
    environment: Mapping[str, object],
    given: Collection[str],
) -> str:
    """Return the part of every page key that identifies the engine.

    `layouts` are page layouts by pool name. `environment` has the environment variables that vLLM
    reads. `given` has the names of those that the user has set. Raises `ConfigError` for a value
    without canonical bytes.
    """
    model = config.model_config
    description = KvDescription.of(model.hf_config, model.dtype, layouts)
    settings = settings_of(
        config, engine_version=engine_version, environment=environment, given=given
    )
    return kv_name(weights, description, settings, share, log)


def settings_of(
    config: EngineConfig,
    *,
    engine_version: str,
    environment: Mapping[str, object],
    given: Collection[str],
) -> KeyedEngineSettings:
    """Return vLLM's configuration as settings; `sharing.py` decides which of them are in page keys."""
    found = settings_in(config, "vllm_config")
    found += [
        Setting(name, name, value, MISSING if name in given else value)
        for name, value in environment.items()
    ]
    drafting = config.speculative_config
    if drafting is not None:
        draft = drafting.draft_model_config
        draft_fields = None if draft is None else described(draft.hf_config)
        found.append(Setting("draft", "draft", draft_fields, MISSING))
    return KeyedEngineSettings(
        "vLLM", engine_version, RELEASES, found, PACKAGE, EXCLUSIONS, _resolved(config)
    )


def _resolved(config: EngineConfig) -> dict[str, object]:
    """Return the values that vLLM fills in for its own defaults, by setting name."""
    worker = config.parallel_config.worker_cls
    found = {**RESOLVED, "LoRAConfig.lora_dtype": config.model_config.dtype}
    if worker.startswith("vllm.v1.worker."):
        found["ParallelConfig.worker_cls"] = worker
    return found


def adapter_options(config: EngineConfig, *, engine_version: str) -> str:
    """Return a digest of vLLM's options that may change how a LoRA adapter is applied."""
    adapters = Setting("lora_config", "lora_config", config.lora_config, None)
    return KeyedEngineSettings(
        "vLLM", engine_version, RELEASES, [adapters], PACKAGE, EXCLUSIONS
    ).digest()


def weights_of(config: EngineConfig, version: str | None, digests: FileDigests) -> str:
    """Return the identity of the engine's weights, including those of a draft model.

    A user-given `version` replaces the digest of all weights, and no file is read. Raises `ConfigError`
    with a remedy if the weights cannot be identified.
    """
    if version is not None:
        return f"version {version}"
    ranks = config.parallel_config.tensor_parallel_size
    found = [_weights(config.model_config, config.load_config, ranks, digests)]
    drafting = config.speculative_config
    draft = None if drafting is None else drafting.draft_model_config
    if drafting is not None and draft is not None:
        load = drafting.draft_load_config or config.load_config
        found.append(_weights(draft, load, ranks, digests))
    return ", draft ".join(found)


def _weights(model: ModelConfig, load: LoadConfig, ranks: int, digests: FileDigests) -> str:
    if load.load_format == DUMMY:
        # Add the number of ranks to the identity of dummy weights, because each rank fills its shard
        # with random numbers.
        return f"dummy {model.seed} on {ranks}"
    name = model.model_weights or model.model
    # Use the revision only for the model's own repository, because it does not apply to weights from
    # another place.
    revision = model.revision if name == model.model else None
    loaded = LoadedWeights(name, revision, load.load_format, load.load_format in FROM_FILES)
    return loaded.identity(digests, WHERE)

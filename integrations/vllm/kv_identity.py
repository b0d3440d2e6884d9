"""What vLLM's KV is, apart from the tokens: part of the key of every page (rule R16).

Two parts. The weights, by what their files hold, or by a version that the user gives. And a digest of
all that the engine is configured with and that is not proven to change no byte of KV. With the model's
name and the page layout, which the cache has of its own, they tell apart whatever must not share.

All ranks must come to the same, and their caches compare it when they open.
"""

import logging
from collections.abc import Mapping

from ..canonical import canonical, digest, tell_parts
from ..model_weights import LoadedWeights
from ..proven_out import names_of
from ..weights import FileDigests
from .contract import EngineConfig, LoadConfig, ModelConfig
from .proven_out import ENVIRONMENT_PROVEN_OUT, left_out
from .settings import WHERE

log = logging.getLogger("vllm.lockstep")

DUMMY = "dummy"

FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
        *("runai_streamer_sharded", "sharded_state", "pt", "npcache", "mistral"),
    }
)
"""The load formats of vLLM that read files of the model's own folder, and nothing else."""


def configuration_digest(
    config: object, *, engine_version: str, environment: Mapping[str, object]
) -> str:
    """Return a digest of what the engine is configured with, less what changes no byte of KV.

    `environment` are the variables that the engine reads. Raises `ConfigError` for a value that has
    no canonical bytes.
    """
    ignored = names_of(ENVIRONMENT_PROVEN_OUT)
    counted = {name: value for name, value in environment.items() if name not in ignored}
    found = canonical(config, "vllm_config", left_out())
    tell_parts(log, found, "vllm_config")
    return digest([engine_version, canonical(counted, "environment"), found])


def weights_of(config: EngineConfig, version: str | None, digests: FileDigests) -> str:
    """Return what the engine's weights are, those of a draft model included.

    The user's `version`, if there is one, stands for all of them, and nothing is read. Raises
    `ConfigError`, which says what to do, where they cannot be told.
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
        # Each rank draws the part that it holds.
        return f"dummy {model.seed} on {ranks}"
    name = model.model_weights or model.model
    # The revision is one of the model, and weights from elsewhere have none.
    revision = model.revision if name == model.model else None
    loaded = LoadedWeights(name, revision, load.load_format, load.load_format in FROM_FILES)
    return loaded.identity(digests, WHERE)

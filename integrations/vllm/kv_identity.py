"""What vLLM's KV is, apart from the tokens: part of the key of every page (rule R16).

Two parts. The weights, by what their files hold, or by a version that the user gives. And the
description that every engine has of the model, where all that this one is configured with is proven to
leave KV as that says; or else a digest of all that is not proven to change no byte of it. With the
model's name and the page layout, which the cache has of its own, they tell apart what must not share.

All ranks must come to the same, and their caches compare it when they open.
"""

import logging
from collections.abc import Collection, Iterator, Mapping

from ...page_format.page_layout import PageLayout
from ..canonical import canonical, digest, tell_parts
from ..kv_description import KvDescription
from ..model_weights import LoadedWeights
from ..proven_out import names_by_owner, names_of
from ..sharing import Options, Share, kv_name, unproven_fields, unproven_version
from ..weights import FileDigests
from .contract import EngineConfig, LoadConfig, ModelConfig
from .proven_out import ENVIRONMENT_PROVEN_OUT, READ_IN, left_out
from .same_function import AT_ANY_VALUE, BY_DEFAULT, VARIABLES, WORKERS
from .settings import WHERE

log = logging.getLogger("vllm.lockstep")

DUMMY = "dummy"

DRAFTS = "drafts 2"
"""In the key where tokens are drafted: pages of before may have been copied ahead of the drafter."""

LOOKED_AT: Mapping[str, frozenset[str]] = {
    "vllm.config.parallel.ParallelConfig": frozenset({"worker_cls"}),
    "vllm.config.lora.LoRAConfig": frozenset({"lora_dtype"}),
}
"""Fields that are neutral at more values than one, by class."""

FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"),
        *("runai_streamer_sharded", "sharded_state", "pt", "npcache", "mistral"),
    }
)
"""The load formats of vLLM that read files of the model's own folder, and nothing else."""


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
    """Return what the key of every page has for this engine's KV; `layouts` are its pages by pool.

    `environment` are the variables that the engine reads, of which the user has set those `given`.
    Raises `ConfigError` for what has no canonical bytes.
    """
    model = config.model_config
    options = Options(
        "vLLM",
        configuration_digest(config, engine_version=engine_version, environment=environment),
        tuple(unproven(config, engine_version=engine_version, given=given)),
    )
    description = KvDescription.of(model.hf_config, model.dtype, layouts)
    return kv_name(weights, description, options, share, log)


def unproven(config: EngineConfig, *, engine_version: str, given: Collection[str]) -> Iterator[str]:
    """Yield what an engine is configured with that other engines may not compute alike."""
    yield from unproven_version(engine_version, READ_IN)
    yield from sorted(set(given) - names_of(ENVIRONMENT_PROVEN_OUT) - names_of(VARIABLES))
    if config.parallel_config.worker_cls not in WORKERS:
        yield "vllm_config.parallel_config.worker_cls"
    lora = config.lora_config
    if lora is not None and lora.lora_dtype != config.model_config.dtype:
        yield "vllm_config.lora_config.lora_dtype"
    nothing = frozenset[str]()
    out, always = left_out(), names_by_owner(AT_ANY_VALUE)
    ignored = {
        owner: out.get(owner, nothing) | always.get(owner, nothing) | LOOKED_AT.get(owner, nothing)
        for owner in (*out, *always)
    }
    found = canonical(config, "vllm_config", ignored)
    yield from unproven_fields(config, found, "vllm_config", BY_DEFAULT)


def configuration_digest(
    config: EngineConfig, *, engine_version: str, environment: Mapping[str, object]
) -> str:
    """Return a digest of what the engine is configured with, less what changes no byte of KV.

    `environment` are the variables that the engine reads. Raises `ConfigError` for a value that has
    no canonical bytes.
    """
    ignored = names_of(ENVIRONMENT_PROVEN_OUT)
    counted = {name: value for name, value in environment.items() if name not in ignored}
    found = canonical(config, "vllm_config", left_out())
    tell_parts(log, found, "vllm_config")
    drafts = [] if config.speculative_config is None else [DRAFTS]
    return digest([engine_version, canonical(counted, "environment"), found, *drafts])


def adapter_options(config: EngineConfig, *, engine_version: str) -> str:
    """Return what may change how this engine applies an adapter, as a digest."""
    return digest([engine_version, canonical(config.lora_config, "lora_config", left_out())])


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

"""Maps vLLM's KV tensors to Lockstep's pools and pages; refuses unsupported vLLM configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import ConfigError
from ...page_format.page_layout import Column, PageLayout
from ...ranks.executor.engine_pages import EnginePages, dtype_name
from ...ranks.protocol.config import ComponentConfig
from ..kv_description import KEYS, VALUES
from ..releases import is_release
from .block_forms import AttentionLayer, form_of, keys_and_values
from .contract import AttentionSpec, EngineCacheConfig, EngineConfig, HashedCacheConfig, LatentSpec
from .groups import PoolGroup, pool_groups, specs_of
from .state_parts import state_columns

LATENT, INDEX = "latent", "index"

_Columns = list[tuple[Column, Sequence[torch.Tensor]]]
"""(column, tensors in layer order) for each column of one pool's pages."""


@dataclass(frozen=True, slots=True)
class VllmPool:
    """A layer group of vLLM as a pool: the layout of its pages, and the tensors that hold them."""

    group: PoolGroup
    layout: PageLayout
    tensors: Mapping[str, Sequence[torch.Tensor]]
    """Maps each column's name to its tensors: one for each layer, in layer order."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The pools of an engine, the main pool first.

    Keys and values are separate columns of shape [heads, tokens, elements]. Engines with the same
    model, dtype and page size therefore have identical pages. `block_forms` maps a backend's blocks to
    these columns. For an unknown backend, a page is a raw block, in a column named after the backend.
    The columns of latent attention and of sparse-attention indices are replicated on all ranks.
    """

    pools: tuple[VllmPool, ...]

    @classmethod
    def of(
        cls,
        cache_config: EngineCacheConfig,
        world_size: int,
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, AttentionLayer],
    ) -> "EngineLayout":
        """Describe the KV tensors [blocks, heads, tokens, elements] that vLLM has registered.

        `cache_config` is the worker's own configuration. `layers` maps a tensor's name to the model's
        layer. Raises `ConfigError` with the layer's name for an unsupported layer.
        """
        groups = cache_config.kv_cache_groups
        names = [name for group in groups for name in group.layer_names]
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise ConfigError(f"the engine has registered no KV tensor for {', '.join(missing)}")
        pools: list[VllmPool] = []
        for pool in pool_groups(cache_config):
            group = groups[pool.group]
            specs = specs_of(group.layer_names, group.kv_cache_spec)
            tensors = {name: kv_caches[name] for name in group.layer_names}
            _require_blocks(pool, tensors)
            columns = _columns(specs, tensors, pool.page_tokens, world_size, layers)
            pools.append(
                VllmPool(
                    pool,
                    PageLayout(
                        page_tokens=pool.page_tokens, columns=tuple(each for each, _ in columns)
                    ),
                    {column.name: views for column, views in columns},
                )
            )
        return cls(tuple(pools))

    @property
    def layout(self) -> PageLayout:
        """The page layout of the main pool."""
        return self.pools[0].layout

    def components(self, pages: int) -> tuple[ComponentConfig, ...]:
        """Return the configuration of every pool except the main pool.

        `pages` is the main pool's number of host pages.
        """
        return tuple(each.group.component(each.layout, pages) for each in self.pools[1:])

    def host_bytes(self, pages: int, world_size: int) -> int:
        """Return a rank's bytes of host memory, summed over all pools.

        `pages` is the main pool's number of host pages.
        """
        return sum(
            each.layout.shard(0, world_size).page_bytes * each.group.host_pages(pages)
            for each in self.pools
        )

    def lend(self, world_size: int) -> dict[str, EnginePages]:
        """Return vLLM's KV tensors as engine-owned device pages (lent), by pool."""
        # Use rank 0's shard for every rank: the rank is unknown until the group opens, and all shards
        # are equally large.
        return {
            each.group.name: EnginePages(each.layout.shard(0, world_size), each.tensors)
            for each in self.pools
        }


def _require_blocks(pool: PoolGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        parts = pool.page_tokens // tensor.shape[2] if tensor.ndim == 4 else 0
        if not parts or parts * tensor.shape[2] != pool.page_tokens or len(tensor) % parts:
            raise ConfigError(
                f"the KV tensor of {name} has shape {list(tensor.shape)}, but LockstepConnector needs"
                f" [blocks, heads, tokens, elements] with {pool.page_tokens} tokens in a block of"
                f" {pool.name}; packed and compressed KV is not supported"
            )


def _columns(
    specs: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    page_tokens: int,
    ranks: int,
    layers: Mapping[str, AttentionLayer],
) -> _Columns:
    """Return the columns of a layer group.

    Layers with the same shape, dtype and role share a column.
    """
    sorts: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        role = getattr(specs[name], "cache_role", None)
        sorts.setdefault((role, tensor.shape[1:], tensor.dtype), []).append(name)
    found: _Columns = []
    seen: list[str] = []
    for names in sorts.values():
        spec, alike = specs[names[0]], [tensors[name] for name in names]
        parts = page_tokens // alike[0].shape[2]
        match type(spec).__name__:
            case "MambaSpec":
                columns = state_columns(spec, alike, ranks)
            case "MLAAttentionSpec":
                columns = _of_latent(spec, alike)
            case _:
                columns = _of_attention(spec, alike, ranks, {form_of(layers[n]) for n in names})
        for column, views in columns:
            before = seen.count(column.name)
            numbered = f"{column.name}.{before}" if before else column.name
            seen.append(column.name)
            whole = [_in_whole_blocks(each, parts) for each in views]
            found.append((replace(column, name=numbered), whole))
    return found


def _in_whole_blocks(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a view of `tensor` with one entry per block.

    In `tensor` itself, each block has `parts` consecutive entries.
    """
    if parts == 1:
        return tensor
    return tensor.view(len(tensor) // parts, parts, *tensor.shape[1:]).transpose(1, 2)


def _of_attention(
    spec: AttentionSpec, tensors: Sequence[torch.Tensor], ranks: int, forms: set[str]
) -> _Columns:
    """Return columns for keys and values; one raw column if the backend's block format is unknown."""
    called = ", ".join(sorted(forms))
    # A backend sets one of these fields only if it packs a token's key and value into one row.
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None
    dense = not packed and tensors[0].shape[3] == spec.head_size + spec.head_size_v
    divided = [keys_and_values(called, each, spec.head_size) if dense else None for each in tensors]
    found = [each for each in divided if each is not None]
    if len(found) < len(tensors):
        # Add the number of ranks to the column's name, because the order of head slots depends on this
        # number.
        alike = f"kv of {called}" + (f" on {ranks} ranks" if spec.num_head_slots else "")
        return [_column(alike, tensors, tensors[0].shape[2], ranks)]
    keys, values = [keys for keys, _ in found], [values for _, values in found]
    return [
        _column(name, views, tensors[0].shape[2], ranks)
        for name, views in ((KEYS, keys), (VALUES, values))
    ]


def _of_latent(spec: LatentSpec, tensors: Sequence[torch.Tensor]) -> _Columns:
    name = INDEX if spec.cache_role.value == "indexer" else LATENT
    return [_column(name, tensors, tensors[0].shape[2])]


def _column(
    name: str, views: Sequence[torch.Tensor], tokens: int, ranks: int | None = None
) -> tuple[Column, Sequence[torch.Tensor]]:
    """Return one column for these layers; `ranks` ranks divide their heads (None: replicated)."""
    first = views[0]
    column = Column(
        name=name,
        layers=len(views),
        # Count every rank's copy of a head as a separate head if there are more ranks than KV heads.
        heads=first.shape[1] * (ranks or 1),
        elements=first[0, 0].numel() // tokens,
        dtype=dtype_name(first.dtype),
        replicated=ranks is None,
    )
    return column, views


def require_supported(config: EngineConfig) -> None:
    """Raise `ConfigError` for a vLLM configuration that Lockstep does not support."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r} in kv_transfer_config,"
            " which ends a request whose load fails; set it to 'recompute'"
        )
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size != 1:
            raise ConfigError(f"{name} is {size}, but LockstepConnector needs 1")
    if config.attention_config.hisparse_config is not None:
        # Refuse Hisparse: Hisparse and this plug-in each need a callback for reallocated blocks, but
        # vLLM keeps only one callback per block.
        raise ConfigError(
            "hisparse_config is set in attention_config, but vLLM reports reused blocks to only one of"
            " hisparse and LockstepConnector; disable one of them"
        )


def require_fences(config: EngineConfig, cache_config: HashedCacheConfig) -> None:
    """Raise `ConfigError` if vLLM's workers would overwrite blocks before copies have read them.

    Checked only for an engine with one scheduler. A scheduler on every rank waits for the copies before
    its worker runs.
    """
    if config.use_v2_model_runner and cache_config.needs_kv_cache_zeroing:
        raise ConfigError(
            "vLLM's model runner V2 fills blocks of this model with zeros before LockstepConnector can"
            " wait for the copies that still read them; set VLLM_USE_V2_MODEL_RUNNER=0, or run a"
            " scheduler on every rank"
        )


def drafts_after_saves(config: EngineConfig, version: str) -> bool:
    """Return whether vLLM calls `wait_for_save` before its drafter has written the draft layers' KV."""
    drafts = config.speculative_config is not None
    return drafts and config.use_v2_model_runner and is_release(version, ["0.32"])


def require_drafts_before_saves(config: EngineConfig, version: str) -> None:
    """Raise `ConfigError` if pages could be copied before the drafter has written their KV.

    Checked only for an engine with a scheduler on every rank. With one scheduler, workers start such
    copies one step later.
    """
    if drafts_after_saves(config, version):
        raise ConfigError(
            f"vLLM {version}'s model runner V2 saves KV before its drafter has written its part;"
            " install vLLM 0.33, set VLLM_USE_V2_MODEL_RUNNER=0, or run one scheduler"
        )

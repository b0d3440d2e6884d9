"""What an engine's KV cache looks like as pages of Lockstep, and which engines cannot be served yet."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ...page_format.page_layout import Column, PageLayout
from ...ranks.executor.engine_pages import dtype_name
from .block_forms import form_of, keys_and_values
from .contract import AttentionLayer, AttentionSpec, EngineCacheConfig, EngineConfig

KEYS, VALUES = "k", "v"


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The page layout of an engine, and what holds its pages: by column, for each layer in order.

    A page has keys and values apart, each in the order [heads, tokens, elements], so every engine of
    the same model, type and page size has the same pages. Where a backend has them in its blocks is for
    `block_forms` to say. Of a backend that is not known there a page is what its blocks are, under a
    name that no other backend shares.
    """

    layout: PageLayout
    tensors: Mapping[str, Sequence[torch.Tensor]]

    @classmethod
    def of(
        cls,
        cache_config: EngineCacheConfig,
        world_size: int,
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, AttentionLayer],
    ) -> "EngineLayout":
        """Describe the tensors [blocks, heads, tokens, elements] that vLLM has registered.

        `layers` are the model's own, by the same names. Raises `ConfigError`, in words that name
        the model's part, for what is not supported.
        """
        groups = cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"the model has {len(groups)} groups of KV layers (windows or recurrent state beside"
                " full attention), and LockstepConnector serves one; run it without the connector"
            )
        names, spec = groups[0].layer_names, groups[0].kv_cache_spec
        tokens = spec.block_size
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise ConfigError(f"the engine has registered no KV tensor for {', '.join(missing)}")
        tensors = [kv_caches[name] for name in names]
        first = tensors[0]
        if first.ndim != 4 or any(each.shape[1:] != first.shape[1:] for each in tensors):
            shapes = sorted({tuple(each.shape[1:]) for each in tensors})
            raise ConfigError(
                "LockstepConnector needs KV tensors [blocks, heads, tokens, elements] of one shape;"
                f" the engine has {shapes}"
            )
        if first.shape[2] != tokens:
            raise ConfigError(
                f"the engine's blocks have {tokens} tokens, and its KV tensors {first.shape[2]};"
                " packed and compressed KV is not supported"
            )
        columns = _columns({form_of(layers[name]) for name in names}, spec, tensors)
        described = tuple(
            Column(
                name=name,
                layers=len(views),
                heads=first.shape[1] * world_size,
                elements=views[0][0, 0].numel() // tokens,
                dtype=dtype_name(first.dtype),
            )
            for name, views in columns.items()
        )
        return cls(PageLayout(page_tokens=tokens, columns=described), columns)


def _columns(
    forms: Collection[str], spec: AttentionSpec, tensors: Sequence[torch.Tensor]
) -> Mapping[str, Sequence[torch.Tensor]]:
    """Return the tensors of each column: keys and values, if all layers have them in known places."""
    called = ", ".join(sorted(forms))
    # A backend that packs a token says how many bytes and slots it makes of it.
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None
    dense = not packed and tensors[0].shape[3] == spec.head_size + spec.head_size_v
    divided = [keys_and_values(called, each, spec.head_size) if dense else None for each in tensors]
    found = [each for each in divided if each is not None]
    if len(found) < len(tensors):
        return {f"kv of {called}": tensors}
    return {KEYS: [keys for keys, _ in found], VALUES: [values for _, values in found]}


def require_supported(config: EngineConfig, spec: object, full_attention: type) -> None:
    """Raise `ConfigError` for an engine whose ranks or layers Lockstep cannot serve under vLLM."""
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
            raise ConfigError(f"{name} is {size}, and LockstepConnector needs 1")
    # Subclasses are other layouts: latent attention, for one, has the same content on every rank.
    if type(spec) is not full_attention:
        raise ConfigError(
            f"the model's KV layers are {type(spec).__name__}, and LockstepConnector serves"
            f" {full_attention.__name__}; run it without the connector"
        )

"""vLLM's layer groups as pools: the kind of each pool, and which tokens of a prefix it must restore.

Each layer group of vLLM has its own block table, and is one pool. A page of the pool is a block with
all layers of the group. The first full-attention group is the main pool. Pages of other pools are
stored and evicted together with the main pool's page of the same tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...errors import ConfigError
from ...page_format.page_layout import PageLayout
from ...ranks.protocol.config import ComponentConfig, Recurrent, SlidingWindow
from ...ranks.protocol.orders import KV_POOL
from .contract import AttentionSpec, EngineCacheConfig, StateSpec, WindowSpec

EVERY_TOKEN = 1 << 30
"""Window size, in tokens, that stands for full attention in all groups except the main pool's. No
prefix is longer."""
STATES_SHARE = 4
"""Number of the main pool's host pages for each host page of a pool of recurrent states.

A pool of states needs fewer pages, because it keeps one state for each prompt or prefill chunk.
"""


class GroupKind(Enum):
    """Kind of pool; it decides which part of a prefix must be restored before a request continues."""

    FULL = KV_POOL
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One layer group of vLLM as a pool; equal on every rank."""

    name: str
    group: int
    """Index of the layer group in vLLM's configuration."""
    kind: GroupKind
    block_tokens: int
    span_tokens: int
    """Number of the prefix's last tokens that a request needs to continue. For a pool of states, the
    number of tokens between two states."""

    @property
    def page_tokens(self) -> int:
        """Number of tokens per page; a state counts as a page of one token."""
        return 1 if self.kind is GroupKind.STATE else self.block_tokens

    def host_pages(self, pages: int) -> int:
        """Return the number of this pool's host pages if the main pool has `pages` host pages."""
        return -(-pages // STATES_SHARE) if self.kind is GroupKind.STATE else pages

    def component(self, layout: PageLayout, pages: int) -> ComponentConfig:
        """Return this pool's component configuration if the main pool has `pages` host pages."""
        host_pages = self.host_pages(pages)
        if self.kind is GroupKind.STATE:
            return Recurrent(
                pool=self.name,
                checkpoint_tokens=self.span_tokens,
                layout=layout,
                host_pages=host_pages,
            )
        return SlidingWindow(
            pool=self.name,
            window_tokens=self.span_tokens,
            layout=layout,
            host_pages=host_pages,
        )


def pool_groups(cache_config: EngineCacheConfig) -> tuple[PoolGroup, ...]:
    """Return the pools of an engine, the main pool first.

    Raises `ConfigError` with the layer's name for an unsupported layer group.
    """
    pools: list[PoolGroup] = []
    for number, group in enumerate(cache_config.kv_cache_groups):
        specs = specs_of(group.layer_names, group.kv_cache_spec)
        kind, span = {layer: _served(layer, spec) for layer, spec in specs.items()}.popitem()[1]
        ordinal = sum(each.kind is kind for each in pools)
        name = f"{kind.value}.{ordinal}" if ordinal else kind.value
        pools.append(PoolGroup(name, number, kind, group.kv_cache_spec.block_size, span))
    if len({each.block_tokens for each in pools}) > 1:
        sizes = ", ".join(f"{each.block_tokens} for {each.name}" for each in pools)
        raise ConfigError(
            f"the model's layer groups have blocks of different sizes ({sizes} tokens), but"
            " LockstepConnector needs one size; run it without the connector"
        )
    main = [each for each in pools if each.name == KV_POOL]
    if not main:
        raise ConfigError(
            "the model has no layer of full attention, which LockstepConnector needs to cache windows"
            " and states; run it without the connector"
        )
    return (*main, *(each for each in pools if each.name != KV_POOL))


def specs_of(layers: Sequence[str], spec: Any) -> Mapping[str, Any]:
    """Return the `KVCacheSpec` of each layer. A group has one spec for all layers, or one per layer."""
    each: Mapping[str, Any] = getattr(spec, "kv_cache_specs", {})
    return {layer: each.get(layer, spec) for layer in layers}


def _served(layer: str, spec: Any) -> tuple[GroupKind, int]:
    """Return the kind and the `span_tokens` of a layer's pool, given the layer's KV specification."""
    find = _KINDS.get(type(spec).__name__)
    if find is None:
        raise _refusal(layer, spec, f"LockstepConnector supports {', '.join(_KINDS)}")
    return find(layer, spec)


def _refusal(layer: str, spec: object, why: str) -> ConfigError:
    return ConfigError(
        f"the model's layer {layer!r} keeps its KV as {type(spec).__name__}, and {why}; run it without"
        " the connector"
    )


def _attention(layer: str, spec: AttentionSpec) -> tuple[GroupKind, int]:
    _require_dense(layer, spec)
    return GroupKind.FULL, EVERY_TOKEN


def _window(layer: str, spec: WindowSpec) -> tuple[GroupKind, int]:
    _require_dense(layer, spec)
    # Subtract 1, because a window includes the next token, which is computed and not restored.
    span = spec.sliding_window - 1 + spec.extra_retained_tokens
    if span < 1:
        raise _refusal(layer, spec, "LockstepConnector supports windows of 2 tokens or more")
    return GroupKind.WINDOW, span


def _state(layer: str, spec: StateSpec) -> tuple[GroupKind, int]:
    if spec.mamba_cache_mode != "align":
        why = (
            f"its mamba_cache_mode is {spec.mamba_cache_mode!r}, but LockstepConnector needs"
            " 'align': set enable_prefix_caching, and mamba_cache_mode if that is not enough"
        )
        raise _refusal(layer, spec, why)
    return GroupKind.STATE, spec.block_size


def _require_dense(layer: str, spec: Any) -> None:
    if spec.tokens_per_state != 1:
        why = f"one entry of it has {spec.tokens_per_state} tokens, which is not supported"
        raise _refusal(layer, spec, why)


_KINDS: Mapping[str, Callable[[str, Any], tuple[GroupKind, int]]] = {
    "FullAttentionSpec": _attention,
    "SlidingWindowSpec": _window,
    "MLAAttentionSpec": _attention,
    "MambaSpec": _state,
}
"""Functions that return a layer's (kind, span in tokens), by the class name of the layer's
specification.

A subclass is not supported, because its blocks may have another layout.
"""

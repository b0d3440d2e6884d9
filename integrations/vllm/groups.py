"""vLLM's groups of layers as pools: which there are, and how much of a prefix each is needed for.

Each group has a block table of its own. A block is one group's at a time, and the i-th layers of all
groups lie in the same memory. A group is a pool here, and a page is a block, of every layer of the
group. The first group of full attention is the main pool; of the others a page comes and goes with the
page of the same tokens there. All of this follows from the engine's configuration, with no tensor.
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
"""The window of layers that attend to every token, and are in a group beside the main one."""
STATES_SHARE = 4
"""For so many host pages of tokens there is one for a state, which stands for all tokens before it: one
is kept where a prompt, or a chunk of one, ends."""


class Kind(Enum):
    """How much of a prefix a request that goes on after it needs."""

    FULL = KV_POOL
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One group of layers as a pool; equal on every rank."""

    name: str
    """Of the pool."""
    group: int
    """Which of the engine's groups it is."""
    kind: Kind
    block_tokens: int
    span_tokens: int
    """How many of the last tokens a request that goes on needs; of a state, how far apart they are."""

    @property
    def page_tokens(self) -> int:
        """The tokens of a page of the pool."""
        return 1 if self.kind is Kind.STATE else self.block_tokens

    def host_pages(self, pages: int) -> int:
        """Return the number of its host pages beside so many of the main pool."""
        return -(-pages // STATES_SHARE) if self.kind is Kind.STATE else pages

    def component(self, layout: PageLayout, pages: int) -> ComponentConfig:
        """Return what a cache keeps of it beside the main pool with its `pages`."""
        host_pages = self.host_pages(pages)
        if self.kind is Kind.STATE:
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
    """Return the pools of an engine, the main one first.

    Raises `ConfigError`, in words that name the layers, for a group that Lockstep does not serve.
    """
    pools: list[PoolGroup] = []
    for number, group in enumerate(cache_config.kv_cache_groups):
        specs = specs_of(group.layer_names, group.kv_cache_spec)
        kind, span = {layer: _served(layer, spec) for layer, spec in specs.items()}.popitem()[1]
        ordinal = sum(each.kind is kind for each in pools)
        name = f"{kind.value}.{ordinal}" if ordinal else kind.value
        pools.append(PoolGroup(name, number, kind, group.kv_cache_spec.block_size, span))
    if len({each.block_tokens for each in pools}) > 1:
        told = ", ".join(f"{each.block_tokens} for {each.name}" for each in pools)
        raise ConfigError(
            f"the model's groups of layers have blocks of different sizes ({told} tokens), and"
            " LockstepConnector needs one size; run it without the connector"
        )
    main = [each for each in pools if each.name == KV_POOL]
    if not main:
        raise ConfigError(
            "the model has no layer of full attention, and LockstepConnector keeps windows and states"
            " beside one; run it without the connector"
        )
    return (*main, *(each for each in pools if each.name != KV_POOL))


def specs_of(layers: Sequence[str], spec: Any) -> Mapping[str, Any]:
    """Return the `KVCacheSpec` of each layer of a group; where layers differ, each has its own."""
    each: Mapping[str, Any] = getattr(spec, "kv_cache_specs", {})
    return {layer: each.get(layer, spec) for layer in layers}


def _served(layer: str, spec: Any) -> tuple[Kind, int]:
    """Return of what kind a layer is, and its `span_tokens`."""
    find = _KINDS.get(type(spec).__name__)
    if find is None:
        raise _refusal(layer, spec, f"LockstepConnector serves {', '.join(_KINDS)}")
    return find(layer, spec)


def _refusal(layer: str, spec: object, why: str) -> ConfigError:
    return ConfigError(
        f"the model's layer {layer!r} keeps its KV as {type(spec).__name__}, and {why}; run it without"
        " the connector"
    )


def _attention(layer: str, spec: AttentionSpec) -> tuple[Kind, int]:
    _require_dense(layer, spec)
    return Kind.FULL, EVERY_TOKEN


def _window(layer: str, spec: WindowSpec) -> tuple[Kind, int]:
    _require_dense(layer, spec)
    # The token that is computed next is in its own window.
    span = spec.sliding_window - 1 + spec.extra_retained_tokens
    if span < 1:
        raise _refusal(layer, spec, "LockstepConnector serves windows of 2 tokens or more")
    return Kind.WINDOW, span


def _state(layer: str, spec: StateSpec) -> tuple[Kind, int]:
    if spec.mamba_cache_mode != "align":
        why = (
            f"its mamba_cache_mode is {spec.mamba_cache_mode!r}, where LockstepConnector serves"
            " 'align': set enable_prefix_caching, and mamba_cache_mode where that is not enough"
        )
        raise _refusal(layer, spec, why)
    return Kind.STATE, spec.block_size


def _require_dense(layer: str, spec: Any) -> None:
    if spec.tokens_per_state != 1:
        why = f"one entry of it stands for {spec.tokens_per_state} tokens, which is not supported"
        raise _refusal(layer, spec, why)


_KINDS: Mapping[str, Callable[[str, Any], tuple[Kind, int]]] = {
    "FullAttentionSpec": _attention,
    "SlidingWindowSpec": _window,
    "MLAAttentionSpec": _attention,
    "MambaSpec": _state,
}
"""vLLM's classes by name. A class derived from one of them is another layout."""

"""Publishes the KV events of `block_events` through vLLM if `kv_events_config` enables events."""

from collections.abc import Sequence

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_cache_spec_kind

from ...ranks.group.member.rank_cache import RankCache
from ...ranks.protocol.events import Reset, Tier
from ...storage_backends.uri import RANK
from .block_events import BlockEvents, ExtraKeys, HashedRequest, PagesRemoved, PagesStored
from .contract import HashedCacheConfig, PublishingEngine
from .tracked import TrackedRequest

_MEDIUMS = {Tier.HOST: MEDIUM_CPU, Tier.STORAGE: MEDIUM_STORAGE}


class EngineHasher:
    """Computes block hashes with vLLM's own functions."""

    def __init__(self, algorithm: str, *, hash_tokens: int, block_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self.block_tokens = block_tokens
        self._function = get_hash_fn_by_name(algorithm)

    def hash(self, before: bytes | None, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
        parent = None if before is None else BlockHash(before)
        return hash_block_tokens(self._function, parent, tokens, extra)

    def extra_keys(self, origin: HashedRequest, start: int, end: int) -> ExtraKeys:
        return generate_block_hash_extra_keys(origin, start, end, 0)[0]


class KVEvents:
    """Converts a replica's events to KV events in vLLM's format."""

    def __init__(
        self, hasher: EngineHasher, *, group: int, spec: object, store: str | None
    ) -> None:
        self._block_tokens = hasher.block_tokens
        self._group = group
        self._kind = get_kv_cache_spec_kind(spec).value
        self._events = BlockEvents(hasher)
        self.listen = self._events.listen
        # Report a store as local if each rank has its own, because no other engine can read such a
        # store.
        remote = "LOCAL" if store is None or RANK in store else "REMOTE"
        self._localities = {Tier.HOST: "LOCAL", Tier.STORAGE: remote}

    def saw(self, cache: RankCache, tracked: TrackedRequest) -> None:
        """Record the namespace and the multimodal items of a new request."""
        self._events.saw(
            tracked.request,
            tracked.namespace,
            lambda each: _seed(cache, each),
            tracked.item_pages(lambda tokens: cache.last_key(tokens, tracked.namespace)),
        )

    def forget(self) -> None:
        """Publish the removal of all blocks after a change of weights.

        vLLM's block hashes do not include the weights, so routers would otherwise match blocks of the
        previous weights.
        """
        self._events.listen([Reset(0, None)])

    def take(self, cache: RankCache) -> list[KVCacheEvent]:
        """Return vLLM's KV events for the changes since the last call."""
        changes = self._events.take(lambda each: _seed(cache, each))
        return [
            self._stored(each) if isinstance(each, PagesStored) else self._removed(each)
            for each in changes
        ]

    def _stored(self, change: PagesStored) -> BlockStored:
        first, pages = change.pages[0], change.pages
        adapter, before = first.origin.lora_request, first.before
        return BlockStored(
            block_hashes=[_external(each) for page in pages for each in page.hashes],
            parent_block_hash=None if before is None else _external(before),
            token_ids=[token for page in pages for token in page.tokens],
            block_size=self._block_tokens,
            lora_id=None if adapter is None else adapter.lora_int_id,
            medium=_MEDIUMS[change.tier],
            lora_name=None if adapter is None else adapter.lora_name,
            extra_keys=to_event_extra_keys([each for page in pages for each in page.extra]),
            group_idx=self._group,
            kv_cache_spec_kind=self._kind,
            locality=self._localities[change.tier],
        )

    def _removed(self, change: PagesRemoved) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[_external(each) for each in change.hashes],
            medium=_MEDIUMS[change.tier],
            group_idx=self._group,
            locality=self._localities[change.tier],
        )


def wanted(
    config: PublishingEngine, cache_config: HashedCacheConfig, store: str | None
) -> KVEvents | None:
    """Return the converter of the cache's events; None if the engine publishes no events."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    specs = [each.kv_cache_spec for each in cache_config.kv_cache_groups]
    group = next((at for at, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), 0)
    block_tokens = specs[group].block_size
    hasher = EngineHasher(
        config.cache_config.prefix_caching_hash_algo,
        hash_tokens=cache_config.hash_block_size or block_tokens,
        block_tokens=block_tokens,
    )
    return KVEvents(hasher, group=group, spec=specs[group], store=store)


def _seed(cache: RankCache, namespace: str) -> bytes:
    return cache.last_key(b"", namespace)


def _external(block_hash: bytes) -> bytes | int:
    return maybe_convert_block_hash(BlockHash(block_hash))

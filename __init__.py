"""Lockstep: a KV cache for tensor-parallel inference that stays identical on every rank.

The names in `__all__` are the public interface, which docs/api.md lists. Start with `Cache`.
"""

# ruff: noqa: PLC0415
from typing import TYPE_CHECKING

from .coordinator.stop_policy import StopPolicy, StopRule
from .coordinator.transport import Transport
from .errors import (
    CollectiveTimeout,
    ConfigError,
    DivergenceError,
    GroupError,
    InternalError,
    LockstepError,
    PeerLost,
    RankUnhealthy,
    StorageError,
    UsageError,
)
from .page_format.page_layout import Column, PageLayout
from .ranks.group.control.client import ask
from .ranks.protocol.answers import Admission, Dropped, Wait
from .ranks.protocol.config import (
    Bounds,
    CacheConfig,
    Eviction,
    HostCacheConfig,
    NamespaceLimit,
    Recurrent,
    SlidingWindow,
    Timeouts,
    WritePolicy,
)
from .ranks.protocol.eviction_policies import EvictionPolicy, Graded, register_eviction_policy
from .ranks.protocol.model_description import KeptState, ModelDescription
from .ranks.protocol.network_config import Control, Peers
from .version import VERSION

if TYPE_CHECKING:
    from .ranks.executor.engine_pages import AxisOrder, EnginePages
    from .ranks.group.cache import Cache
    from .ranks.group.host_cache import HostCache
    from .ranks.group.member.cache_stats import CacheStats
    from .ranks.replica.attaching import StoreState
    from .ranks.replica.operations.requests import LoadState
    from .ranks.replica.tree.matching import Match

__version__ = VERSION


def __getattr__(name: str) -> object:
    """Import a slow module when a name from it is first used.

    Importing torch takes seconds; importing the replica takes 0.25 s.
    """
    match name:
        case "AxisOrder" | "EnginePages":
            from .ranks.executor import engine_pages

            return getattr(engine_pages, name)
        case "Cache":
            from .ranks.group import cache

            return cache.Cache
        case "HostCache":
            from .ranks.group import host_cache

            return host_cache.HostCache
        case "CacheStats":
            from .ranks.group.member import cache_stats

            return cache_stats.CacheStats
        case "StoreState":
            from .ranks.replica import attaching

            return attaching.StoreState
        case "LoadState":
            from .ranks.replica.operations import requests

            return requests.LoadState
        case "Match":
            from .ranks.replica.tree import matching

            return matching.Match
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Admission",
    "AxisOrder",
    "Bounds",
    "Cache",
    "CacheConfig",
    "CacheStats",
    "CollectiveTimeout",
    "Column",
    "ConfigError",
    "Control",
    "DivergenceError",
    "Dropped",
    "EnginePages",
    "Eviction",
    "EvictionPolicy",
    "Graded",
    "GroupError",
    "HostCache",
    "HostCacheConfig",
    "InternalError",
    "KeptState",
    "LoadState",
    "LockstepError",
    "Match",
    "ModelDescription",
    "NamespaceLimit",
    "PageLayout",
    "PeerLost",
    "Peers",
    "RankUnhealthy",
    "Recurrent",
    "SlidingWindow",
    "StopPolicy",
    "StopRule",
    "StorageError",
    "StoreState",
    "Timeouts",
    "Transport",
    "UsageError",
    "Wait",
    "WritePolicy",
    "__version__",
    "ask",
    "register_eviction_policy",
]

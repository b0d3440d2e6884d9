"""Lockstep: a KV cache for tensor-parallel inference that stays the same on every rank.

The names below are the public interface; `Cache` is where to start.
"""

from .coordinator.collective import Transport
from .coordinator.stop_policy import StopPolicy, StopRule
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
from .ranks.cache import Cache
from .ranks.cache_stats import CacheStats
from .ranks.config import (
    Bounds,
    CacheConfig,
    Eviction,
    NamespaceLimit,
    Recurrent,
    SlidingWindow,
    Timeouts,
    WritePolicy,
)
from .ranks.host_cache import HostCache
from .ranks.model_description import KeptState, ModelDescription
from .ranks.replica.answers import Admission, Wait
from .ranks.replica.attaching import StoreState
from .ranks.replica.requests import LoadState
from .ranks.replica.tree.matching import Match
from .version import VERSION

__version__ = VERSION

__all__ = [
    "Admission",
    "Bounds",
    "Cache",
    "CacheConfig",
    "CacheStats",
    "CollectiveTimeout",
    "Column",
    "ConfigError",
    "DivergenceError",
    "Eviction",
    "GroupError",
    "HostCache",
    "InternalError",
    "KeptState",
    "LoadState",
    "LockstepError",
    "Match",
    "ModelDescription",
    "NamespaceLimit",
    "PageLayout",
    "PeerLost",
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
]

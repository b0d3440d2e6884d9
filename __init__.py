"""Lockstep: a KV cache for tensor-parallel inference that stays the same on every rank.

The names in `__all__` are the public interface, which docs/api.md lists; `Cache` is where to start.
"""

from typing import TYPE_CHECKING

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
from .ranks.group.cache import Cache
from .ranks.group.control.client import ask
from .ranks.group.host_cache import HostCache
from .ranks.group.member.cache_stats import CacheStats
from .ranks.protocol.answers import Admission, Dropped, Wait
from .ranks.protocol.config import (
    Bounds,
    CacheConfig,
    Eviction,
    NamespaceLimit,
    Recurrent,
    SlidingWindow,
    Timeouts,
    WritePolicy,
)
from .ranks.protocol.eviction_policies import EvictionPolicy, Graded, register_eviction_policy
from .ranks.protocol.model_description import KeptState, ModelDescription
from .ranks.protocol.outside import Control, Peers
from .ranks.replica.attaching import StoreState
from .ranks.replica.operations.requests import LoadState
from .ranks.replica.tree.matching import Match
from .version import VERSION

if TYPE_CHECKING:
    from .ranks.executor.engine_pages import AxisOrder, EnginePages

__version__ = VERSION

_WITH_TORCH = ("AxisOrder", "EnginePages")
"""Names whose module imports torch, which takes seconds: they are loaded when they are asked for."""


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        from .ranks.executor import engine_pages  # noqa: PLC0415

        return getattr(engine_pages, name)
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

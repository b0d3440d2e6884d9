"""What one more block costs a request that decodes, by how many it has computed before.

- `lent`: `HostCache.back_up`, where an engine owns the device pages: what a plug-in calls for it.
- `owned`: `Cache.insert`, where the cache does.
- `checkpoint`: the same, where that block ends with a recurrent state that is kept, as every 16th
  does. Each of them divides the path, so there are as many nodes as checkpoints.

Copies end at once, so that nothing but the block's own is in flight.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..coordinator.ballot import Ended, Progress
from ..coordinator.collectives.in_process import InProcessCollective, InProcessGroup
from ..page_format.page_layout import Column, PageLayout
from ..ranks.cache import Cache
from ..ranks.config import CacheConfig, ComponentConfig, Recurrent
from ..ranks.host_cache import HostCache
from ..ranks.orders import CopyToDevice, CopyToHost, Order
from ..ranks.rank_cache import RankCache
from ..ranks.replica.settings import ReplicaConfig
from .silent_executor import SilentExecutor

BLOCKS = (16, 256, 1024, 4096)
BLOCK_TOKENS = 16
CHECKPOINT_BLOCKS = 16
DECODING = {
    "lent": "lent pages",
    "owned": "owned pages",
    "checkpoint": "with a state that is kept",
}
"""What is measured, in words."""
_AROUND = 9
"""The median of so many blocks stands for the last of them."""

DecodeCosts = dict[str, dict[str, float]]
"""Microseconds by what is measured, and by the block's number."""


class _Instant(SilentExecutor):
    """Ends every copy by the next round."""

    def __init__(self) -> None:
        self._said: list[Progress] = []

    def carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, CopyToDevice | CopyToHost):
                self._said.append(Ended(order.operation, ok=True))

    def progress(self) -> list[Progress]:
        said, self._said = self._said, []
        return said


def decode_costs(blocks: Sequence[int] = BLOCKS) -> DecodeCosts:
    """Measure the blocks of these numbers, of a request that computes all of them in turn."""
    return {"lent": _lent(blocks), "owned": _owned(blocks), "checkpoint": _checkpoint(blocks)}


def _lent(blocks: Sequence[int]) -> dict[str, float]:
    most = max(blocks)
    cache = HostCache(*_parts(most, device_pages=0))
    tokens, pages = _tokens(most), np.arange(most, dtype=np.int32)
    return _timed(
        cache,
        blocks,
        lambda block: cache.back_up("r", tokens[: block * BLOCK_TOKENS], pages[:block]),
    )


def _owned(blocks: Sequence[int]) -> dict[str, float]:
    most = max(blocks)
    return _inserted(Cache(*_parts(most, device_pages=most)), blocks)


def _checkpoint(blocks: Sequence[int]) -> dict[str, float]:
    most = max(blocks)
    # Two more: the state that the request works on, and one that is copied from.
    slots = most // CHECKPOINT_BLOCKS + 2
    state = Recurrent(
        checkpoint_tokens=CHECKPOINT_BLOCKS * BLOCK_TOKENS,
        layout=_layout(1),
        device_pages=slots,
        host_pages=slots,
    )
    cache = Cache(*_parts(most, device_pages=most, components=(state,)))
    return _inserted(cache, blocks, stride=CHECKPOINT_BLOCKS)


def _inserted(cache: Cache, blocks: Sequence[int], *, stride: int = 1) -> dict[str, float]:
    tokens = _tokens(max(blocks))
    cache.load_back("r", tokens[:0], reserve_tokens=len(tokens))
    return _timed(
        cache,
        blocks,
        lambda block: cache.insert("r", tokens[: block * BLOCK_TOKENS], final=False),
        stride=stride,
    )


def _timed(
    cache: RankCache, blocks: Sequence[int], command: Callable[[int], object], *, stride: int = 1
) -> dict[str, float]:
    """Time every block; the median of the last few, each `stride` before the next, stands for one.

    So with a stride there is nothing to be said of the first few.
    """
    took: list[float] = []
    found: dict[str, float] = {}
    for block in range(1, max(blocks) + 1):
        began = time.perf_counter()
        command(block)
        took.append(time.perf_counter() - began)
        cache.open_round()
        cache.close_round()
        if block in blocks:
            around = took[::-stride][:_AROUND]
            if stride == 1 or len(around) == _AROUND:
                found[str(block)] = round(statistics.median(around) * 1e6, 1)
    return found


def _tokens(blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    random = np.random.default_rng(1)
    return random.integers(0, 1 << 31, blocks * BLOCK_TOKENS, dtype=np.int32)


def _parts(
    blocks: int, *, device_pages: int, components: tuple[ComponentConfig, ...] = ()
) -> tuple[CacheConfig, InProcessCollective, SilentExecutor, ReplicaConfig]:
    config = CacheConfig(
        model="bench",
        layout=_layout(BLOCK_TOKENS),
        components=components,
        device_pages=device_pages,
        host_pages=blocks,
    )
    replica_config = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"bench")
    return config, InProcessGroup(1).member(0), _Instant(), replica_config


def _layout(page_tokens: int) -> PageLayout:
    column = Column(name="kv", layers=1, heads=1, elements=1)
    return PageLayout(page_tokens=page_tokens, columns=(column,))

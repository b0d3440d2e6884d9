"""Cache for an engine that runs the same scheduler on every rank, with cache-owned device pages.

Once per engine step the engine calls `step`, even if nothing is in flight. Ranks communicate only in
`step`. A fact that only one rank knows (disk speed, an object lost by its store) changes no answer
until all ranks agree on it.

    admission:  match -> prefetch -> step ... until prefetch_done -> load_back -> step ... until READY
    compute:    write into the pages of each pool's page_table; insert(final=False) after each chunk,
                and end a chunk at each of the admission's checkpoints
    finish:     insert(final=True), release

The last token of a prompt must always be computed, so an engine passes `tokens[:-1]` to match, prefetch
and load_back.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...coordinator.collective import Collective
from ...errors import UsageError
from ..protocol.answers import Admission, Wait
from ..protocol.config import CacheConfig
from ..protocol.orders import KV_POOL
from ..protocol.timed_events import Timeline
from ..replica.operations.requests import LoadState
from ..replica.tree.node import NO_PERSIST_PREFIX
from ..replica.tree.tokens import Tokens, as_token_bytes
from .member.arguments import as_count, as_flag, require_text
from .member.group_rank import Listener
from .member.rank_cache import RankCache

if TYPE_CHECKING:
    import torch

    from ..executor.pools import DevicePool


class Cache(RankCache):
    """One rank's cache, with cache-owned device pages.

    Every rank must make the same calls in the same order from one thread; answers are then equal on
    every rank. Only `attach_store`, `detach_store` and `store_state` may be called from any thread.
    Tokens are int32 ids in any sequence or one-dimensional array; lengths are in tokens. A request's
    name can be used again after `release`.

    Calls out of order or with impossible arguments raise `UsageError` and change nothing. After the
    group's epoch has ended, all commands except `release` and `abort` raise the `GroupError` that ended
    it.
    """

    config: CacheConfig

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        collective: Collective | None = None,
        *,
        device: "torch.device | str" = "cpu",
        listener: Listener | None = None,
        timeline: Timeline | None = None,
    ) -> "Cache":
        """Open this rank's cache: compare settings with all ranks, allocate memory, open the store.

        Collective: every rank calls it at the same point. `collective` carries the rounds and belongs
        to the cache afterwards; by default a gloo group of all ranks of `torch.distributed`, which must
        be initialised. `listener` receives events with page keys, and `timeline` receives timed events;
        ranks may differ in both. Raises the same `ConfigError` on every rank if settings differ or one
        rank cannot start.
        """
        # Import torch only in this method: the import takes seconds, and simulation and the replica's
        # tests do not need torch.
        import torch  # noqa: PLC0415

        from .control.control_opening import controlled  # noqa: PLC0415
        from .opening import new_group, open_rank  # noqa: PLC0415

        group = collective or new_group(config)
        opened = open_rank(
            config,
            group,
            torch.device(device),
            names_pages=listener is not None,
            timeline=timeline,
        )
        return controlled(cls(config, group, *opened, listener=listener, timeline=timeline), group)

    @property
    def device_pools(self) -> "Mapping[str, DevicePool]":
        """The device pages of each pool, by pool name.

        `.column(name)` of a pool is a tensor [layers, pages, heads, tokens, elements] of this rank's
        layers and heads, initially zero; `.pages` is the number of pages. The cache owns the memory.
        From READY on, the engine may read all pages in a request's `page_table`. The engine may write
        only the request's unshared pages, until they are inserted.
        """
        # Simulation's executor has no attribute `device_pools`. Test for the attribute, because
        # `isinstance` would need an import of torch, which simulation avoids.
        pools: Mapping[str, DevicePool] | None = getattr(self._executor, "device_pools", None)
        if pools is None:
            raise UsageError("this cache has no device pages of its own")
        return pools

    @property
    def device_pool(self) -> "DevicePool":
        """The device pages of the full-attention pool, which every model has."""
        return self.device_pools[KV_POOL]

    def load_back(
        self,
        request: str,
        tokens: Tokens,
        namespace: str = "",
        *,
        reserve_tokens: int = 0,
        priority: int = 0,
    ) -> Admission | Wait:
        """Admit a request: lock its device prefix, load back its host prefix, allocate the other pages.

        `tokens` are the tokens that may come from the cache. `reserve_tokens` is the total number of
        tokens to allocate device pages for. Either everything succeeds, or nothing changes and a `Wait`
        gives the reason. The request's prefetch stops. Its pages that have landed on every rank by the
        last verdict count as cached. The engine may use the device pages once `load_state` is READY.
        With the eviction policy `priority`, pages used only by requests of a lower `priority` are
        evicted first. Raises `UsageError` if the request does not fit even an empty device.
        """
        self._require_group()
        require_text(namespace)
        if namespace.startswith(NO_PERSIST_PREFIX):
            raise UsageError(
                f"namespace {namespace!r} begins with NUL, so nothing would be persisted; rename it"
            )
        data, reserve = as_token_bytes(tokens), as_count(reserve_tokens)
        rank = as_count(priority, "priority")
        return self._follow(self._replica.load_back(request, namespace, data, reserve, rank))

    def load_state(self, request: str) -> LoadState:
        """Return whether an admitted request's prefix is on the device on every rank.

        Raises `UsageError` if the request was never admitted.
        """
        return self._replica.load_state(request)

    def page_table(self, request: str, pool: str = KV_POOL) -> npt.NDArray[np.int32]:
        """Return a copy of a READY request's device page table, in token order, shared prefix first.

        Token t is in slot t % `page_tokens` of the page at index t // `page_tokens`. In a sliding
        window's pool the table covers the same positions, with -1 for pages already freed left of the
        window. In a recurrent state's pool the table has one element, the slot of the request's working
        state. When the request becomes READY the slot holds the state after its cached tokens, if any;
        the engine updates it in place. Call again after each `insert`, which may replace a page of the
        request by an equal page of the tree. Raises `UsageError` unless the request is READY.
        """
        require_text(pool, "a pool")
        return np.array(self._replica.page_table(request, pool), dtype=np.int32)

    def extend(self, request: str, total_tokens: int) -> bool:
        """Allocate device pages for `total_tokens` tokens in total; return False if there is no room.

        If False, nothing has changed. A request larger than the whole device never gets room, and the
        engine must abort it. Otherwise room appears when other requests are released or retracted.
        """
        self._require_group()
        return self._follow(self._replica.extend(request, as_count(total_tokens)))

    def insert(self, request: str, tokens: Tokens, *, final: bool = True) -> int:
        """Publish the whole pages of `tokens`, whose KV is in the request's pages of every pool.

        Call only after this KV is written. Writes that are enqueued on the engine's stream are
        sufficient if all later uses of the pages are enqueued after them. `final=False` means that the
        prompt continues (chunked prefill). Published pages are shared and backed up under the write
        policy. They stay locked for the request, except pages left of its sliding windows. A recurrent
        state is kept if the last page of `tokens` is whole, and `len(tokens)` is one of the admission's
        checkpoints or a regular checkpoint. Returns the number of tokens now shared with the tree; the
        engine must not write their pages any more. Raises `UsageError` if the request has no pages for
        the tokens, or if the tokens differ from those already shared.
        """
        self._require_group()
        data, ends = as_token_bytes(tokens), as_flag(final, "final")
        return self._follow(self._replica.insert(request, data, final=ends))

    def retract(self, request: str, tokens: Tokens) -> bool:
        """Move a READY request and all its state in every pool from the device to host memory.

        `tokens` are all tokens computed so far; their whole pages are published. The request's device
        pages, including a partial last page, and its working state are copied to host memory, then
        freed. `load_state` is SAVING during the copies and SAVED afterwards, or FAILED if a copy
        failed. After FAILED call `load_back` again. Returns False, and the request continues, if host
        memory has no room.
        """
        self._require_group()
        return self._follow(self._replica.retract(request, as_token_bytes(tokens)))

    def resume(self, request: str, *, reserve_tokens: int = 0) -> Admission | Wait:
        """Bring a SAVED request back, with device pages for `reserve_tokens` tokens in total.

        The request is LOADING, then READY with the same page contents in other pages. Checksums are
        verified; on a mismatch the request is FAILED. `Wait.LOST` means that pages shared with other
        requests were lost, and the request counts as never admitted. Raises `UsageError` as `load_back`
        does.
        """
        self._require_group()
        return self._follow(self._replica.resume(request, as_count(reserve_tokens)))

    def release(self, request: str) -> None:
        """Forget a request: unlock its shared pages and free its other pages.

        Inserted pages stay cached. Freed pages may be reallocated at once, so the engine must not
        enqueue further work on them.
        """
        self._follow(self._replica.release(request))
        self._observer.released(request)

    def abort(self, request: str) -> None:
        """Forget a request in any state, including an unknown request.

        Pages that its prefetch has read stay cached; I/O in flight settles in the background.
        """
        if self._replica.knows(request):
            self.release(request)

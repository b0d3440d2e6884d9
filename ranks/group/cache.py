"""The engine's side: one cache for an engine that runs the same scheduler on every rank.

Every rank makes the same calls in the same order with the same arguments, and gets the same answers.
Once per engine step, whatever is in flight, it calls `step`, which is the only place where ranks
communicate. Local facts (how fast a disk is, what a store has lost) never show in an answer before
all ranks have agreed on them.

    admission:  match -> prefetch -> step ... until prefetch_done -> load_back -> step ... until READY
    compute:    write into the pages of each pool's page_table; insert(final=False) after each chunk,
                and end a chunk at each of the admission's checkpoints
    finish:     insert(final=True), release

The last token of a prompt has to be computed in any case, so an engine gives `tokens[:-1]` to match,
prefetch and load_back.
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
from ..replica.tree.node import PASSING
from ..replica.tree.tokens import Tokens, as_token_bytes
from .member.arguments import as_count, as_flag, require_text
from .member.member import Listener
from .member.rank_cache import RankCache

if TYPE_CHECKING:
    import torch

    from ..executor.pools import DevicePool


class Cache(RankCache):
    """One rank's cache, with device pages of its own.

    What it answers is the same on every rank, as long as every rank makes the same calls in the same
    order, all from one thread (`attach_store`, `detach_store` and `store_state` apart). Answers change
    by these calls and in `step`, and nowhere else. Lengths are in tokens, and tokens are int32 ids in
    any sequence or one-dimensional array. A request's name is free again once it was released.

    Calls out of order or with impossible arguments raise `UsageError` and change nothing. Once the
    group's epoch is over, all commands but `release` and `abort` raise the `GroupError` that ended it.
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
        """Make this rank's cache: compare settings over the ranks, get memory, open the store.

        Every rank calls it at the same point. `collective` is the transport for rounds,
        the cache's from now on; by default a new gloo group of all ranks of `torch.distributed`,
        which must be initialised. `listener`, which a rank may have or not, is told what happens, with
        pages by their keys; `timeline`, likewise, what takes time here. Raises the same `ConfigError`
        on every rank if settings differ or one rank cannot start.
        """
        # Simulation and the replica's tests need no torch, which takes seconds to import.
        import torch  # noqa: PLC0415

        from .control.opening import controlled  # noqa: PLC0415
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
        """The device pages of each pool, by its name.

        `.column(name)` of each is a tensor [layers, pages, heads, tokens, elements] of this rank's
        layers and heads, zero at first; `.pages` is how many there are. The memory is the cache's. The
        engine writes only into pages that are a request's own by its `page_table`, from READY until
        they are inserted, and reads those of the table's prefix, too.
        """
        # Only the simulated executor has none, and whoever imports this class need not have torch.
        pools: Mapping[str, DevicePool] | None = getattr(self._executor, "device_pools", None)
        if pools is None:
            raise UsageError("this cache has no device pages of its own")
        return pools

    @property
    def device_pool(self) -> "DevicePool":
        """The device pages of full attention, which every model has."""
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
        """Admit a request: lock its device prefix, load back what the host has, reserve the rest.

        `tokens` are those that may be taken from the cache; `reserve_tokens` is the number of tokens
        in total that the request needs device pages for. All of it happens, or nothing does and a
        `Wait` says why. A prefetch of the request ends with what has landed by the last verdict.
        The pages may be used once `load_state` is READY. Under eviction by priority, what only
        requests of a lower `priority` use leaves first. Raises `UsageError` for a request that even an
        empty device has no room for: to wait would be in vain.
        """
        self._require_group()
        require_text(namespace)
        if namespace.startswith(PASSING):
            raise UsageError(
                f"namespace {namespace!r} begins with NUL, so nothing of it would be stored; rename it"
            )
        data, reserve = as_token_bytes(tokens), as_count(reserve_tokens)
        rank = as_count(priority, "priority")
        return self._follow(self._replica.load_back(request, namespace, data, reserve, rank))

    def load_state(self, request: str) -> LoadState:
        """Say whether an admitted request's prefix is on the device on every rank.

        Raises `UsageError` for a request that was never admitted.
        """
        return self._replica.load_state(request)

    def page_table(self, request: str, pool: str = KV_POOL) -> npt.NDArray[np.int32]:
        """Return the device pages of a READY request in token order: shared prefix, then its own.

        Token t is in slot t % `page_tokens` of the page at t // `page_tokens`. Of a sliding window's
        pool: over the same positions, with -1 where the request has no page any more, left of its
        trailing window. Of a recurrent state's pool: one element, the slot of the state that the
        request works on, which holds the state after its cached tokens once it is READY (unless there
        are none), and which the engine changes in place. A copy. `insert` may change the table, since
        a page that the tree has already replaces the request's own; so read it anew after each. Raises
        `UsageError` unless the request is READY.
        """
        require_text(pool, "a pool")
        return np.array(self._replica.page_table(request, pool), dtype=np.int32)

    def extend(self, request: str, total_tokens: int) -> bool:
        """Reserve device pages for `total_tokens` tokens in total; False if there is no room.

        Nothing has changed then. There never is room for more than the device has, where the engine
        has to end the request; for less there is once others have released, or left by `retract`.
        """
        self._require_group()
        return self._follow(self._replica.extend(request, as_count(total_tokens)))

    def insert(self, request: str, tokens: Tokens, *, final: bool = True) -> int:
        """Publish the whole pages of `tokens`, whose content is in the request's pages of every pool.

        Call it only when that has been written, or is ordered before every later use on the engine's
        stream. `final=False` says that the prompt goes on (chunked prefill). The published pages are
        shared, backed up under the write policy, and stay locked for the request, but for those that
        its windows have left. A recurrent state is kept where `tokens` end with a whole page at one of
        the admission's checkpoints, or at a regular one. Returns the number of tokens that the tree
        now shares with the request; their pages are written no more. Raises `UsageError` for more
        tokens than it has pages for, or others than it shares already.
        """
        self._require_group()
        data, ends = as_token_bytes(tokens), as_flag(final, "final")
        return self._follow(self._replica.insert(request, data, final=ends))

    def retract(self, request: str, tokens: Tokens) -> bool:
        """Move a request that is READY off the device, with everything that it holds in every pool.

        `tokens` are all that it has computed; their whole pages are published. Its device pages,
        also one that is not full yet, and the state it works on are copied to host memory, and free
        once that has settled: `load_state` says SAVING until then, and SAVED after it. FAILED, as
        after a load back, means that a copy went wrong: `load_back` it again. Returns False, and the
        request goes on, if host memory has no room.
        """
        self._require_group()
        return self._follow(self._replica.retract(request, as_token_bytes(tokens)))

    def resume(self, request: str, *, reserve_tokens: int = 0) -> Admission | Wait:
        """Bring a SAVED request back, with device pages for `reserve_tokens` tokens in total.

        It is LOADING, and once it is READY its tables have what they had, in other pages. Its bytes
        are checked on the way: if they are not what was saved it is FAILED. `Wait.LOST` says that
        what it shared with others is gone; it is as one that was never admitted then. Raises
        `UsageError` as `load_back` does.
        """
        self._require_group()
        return self._follow(self._replica.resume(request, as_count(reserve_tokens)))

    def release(self, request: str) -> None:
        """Forget a request: unlock what it shares and give back what is its own.

        What was inserted stays cached; the rest is gone. Its pages may be another's from now on, so
        the engine's stream must not be given anything more for them.
        """
        self._follow(self._replica.release(request))
        self._observer.released(request)

    def abort(self, request: str) -> None:
        """Forget a request wherever it stands, also one that is not known.

        What its prefetch has landed stays cached; what is still moving settles by itself.
        """
        if self._replica.knows(request):
            self.release(request)

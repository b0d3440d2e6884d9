"""The engine's side where the engine owns the device pages: host memory and storage beside them.

For engines with a page allocator and a prefix cache of their own, as vLLM has. The engine lends its
pages for copies: each call names them, on each rank its own, and they stay as they are until the
copies that touch them have ended on every rank. Full attention is all that can be cached so.

    admission:  prefetch -> begin_step ... until prefetch_done -> hit -> load -> ... until READY
    compute:    back_up after each chunk whose pages are whole
    preemption: fence, before anything overwrites the request's pages
    finish:     release; if that says False, the pages are free once `take_freed` names the request

Once per engine step, also when nothing is in flight: `begin_step`, decisions and commands, `end_step`;
then, where the engine launches its forward pass, `begin_loads` before it and `begin_backups` after it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..coordinator.ballot import Ended
from ..coordinator.collectives.base import Collective
from ..errors import ConfigError, UsageError
from .config import CacheConfig
from .executor.base import Executor
from .orders import Cancel, CopyToDevice, CopyToHost, Fence, Order
from .rank_cache import RankCache, as_count, require_text
from .replica.pages import PageRun, page_run
from .replica.serving import LoadState
from .replica.settings import ReplicaConfig
from .replica.tokens import Tokens, as_token_bytes

if TYPE_CHECKING:
    from .executor.engine_pages import EnginePages

Copy = CopyToDevice | CopyToHost


class HostCache(RankCache):
    """One rank's cache in host memory and storage, under an engine's own device pages.

    Orders of copies wait for `begin_loads` and `begin_backups`, since only the engine knows where its
    device's stream has come to. All others are given at once.
    """

    def __init__(
        self,
        config: CacheConfig,
        collective: Collective,
        executor: Executor,
        replica_config: ReplicaConfig,
        *,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(config, collective, executor, replica_config, clock_ms=clock_ms)
        self._held: list[Copy] = []

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        pages: "EnginePages",
        collective: Collective | None = None,
    ) -> "HostCache":
        """Make this rank's cache under the engine's `pages`; everything else is as for `Cache.open`."""
        # Simulation needs no torch, which takes seconds to import.
        from .opening import new_group, open_host_cache  # noqa: PLC0415

        if config.device_pages:
            raise ConfigError(
                f"device_pages is {config.device_pages}, must be 0: the engine owns them"
            )
        return open_host_cache(config, collective or new_group(config), pages)

    def hit(
        self, request: str, tokens: Tokens, namespace: str = "", *, device_tokens: int = 0
    ) -> int:
        """Return how many tokens `load` can bring beyond the `device_tokens` that the engine has.

        Whole pages; 0 for a request whose load has failed, which computes instead. Valid until the
        next call that may take host pages: `back_up`, or `begin_step`.
        """
        self._require_group()
        require_text(namespace)
        return self.replica.hit(request, namespace, as_token_bytes(tokens), as_count(device_tokens))

    def load(
        self, request: str, tokens: Tokens, device_pages: Sequence[int], *, device_tokens: int = 0
    ) -> None:
        """Bring `tokens`, which `hit` has just promised, from `device_tokens` on.

        `device_pages` are the pages for what is brought, in order. They belong to the load until
        `load_state` says READY or FAILED. A prefetch of the request ends with what has landed.
        """
        self._require_group()
        pages = _run(device_pages)
        self.replica.load(request, as_token_bytes(tokens), as_count(device_tokens), pages)
        self._dispatch()

    def load_state(self, request: str) -> LoadState:
        """Say how far the request's load is, on every rank.

        FAILED is final: the request's device pages hold nothing, and `hit` finds nothing for it any
        more. Either way no copy touches the pages.
        """
        return self.replica.load_state(request)

    def back_up(
        self, request: str, tokens: Tokens, device_pages: Sequence[int], namespace: str = ""
    ) -> int:
        """Copy to host memory what of `tokens` is not there, and then to storage.

        `device_pages` are the pages of the whole prefix in token order; their KV is written, or is
        ordered before `begin_backups`. They must not be overwritten before `take_freed` names the
        request, after its `release`, or before a `fence`. Returns the number of tokens that are on
        the host or on their way; it is smaller where there is no room.
        """
        self._require_group()
        require_text(namespace)
        count = self.replica.back_up(request, namespace, as_token_bytes(tokens), _run(device_pages))
        self._dispatch()
        return count

    def fence(self, request: str) -> None:
        """Return when the request's device pages may be overwritten: it is preempted.

        Backups that read them are waited for, up to `timeouts.fence_s`, and fail after that. The
        request is known on; it may prefetch and load again. Of one that was released and still lends
        pages only this rank's copies are waited for; one that is not known lends none.
        """
        self._require_group()
        if request in self.replica.state.requests:
            self.replica.fence(request)
            self._dispatch()
        else:
            self.keep_off(request)

    def keep_off(self, request: str | None = None) -> None:
        """Return when no copy of this rank's touches the request's device pages, or any device page.

        For an engine that gives pages away, or unmaps them, before its next step. This is no command:
        each rank calls it whenever its engine does so, and the replica does not hear of it. Copies are
        waited for, up to `timeouts.fence_s`, and fail after that.
        """
        copies = self.replica.touching(request)
        if copies:
            self._carry_out([Fence(copies, self.config.timeouts.fence_s)])

    def release(self, request: str) -> bool:
        """Forget a request; say whether its device pages are free on every rank.

        If not, they are free once `take_freed` returns the request's name, which may not be used
        again before. Those of a request that is not known are free.
        """
        if request not in self.replica.state.requests:
            return not self.lends(request)
        free = self.replica.leave(request)
        self._dispatch()
        return free

    def lends(self, request: str) -> bool:
        """Say whether copies on some rank may still touch the request's device pages."""
        return bool(self.replica.touching(request))

    @property
    def pending_frees(self) -> bool:
        """Whether device pages of released requests will become free without further commands."""
        return self.replica.offloading.frees

    def end_step(self, *, idle_s: float = 0.0) -> None:
        """See `RankCache.end_step`; there is no use in waiting for copies that are not begun yet."""
        super().end_step(idle_s=0.0 if self._held else idle_s)

    def settle_copies(self) -> bool:
        """Run rounds until the device pages of released requests are free; for an idle engine.

        Every rank calls it at the same point. Returns False where that takes longer than copies may
        take at all, in agreed time: pages of a copy that never ends stay with it.
        """
        times = self.config.timeouts
        return self._step_until(
            lambda: not self.replica.offloading.waits, times.copy_s + times.quiesce_s
        )

    def take_freed(self) -> list[str]:
        """Return the released requests whose device pages have become free since the last call."""
        return self.replica.take_freed()

    def reset(self, weights_version: str | None = None) -> None:
        """Offer nothing of what is cached now to any request that has not begun to compute.

        Pins end. `weights_version` names the weights that are computed with from now on: storage is
        read and written under that name, and what it has is found by any cache that resets to the same
        name. Without one, keys begin anew that nobody has used or will use again, and storage is left
        alone until a reset names a version; after a restart it has what the configuration's
        `weights_version` had before the first reset. Requests that have loaded or backed up go on with
        what they have, and nothing of theirs goes to storage any more. One that has computed and done
        neither counts as not begun, so the engine must not let it back up what it has from before.
        """
        self._require_group()
        if weights_version is not None:
            require_text(weights_version, "a weights version")
        self.replica.reset(weights_version)
        self._dispatch()

    def begin_loads(self) -> None:
        """Begin the copies to the device: before the forward pass of this step is launched."""
        self._begin(CopyToDevice)

    def begin_backups(self) -> None:
        """Begin the copies to the host: after the forward pass of this step was launched."""
        self._begin(CopyToHost)

    def flush(self) -> bool:
        """See `RankCache.flush`; copies that still wait for the engine are begun."""
        self.begin_loads()
        self.begin_backups()
        return super().flush()

    def _begin(self, kind: type[Copy]) -> None:
        held, self._held = self._held, []
        begun = [order for order in held if isinstance(order, kind)]
        self._held = [order for order in held if not isinstance(order, kind)]
        if begun:
            self.executor.carry_out(begun)

    def _carry_out(self, orders: Sequence[Order]) -> None:
        given: list[Order] = []
        for order in orders:
            if isinstance(order, CopyToDevice | CopyToHost):
                self._held.append(order)
                continue
            if isinstance(order, Fence):
                self._drop(set(order.operations))
            elif isinstance(order, Cancel):
                self._drop({order.operation})
            given.append(order)
        if given:
            self.executor.carry_out(given)

    def _drop(self, operations: set[int]) -> None:
        """Let copies that were not begun fail: the pages that they name are not theirs any more."""
        for order in self._held:
            if order.operation in operations:
                self.ballot.note(Ended(order.operation, ok=False))
        self._held = [order for order in self._held if order.operation not in operations]


def _run(pages: Sequence[int]) -> PageRun:
    try:
        return page_run(pages)
    except (OverflowError, TypeError) as error:
        raise UsageError(f"device pages must be page numbers: {error}") from error

"""The engine's side where the engine owns the device pages: host memory and storage beside them.

For engines with a page allocator and a prefix cache of their own, as vLLM has. The engine lends its
pages for copies: each call names them, on each rank its own, and they stay as they are until the
copies that touch them have ended on every rank. That is so for every pool that the model has.

    admission:  prefetch -> begin_step ... until prefetch_done -> hit -> load -> ... until READY
    compute:    admit, and back_up after each chunk whose pages are whole
    preemption: fence, before anything overwrites the request's pages
    finish:     release; if that says False, the pages are free once `collect_freed` names the request

Once per engine step, also when nothing is in flight: `begin_step`, decisions and commands, `end_step`;
then, where the engine launches its forward pass, `begin_loads` before it and `begin_backups` after it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ...coordinator.collective import Collective
from ...errors import GroupError, InternalError, UsageError
from ..protocol.answers import Wait
from ..protocol.config import HostCacheConfig
from ..protocol.orders import KV_POOL, Direction, Fence
from ..protocol.timed_events import Timeline
from ..replica.core.pages import PageRun, page_run
from ..replica.operations.lent import NO_PAGE
from ..replica.operations.requests import LoadState
from ..replica.tree.node import HOST
from ..replica.tree.tokens import Tokens, as_token_bytes
from .member.arguments import as_count, as_seconds, require_text
from .member.member import FLUSH_POLL_S, Flushed, Listener
from .member.rank_cache import RankCache

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .opening import Lent


Pages: TypeAlias = "Sequence[int] | npt.NDArray[np.int32]"
PagesByPool: TypeAlias = "Pages | Mapping[str, Pages]"
"""Device pages that are lent: of the pool of full attention alone, or of each pool by its name.

Of a pool with a page for each page of tokens in token order, with -1 where the engine has none any more
(left of a sliding window); of a pool of states the one slot that holds the state after the tokens.
"""


class HostCache(RankCache):
    """One rank's cache in host memory and storage, under an engine's own device pages.

    Copies wait for `begin_loads` and `begin_backups`, since only the engine knows where its device's
    stream has come to.
    """

    config: HostCacheConfig

    @classmethod
    def open(
        cls,
        config: HostCacheConfig,
        pages: "Lent",
        collective: Collective | None = None,
        *,
        listener: Listener | None = None,
        timeline: Timeline | None = None,
    ) -> "HostCache":
        """Make this rank's cache under the engine's `pages`, those of each pool by its name.

        Full attention's may be given alone. Everything else is as for `Cache.open`.
        """
        # Simulation needs no torch, which takes seconds to import.
        from .control.opening import controlled  # noqa: PLC0415
        from .opening import new_group, open_rank  # noqa: PLC0415

        group = collective or new_group(config)
        opened = open_rank(
            config,
            group,
            pages,
            names_pages=listener is not None,
            timeline=timeline,
        )
        return controlled(cls(config, group, *opened, listener=listener, timeline=timeline), group)

    def hit(
        self, request: str, tokens: Tokens, namespace: str = "", *, device_tokens: int = 0
    ) -> int:
        """Return how many tokens `load` can bring beyond the `device_tokens` that the engine has.

        Whole pages. 0 for a request whose load has failed, which computes instead. Valid until the next
        call that may take host pages: `back_up`, or `begin_step`.
        """
        self._require_group()
        require_text(namespace)
        data, count = as_token_bytes(tokens), _start(device_tokens)
        return self._follow(self._replica.hit(request, namespace, data, count))

    def load(
        self, request: str, tokens: Tokens, device_pages: PagesByPool, *, device_tokens: int = 0
    ) -> None:
        """Bring `tokens`, which `hit` has just promised, from `device_tokens` on.

        `device_pages` are the pages for what is brought, in order. They belong to the load until
        `load_state` says READY or FAILED. Of a window only the pages from `needed_from` on are filled:
        those before it stay as they are, and `back_up` and `retract` never copy them for this request,
        until a `fence`. A prefetch of the request ends with what has landed.
        """
        self._require_group()
        data, start = as_token_bytes(tokens), _start(device_tokens)
        self._follow(self._replica.load(request, data, start, self._runs(device_pages)))

    def admit(
        self, request: str, tokens: Tokens, namespace: str = "", *, device_tokens: int = 0
    ) -> None:
        """Count a request that computes from here on, once for each time that it begins to.

        `tokens` are those that it could have had from the cache; the engine has the first
        `device_tokens` of them on the device, with what was loaded. Nothing but statistics follows.
        """
        self._require_group()
        require_text(namespace)
        data, count = as_token_bytes(tokens), _start(device_tokens)
        self._follow(self._replica.admit(request, namespace, data, count))

    def needed_from(self, tokens: int) -> dict[str, int]:
        """Return from which token on a match of whole pages that ends at `tokens` needs each pool's."""
        unit, components = self.config.layout.page_tokens, self._replica.prefixes.components
        whole = as_count(tokens) // unit
        return {each.pool: each.needed_from(whole) * unit for each in components}

    def free_host_pages(self) -> int:
        """Return how many of full attention's host pages hold nothing; the same on every rank."""
        return self._replica.prefixes.residence.pools[HOST][0].free

    def fetched(self, request: str) -> tuple[int, int]:
        """Return from which token to which one the request's prefetch has brought pages from storage.

        Some may have left host memory since. (0, 0) for a request that is admitted, or not known.
        """
        unit, known = self.config.layout.page_tokens, self._replica.requests.get(request)
        first, last = (0, 0) if known is None else known.fetched
        return first * unit, last * unit

    def refused(self, request: str) -> bool:
        """Say whether a rank could not connect to the group that the last prefetch was to read from."""
        known = self._replica.requests.get(request)
        return known is not None and known.refused

    def load_state(self, request: str) -> LoadState:
        """Say how far the request's load is, on every rank.

        FAILED is final: the device pages that were to be loaded hold nothing, and `hit` finds nothing
        for the request any more. Either way no copy touches the pages. `retract` says what the states
        mean after it.
        """
        return self._replica.load_state(request)

    def back_up(
        self, request: str, tokens: Tokens, device_pages: PagesByPool, namespace: str = ""
    ) -> int:
        """Copy to host memory what of `tokens` is not there, and then to storage.

        `device_pages` are the pages of the whole prefix in token order; their KV is written, or is
        ordered before `begin_backups`. They must not be overwritten before `collect_freed` names the
        request, after its `release`, or before a `fence`. Nothing goes to storage of a namespace that
        begins with NUL: its pages are worth nothing after this life of the engine. Returns the number
        of tokens that are on the host or on their way; it is smaller where there is no room.
        """
        self._require_group()
        require_text(namespace)
        data, runs = as_token_bytes(tokens), self._runs(device_pages)
        return self._follow(self._replica.back_up(request, namespace, data, runs))

    def retract(self, request: str, tokens: Tokens, device_pages: PagesByPool) -> bool:
        """Copy all that a request has to host memory, so that its device pages can be given away.

        `tokens` are all that it has computed, `device_pages` what holds them: also a page that is not
        full yet, and the state that it works on. `load_state` says SAVING until every rank has it all,
        then SAVED; FAILED says that the request goes on as it is. Either way no copy touches the pages
        any more, but for one that hangs: where the request still `lends`, `keep_off` comes before
        anything overwrites them. Returns False, and it goes on, if host memory has no room.
        """
        self._require_group()
        data, runs = as_token_bytes(tokens), self._runs(device_pages)
        return self._follow(self._replica.retract_lent(request, data, runs))

    def resume(
        self, request: str, device_pages: PagesByPool, *, device_tokens: int = 0
    ) -> Wait | None:
        """Bring a SAVED request back to device pages: what it goes on with from `device_tokens` on.

        Of a window that is what `needed_from` names for its whole pages, as far as it was lent when
        the request was retracted, and the page that is not full. -1 may stand for all else, and for
        what was given up since; pages that are lent for all else are not filled, as by `load`.
        The pages belong to the load until `load_state` says READY; bytes are checked on the way, and
        FAILED says that it has to be computed anew. `Wait.LOST` says that what it shared with others
        is gone: it is as one that was never admitted then.
        """
        self._require_group()
        runs, start = self._runs(device_pages), _start(device_tokens)
        return self._follow(self._replica.resume_lent(request, runs, start))

    def fence(self, request: str) -> None:
        """Return when the request's device pages may be overwritten: it is preempted.

        Backups that read them are waited for, up to `timeouts.fence_s`, and fail after that. The
        request is known on; it may prefetch and load again. Of one that was released and still lends
        pages only this rank's copies are waited for; one that is not known lends none.
        """
        self._require_group()
        if self._replica.knows(request):
            self._follow(self._replica.fence(request))
        else:
            self.keep_off(request)

    def keep_off(self, request: str | None = None) -> None:
        """Return when no copy of this rank's touches the request's device pages, or any device page.

        For an engine that gives pages away, or unmaps them, before its next step. This is no command:
        each rank calls it whenever its engine does so, and the replica does not hear of it. Copies are
        waited for, up to `timeouts.fence_s`, and fail after that.
        """
        copies = self._replica.touching(request)
        if copies:
            self._executor.carry_out([Fence(copies, self.config.timeouts.fence_s)])

    def release(self, request: str) -> bool:
        """Forget a request; say whether its device pages are free on every rank.

        If not, they are free once `collect_freed` returns the request's name, which may not be used
        again before. Those of a request that is not known are free.
        """
        if not self._replica.knows(request):
            return not self.lends(request)
        freed = self._follow(self._replica.release(request))
        self._observer.released(request)
        return freed

    def lends(self, request: str) -> bool:
        """Say whether copies on some rank may still touch the request's device pages."""
        return bool(self._replica.touching(request))

    def awaits_room(self, request: str) -> bool:
        """Say whether host memory had no room for all of the request's last `back_up`.

        Or a copy has failed. `back_up` again when `backup_is_due`, with the same tokens and the pages
        that hold them then. A prompt that is longer than host memory takes several such calls. A
        request that is released or fenced meanwhile gives it up, which the metrics count.
        """
        return self._replica.awaits_room(request)

    def backup_is_due(self, request: str) -> bool:
        """Say whether a backup that awaits room may find some: an operation has ended since."""
        return self._replica.backup_is_due(request)

    def awaits_copies(self, request: str) -> bool:
        """Say whether copies of the request's device pages are waited for; one that hangs is not."""
        return bool(self._replica.touching(request, awaited=True))

    def copies(self, request: str) -> tuple[int, ...]:
        """Return the copies that may touch the request's device pages on some rank, the newest last.

        Each has a number that no other one ever has. Those that a `fence` has ended are not among them.
        """
        return self._replica.touching(request)

    @property
    def pending_frees(self) -> bool:
        """Whether device pages of released requests will become free without further commands."""
        return bool(self._freed) or self._replica.waits_for_frees

    def finish_copies(self) -> bool:
        """Run rounds until the device pages of released requests are free; for an idle engine.

        Every rank calls it at the same point. Returns False where some are not free after as long as
        copies may take at all, in agreed time: pages of a copy that never ends stay with it.
        """
        times = self.config.timeouts
        replica = self._replica
        self.step_until(lambda: not replica.waits_for_frees, times.copy_s + times.quiesce_s)
        return not replica.leaving

    def collect_freed(self) -> list[str]:
        """Return the released requests whose device pages have become free since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def compare(self, timeout_s: float) -> GroupError | InternalError | None:
        """Compare with the other ranks what was done so far; for an engine that has failed itself.

        Returns the error that ends the group: ranks that differ are named in it, and one that does not
        come within `timeout_s` ends it too. None where the ranks have done the same.
        """
        timeout_s = as_seconds(timeout_s, "timeout_s")
        try:
            self._rounds.hurry(timeout_s)
            self.step(idle_s=FLUSH_POLL_S)
        except (GroupError, InternalError) as error:
            return error
        return None

    def run_until_decided(self, proposal: "Future[None]") -> bool:
        """Run rounds until a store is attached, detached or refused, for an engine that stands still.

        Every rank calls it at the same point, after it has been told. Returns False where that took
        longer than `timeouts.open_s` in agreed time, twice.
        """
        return self.step_until(proposal.done, 2 * self.config.timeouts.open_s)

    def begin_loads(self) -> None:
        """Begin the copies to the device: before the forward pass of this step is launched."""
        self._executor.begin_copies(Direction.TO_DEVICE)

    def begin_backups(self) -> None:
        """Begin the copies to the host: after the forward pass of this step was launched."""
        self._executor.begin_copies(Direction.TO_HOST)

    def flush(self) -> Flushed:
        """See `RankCache.flush`; copies that still wait for the engine are begun."""
        self.begin_loads()
        self.begin_backups()
        return super().flush()

    def _runs(self, pages: PagesByPool) -> list[PageRun]:
        """Return the pages that are lent by component."""
        if not isinstance(pages, Mapping):
            pages = {KV_POOL: pages}
        pools = [each.pool for each in self._replica.prefixes.components]
        unknown = set(pages) - set(pools)
        if unknown:
            raise UsageError(f"there is no pool {unknown.pop()!r}; known: {', '.join(pools)}")
        return [_run(pages.get(pool, ())) for pool in pools]


def _run(pages: Pages) -> PageRun:
    """Return pages as the replica has them; cheap for buffers of int32, slower for Python lists."""
    try:
        view = None if isinstance(pages, list | tuple | range) else memoryview(pages)  # type: ignore[arg-type]
        run = page_run()
        if view is not None and view.format == "i" and view.c_contiguous and view.ndim == 1:
            run.frombytes(view.cast("B"))
        else:
            run = page_run(pages)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"device pages must be page numbers: {error}") from error
    if run and np.frombuffer(run, dtype=np.int32).min() < NO_PAGE:
        raise UsageError(f"device pages must be page numbers, or {NO_PAGE} where there is none")
    return run


def _start(device_tokens: int) -> int:
    """Return how many tokens the engine has itself."""
    start = as_count(device_tokens, "device_tokens")
    if start < 0:
        raise UsageError(f"device_tokens is {start}, must be 0 or more")
    return start

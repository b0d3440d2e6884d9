"""Cache in host memory and storage for an engine that owns the device pages, such as vLLM.

Each call names, in every pool of the model, the engine's device pages to copy. Page numbers may differ
between ranks. The engine must not reuse these pages until the copies have finished on every rank.

    admission:  prefetch -> begin_step ... until prefetch_done -> match_host -> load ... until READY
    compute:    admit, and back_up after each chunk that completes pages
    preemption: fence, before anything overwrites the request's pages
    finish:     release; if it returns False, the pages are free once `collect_freed` names the request

In each engine step, even if nothing is in flight, the engine calls `begin_step`, makes its decisions
and commands, and calls `end_step`. It calls `begin_loads` before it launches the forward pass, and
`begin_backups` after the launch.
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
from ..protocol.renamed import former_name
from ..protocol.timed_events import Timeline
from ..replica.core.pages import PageRun, page_run
from ..replica.operations.lent import NO_PAGE
from ..replica.operations.requests import LoadState
from ..replica.tree.node import HOST
from ..replica.tree.tokens import Tokens, as_token_bytes
from .member.arguments import as_count, as_seconds, require_text
from .member.group_rank import FLUSH_POLL_S, Flushed, Listener
from .member.rank_cache import RankCache

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .opening import Lent


Pages: TypeAlias = "Sequence[int] | npt.NDArray[np.int32]"
PagesByPool: TypeAlias = "Pages | Mapping[str, Pages]"
"""Engine-owned device pages: a sequence for the full-attention pool alone, or a mapping by pool name.

For the KV of full attention or of a sliding window: page numbers in token order, with -1 for pages that
the engine has freed (left of a sliding window). For a recurrent state: the slot with the state after
the tokens.
"""


class HostCache(RankCache):
    """One rank's cache in host memory and storage, below the engine's own device pages.

    The engine starts the copies by `begin_loads` and `begin_backups`, because only the engine knows
    which work is already queued on its device stream.
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
        """Open this rank's cache for the engine's `pages`, given by pool name.

        Full attention's pages may be given without a mapping. The other arguments and the errors are
        those of `Cache.open`.
        """
        # Import these modules only here, because they import torch, which takes seconds and which
        # simulation does not need.
        from .control.control_opening import controlled  # noqa: PLC0415
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

    def match_host(
        self, request: str, tokens: Tokens, namespace: str = "", *, device_tokens: int = 0
    ) -> int:
        """Return how many tokens `load` can load beyond the engine's own `device_tokens`.

        The number is a multiple of the page size. It is 0 if a load of the request has failed, so that
        the engine computes the tokens. It is valid until the next call that may allocate host pages:
        `back_up` or `begin_step`.
        """
        self._require_group()
        require_text(namespace)
        data, count = as_token_bytes(tokens), _start(device_tokens)
        return self._follow(self._replica.match_host(request, namespace, data, count))

    def load(
        self, request: str, tokens: Tokens, device_pages: PagesByPool, *, device_tokens: int = 0
    ) -> None:
        """Load the `tokens` matched by the preceding `match_host`, starting at `device_tokens`.

        `device_pages` are the destination pages, in order. They belong to the load until `load_state`
        is READY or FAILED. In a sliding window's pool only pages from `needed_from` on are filled.
        Earlier pages keep their old content, so `back_up` and `retract` skip the earlier pages until a
        `fence` ends the request's use of its device pages. The request's prefetch stops, and its pages
        that have landed remain cached.
        """
        self._require_group()
        data, start = as_token_bytes(tokens), _start(device_tokens)
        self._follow(self._replica.load(request, data, start, self._runs(device_pages)))

    def admit(
        self, request: str, tokens: Tokens, namespace: str = "", *, device_tokens: int = 0
    ) -> None:
        """Count in the statistics that the engine starts to compute a request. Call once per start.

        `tokens` are the request's tokens that may come from the cache. The first `device_tokens` of
        them are on the device; this number includes the tokens that `load` has loaded.
        """
        self._require_group()
        require_text(namespace)
        data, count = as_token_bytes(tokens), _start(device_tokens)
        self._follow(self._replica.admit(request, namespace, data, count))

    def needed_from(self, tokens: int) -> dict[str, int]:
        """Return, by pool, the position from which pages are needed to restore a prefix.

        `tokens` is the length of the prefix. Positions count tokens.
        """
        unit, components = self.config.layout.page_tokens, self._replica.prefixes.components
        whole = as_count(tokens) // unit
        return {each.pool: each.needed_from(whole) * unit for each in components}

    def free_host_pages(self) -> int:
        """Return the number of free full-attention host pages; the same on every rank."""
        return self._replica.prefixes.allocator.pools[HOST][0].free

    def fetched(self, request: str) -> tuple[int, int]:
        """Return (first, end), the range of tokens that the request's prefetch read from storage.

        Some of the range's pages may have been evicted after the prefetch. Returns (0, 0) if the
        request is admitted or unknown.
        """
        unit, known = self.config.layout.page_tokens, self._replica.requests.get(request)
        first, last = (0, 0) if known is None else known.fetched
        return first * unit, last * unit

    def refused(self, request: str) -> bool:
        """Return whether some rank could not reach the source group of the request's last prefetch."""
        known = self._replica.requests.get(request)
        return known is not None and known.refused

    def load_state(self, request: str) -> LoadState:
        """Return the state of the request's load, agreed by all ranks.

        FAILED is final: the destination pages have no valid content, and `match_host` returns 0 for the
        request. In states READY and FAILED no copy touches the pages. For states after a retraction see
        `retract`.
        """
        return self._replica.load_state(request)

    def back_up(
        self, request: str, tokens: Tokens, device_pages: PagesByPool, namespace: str = ""
    ) -> int:
        """Copy the pages of `tokens` that are not in host memory yet to host memory, then to storage.

        `device_pages` are the pages of the whole prefix in token order. Their KV must be written by
        work enqueued before `begin_backups`. The engine must not overwrite them until `collect_freed`
        names the request after its `release`, or until a `fence`. Pages of a namespace that begins with
        NUL are never persisted, because they are valid only in this run of the engine. Returns the
        number of tokens in host memory or being copied; less than `tokens` if host memory has no room.
        """
        self._require_group()
        require_text(namespace)
        data, runs = as_token_bytes(tokens), self._runs(device_pages)
        return self._follow(self._replica.back_up(request, namespace, data, runs))

    def retract(self, request: str, tokens: Tokens, device_pages: PagesByPool) -> bool:
        """Copy all state of a request to host memory, so that its device pages can be reused.

        `tokens` are all tokens computed so far. `device_pages` hold their KV, including a partial last
        page and the working state. `load_state` is SAVING until every rank has copied everything, then
        SAVED. It is FAILED if a copy failed; the request then continues on its device pages. Even after
        SAVED or FAILED a copy that hangs may be in flight: if `has_copies_in_flight` is true, call
        `wait_for_copies` before overwriting the pages. Returns False, and the request continues, if
        host memory has no room.
        """
        self._require_group()
        data, runs = as_token_bytes(tokens), self._runs(device_pages)
        return self._follow(self._replica.retract_lent(request, data, runs))

    def resume(
        self, request: str, device_pages: PagesByPool, *, device_tokens: int = 0
    ) -> Wait | None:
        """Load a SAVED request back to device pages, starting at `device_tokens`.

        In a sliding window's pool the load fills the partial last page, and those pages from
        `needed_from` on that were passed to `retract`. It does not fill other pages, or pages freed
        after `retract`, so `device_pages` may have -1 in their places. The pages belong to the load
        until `load_state` is READY. Checksums are verified; FAILED means that the request must be
        recomputed. `Wait.LOST` means that pages shared with other requests were lost, and the request
        counts as never admitted.
        """
        self._require_group()
        runs, start = self._runs(device_pages), _start(device_tokens)
        return self._follow(self._replica.resume_lent(request, runs, start))

    def fence(self, request: str) -> None:
        """Block until a preempted request's device pages may be overwritten.

        If a backup still reads the pages after `timeouts.fence_s`, the backup fails. After the call the
        request may prefetch and load again. For a released request the call waits for this rank's
        copies only. Returns at once for an unknown request.
        """
        self._require_group()
        if self._replica.knows(request):
            self._follow(self._replica.fence(request))
        else:
            self.wait_for_copies(request)

    def wait_for_copies(self, request: str | None = None) -> None:
        """Block until no copy of this rank touches the request's device pages (None: any device page).

        For an engine that frees or unmaps pages before its next step. Not a command: each rank may call
        it at any time, and the replica does not change. Copies that outlast `timeouts.fence_s` fail.
        """
        copies = self._replica.touching(request)
        if copies:
            self._executor.carry_out([Fence(copies, self.config.timeouts.fence_s)])

    def release(self, request: str) -> bool:
        """Forget a request; return whether its device pages are free on every rank.

        If False, the pages are free once `collect_freed` returns the request's name. The name must not
        be used again before that. The pages of an unknown request are free.
        """
        if not self._replica.knows(request):
            return not self.has_copies_in_flight(request)
        freed = self._follow(self._replica.release(request))
        self._observer.released(request)
        return freed

    def has_copies_in_flight(self, request: str) -> bool:
        """Return whether copies on some rank may still touch the request's device pages."""
        return bool(self._replica.touching(request))

    def waits_for_host_pages(self, request: str) -> bool:
        """Return whether the request's last `back_up` was incomplete.

        A backup is incomplete if host memory has no room or a copy failed. Once `backup_is_due` returns
        True, call `back_up` again with the same tokens and their current device pages. A prompt longer
        than host memory takes several calls. `release` and `fence` cancel the rest of the backup; the
        metrics then count the pages that were not backed up.
        """
        return self._replica.waits_for_host_pages(request)

    def backup_is_due(self, request: str) -> bool:
        """Return whether to retry an incomplete backup now.

        A retry may succeed once some operation has finished since the last `back_up`, or once a pause
        of writes to the store has ended.
        """
        return self._replica.backup_is_due(request)

    def awaits_copies(self, request: str) -> bool:
        """Return whether a copy of the request's device pages is in flight and not quarantined."""
        return bool(self._replica.touching(request, awaited=True))

    def copies(self, request: str) -> tuple[int, ...]:
        """Return the ids of copies that may touch the request's device pages on some rank.

        The newest copy is last. Ids are never reused. Copies ended by a `fence` are not included.
        """
        return self._replica.touching(request)

    @property
    def pending_frees(self) -> bool:
        """Whether `collect_freed` returns names now, or will once copies in flight have ended."""
        return bool(self._freed) or self._replica.waits_for_frees

    def finish_copies(self) -> bool:
        """Run rounds until the device pages of all released requests are free; for an idle engine.

        Every rank calls it at the same point. Returns False if some pages are not free after `copy_s` +
        `quiesce_s` of agreed time. Pages of a copy that never finishes are never freed.
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
        """Compare this rank's history of commands with the other ranks'; for an engine that has failed.

        Runs one round. The round ends the group if the ranks' histories differ, or if a rank does not
        answer within `timeout_s`; then `compare` returns the error, which names the ranks. Returns None
        if all ranks agree.
        """
        timeout_s = as_seconds(timeout_s, "timeout_s")
        try:
            self._rounds.shorten_timeout(timeout_s)
            self.step(idle_s=FLUSH_POLL_S)
        except (GroupError, InternalError) as error:
            return error
        return None

    def run_until_decided(self, proposal: "Future[None]") -> bool:
        """Run rounds until a staged attach or detach of a store is decided; for an idle engine.

        Every rank calls this at the same point, after the rank has staged the proposal. Returns False
        if nothing is decided after two times `timeouts.open_s` of agreed time.
        """
        return self.step_until(proposal.done, 2 * self.config.timeouts.open_s)

    def begin_loads(self) -> None:
        """Start the copies to the device. Call before launching this step's forward pass."""
        self._executor.begin_copies(Direction.TO_DEVICE)

    def begin_backups(self) -> None:
        """Start the copies to the host. Call after launching this step's forward pass."""
        self._executor.begin_copies(Direction.TO_HOST)

    def flush(self) -> Flushed:
        """Start all copies not started yet, then flush as `RankCache.flush` does."""
        self.begin_loads()
        self.begin_backups()
        return super().flush()

    def _runs(self, pages: PagesByPool) -> list[PageRun]:
        """Return the engine's device pages as one list of page numbers for each component."""
        if not isinstance(pages, Mapping):
            pages = {KV_POOL: pages}
        pools = [each.pool for each in self._replica.prefixes.components]
        unknown = set(pages) - set(pools)
        if unknown:
            raise UsageError(f"there is no pool {unknown.pop()!r}; known: {', '.join(pools)}")
        return [_run(pages.get(pool, ())) for pool in pools]

    hit = former_name("HostCache.hit", match_host)
    lends = former_name("HostCache.lends", has_copies_in_flight)
    keep_off = former_name("HostCache.keep_off", wait_for_copies)
    awaits_room = former_name("HostCache.awaits_room", waits_for_host_pages)


def _run(pages: Pages) -> PageRun:
    """Convert page numbers to an int32 array. Fast for int32 buffers, slower for Python lists."""
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
    """Check and return the number of tokens that the engine already has on the device."""
    start = as_count(device_tokens, "device_tokens")
    if start < 0:
        raise UsageError(f"device_tokens is {start}, must be 0 or more")
    return start

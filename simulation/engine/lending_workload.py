"""A simulated engine that owns its device pages and passes them to a `HostCache` for copies.

The engine works like vLLM's scheduler. Between the halves of a step it prefetches, queries hits, loads,
computes in chunks, backs up whole pages, preempts and releases. Its forward pass runs after the loads
of the step have started, and before its backups start. The pages of a preempted request may be given to
other requests before the cache fences these pages, but are overwritten only after the fence.
"""

from collections.abc import Sequence

from ...ranks.group.host_cache import HostCache
from ...ranks.group.member.rank_cache import RankCache
from ...ranks.replica.operations.requests import LoadState
from ...ranks.replica.tree.node import HOST
from ..checkers.checkers import check_loads
from ..rank.memory import SymbolicMemory
from ..world.faults import Mishap
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest, EngineStage
from ..world.violated import Violated, not_to_be_had
from ..world.world import IDLE_S
from .engine import PATIENCE, SimulatedEngine
from .engine_pools import EnginePools, Held
from .lending_backups import LendingBackups
from .lending_loads import LendingLoads
from .lending_misuse import misuse
from .lending_retracts import LendingRetracts
from .sampling_apart import Bringing, host_cache_commands

_COMPUTES = (EngineStage.COMPUTING, EngineStage.ANSWERING)


class LendingWorkload(SimulatedEngine[HostCache]):
    """A simulated engine that owns its device pages."""

    kind = HostCache

    def begin_epoch(self, caches: Sequence[RankCache], memories: Sequence[SymbolicMemory]) -> None:
        super().begin_epoch(caches, memories)
        self._pools = EnginePools(self._model, memories, self._page, self._random)
        self._model.begin_epoch(self._pools.pools)
        unit, random, coverage = self._page, self._random, self._coverage
        parts = (self._caches, self._pools, unit, random, coverage, self._ask)
        self._loads, self._backups = LendingLoads(*parts), LendingBackups(*parts)
        self._retracts = LendingRetracts(*parts)
        self._leaving: dict[str, Held] = {}
        """By name of a released request: its device pages, which copies may still access."""
        self._generation, self._windows = 0, self._world.stream("windows")
        self._holds_copies = False
        """Whether the cache has ordered a copy in this step that the engine has not started yet."""
        # Make resets rare in a pair of groups, because requests cannot be handed over between groups
        # with different weights.
        rates = (0.0, 0.0, 0.0, 0.005) if self._world.role else (0.0, 0.0, 0.01, 0.06)
        self._resets = self._random.choice(rates)
        self._impatience = self._random.choice((0.0, 0.1, 0.5))

    def decide(self, *, active: bool) -> float:
        random = self._random
        self._collect_freed()
        if not active:
            return 0.0
        if random.random() < self._resets:
            self._reset()
        self._control()
        if self._is_due():
            self._arrive()
            new, keeps_windows = self.requests[-1], self._windows.random() < 0.3
            new.generation, new.keeps_windows = self._generation, keeps_windows
        for request in list(self.requests):
            if self._faults.strikes(Mishap.ABORTED_REQUEST):
                self._abort(request)
            elif random.random() < 0.9 and not request.fence_due:
                self._act(request)
        for request in self.requests:
            self._fence_if_due(request)
        self.requests = [each for each in self.requests if each.stage is not EngineStage.GONE]
        if self.requests and random.random() < 0.05:
            request = random.choice(self.requests)
            misuse(self._caches, request, list(self._leaving), random)
            self._coverage["misuse refused"] += 1
        busy = self._holds_copies or any(each.planned for each in self.requests)
        return 0.0 if busy or random.random() >= 0.5 else IDLE_S

    def forward(self) -> None:
        self._pools.overwrite()
        for cache in self._caches:
            cache.begin_loads()
        for request in self.requests:
            if request.planned:
                self._model.compute(request, request.planned)
                request.planned = 0
                self._pools.publish(request)
                if request.stage is EngineStage.COMPUTING:
                    request.stage = self._stage(request)
            self._pools.copy_state(request)
        for cache in self._caches:
            cache.begin_backups()
        self._holds_copies = False

    def drain(self) -> None:
        for request in self.requests:
            self._abort(request)
        self.requests.clear()

    def check_pages(self) -> None:
        self._model.check_expected(self.requests)
        self._pools.check_free()
        check_loads(self._caches[0])

    def probe(self) -> bool:
        """Raise unless every device page is free, and also every host page once the cache is reset."""
        for name, pool in self._pools.pools.items():
            if self._leaving or pool.free != pool.count:
                left = f"{pool.free} while {list(self._leaving)} are leaving"
                raise not_to_be_had(f"{pool.count} device {name} pages", left)
        self._ask_all("reset", lambda c: c.reset())
        prefixes = self._caches[0].inspection.prefixes
        nodes, roots = prefixes.tree.node_count, len(prefixes.tree.roots)
        for host in prefixes.allocator.pools[HOST]:
            if host.free != host.capacity or nodes or roots:
                left = f"{host.free} free after a reset, and a tree of {nodes} nodes, {roots} roots"
                raise not_to_be_had(f"{host.capacity} {host.name} pages", left)
        return True

    def _commands_with_tokens(self, namespace: str, prompt: bytes) -> list[Bringing[HostCache]]:
        return host_cache_commands(self.requests, namespace, prompt, self._pools)

    def _act(self, request: EngineRequest) -> None:
        if request.stage in (*_COMPUTES, EngineStage.PUBLISHED):
            self._backups.let_go(request)
        match request.stage:
            case EngineStage.ARRIVED:
                self._prefetch(request)
            case EngineStage.PREFETCHING:
                done = self._ask(request, "prefetch_done", lambda c: c.prefetch_done(request.name))
                if self._random.random() < (0.4 if done else self._impatience):
                    request.stage = EngineStage.WAITING
            case EngineStage.WAITING:
                self._admit(request)
            case EngineStage.LOADING:
                self._look_at_load(request)
            case EngineStage.COMPUTING:
                chunk = self._random.randint(1, 6 * self._page)
                self._plan(request, min(request.prompt, request.computed + chunk))
                if request.stage in _COMPUTES and self._random.random() < 0.6:
                    self._back_up(request)
            case EngineStage.ANSWERING:
                self._answer(request)
            case EngineStage.PUBLISHED:
                self._leave(request)
            case EngineStage.RETRACTED:
                self._look_at_retract(request)
            case EngineStage.GONE:
                pass
        if request.admitted and request.stage in (*_COMPUTES, EngineStage.RETRACTED):
            length = request.computed or request.bringing
            served = self._serves.serve(self._caches, request, length)
            self._coverage["served to peers"] += served
        if request.stage in _COMPUTES and self._random.random() < 0.04:
            self._retract(request)
        if request.stage in _COMPUTES and self._random.random() < 0.015:
            self._preempt(request)

    def _admit(self, request: EngineRequest) -> None:
        first, last = self._loads.choose(request)
        computes = first == last
        if computes:
            for each in self.requests:
                # The admitted request may get pages of requests that were preempted in this step, and
                # writes to them at once. Fence the preempted requests first.
                self._fence_if_due(each)
        forks = computes and first > 0
        if not self._pools.begin(request, first, last * self._page, forks=forks):
            self._refused(request)
            return
        request.computed = first * self._page
        self._coverage["tokens from device"] += request.computed
        if computes:
            self._model.check_tables(request)
            self._loads.admit(request)
            request.stage = EngineStage.COMPUTING
        else:
            self._loads.load(request, first, last)
            self._holds_copies = True

    def _look_at_load(self, request: EngineRequest) -> None:
        state = self._loads.look(request)
        if state is LoadState.LOADING:
            return
        pools, resumes, request.resumes = self._pools, request.resumes, False
        if state is LoadState.READY:
            self._loads.admit(request)
            request.stage = self._stage(request)
            self._model.check_tables(request)
            pools.publish(request)
            return
        self._begin_anew(request, max(request.prompt, request.bringing if resumes else 0))
        request.stage, request.unfilled = EngineStage.COMPUTING, {}
        if not pools.can_compute(request) or self._random.random() < 0.5:
            # Sometimes restart the request without pages, like some engines do; other requests may get
            # its pages at once.
            pools.give_back(pools.take_all(request), overwrite=self._random.random() < 0.5)
            request.computed = 0
            request.stage = EngineStage.WAITING

    def _stage(self, request: EngineRequest) -> EngineStage:
        return (
            EngineStage.ANSWERING if request.computed >= request.prompt else EngineStage.COMPUTING
        )

    def _plan(self, request: EngineRequest, length: int) -> int:
        """Plan to compute up to `length` tokens, or as many as free pages allow; return the number."""
        if request.lends_state:
            self._coverage["waits for a backup of its state"] += 1
            return request.computed
        length = self._pools.extend(request, length)
        if length > request.computed:
            request.refused = 0
            request.planned = length
        else:
            self._refused(request)
        return length

    def _back_up(self, request: EngineRequest) -> None:
        self._holds_copies |= self._backups.back_up(request, self._generation)

    def _answer(self, request: EngineRequest) -> None:
        known = len(request.tokens) // TOKEN_BYTES
        missing = request.prompt + request.answer - known
        if missing <= 0 and request.computed == known:
            self._back_up(request)
            self._prompts.remember(request.namespace, request.tokens)
            request.stage = EngineStage.PUBLISHED
            return
        if missing > 0:
            request.tokens += self._prompts.answer(min(missing, self._page + 1))
        length = self._plan(request, len(request.tokens) // TOKEN_BYTES)
        if request.stage is EngineStage.ANSWERING:
            # Drop decoded tokens for which no page was free. No client has received them, and they are
            # sampled again.
            request.tokens = request.head(max(request.prompt, request.computed, length))
            if self._random.random() < 0.3:
                self._back_up(request)

    def _refused(self, request: EngineRequest) -> None:
        """React to a lack of free pages: wait, preempt or retract a request, or abort `request`."""
        request.refused += 1
        if request.refused > PATIENCE:
            self._coverage["given up"] += 1
            self._abort(request)
        elif self._random.random() < 0.3:
            computing = [each for each in self.requests if each.stage in _COMPUTES and each.table]
            if computing:
                evict = self._preempt if self._random.random() < 0.5 else self._retract
                evict(computing[-1])

    def _retract(self, request: EngineRequest) -> None:
        self._holds_copies |= self._retracts.retract(request)

    def _look_at_retract(self, request: EngineRequest) -> None:
        became = self._retracts.look(request)
        if became == "resumed":
            self._holds_copies = True
        elif became == "failed":
            request.failed = True
            request.stage = self._stage(request)
            self._model.check_tables(request)
        elif became == "lost":
            self._begin_again(request)
        elif request.refused > 2 * PATIENCE:
            self._abort(request)

    def _begin_again(self, request: EngineRequest) -> None:
        """Restart a request from its first token, because its saved pages were lost."""
        self._begin_anew(request, max(request.prompt, request.bringing))
        request.computed, request.stage = 0, EngineStage.ARRIVED
        request.admitted = request.failed = False
        request.generation = self._generation

    def _preempt(self, request: EngineRequest) -> None:
        """Preempt a request, so that others get its pages at once, and restart it.

        The tokens that the request has decoded may become part of its prompt.
        """
        self._coverage["preempted"] += 1
        if self._random.random() < 0.3:
            self._back_up(request)
        begins_anew = self._random.random() < 0.5
        self._begin_anew(
            request, request.prompt if begins_anew else max(request.prompt, request.computed)
        )
        request.computed = request.planned = 0
        request.stage = EngineStage.ARRIVED
        request.fence_due = True
        held, fenced = self._pools.take_all(request), self._random.random() < 0.5
        if fenced:
            self._fence_if_due(request)
        self._pools.give_back(held, overwrite=fenced and self._random.random() < 0.5)

    def _begin_anew(self, request: EngineRequest, known: int) -> None:
        """Restart a request: its first `known` tokens become its prompt, to be computed again."""
        request.tokens = request.head(known)
        request.answer = max(0, request.answer - (known - request.prompt))
        request.prompt, request.refused = known, 0

    def _fence_if_due(self, request: EngineRequest) -> None:
        if request.fence_due:
            request.fence_due = request.admitted = request.unknown = False
            request.generation = self._generation
            self._ask(request, "fence", lambda c: c.fence(request.name))
            self._coverage["fences"] += 1

    def _abort(self, request: EngineRequest) -> None:
        self._coverage[f"aborted when {request.stage.name.lower()}"] += 1
        self._fence_if_due(request)
        self._release(request)

    def _leave(self, request: EngineRequest) -> None:
        """Release a finished request; if another group may read it, free only its device pages."""
        if not self._stays(request):
            self._release(request)
        elif not self._ask(request, "lends", lambda c: c.has_copies_in_flight(request.name)):
            held = self._pools.take_all(request)
            self._pools.give_back(held, overwrite=self._random.random() < 0.5)

    def _release(self, request: EngineRequest) -> None:
        request.planned = 0
        request.stage = EngineStage.GONE
        held = self._pools.take_all(request)
        if self._ask(request, "release", lambda c: c.release(request.name)):
            self._freed(request.name, held)
        else:
            self._coverage["delayed frees"] += 1
            self._leaving[request.name] = held

    def _collect_freed(self) -> None:
        for name in self._ask_all("collect_freed", lambda c: c.collect_freed()):
            if name not in self._leaving:
                raise Violated(f"collect_freed names {name}, which was not released")
            self._freed(name, self._leaving.pop(name))
        # If `pending_frees` is true, a released request must be waiting for its copies. Quarantined
        # copies do not count, because they may never end.
        if self._ask_all("pending_frees", lambda c: c.pending_frees) and not self._leaving:
            raise Violated("pending_frees is true, but no released request is pending")

    def _freed(self, name: str, held: Held) -> None:
        self._pools.give_back(held, overwrite=self._random.random() < 0.5)
        self._old_names.append(name)

    def _reset(self) -> None:
        """Reset the cache; raise if a request that waits for admission still has a hit afterwards."""
        if self._random.random() < 0.5:
            for request in self.requests:
                if request.stage in _COMPUTES:
                    self._preempt(request)
        self._generation += 1
        # Put the generation (number of resets) into the weights' name: page contents differ between
        # generations, so page keys must differ, too.
        version = f"weights {self._generation}" if self._generation % 3 else None
        self._ask_all("reset", lambda c: c.reset(version))
        self._coverage["resets"] += 1
        self._pools.forget_cached()
        for request in self.requests:
            if not request.admitted and not request.computed:
                request.generation = self._generation
                is_queued = request.stage in (EngineStage.PREFETCHING, EngineStage.WAITING)
                if is_queued and (hit := self._loads.hit(request, 0)):
                    raise Violated(f"request {request.name} has a hit of {hit} right after a reset")
            elif not request.admitted:
                request.unknown = True

"""An engine with device pages of its own, which it lends to a `HostCache` for copies.

It works as vLLM's scheduler does. Between the halves of a step it decides: it prefetches, asks what
can be brought, loads, computes in chunks, backs up what is whole, preempts, lets go. Then it launches
its forward pass, between the copies that must precede it and those that must follow. Pages of a
preempted request are handed to others before their fence, and overwritten after it.
"""

from collections.abc import Sequence

from ..ranks.host_cache import HostCache
from ..ranks.orders import KV_POOL
from ..ranks.rank_cache import RankCache
from ..ranks.replica.serving import LoadState
from ..ranks.replica.tree import HOST
from .checkers import Violated, check_covered, check_loads
from .device_pages import DevicePages
from .engine import PATIENCE, Engine
from .engine_request import EngineRequest, Stage
from .faults import Fault
from .lending_misuse import misuse
from .memory import Memory
from .prompts import TOKEN_BYTES
from .sampling_apart import Bringing, host_cache_commands
from .world import IDLE_S

_COMPUTES = (Stage.COMPUTING, Stage.ANSWERING)


class LendingWorkload(Engine[HostCache]):
    """An engine that owns its device pages."""

    kind = HostCache

    def begin_epoch(self, caches: Sequence[RankCache], memories: Sequence[Memory]) -> None:
        """See `Engine`."""
        super().begin_epoch(caches, memories)
        self._pages = DevicePages([each.device[KV_POOL] for each in memories], self._random)
        self._leaving: dict[str, list[int]] = {}
        """Requests that were released, and their pages, which are not free yet."""
        self._generation = 0
        self._holds_copies = False
        """Copies of this step wait for its forward pass."""
        self._resets = self._random.choice((0.0, 0.0, 0.01, 0.06))
        self._impatience = self._random.choice((0.0, 0.1, 0.5))

    def decide(self, *, active: bool) -> float:
        """See `Engine`."""
        random = self._random
        self._take_freed()
        if not active:
            return 0.0
        if random.random() < self._resets:
            self._reset()
        room = len(self.requests) < self._world.requests_max
        if room and random.random() < self._world.arrival_rate:
            self._arrive()
            self.requests[-1].generation = self._generation
        for request in list(self.requests):
            if self._faults.strikes(Fault.ABORTED_REQUEST):
                self._abort(request)
            elif random.random() < 0.9 and not request.fence_due:
                self._act(request)
        for request in self.requests:
            self._fence_if_due(request)
        self.requests = [each for each in self.requests if each.stage is not Stage.GONE]
        if self.requests and random.random() < 0.05:
            request = random.choice(self.requests)
            misuse(self._caches, request, list(self._leaving), random)
            self._coverage["misuse refused"] += 1
        busy = self._holds_copies or any(each.planned for each in self.requests)
        return 0.0 if busy or random.random() >= 0.5 else IDLE_S

    def forward(self) -> None:
        """See `Engine`."""
        for cache in self._caches:
            cache.begin_loads()
        for request in self.requests:
            if request.planned:
                self._compute_planned(request)
        for cache in self._caches:
            cache.begin_backups()
        self._holds_copies = False

    def drain(self) -> None:
        """See `Engine`."""
        for request in self.requests:
            self._abort(request)
        self.requests.clear()

    def check_pages(self) -> None:
        """See `Engine`."""
        self._pages.check(self._model.expected(self.requests)[KV_POOL])
        check_loads(self._caches[0])

    def probe(self) -> bool:
        """Every device page is free, and a reset leaves every host page free."""
        free, count = self._pages.free, self._pages.count
        if self._leaving or free != count:
            raise Violated(
                f"{free} of the engine's {count} device pages are free at rest, and"
                f" {list(self._leaving)} are still leaving"
            )
        self._ask_all("reset", lambda c: c.reset())
        state = self._caches[0].replica.state
        pool, nodes, roots = state.pools[HOST][0], state.tree.node_count, len(state.tree.roots)
        if pool.free != pool.capacity or nodes or roots:
            raise Violated(
                f"{pool.free} of {pool.capacity} host pages are free after a reset at rest, and the "
                f"tree has {nodes} nodes and {roots} roots"
            )
        return True

    def _commands_with_tokens(self, namespace: str, prompt: bytes) -> list[Bringing[HostCache]]:
        return host_cache_commands(self.requests, namespace, prompt, self._pages)

    def _act(self, request: EngineRequest) -> None:
        match request.stage:
            case Stage.ARRIVED:
                self._prefetch(request)
            case Stage.PREFETCHING:
                done = self._ask(request, "prefetch_done", lambda c: c.prefetch_done(request.name))
                if self._random.random() < (0.4 if done else self._impatience):
                    request.stage = Stage.WAITING
            case Stage.WAITING:
                self._admit(request)
            case Stage.LOADING:
                self._look_at_load(request)
            case Stage.COMPUTING:
                chunk = self._random.randint(1, 6 * self._page)
                self._plan(request, min(request.prompt, request.computed + chunk))
                if request.stage in _COMPUTES and self._random.random() < 0.6:
                    self._back_up(request)
            case Stage.ANSWERING:
                self._answer(request)
            case Stage.PUBLISHED:
                self._release(request)
            case Stage.RETRACTED | Stage.GONE:
                pass
        if request.stage in _COMPUTES and self._random.random() < 0.015:
            self._preempt(request)

    # Before a request computes.

    def _prefetch(self, request: EngineRequest) -> None:
        request.stage = Stage.WAITING
        if self._random.random() < 0.2:
            return
        tokens = request.head(request.prompt - 1)
        begun = self._ask(
            request, "prefetch", lambda c: c.prefetch(request.name, tokens, request.namespace)
        )
        self._coverage["prefetch begun" if begun else "prefetch not begun"] += 1
        if begun:
            request.stage = Stage.PREFETCHING

    def _hit(self, request: EngineRequest, device_tokens: int) -> int:
        """Ask what can be brought, and compare it with what the cache says that it has."""
        tokens = request.head(request.prompt - 1)
        hit = self._ask(
            request,
            "hit",
            lambda c: c.hit(request.name, tokens, request.namespace, device_tokens=device_tokens),
        )
        found = self._ask(request, "match", lambda c: c.match(tokens, request.namespace))
        expected = 0 if request.failed else max(0, found.host_tokens - device_tokens)
        if hit != expected or hit % self._page or device_tokens + hit > request.prompt - 1:
            raise Violated(
                f"request {request.name} has {device_tokens} tokens on the device, match finds "
                f"{found.host_tokens} on the host, and hit says {hit}, where it "
                f"{'failed to load before' if request.failed else 'never failed to load'}"
            )
        return hit

    def _admit(self, request: EngineRequest) -> None:
        whole = (request.prompt - 1) // self._page
        table: list[int] = []
        if self._random.random() < 0.7:
            table = self._pages.share(self._model.full_pages(request, whole))
        on_device = len(table)
        asks = self._random.random() < 0.95
        hit = self._hit(request, on_device * self._page) // self._page if asks else 0
        if hit and self._random.random() < 0.15:
            hit = self._random.randint(0, hit)
        own = self._pages.allocate(hit)
        if own is None:
            self._pages.give_back(table)
            self._refused(request)
            return
        request.table = table + own
        request.computed = on_device * self._page
        self._coverage["tokens from device"] += request.computed
        self._check_table(request, request.computed)
        if not hit:
            request.stage = Stage.COMPUTING
            return
        end = (on_device + hit) * self._page
        self._ask(
            request,
            "load",
            lambda c: c.load(
                request.name,
                request.head(end),
                self._pages.on(c.rank, own),
                device_tokens=request.computed,
            ),
        )
        self._coverage["loads"] += 1
        self._holds_copies = request.admitted = True
        request.bringing = end
        request.stage = Stage.LOADING

    def _look_at_load(self, request: EngineRequest) -> None:
        state = self._ask(request, "load_state", lambda c: c.load_state(request.name))
        if state is LoadState.LOADING:
            return
        first = request.computed // self._page
        who = f"load of request {request.name}, which is {state.name}"
        self._pages.require_untouched(who, request.table[first:])
        if state is LoadState.READY:
            self._coverage["tokens from host"] += request.bringing - request.computed
            request.computed = request.bringing
            request.stage = Stage.COMPUTING
            self._check_table(request, request.computed)
            self._publish(request)
            return
        self._coverage["loads failed"] += 1
        request.failed = True
        self._hit(request, 0)
        request.stage = Stage.COMPUTING
        if self._random.random() < 0.5:
            # Another engine would begin again from nothing, and others may have the pages at once.
            self._give_back_table(request)
            request.computed = 0
            request.stage = Stage.WAITING

    # While it computes.

    def _plan(self, request: EngineRequest, length: int) -> int:
        """Plan to compute up to `length` tokens, as far as there is room; return how far that is."""
        missing = -(-length // self._page) - len(request.table)
        own = self._pages.allocate(max(0, missing))
        if own is None:
            length = min(length, len(request.table) * self._page)
            self._refused(request)
        else:
            request.table += own
            request.refused = 0
        if length > request.computed and request.stage in _COMPUTES:
            request.planned = length
        return length

    def _compute_planned(self, request: EngineRequest) -> None:
        length = request.planned
        for index in range(request.computed // self._page, -(-length // self._page)):
            before = self._model.content(request, index, request.computed)
            after = self._model.content(request, index, length)
            who = f"request {request.name}"
            self._pages.compute(request.table[index], before, after, who)
        request.computed, request.planned = length, 0
        self._publish(request)
        if request.stage is Stage.COMPUTING and length >= request.prompt:
            request.stage = Stage.ANSWERING

    def _publish(self, request: EngineRequest) -> None:
        whole = request.computed // self._page
        self._pages.publish(request.table[:whole], self._model.full_pages(request, whole))

    def _check_table(self, request: EngineRequest, length: int) -> None:
        """The pages of the first `length` tokens hold their content on every rank."""
        wanted = self._model.full_pages(request, length // self._page)
        self._pages.require_holding(f"request {request.name}", request.table, wanted)

    def _back_up(self, request: EngineRequest) -> None:
        """Back up what is whole after this step's forward pass, or sometimes less of it."""
        known = max(request.computed, request.planned)
        if request.unknown or (known < self._page and self._random.random() < 0.9):
            return
        if self._random.random() < 0.15:
            known = self._random.randint(0, known)
        tokens, pages = request.head(known), known // self._page
        table = request.table if self._random.random() < 0.2 else request.table[:pages]
        covered = self._ask(
            request,
            "back_up",
            lambda c: c.back_up(
                request.name, tokens, self._pages.on(c.rank, table), request.namespace
            ),
        )
        self._coverage["backups"] += 1
        self._holds_copies = request.admitted = True
        match = self._ask(request, "match", lambda c: c.match(tokens, request.namespace))
        found = match.host_tokens if request.generation == self._generation else 0
        check_covered(f"back_up of request {request.name}", covered, found, known, self._page)

    def _answer(self, request: EngineRequest) -> None:
        known = len(request.tokens) // TOKEN_BYTES
        missing = request.prompt + request.answer - known
        if missing <= 0 and request.computed == known:
            self._back_up(request)
            self._prompts.remember(request.namespace, request.tokens)
            request.stage = Stage.PUBLISHED
            return
        if missing > 0:
            request.tokens += self._prompts.answer(min(missing, self._page + 1))
        length = self._plan(request, len(request.tokens) // TOKEN_BYTES)
        if request.stage is Stage.ANSWERING:
            # What found no room was not put out: the engine samples it again.
            request.tokens = request.head(max(request.prompt, request.computed, length))
            if self._random.random() < 0.3:
                self._back_up(request)

    # The end of a request, for now or for good.

    def _refused(self, request: EngineRequest) -> None:
        """There is no room: wait for it, take it from another request, or give up."""
        request.refused += 1
        if request.refused > PATIENCE:
            self._coverage["given up"] += 1
            self._abort(request)
        elif self._random.random() < 0.3:
            computing = [each for each in self.requests if each.stage in _COMPUTES and each.table]
            if computing:
                self._preempt(computing[-1])

    def _preempt(self, request: EngineRequest) -> None:
        """Hand the request's pages to others at once; it begins again, perhaps with its answer."""
        self._coverage["preempted"] += 1
        if self._random.random() < 0.3:
            self._back_up(request)
        begins_anew = self._random.random() < 0.5
        known = request.prompt if begins_anew else max(request.prompt, request.computed)
        request.tokens = request.head(known)
        request.answer = max(0, request.answer - (known - request.prompt))
        request.prompt = known
        request.computed = request.planned = request.refused = 0
        request.stage = Stage.ARRIVED
        request.fence_due = True
        if self._random.random() < 0.5:
            self._fence_if_due(request)
        self._give_back_table(request)

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

    def _release(self, request: EngineRequest) -> None:
        request.planned = 0
        request.stage = Stage.GONE
        if self._ask(request, "release", lambda c: c.release(request.name)):
            self._freed(request.name, request.table)
        else:
            self._coverage["delayed frees"] += 1
            self._leaving[request.name] = request.table
        request.table = []

    def _take_freed(self) -> None:
        for name in self._ask_all("take_freed", lambda c: c.take_freed()):
            if name not in self._leaving:
                raise Violated(f"take_freed names {name}, which is not leaving")
            self._freed(name, self._leaving.pop(name))
        # Pages of a copy that is quarantined may never be free, and nobody is to wait for them.
        if self._ask_all("pending_frees", lambda c: c.pending_frees) and not self._leaving:
            raise Violated("nobody is leaving, and pending_frees says otherwise")

    def _freed(self, name: str, pages: list[int]) -> None:
        self._pages.give_back(pages)
        self._old_names.append(name)

    def _give_back_table(self, request: EngineRequest) -> None:
        pages, request.table = request.table, []
        self._pages.give_back(pages)

    def _reset(self) -> None:
        """Drop all that is cached; what begins from here on must see nothing of it."""
        if self._random.random() < 0.5:
            for request in self.requests:
                if request.stage in _COMPUTES:
                    self._preempt(request)
        self._generation += 1
        # Contents follow the generation, and so do the keys of one that is named.
        version = f"weights {self._generation}" if self._generation % 3 else None
        self._ask_all("reset", lambda c: c.reset(version))
        self._coverage["resets"] += 1
        self._pages.forget_cached()
        for request in self.requests:
            if not request.admitted and not request.computed:
                request.generation = self._generation
                if request.stage in (Stage.PREFETCHING, Stage.WAITING) and self._hit(request, 0):
                    raise Violated(f"request {request.name} gets a hit right after a reset")
            elif not request.admitted:
                request.unknown = True

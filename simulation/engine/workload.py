"""A simulated engine with the commands of a continuous-batching scheduler, equal on every rank.

Several requests are in flight. Each takes one action at a time, at moments drawn from the seed:
prefetch, wait, load back, compute chunks and publish some, decode, publish everything, release. After a
hit, the pages on the device are checked before the model computes further tokens (`model`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from ...ranks.group.cache import Cache
from ...ranks.group.member.rank_cache import RankCache
from ...ranks.protocol.answers import Admission, Wait
from ...ranks.protocol.config import Eviction
from ...ranks.replica.operations.requests import LoadState
from ...ranks.replica.tree.matching import Match
from ..checkers.checkers import check_admission, check_match
from ..checkers.published import Published
from ..rank.cluster import ask
from ..rank.memory import SymbolicMemory
from ..world.contents import ExpectedContents
from ..world.faults import FaultSource, Mishap
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest, EngineStage
from ..world.violated import Violated
from ..world.world import World
from .engine import PATIENCE, SimulatedEngine
from .every_rank import NO_PAGE
from .misuse import misuse, refuse, refused_and_changed
from .pins_and_retracts import Pins, Retracts
from .probing import probe
from .sampling_apart import Bringing, cache_commands
from .serving_again import serve_again

_SERVED = (EngineStage.COMPUTING, EngineStage.ANSWERING, EngineStage.RETRACTED)
"""Stages in which an engine may serve a request's computed pages to other groups."""


class Workload(SimulatedEngine[Cache]):
    """A simulated engine over a `Cache`, which owns the device pages."""

    kind = Cache

    def __init__(
        self,
        world: World,
        *,
        contents: ExpectedContents,
        faults: FaultSource,
        coverage: Counter[str],
        trace: Callable[[str], None] | None,
    ) -> None:
        super().__init__(world, contents=contents, faults=faults, coverage=coverage, trace=trace)
        self._pins = Pins(world)
        self._retracts = Retracts(world)

    def begin_epoch(self, caches: Sequence[RankCache], memories: Sequence[SymbolicMemory]) -> None:
        super().begin_epoch(caches, memories)
        self._published = Published(self._world, self._contents)
        self._pins.begin_epoch()

    def step(self) -> None:
        random = self._random
        self._control()
        if self._is_due():
            self._arrive()
        for request in list(self.requests):
            if self._faults.strikes(Mishap.ABORTED_REQUEST):
                self._abort(request)
            elif random.random() < 0.9:
                self._act(request)
        self.requests = [each for each in self.requests if each.stage is not EngineStage.GONE]
        if self.requests and random.random() < 0.05:
            request = random.choice(self.requests)
            self._coverage["misuse refused"] += misuse(self._caches, request, random, self._page)
        if random.random() < 0.1:
            namespace, tokens = self._prompts.draw()
            self._match(namespace, tokens)
        self._coverage["pins"] += self._pins.step(self._caches, self._prompts)

    def probe(self) -> bool:
        return probe(self._caches, self._world)

    def serve_again(self, take_step: Callable[[], None]) -> list[tuple[str, bytes]]:
        """Serve the cached part of earlier prompts again; return each part's (namespace, tokens).

        No operation may be in flight.
        """
        return serve_again(self._caches, self._prompts.earliest_first, take_step)

    def _note_room(self) -> None:
        self._published.note_room(self.requests, self._caches[0].inspection)

    def _let_go(self, name: str) -> None:
        self._ask_all(f"release of request {name}", lambda c: c.release(name))

    def drain(self) -> None:
        for request in self.requests:
            self._abort(request)
        self.requests.clear()
        self._pins.drain(self._caches)

    def check_pages(self) -> None:
        self._model.check_expected(self.requests)

    def _commands_with_tokens(self, namespace: str, prompt: bytes) -> list[Bringing[Cache]]:
        return cache_commands(self.requests, namespace, prompt)

    def _act(self, request: EngineRequest) -> None:
        if request.stage in _SERVED:
            served = self._serves.serve(self._caches, request, request.computed)
            self._coverage["served to peers"] += served
        match request.stage:
            case EngineStage.ARRIVED:
                self._prefetch(request)
            case EngineStage.PREFETCHING:
                done = self._ask(request, "prefetch_done", lambda c: c.prefetch_done(request.name))
                if done and self._random.random() < 0.4:
                    request.stage = EngineStage.WAITING
            case EngineStage.WAITING:
                self._load_back(request)
            case EngineStage.LOADING:
                self._look_at_load(request)
            case EngineStage.COMPUTING | EngineStage.ANSWERING if self._retracts.strikes():
                self._retract(request)
            case EngineStage.COMPUTING:
                self._compute(request)
            case EngineStage.ANSWERING:
                self._answer(request)
            case EngineStage.RETRACTED:
                self._look_at_retract(request)
            case EngineStage.PUBLISHED:
                if not self._stays(request):
                    self._release(request)
            case EngineStage.GONE:
                pass

    def _before_prefetch(self, request: EngineRequest, tokens: bytes) -> None:
        request.cached_before = self._match(request.namespace, tokens).host_tokens

    def _match(self, namespace: str, tokens: bytes) -> Match:
        found = ask("match", self._caches, lambda c: c.match(tokens, namespace))
        whole = len(tokens) // TOKEN_BYTES // self._page
        check_match(found, whole * self._page, self._page)
        self._published.check_match(found, namespace, tokens)
        return found

    def _load_back(self, request: EngineRequest) -> None:
        tokens = request.head(request.prompt - 1)
        before = self._match(request.namespace, tokens)
        reserve = request.prompt
        if self._random.random() < 0.3:
            reserve = self._random.randint(0, request.prompt)
        numbers = {"reserve_tokens": reserve, "priority": request.priority}

        def command(cache: Cache) -> Admission | Wait:
            return cache.load_back(request.name, tokens, request.namespace, **numbers)

        if not self._world.may_fit(before.host_tokens, reserve):
            refuse(self._caches, f"load_back of request {request.name}, too long", command)
            self._coverage["too long for the device"] += 1
            self._abort(request)
            return
        request.generation = self._controls.generation
        answer = self._ask(request, "load_back", command)
        if isinstance(answer, Wait):
            self._coverage[f"admission {answer.value}"] += 1
            after = self._match(request.namespace, tokens)
            if (
                after.device_tokens != before.device_tokens
                or after.host_tokens < before.host_tokens
            ):
                raise refused_and_changed(0, f"load_back of request {request.name}")
            request.refused += 1
            if request.refused > PATIENCE:
                self._coverage["given up"] += 1
                self._abort(request)
            return
        self._admitted(request, answer, before, reserve)

    def _admitted(
        self, request: EngineRequest, answer: Admission, before: Match, reserve: int
    ) -> None:
        sparse = bool(self._world.config.components)
        check_admission(answer, before, request.prompt - 1, self._page, sparse=sparse)
        total = answer.device_tokens + answer.host_tokens + answer.storage_tokens
        brought_max = max(0, total - request.cached_before) if request.prefetched else 0
        if answer.storage_tokens > brought_max:
            before_it = f"there were {request.cached_before} tokens before its prefetch"
            raise Violated(f"an admission says {answer}, but {before_it}")
        if self._world.config.eviction is Eviction.PRIORITY:
            self._coverage["admitted with a priority"] += request.priority > 0
        self._coverage["tokens from device"] += answer.device_tokens
        self._coverage["tokens from host"] += answer.host_tokens
        self._coverage["tokens from storage"] += answer.storage_tokens
        request.computed = answer.device_tokens + answer.host_tokens + answer.storage_tokens
        pages = max(request.computed // self._page, -(-reserve // self._page))
        request.room = pages * self._page
        request.checkpoints = answer.checkpoints
        self._published.loading(answer)
        self._note_room()
        if answer.operation is None:
            self._ready(request)
        else:
            request.stage = EngineStage.LOADING

    def _look_at_load(self, request: EngineRequest) -> None:
        state = self._ask(request, "load_state", lambda c: c.load_state(request.name))
        if state is LoadState.READY and request.resumes:
            request.resumes, request.stage = False, request.came_from
            self._read_tables(request)
        elif state is LoadState.READY:
            self._ready(request)
        elif state is LoadState.FAILED:
            self._coverage["load back failed"] += 1
            self._begin_again(request, EngineStage.WAITING)

    def _retract(self, request: EngineRequest) -> None:
        done = self._retracts.retract(self._caches, request)
        self._coverage["retracted" if done else "retract refused"] += 1
        self._published.add(request, request.shared)
        if not done:
            self._read_tables(request)

    def _look_at_retract(self, request: EngineRequest) -> None:
        became = self._retracts.look(self._caches, request, self._resumed)
        self._coverage[f"retract {became}"] += became != "waits"
        if became in ("failed", "lost"):
            self._begin_again(request, EngineStage.WAITING)
        elif request.refused > PATIENCE:
            self._abort(request)

    def _resumed(self, request: EngineRequest, answer: Admission) -> None:
        request.stage, request.resumes = EngineStage.LOADING, True
        self._published.loading(answer)
        self._note_room()

    def _ready(self, request: EngineRequest) -> None:
        request.stage = EngineStage.COMPUTING
        request.shared = request.computed
        self._published.add(request, request.shared)
        self._read_tables(request)
        self._check_shared(request)
        if self._world.checkpoint_tokens is not None:
            self._coverage["hits at a checkpoint"] += request.shared > 0

    def _check_shared(self, request: EngineRequest) -> None:
        found = self._match(request.namespace, request.head(request.shared))
        if request.generation == self._controls.generation:
            self._published.check_shared(found, request, self._caches[0].inspection)

    def _read_tables(self, request: EngineRequest) -> None:
        """Read a request's page tables; raise unless its pages hold the right content on every rank."""
        for layers in self._model.layers:
            request.tables[layers.pool] = self._page_table(request.name, layers.pool)
        self._model.check_tables(request)
        behind = sum(table.count(NO_PAGE) for table in request.tables.values())
        self._coverage["pages left behind by a window"] += behind

    def _page_table(self, name: str, pool: str) -> list[int]:
        return self._ask_all(
            f"page_table of {pool} of request {name}", lambda c: c.page_table(name, pool).tolist()
        )

    def _compute(self, request: EngineRequest) -> None:
        chunk = self._random.randint(1, 6 * self._page)
        end = self._chunk_end(request, min(request.prompt, request.computed + chunk))
        if not self._advance(request, end):
            return
        if request.computed == request.prompt:
            request.stage = EngineStage.ANSWERING
        at_checkpoint = request.computed in request.checkpoints
        self._coverage["chunks that end at a checkpoint"] += at_checkpoint
        share = 0.9 if at_checkpoint else 0.5
        if self._random.random() < share:
            self._insert(request, final=False)

    def _chunk_end(self, request: EngineRequest, end: int) -> int:
        """Return the token count at which the next chunk ends: often the next checkpoint, or `end`."""
        ahead = [each for each in request.checkpoints if request.computed < each < end]
        return min(ahead) if ahead and self._random.random() < 0.85 else end

    def _answer(self, request: EngineRequest) -> None:
        missing = request.prompt + request.answer - len(request.tokens) // TOKEN_BYTES
        if missing <= 0:
            self._insert(request, final=True)
            self._prompts.remember(request.namespace, request.head(request.computed))
            request.stage = EngineStage.PUBLISHED
            return
        request.tokens += self._prompts.answer(min(missing, self._page + 1))
        if not self._advance(request, len(request.tokens) // TOKEN_BYTES):
            return
        # Drop decoded tokens for which no page was free. No client has received them, and they are
        # sampled again.
        request.tokens = request.head(max(request.prompt, request.computed))
        every = self._world.checkpoint_tokens
        share = 0.1 if every is None or request.computed % every else 0.6
        if self._random.random() < share:
            self._insert(request, final=False)

    def _advance(self, request: EngineRequest, length: int) -> bool:
        """Compute up to `length` tokens, or as many as free pages allow; return False if preempted."""
        if request.room < length:
            total = length if self._random.random() < 0.6 else length + 2 * self._page
            if self._ask(request, "extend", lambda c: c.extend(request.name, total)):
                request.room = -(-total // self._page) * self._page
                request.refused = 0
                self._note_room()
                self._read_tables(request)
            else:
                self._coverage["extend refused"] += 1
                tables = dict(request.tables)
                self._read_tables(request)
                if request.tables != tables:
                    raise refused_and_changed(0, f"extend of request {request.name}")
                request.refused += 1
                length = min(length, request.room)
                if request.refused > PATIENCE // 3:
                    self._preempt(request)
                    return False
        self._model.compute(request, length)
        return True

    def _preempt(self, request: EngineRequest) -> None:
        """Preempt a request: sometimes publish its tokens, then free its pages and restart it."""
        self._coverage["preempted"] += 1
        if self._random.random() < 0.5:
            self._insert(request, final=False)
        self._let_go(request.name)
        self._begin_again(request, EngineStage.ARRIVED)

    def _begin_again(self, request: EngineRequest, stage: EngineStage) -> None:
        """Make a request compute its prompt again, because it has lost its pages."""
        request.tokens = request.head(request.prompt)
        request.stage, request.resumes = stage, False
        request.computed = request.room = request.shared = request.refused = 0
        request.tables.clear()

    def _insert(self, request: EngineRequest, *, final: bool) -> None:
        tokens = request.head(request.computed)
        shared = self._ask(
            request,
            "insert final" if final else "insert chunk",
            lambda c: c.insert(request.name, tokens, final=final),
        )
        if shared % self._page or not request.shared <= shared <= request.computed:
            had = f"request {request.name} shared {request.shared} and computed {request.computed}"
            raise Violated(f"an insert says that {shared} tokens are shared, where {had}")
        request.shared = shared
        self._published.add(request, shared)
        before = request.table
        self._read_tables(request)
        if request.table[: len(before)] != before[: len(request.table)]:
            self._coverage["pages repointed to duplicates"] += 1
        self._check_shared(request)

    def _release(self, request: EngineRequest) -> None:
        self._let_go(request.name)
        self._go(request)

    def _abort(self, request: EngineRequest) -> None:
        self._coverage[f"aborted when {request.stage.name.lower()}"] += 1
        if request.stage is not EngineStage.ARRIVED:
            self._ask(request, "abort", lambda c: c.abort(request.name))
        self._go(request)

    def _go(self, request: EngineRequest) -> None:
        request.stage = EngineStage.GONE
        request.tables.clear()
        self._old_names.append(request.name)

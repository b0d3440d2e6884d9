"""An engine: the commands that a continuous-batching scheduler gives, the same on every rank.

Several requests are in flight. Each goes its way, one action at a time, at moments drawn from the
seed: prefetch, wait, load back, compute in chunks and publish some of them, put out tokens, publish
the whole, let go. The model's work is to write the content of each token run into the request's
device pages on every rank; what it finds there as a hit is checked first.
"""

from collections.abc import Sequence

from ..ranks.cache import Cache
from ..ranks.rank_cache import RankCache
from ..ranks.replica.matching import Match
from ..ranks.replica.serving import Admission, LoadState, Wait
from .checkers import Violated, check_admission, check_expected, check_hit, check_match
from .cluster import ask
from .engine import PATIENCE, Engine
from .engine_request import EngineRequest, Stage
from .faults import Fault
from .memory import Slots
from .misuse import misuse
from .prompts import TOKEN_BYTES


class Workload(Engine[Cache]):
    """An engine whose device pages the cache owns."""

    kind = Cache

    def begin_epoch(self, caches: Sequence[RankCache], devices: list[Slots]) -> None:
        """See `Engine`."""
        super().begin_epoch(caches, devices)
        self._published: set[int] = set()
        """Contents that were published, or restored to the device, in this epoch."""
        self._loaded = 0
        """Pages that load backs of this epoch were to fill, whatever became of them."""
        self._overflowed = False

    def step(self) -> None:
        """Give some commands, as the scheduler does between two forward passes."""
        random = self._random
        room = len(self.requests) < self._world.requests_max
        if room and random.random() < self._world.arrival_rate:
            self._arrive()
        for request in list(self.requests):
            if self._faults.strikes(Fault.ABORTED_REQUEST):
                self._abort(request)
            elif random.random() < 0.9:
                self._act(request)
        self.requests = [each for each in self.requests if each.stage is not Stage.GONE]
        if self.requests and random.random() < 0.05:
            request = random.choice(self.requests)
            self._coverage["misuse refused"] += misuse(self._caches, request, random, self._page)
        if random.random() < 0.1:
            namespace, tokens = self._prompts.draw()
            self._match(namespace, tokens)

    def probe(self) -> None:
        """Ask for every device page at once, which must succeed while nobody holds any."""
        pages = self._world.device_pages
        answer = self._ask_all(
            "load_back of everything",
            lambda c: c.load_back("probe", b"", reserve_tokens=pages * self._page),
        )
        table = self._ask_all("page_table", lambda c: c.page_table("probe").tolist())
        if isinstance(answer, Wait) or sorted(table) != list(range(pages)):
            raise Violated(f"nobody holds device pages, and not all can be had: {answer}, {table}")
        self._ask_all("release", lambda c: c.release("probe"))

    def drain(self) -> None:
        """Let go of every request."""
        for request in self.requests:
            self._abort(request)
        self.requests.clear()

    def check_pages(self) -> None:
        """See `Engine`."""
        expected = self._expected()
        for rank, device in enumerate(self._devices):
            check_expected(f"rank {rank}", device, expected)

    def _act(self, request: EngineRequest) -> None:
        match request.stage:
            case Stage.ARRIVED:
                self._prefetch(request)
            case Stage.PREFETCHING:
                done = self._ask(request, "prefetch_done", lambda c: c.prefetch_done(request.name))
                if done and self._random.random() < 0.4:
                    request.stage = Stage.WAITING
            case Stage.WAITING:
                self._load_back(request)
            case Stage.LOADING:
                self._look_at_load(request)
            case Stage.COMPUTING:
                self._compute(request)
            case Stage.ANSWERING:
                self._answer(request)
            case Stage.PUBLISHED:
                self._release(request)
            case Stage.GONE:
                pass

    def _prefetch(self, request: EngineRequest) -> None:
        request.stage = Stage.WAITING
        if self._random.random() < 0.2:
            return
        tokens = request.head(request.prompt - 1)
        request.cached_before = self._match(request.namespace, tokens).host_tokens
        begun = self._ask(
            request, "prefetch", lambda c: c.prefetch(request.name, tokens, request.namespace)
        )
        self._coverage["prefetch begun" if begun else "prefetch not begun"] += 1
        request.prefetched = begun
        if begun:
            request.stage = Stage.PREFETCHING

    def _match(self, namespace: str, tokens: bytes) -> Match:
        found = ask("match", self._caches, lambda c: c.match(tokens, namespace))
        whole = len(tokens) // TOKEN_BYTES // self._page
        check_match(found, whole * self._page, self._page)
        if not self._overflowed:
            published = 0
            while published < whole and self._page_content(namespace, tokens, published + 1) in (
                self._published
            ):
                published += 1
            if found.device_tokens < published * self._page:
                raise Violated(
                    f"match finds {found.device_tokens} tokens on the device, of which "
                    f"{published * self._page} were published and never had to leave"
                )
        return found

    def _page_content(self, namespace: str, tokens: bytes, pages: int) -> int:
        return self._contents.of(namespace, tokens[: pages * self._page * TOKEN_BYTES])

    def _note_room(self) -> None:
        """Note when the device may have been full: from then on published pages may have left."""
        held = sum(-(-request.room // self._page) for request in self.requests)
        if len(self._published) + self._loaded + held > self._world.device_pages:
            self._overflowed = True

    def _load_back(self, request: EngineRequest) -> None:
        tokens = request.head(request.prompt - 1)
        before = self._match(request.namespace, tokens)
        reserve = request.prompt
        if self._random.random() < 0.3:
            reserve = self._random.randint(0, request.prompt)
        answer = self._ask(
            request,
            "load_back",
            lambda c: c.load_back(request.name, tokens, request.namespace, reserve_tokens=reserve),
        )
        if isinstance(answer, Wait):
            self._coverage[f"admission {answer.value}"] += 1
            after = self._match(request.namespace, tokens)
            if (
                after.device_tokens != before.device_tokens
                or after.host_tokens < before.host_tokens
            ):
                raise Violated(f"an admission was put off, and {before} became {after}")
            request.refused += 1
            if request.refused > PATIENCE:
                self._coverage["given up"] += 1
                self._abort(request)
            return
        self._admitted(request, answer, before, reserve)

    def _admitted(
        self, request: EngineRequest, answer: Admission, before: Match, reserve: int
    ) -> None:
        check_admission(answer, before, request.prompt - 1, self._page)
        total = answer.device_tokens + answer.host_tokens + answer.storage_tokens
        brought_max = max(0, total - request.cached_before) if request.prefetched else 0
        if answer.storage_tokens > brought_max:
            raise Violated(
                f"request {request.name} had {request.cached_before} tokens before its prefetch, "
                f"and its admission says {answer}"
            )
        self._coverage["tokens from device"] += answer.device_tokens
        self._coverage["tokens from host"] += answer.host_tokens
        self._coverage["tokens from storage"] += answer.storage_tokens
        request.computed = answer.device_tokens + answer.host_tokens + answer.storage_tokens
        pages = max(request.computed // self._page, -(-reserve // self._page))
        request.room = pages * self._page
        self._loaded += (answer.host_tokens + answer.storage_tokens) // self._page
        self._note_room()
        if answer.operation is None:
            self._ready(request)
        else:
            request.stage = Stage.LOADING

    def _look_at_load(self, request: EngineRequest) -> None:
        state = self._ask(request, "load_state", lambda c: c.load_state(request.name))
        if state is LoadState.READY:
            self._ready(request)
        elif state is LoadState.FAILED:
            self._coverage["load back failed"] += 1
            request.computed = request.room = 0
            request.stage = Stage.WAITING

    def _ready(self, request: EngineRequest) -> None:
        request.stage = Stage.COMPUTING
        for pages in range(1, request.computed // self._page + 1):
            self._published.add(self._page_content(request.namespace, request.tokens, pages))
        request.shared = request.computed
        self._read_table(request)

    def _read_table(self, request: EngineRequest) -> None:
        """Read the page table, and check that its pages hold on every rank what they must."""
        table = self._ask(request, "page_table", lambda c: c.page_table(request.name).tolist())
        if len(table) * self._page < request.room or len(set(table)) != len(table):
            raise Violated(
                f"request {request.name} has room for {request.room} tokens, its page table is "
                f"{table}"
            )
        request.table = table
        wanted = [
            self._content_at(request, index, request.computed)
            for index in range(-(-request.computed // self._page))
        ]
        for rank, device in enumerate(self._devices):
            check_hit(f"rank {rank}, request {request.name}", device, table, wanted)

    def _compute(self, request: EngineRequest) -> None:
        chunk = self._random.randint(1, 6 * self._page)
        if not self._advance(request, min(request.prompt, request.computed + chunk)):
            return
        if request.computed == request.prompt:
            request.stage = Stage.ANSWERING
        if self._random.random() < 0.5:
            self._insert(request, final=False)

    def _answer(self, request: EngineRequest) -> None:
        missing = request.prompt + request.answer - len(request.tokens) // TOKEN_BYTES
        if missing <= 0:
            self._insert(request, final=True)
            self._prompts.remember(request.namespace, request.head(request.computed))
            request.stage = Stage.PUBLISHED
            return
        request.tokens += self._prompts.answer(min(missing, self._page + 1))
        if not self._advance(request, len(request.tokens) // TOKEN_BYTES):
            return
        # What found no room was not put out: the engine samples it again.
        request.tokens = request.head(max(request.prompt, request.computed))
        if self._random.random() < 0.1:
            self._insert(request, final=False)

    def _advance(self, request: EngineRequest, length: int) -> bool:
        """Compute up to `length` tokens, as far as there is room; False if it lost its pages."""
        if request.room < length:
            total = length if self._random.random() < 0.6 else length + 2 * self._page
            if self._ask(request, "extend", lambda c: c.extend(request.name, total)):
                request.room = -(-total // self._page) * self._page
                request.refused = 0
                self._note_room()
                self._read_table(request)
            else:
                self._coverage["extend refused"] += 1
                table = request.table
                self._read_table(request)
                if request.table != table:
                    raise Violated(f"extend of request {request.name} was refused, and took pages")
                request.refused += 1
                length = min(length, request.room)
                if request.refused > PATIENCE // 3:
                    self._preempt(request)
                    return False
        for index in range(request.computed // self._page, -(-length // self._page)):
            before = self._content_at(request, index, request.computed)
            after = self._content_at(request, index, length)
            for rank, device in enumerate(self._devices):
                who = f"rank {rank}, request {request.name}"
                device.compute(request.table[index], before, after, who)
        request.computed = max(request.computed, length)
        return True

    def _preempt(self, request: EngineRequest) -> None:
        """Give the request's pages to others and begin again, perhaps from what it published."""
        self._coverage["preempted"] += 1
        if self._random.random() < 0.5:
            self._insert(request, final=False)
        self._ask(request, "release", lambda c: c.release(request.name))
        request.tokens = request.head(request.prompt)
        request.stage = Stage.ARRIVED
        request.computed = request.room = request.shared = request.refused = 0
        request.table = []

    def _insert(self, request: EngineRequest, *, final: bool) -> None:
        tokens = request.head(request.computed)
        shared = self._ask(
            request,
            "insert final" if final else "insert chunk",
            lambda c: c.insert(request.name, tokens, final=final),
        )
        if shared % self._page or not request.shared <= shared <= request.computed:
            raise Violated(
                f"request {request.name} shared {request.shared} tokens, computed "
                f"{request.computed}, and insert says that {shared} are shared"
            )
        request.shared = shared
        for pages in range(1, shared // self._page + 1):
            self._published.add(self._page_content(request.namespace, tokens, pages))
        before = request.table
        self._read_table(request)
        if request.table[: len(before)] != before[: len(request.table)]:
            self._coverage["pages repointed to duplicates"] += 1
        found = self._match(request.namespace, tokens)
        if found.device_tokens < shared:
            raise Violated(
                f"insert of request {request.name} says that {shared} tokens are shared, and match "
                f"finds {found.device_tokens} of them on the device"
            )

    def _release(self, request: EngineRequest) -> None:
        self._ask(request, "release", lambda c: c.release(request.name))
        self._go(request)

    def _abort(self, request: EngineRequest) -> None:
        self._coverage[f"aborted when {request.stage.name.lower()}"] += 1
        if request.stage is not Stage.ARRIVED:
            self._ask(request, "abort", lambda c: c.abort(request.name))
        self._go(request)

    def _go(self, request: EngineRequest) -> None:
        request.stage = Stage.GONE
        request.table = []
        self._old_names.append(request.name)

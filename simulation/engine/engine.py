"""Common base of the simulated engines: draws arriving requests, and gives commands to all ranks.

The owner of the device pages determines the commands and their timing. An engine over a `Cache` gives
its commands before a step. An engine over a `HostCache` gives them between the two halves of a step,
and launches its forward pass after the step.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ...ranks.group.member.rank_cache import RankCache
from ..rank.cluster import Answer, ask
from ..rank.memory import SymbolicMemory
from ..world.contents import ExpectedContents
from ..world.faults import FaultSource
from ..world.prompts import TOKEN_BYTES, Prompts
from ..world.request import EngineRequest, EngineStage
from ..world.world import World
from .drawn_controls import DrawnControls
from .every_rank import every_rank
from .group_handoff import GroupHandoff
from .model import SimulatedModel
from .sampling_apart import Bringing, bring
from .serving import ServesPeers

PATIENCE = 25
"""Number of refusals for lack of pages after which the engine aborts a request."""

_PRIORITIES = (0, 0, 1, 5)
"""Request priorities, drawn with equal chance; used only with a `Cache`."""

CacheT = TypeVar("CacheT", bound=RankCache)


class SimulatedEngine(ABC, Generic[CacheT]):
    """The simulated engine of one schedule; at the end of an epoch it drops its requests."""

    kind: type[CacheT]
    """The cache class that this engine drives."""

    def __init__(
        self,
        world: World,
        *,
        contents: ExpectedContents,
        faults: FaultSource,
        coverage: Counter[str],
        trace: Callable[[str], None] | None,
    ) -> None:
        self.requests: list[EngineRequest] = []
        self.gives: GroupHandoff | None = None
        """Queue through which finished requests go to a consumer group; None if there is no such group.
        """
        self.takes: GroupHandoff | None = None
        """Queue through which requests come from a producer group; None if there is no such group."""
        self._world = world
        self._page = world.page_tokens
        self._contents = contents
        self._model = SimulatedModel(world.config, contents)
        self._faults = faults
        self._coverage = coverage
        self._trace = trace
        self._random = world.stream("workload")
        self._priorities = world.stream("priorities")
        self._prompts = Prompts(world)
        self._serves = ServesPeers(world)
        self._controls = DrawnControls(world)
        self._named = 0
        self._old_names: list[str] = []
        self._caches: list[CacheT] = []

    def begin_epoch(self, caches: Sequence[RankCache], memories: Sequence[SymbolicMemory]) -> None:
        """Continue with the caches and memories of a new group, dropping all requests in flight."""
        self.requests.clear()
        self._controls.generation = 0
        self._prompts.begin_epoch()
        self._caches = [cache for cache in caches if isinstance(cache, self.kind)]
        self._model.begin_epoch(every_rank(memories))

    def step(self) -> None:
        """Let the engine act before a step: give its commands to all ranks."""

    def decide(self, *, active: bool) -> float:
        """Give the engine's commands to all ranks, between the two halves of a step.

        New work starts only if `active`. Return for how many seconds the engine waits for I/O in this
        step if it computes nothing.
        """
        del active
        return 0.0

    def forward(self) -> None:
        """Launch the step's forward pass."""

    @abstractmethod
    def drain(self) -> None:
        """Abort or release every request."""

    @abstractmethod
    def check_pages(self) -> None:
        """Raise unless device pages in use hold the right content on every rank."""

    @abstractmethod
    def probe(self) -> bool:
        """Once no operation is in flight: raise unless all pages can be allocated.

        Return False if the cache needs more steps first: the caller takes a step and calls again.
        """

    def sample_apart(self, rank: int) -> None:
        """Give one command to all ranks, with different tokens on `rank` than on the others."""
        bringing = self._random.choice(self._commands_with_tokens(*self._prompts.draw()))
        self._coverage[f"sampled apart before {bringing[0]}"] += 1
        bring(self._caches, rank, bringing)

    @abstractmethod
    def _commands_with_tokens(self, namespace: str, prompt: bytes) -> list[Bringing[CacheT]]:
        """Return all commands that carry tokens of the new `prompt` or of requests in flight."""

    def _control(self) -> None:
        """Draw whether to give an operator command to the caches, and count it."""
        done = self._controls.step(self._caches, self.requests)
        if done:
            self._coverage[done] += 1

    def _is_due(self) -> bool:
        """Draw whether a request arrives; none does if the maximum number of requests is in flight.

        Finished requests that are kept only to serve their pages do not count.
        """
        served = sum(each.is_served for each in self.requests)
        rate = self._world.arrival_rate
        if self.takes is not None and not self.takes.waiting:
            rate *= 0.2
        return len(self.requests) - served < self._world.requests_max and (
            self._random.random() < rate
        )

    def _stays(self, request: EngineRequest) -> bool:
        """Return whether a finished request is kept because another group may read its pages."""
        return self.gives is not None and self.gives.stays(self._caches, request)

    def _arrive(self) -> None:
        handed = None if self.takes is None else self.takes.take()
        if handed is None:
            namespace, tokens = self._prompts.draw()
        else:
            # A handed-over request arrives with the first token of its answer, which the producer has
            # sampled.
            namespace, tokens = handed.namespace, handed.tokens + self._prompts.answer(1)
        if self._old_names and self._random.random() < 0.2:
            name = self._old_names.pop(self._random.randrange(len(self._old_names)))
        else:
            self._named += 1
            name = f"r{self._named}"
        request = EngineRequest(name, namespace, tokens, len(tokens) // TOKEN_BYTES)
        request.source = "" if handed is None else handed.source
        request.answer = self._random.randint(0, 2 * self._page)
        request.priority = self._priorities.choice(_PRIORITIES)
        self.requests.append(request)

    def _prefetch(self, request: EngineRequest) -> None:
        request.stage = EngineStage.WAITING
        if self._random.random() < 0.2 and not request.source:
            return
        tokens = request.head(request.prompt - 1)
        self._before_prefetch(request, tokens)
        begun = self._ask(
            request,
            "prefetch",
            lambda c: c.prefetch(request.name, tokens, request.namespace, source=request.source),
        )
        self._coverage["prefetch begun" if begun else "prefetch not begun"] += 1
        request.prefetched = begun
        if begun:
            request.stage = EngineStage.PREFETCHING

    def _before_prefetch(self, request: EngineRequest, tokens: bytes) -> None:
        """Hook that is called before a prefetch; subclasses may record how many tokens are cached."""

    def _ask(
        self, request: EngineRequest, what: str, command: Callable[[CacheT], Answer]
    ) -> Answer:
        return self._ask_all(f"{what} of request {request.name}", command)

    def _ask_all(self, what: str, command: Callable[[CacheT], Answer]) -> Answer:
        answer = ask(what, self._caches, command)
        if self._trace is not None:
            self._trace(f"{what} -> {answer}")
        return answer

"""One run: every request of a trace goes to a group by a policy, in virtual time.

A group computes one prompt after the other, in the order in which they came, out of a cache of its own.
It tells what it has in KV events, through a publisher, and the router knows it from an index of those;
so a policy sees what it would see, and what is on its way it does not see yet.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...errors import ConfigError
from ...ranks.disaggregation.groups.kv_events import EventBatch, KVEventPublisher
from ...ranks.disaggregation.groups.prefix_index import PrefixIndex
from ...ranks.disaggregation.groups.router import Group, Prompt, Role
from ...ranks.replica.notices import Notice
from .arrivals import Arrival
from .block_cache import BlockCache, PagedPrompt
from .policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How fast one group computes prompts."""

    tokens_per_s: float
    attention_tokens: int = 0
    """The position at which a token costs twice what the first one does; 0 if all cost the same."""

    def seconds(self, start: int, end: int) -> float:
        """Return how long the tokens of a prompt from `start` to `end` take."""
        work = float(end - start)
        if self.attention_tokens:
            work += (end * end - start * start) / (2 * self.attention_tokens)
        return work / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run is of."""

    groups: int
    device_pages: int
    """Pages of each group."""
    service: Service
    scale: float = 1.0
    """The trace's times are multiplied by this."""
    lag_s: float = 0.0
    """How long KV events are on their way to the router."""


@dataclass(slots=True, kw_only=True)
class RunCounts:
    """What a run has shown."""

    tokens: int = 0
    hit_tokens: int = 0
    waits_s: list[float] = field(default_factory=list[float])
    """How long each request waited before it was computed, in the order in which they began."""
    first_tokens_s: list[float] = field(default_factory=list[float])
    """How long each request waited until its prompt was computed."""
    busy_s: float = 0.0
    """How long groups computed, all together."""
    took_s: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """The part of all prompt tokens that came from a cache."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class _Queued:
    arrived_s: float
    prompt: PagedPrompt
    expected: int
    """Tokens that the router expects to be computed."""


class _PrefillGroup:
    """One group: its queue, what it computes now, its cache and its events."""

    def __init__(self, name: str, device_pages: int) -> None:
        self.name = name
        self.cache = BlockCache(device_pages)
        self.publisher = KVEventPublisher(life=0)
        self.waiting: deque[_Queued] = deque()
        self.waiting_tokens = 0
        self.running: PagedPrompt | None = None
        self.running_from_s = self.running_until_s = 0.0
        self.running_tokens = 0


class _Run:
    def __init__(self, settings: RunSettings, policy: Policy) -> None:
        self._settings = settings
        self._policy = policy
        self.counts = RunCounts()
        self._groups = {
            name: _PrefillGroup(name, settings.device_pages)
            for name in (f"group-{number}" for number in range(settings.groups))
        }
        self._template = Group(
            name="", role=Role.PREFILL, prefill_tokens_per_s=settings.service.tokens_per_s
        )
        self._index = PrefixIndex()
        for name in self._groups:
            self._index.heard(name, 0, -1)
        self._ends: list[tuple[float, str]] = []
        self._on_their_way: deque[tuple[float, str, EventBatch]] = deque()

    def arrive(self, now_s: float, prompt: PagedPrompt) -> None:
        """Route a request that comes now."""
        self._let_end(now_s)
        self._deliver(now_s)
        hits = self._index.hits(prompt.keys[: prompt.usable_pages]) if self._policy.asks else {}
        asked = Prompt(tokens=prompt.tokens, page_tokens=prompt.page_tokens, hits=hits)
        chosen = self._policy.choose(
            [self._told(each, now_s) for each in self._groups.values()], asked
        )
        group = self._groups[chosen]
        expected = asked.missing(chosen)
        group.waiting.append(_Queued(now_s, prompt, expected))
        group.waiting_tokens += expected
        if group.running is None:
            self._begin(group, now_s)

    def finish(self) -> RunCounts:
        """Let all end that is still queued."""
        self._let_end(float("inf"))
        return self.counts

    def _told(self, group: _PrefillGroup, now_s: float) -> Group:
        """Return what the router knows of a group's queue: what it has sent it, less what has ended."""
        tokens, requests = group.waiting_tokens, len(group.waiting)
        if group.running is not None:
            whole_s = group.running_until_s - group.running_from_s
            left = (group.running_until_s - now_s) / whole_s
            tokens, requests = tokens + round(group.running_tokens * left), requests + 1
        return replace(
            self._template, name=group.name, queued_requests=requests, queued_tokens=tokens
        )

    def _let_end(self, until_s: float) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            now_s, name = heapq.heappop(self._ends)
            group = self._groups[name]
            assert group.running is not None
            self._tell(group, group.cache.insert(group.running), now_s)
            group.running = None
            self.counts.took_s = now_s
            if group.waiting:
                self._begin(group, now_s)

    def _begin(self, group: _PrefillGroup, now_s: float) -> None:
        queued = group.waiting.popleft()
        group.waiting_tokens -= queued.expected
        prompt, counts = queued.prompt, self.counts
        hit, notices = group.cache.admit(prompt)
        self._tell(group, notices, now_s)
        start = hit * prompt.page_tokens
        computing_s = self._settings.service.seconds(start, prompt.tokens)
        group.running, group.running_tokens = prompt, prompt.tokens - start
        group.running_from_s, group.running_until_s = now_s, now_s + computing_s
        heapq.heappush(self._ends, (group.running_until_s, group.name))
        counts.tokens += prompt.tokens
        counts.hit_tokens += start
        counts.busy_s += computing_s
        counts.waits_s.append(now_s - queued.arrived_s)
        counts.first_tokens_s.append(group.running_until_s - queued.arrived_s)

    def _tell(self, group: _PrefillGroup, notices: Sequence[Notice], now_s: float) -> None:
        if not self._policy.asks:
            return
        batch = group.publisher.fold(notices, now_s)
        if batch is not None:
            self._on_their_way.append((now_s + self._settings.lag_s, group.name, batch))

    def _deliver(self, now_s: float) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= now_s:
            _, name, batch = self._on_their_way.popleft()
            self._index.apply(name, batch)


def run(arrivals: Sequence[Arrival], settings: RunSettings, policy: Policy) -> RunCounts:
    """Let all requests come and be computed. Raises `ConfigError` if one cannot fit into a group."""
    longest = max(each.prompt.pages for each in arrivals)
    if longest > settings.device_pages:
        raise ConfigError(
            f"a prompt needs {longest} pages, and a group has {settings.device_pages}; give more"
        )
    simulated = _Run(settings, policy)
    for each in arrivals:
        simulated.arrive(each.at_s * settings.scale, each.prompt)
    return simulated.finish()

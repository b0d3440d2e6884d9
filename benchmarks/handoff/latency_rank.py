"""One process of the benchmark of how long handoffs take: rank 0 computes, rank 1 goes on."""

import secrets
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ...coordinator.collectives.in_process import InProcessGroup
from ...errors import InternalError
from ...page_format.page_layout import Column, PageLayout
from ...ranks.agreed_pools import namespace_of
from ...ranks.cache import Cache
from ...ranks.config import CacheConfig
from ...ranks.disaggregation.arrivals import Arrivals
from ...ranks.disaggregation.control import Control, decode, encode
from ...ranks.disaggregation.departures import Departures, GoesOn
from ...ranks.disaggregation.early_loads import EarlyLoads
from ...ranks.disaggregation.manifest import HandoffTerms
from ...ranks.disaggregation.messages.leading_inbox import LeadingInbox
from ...ranks.disaggregation.messages.numbering import InboxBounds
from ...ranks.disaggregation.messages.sender import MessageSender
from ...ranks.outside import Peers
from ...ranks.replica.answers import Wait
from ...ranks.replica.extent import Extent
from ...ranks.replica.requests import LoadState
from ..rank_processes import Member, Say
from .latency_settings import PAGE_TOKENS, Job, LatencySettings, Moment, Moments, jobs
from .unchecked import checksums

_LATE_S: Final = 120.0
_IDLE_S: Final = 0.001
_TRANSFERS: Final = 5

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Trial:
    """One prompt."""

    name: str
    tokens: Tokens
    job: Job


@dataclass(frozen=True, slots=True)
class _Side:
    """One group: its cache, and how it reaches the other."""

    cache: Cache
    terms: HandoffTerms
    send: Callable[[str, Control], None]
    partner: str
    """The inbox of the other group."""
    source: str
    """Where the group that computes serves its pages."""

    def step(self, hear: Callable[[Control], object], idle_s: float = 0.0) -> None:
        """Step, and hear what has come."""
        self.cache.step(idle_s=idle_s)
        for raw in self.cache.messages():
            hear(decode(raw))

    def until(self, done: Callable[[], bool], hear: Callable[[Control], object]) -> None:
        """Step until something is so, and hear what comes."""
        deadline = time.monotonic() + _LATE_S
        while not done():
            if time.monotonic() > deadline:
                raise InternalError("a handoff of the benchmark has not ended")
            self.step(hear, _IDLE_S)

    def admit(self, trial: _Trial, cached: Tokens | None = None) -> None:
        """Have device pages for a prompt, with what there is of `cached`; wait until it is READY."""
        cache, tokens = self.cache, b"" if cached is None else cached
        reserve = len(trial.tokens)
        self.until(
            lambda: (
                not isinstance(cache.load_back(trial.name, tokens, reserve_tokens=reserve), Wait)
            ),
            _nothing,
        )
        self.until(lambda: cache.load_state(trial.name) is LoadState.READY, _nothing)

    def end(self, trial: _Trial) -> None:
        """Let a request go, and everything that is in flight for it."""
        self.cache.abort(trial.name)
        self.until(lambda: not self.cache.inspection.in_flight, _nothing)


def measure(settings: LatencySettings, member: Member, say: Say) -> Moments:
    """Measure as one of the two processes."""
    with _opened(settings, member) as side:
        if member.rank == 0:
            return _Computing(settings, side).run(settings, say)
        return _GoingOn(side).run(settings)


@contextmanager
def _opened(settings: LatencySettings, member: Member) -> Generator[_Side]:
    column = Column(name="kv", layers=1, heads=1, elements=settings.token_bytes, dtype="uint8")
    config = CacheConfig(
        model="benchmark",
        layout=PageLayout(page_tokens=PAGE_TOKENS, columns=(column,)),
        device_pages=settings.pages,
        host_pages=settings.pages,
        populate_host=True,
        peers=Peers(),
    )
    inbox = LeadingInbox(
        "127.0.0.1:0",
        secret=b"",
        bounds=InboxBounds(),
        life=secrets.token_bytes(16),
        world_size=1,
    )
    sender = MessageSender()
    cache = Cache.open(config, InProcessGroup(1).member(0), inbox=inbox)

    def send(to: str, message: Control) -> None:
        sender.send(to, encode(message), deadline_s=_LATE_S)

    # Memory that is touched for the first time comes from the system, far slower than it is copied.
    cache.device_pool.column("kv").fill_(1)
    try:
        own = f"{inbox.address} {cache.serving_uri}"
        (member.folder / f"side-{member.rank}").write_text(own, encoding="ascii")
        dist.barrier()
        texts = [(member.folder / f"side-{rank}").read_text(encoding="ascii") for rank in (0, 1)]
        addresses = [each.split() for each in texts]
        terms = HandoffTerms.of(namespace_of(config))
        yield _Side(cache, terms, send, addresses[1 - member.rank][0], addresses[0][1])
        # Who reads leaves first, so that nobody is cut off.
        if member.rank == 1:
            cache.abandon()
        dist.barrier()
    finally:
        cache.abandon()
        sender.close()
        inbox.close()


def _tokens(number: int, count: int) -> Tokens:
    """Return the tokens of a prompt that shares no page with another."""
    return np.random.default_rng(number).integers(0, 1 << 20, count, dtype=np.int32)


def _trials(settings: LatencySettings) -> list[_Trial]:
    """Return what both sides do, in their order; first those by which the transfer is measured."""
    all_jobs = [Job(0.0, settings.chunk_tokens, checked=True)] * _TRANSFERS + jobs(settings)
    return [
        _Trial(f"prompt-{number}", _tokens(number, job.prompt_tokens), job)
        for number, job in enumerate(all_jobs)
    ]


class _Computing:
    """The group that computes prompts in chunks, and lets them go."""

    def __init__(self, settings: LatencySettings, side: _Side) -> None:
        self._chunk = settings.chunk_tokens
        self._side = side
        self._departures = Departures(side.cache, side.terms, side.send, directly=True)

    def run(self, settings: LatencySettings, say: Say) -> Moments:
        """Return when each prompt was computed."""
        trials = _trials(settings)
        for trial in trials[:_TRANSFERS]:
            self._offer(trial)
        told = [0.0]
        dist.broadcast_object_list(told, src=1)
        computed: list[Moment] = []
        for trial in trials[_TRANSFERS:]:
            job = trial.job
            say(f"{job.prompt_tokens:,} tokens, computed in {job.ratio:g} times what they travel")
            with checksums(kept=job.checked):
                computed.append(self._let_go(trial, job.ratio * told[0]))
        return Moments(told[0], computed)

    def _offer(self, trial: _Trial) -> None:
        """Let the other group fetch a chunk while nothing else happens."""
        side, cache = self._side, self._side.cache
        name, tokens = trial.name, trial.tokens
        side.admit(trial)
        cache.insert(name, tokens, final=False)
        side.until(
            lambda: cache.serve(name, tokens, ttl_s=_LATE_S) == len(tokens), self._departures.hear
        )
        dist.barrier()
        dist.barrier()
        side.end(trial)

    def _let_go(self, trial: _Trial, chunk_s: float) -> Moment:
        side, cache, departures = self._side, self._side.cache, self._departures
        name, tokens = trial.name, trial.tokens
        side.admit(trial)
        departures.begin(name, side.partner)
        dist.barrier()
        began_s = time.monotonic()
        ends = [*range(self._chunk, len(tokens), self._chunk), len(tokens)]
        for start, end in pairwise((0, *ends)):
            time.sleep(chunk_s * (end - start) / self._chunk)
            cache.insert(name, tokens[:end], final=False)
            departures.computed(name, tokens[:end])
            if end < len(tokens):
                departures.step()
                side.step(departures.hear)
        computed_s = time.monotonic()
        cache.retract(name, tokens)
        side.until(self._is_saved(name), departures.hear)
        departures.saved(name, tokens, GoesOn(first_token=1))
        side.until(self._is_gone(name), departures.hear)
        dist.barrier()
        side.end(trial)
        return Moment(began_s, computed_s)

    def _is_saved(self, name: str) -> Callable[[], bool]:
        def is_saved() -> bool:
            self._departures.step()
            return self._side.cache.load_state(name) is LoadState.SAVED

        return is_saved

    def _is_gone(self, name: str) -> Callable[[], bool]:
        def is_gone() -> bool:
            self._departures.step()
            return name not in self._departures

        return is_gone


class _GoingOn:
    """The group that goes on with prompts."""

    def __init__(self, side: _Side) -> None:
        self._side = side
        self._arrivals = Arrivals(side.cache, side.terms, side.send, early=EarlyLoads(side.cache))

    def run(self, settings: LatencySettings) -> Moments:
        """Return when each prompt was READY."""
        trials = _trials(settings)
        # The first finds memory that was never used.
        transfer_s = statistics.median([self._fetch(each) for each in trials[:_TRANSFERS]][1:])
        dist.broadcast_object_list([transfer_s], src=1)
        ready: list[Moment] = []
        for trial in trials[_TRANSFERS:]:
            with checksums(kept=trial.job.checked):
                ready.append(self._take_up(trial))
        return Moments(transfer_s, ready)

    def _fetch(self, trial: _Trial) -> float:
        """Return how long a chunk takes from host memory to host memory."""
        side, cache = self._side, self._side.cache
        dist.barrier()
        began = time.monotonic()
        cache.prefetch(trial.name, trial.tokens, extent=Extent.KV, source=side.source)
        side.until(lambda: cache.prefetch_done(trial.name), self._arrivals.hear)
        took_s = time.monotonic() - began
        if cache.received(trial.name, trial.tokens) != len(trial.tokens):
            raise InternalError("a chunk of the benchmark has not come")
        dist.barrier()
        side.end(trial)
        return took_s

    def _take_up(self, trial: _Trial) -> Moment:
        side, arrivals = self._side, self._arrivals
        arrivals.expect(trial.name, trial.tokens, side.partner)
        before = arrivals.outcomes.copy()
        dist.barrier()
        began_s = time.monotonic()
        side.until(lambda: bool(arrivals.step()), arrivals.hear)
        side.admit(trial, trial.tokens)
        ready_s = time.monotonic()
        (outcome,) = arrivals.outcomes - before
        dist.barrier()
        side.end(trial)
        return Moment(began_s, ready_s, outcome.value)


def _nothing(_message: Control) -> None:
    """Hear what comes too late to matter."""

"""One schedule of two groups: requests come to both, and every one of them must be served."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ...errors import LockstepError
from ...small_engine.handed_requests import HandedRequest, arrival_of
from ..checkers.findings.finding import Finding, Violated
from ..checkers.findings.group import Crashed, Restless
from ..checkers.findings.handoff import LeftBehind, NotServed
from ..clock import VirtualClock
from ..contents import Contents
from ..engine.prompts import Prompts
from ..epoch import SOUND_BUILD, Build
from ..rank.shared_store import SharedObjects
from ..result import Violation
from .faults import HandoffFault
from .group import Group
from .post import Post
from .world import DECODE, PREFILL, HandoffWorld, draw_handoff_world

_OVER_WITHIN_US = 60_000_000
"""How long after the last request came all must be served, and let go of."""
_REST_STEPS_MAX = 2_000
_LATE_ENDS_US = 6_000_000
"""After so long every transfer has ended that ever ends."""


@dataclass(slots=True, kw_only=True)
class HandoffResult:
    """What a schedule has done."""

    seed: int
    pair: str
    profile: str
    way: str
    """How pages went: directly or by the store."""
    steps: int = 0
    requests: int = 0
    served: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """How requests have come, by `Outcome`."""
    departures: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    coverage: Counter[str] = field(default_factory=Counter[str])
    violation: Violation | None = None
    transcript: list[str] = field(default_factory=list[str])


class HandoffSchedule:
    """Runs the schedule of one world. It can be run once."""

    def __init__(
        self, world: HandoffWorld, *, record: bool = False, build: Build = SOUND_BUILD
    ) -> None:
        self.world = world
        self.result = HandoffResult(
            seed=world.seed,
            pair=world.pair,
            profile=world.prefill.profile,
            way="directly" if world.directly else "by the store",
        )
        self._record = record
        self._random = world.stream("schedule")
        self._clock = VirtualClock()
        troubles = world.troubles
        for kind in troubles.kinds:
            self.result.faults[kind.value] += 1
        post = self._post = Post(
            self._clock,
            world.stream("post"),
            troubles,
            coverage=self.result.coverage,
            trace=self._trace,
        )
        self._shared = SharedObjects(frozenset({world.prefill.ranks, world.decode.ranks}))
        contents, meanings = Contents(), dict[tuple[str, bytes], int]()
        self._namespaces: dict[str, str] = {}
        """Of all requests that were sent, by name."""
        self._prefill, self._decode = (
            Group(
                world,
                group,
                clock=self._clock,
                shared=self._shared,
                meanings=meanings,
                contents=contents,
                namespaces=self._namespaces,
                post=post,
                build=build,
                faults=self.result.faults,
            )
            for group in (world.prefill, world.decode)
        )
        self._decode.read_from(self._prefill.serving)
        self._prompts = Prompts(world.prefill)
        arrivals = [self._random.randrange(world.arrivals_us + 1) for _ in range(world.requests)]
        self._due_us = sorted(arrivals, reverse=True)
        self._sent: list[str] = []
        self._aborted = 0
        self._last_us = 0
        self._moments = {
            "prefill dies": troubles.prefill_dies_us,
            "decode dies": troubles.decode_dies_us,
            "nobody can connect": troubles.gone_us,
            "half of the objects are lost": troubles.half_us,
        }

    def run(self) -> HandoffResult:
        """Run until every request is served and all is at rest, or to the first violation."""
        try:
            while not self._is_over:
                self._step()
            self._come_to_rest()
        except Violated as violated:
            self._violated(violated.finding)
        except (LockstepError, AssertionError, LookupError, TypeError, ValueError) as error:
            self._violated(Crashed.of(error))
        self._count()
        return self.result

    @property
    def _alive(self) -> list[Group]:
        return [each for each in (self._prefill, self._decode) if each.is_alive]

    @property
    def _served(self) -> int:
        return self._decode.schedulers[0].counts.requests

    @property
    def _is_over(self) -> bool:
        if self._due_us or self._post.on_their_way:
            return False
        decoded = self._served + self._aborted >= len(self._sent) or not self._decode.is_alive
        return decoded and not (self._prefill.is_alive and self._prefill.in_system)

    def _step(self) -> None:
        """Let one group or both take a step, after what happens at this moment."""
        self._arrive()
        self._strike()
        groups = self._alive
        if self._random.random() < 0.3:
            groups = [self._random.choice(groups)] if groups else []
        for group in groups:
            group.step()
            self.result.steps += 1
        if not groups:
            self._clock.advance(10_000)
        if self._due_us:
            self._last_us = self._clock.now_us
        if not self._is_over and self._clock.now_us - self._last_us > _OVER_WITHIN_US:
            self._hangs(_OVER_WITHIN_US / 1e6)

    def _hangs(self, after_s: float) -> None:
        served = self._served + self._aborted
        if self._decode.is_alive and served < len(self._sent):
            raise Violated(NotServed(served, len(self._sent), after_s))
        raise Violated(LeftBehind(PREFILL, f"{self._prefill.in_system} requests"))

    def _come_to_rest(self) -> None:
        """Let everything end; raise unless nothing is left, and all that there is can be had again."""
        for _ in range(_REST_STEPS_MAX):
            self._step()
            if not all(group.is_idle for group in self._alive):
                continue
            before = [set(group.in_flight) for group in self._alive]
            self._clock.advance(_LATE_ENDS_US)
            for _ in range(10 + sum(map(len, before))):
                self._step()
            # A write that failed may be tried again when another one has ended.
            now = [set(group.in_flight) for group in self._alive]
            begun = any(after - earlier for after, earlier in zip(now, before, strict=True))
            if not begun and all(group.is_idle for group in self._alive):
                break
        else:
            raise Violated(Restless("two groups do not come to rest", _REST_STEPS_MAX))
        for group in self._alive:
            group.check_rest()
        for _ in range(_REST_STEPS_MAX):
            if [group.has_room() for group in self._alive].count(False) == 0:
                return
            self._step()
        raise Violated(Restless("an idle group has no room for a request", _REST_STEPS_MAX))

    def _arrive(self) -> None:
        while self._due_us and self._due_us[-1] <= self._clock.now_us:
            self._due_us.pop()
            namespace, prompt = self._prompts.draw()
            tokens = np.frombuffer(prompt, dtype=np.int32)
            number = len(self._sent)
            outputs = self._random.randint(1, self.world.output_tokens_max)
            name = f"r{number}"
            request = HandedRequest(
                index=number,
                name=name,
                namespace=namespace,
                prompt_length=len(tokens),
                output_length=outputs,
                prompt_tokens=tokens,
            )
            self._sent.append(name)
            self._namespaces[name] = namespace
            # Whoever routes a request sees to it that the group that decodes hears of it.
            self._post.send(DECODE, arrival_of(request, PREFILL), surely=True)
            self._post.send(PREFILL, arrival_of(request, DECODE))
            self._prompts.remember(namespace, prompt)

    def _strike(self) -> None:
        """Let happen what is due, and abort a request now and then."""
        for what, moment_us in list(self._moments.items()):
            if moment_us is not None and moment_us <= self._clock.now_us:
                del self._moments[what]
                self._trace(what)
                self._happen(what)
        if self.world.troubles.has(HandoffFault.ABORTS) and self._random.random() < 0.01:
            self._abort()

    def _happen(self, what: str) -> None:
        match what:
            case "prefill dies":
                self._prefill.die()
            case "decode dies":
                self._decode.die()
            case "nobody can connect":
                self._prefill.serving.is_gone = True
            case _:
                self.result.coverage[what] += self._shared.lose_half(self._random)

    def _abort(self) -> None:
        if not self._sent:
            return
        name, group = self._random.choice(self._sent), self._random.randrange(3)
        if group != 0 and self._prefill.is_alive:
            self.result.coverage["aborted where it is computed"] += self._prefill.abort(name)
        if group != 1 and self._decode.is_alive:
            gone = self._decode.abort(name)
            self._aborted += gone
            self.result.coverage["aborted where it goes on"] += gone

    def _violated(self, finding: Finding) -> None:
        self._trace(f"violated: {finding}")
        self.result.violation = Violation(
            seed=self.world.seed,
            step=self.result.steps,
            finding=finding,
            replay=self.world.replay,
        )

    def _count(self) -> None:
        result = self.result
        result.requests, result.served = len(self._sent), self._served
        arrivals, departures = self._decode.arrivals[0], self._prefill.departures[0]
        result.outcomes += Counter({each.value: n for each, n in arrivals.outcomes.items()})
        result.refusals += Counter({each.value: n for each, n in arrivals.refusals.items()})
        result.departures += departures.outcomes

    def _trace(self, line: str) -> None:
        if self._record:
            self.result.transcript.append(f"{self._clock.now_us} us: {line}")


def run_handoff_schedule(
    seed: int,
    *,
    prefill_ranks: int | None = None,
    decode_ranks: int | None = None,
    profile: str | None = None,
    faults: str = "mixed",
    depth: int | None = None,
    build: Build = SOUND_BUILD,
    record: bool = False,
) -> HandoffResult:
    """Run the schedule of one seed; equal arguments always give equal runs."""
    world = draw_handoff_world(
        seed,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        profile=profile,
        faults=faults,
        depth=depth,
    )
    return HandoffSchedule(world, record=record, build=build).run()

"""Control requests in simulated schedules (rule R14) arrive late, repeated and out of order."""

import pytest

from lockstep.coordinator.verdict import Verdict
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.member.request_log import RequestLog
from lockstep.ranks.protocol.effects import Effects
from lockstep.simulation.exploration import Exploration
from lockstep.simulation.explore import ExplorationReport, explore
from lockstep.simulation.rank.epoch import Build
from tests.kit.planted_bugs import assert_found, violations


@pytest.fixture(scope="module", params=[0, 1], ids=["depth 0", "depth 1"])
def report(request: pytest.FixtureRequest) -> ExplorationReport:
    depth = request.param
    return explore(
        Exploration(seeds=range(700, 706), ranks=3, steps=100, faults="mixed", depth=depth),
        processes=1,
    )


def test_requests_that_come_late_again_and_out_of_order_are_commands_everywhere_at_once(
    report: ExplorationReport,
) -> None:
    """Rules R13 and R14: every rank executes the same bytes in the same step, in numeric order."""
    assert not report["violations"], "\n".join(each["replay"] for each in report["violations"])
    happened = {name for name, times in report["coverage"].items() if times}
    assert {"requests heard", "requests repeated", "requests out of order"} <= happened


class _CountsThoseBeyondAGap(RequestLog):
    """Planted bug: a log reports its number of requests although earlier requests are missing."""

    @property
    def count(self) -> int:
        return self.waiting + self._gone


class _SpoilsAByte(RequestLog):
    """Planted bug: a log changes the bytes of each request."""

    def note(self, number: int, content: bytes) -> bool:
        return super().note(number, content[:-1])


class _HasItsOwnOrder(RequestLog):
    """Planted bug: a log renumbers requests in order of arrival."""

    def note(self, number: int, content: bytes) -> bool:
        return super().note(self.count + 1, content)


class _Forgets(RequestLog):
    """Planted bug: a log drops requests that arrive before their predecessors."""

    def note(self, number: int, content: bytes) -> bool:
        return number == self.count + 1 and super().note(number, content)


class _HearsItsOwn(Cache):
    """Planted bug: a rank executes requests once it has them, without the other ranks."""

    def _apply(self, verdict: Verdict) -> Effects:
        assert self._requests.log is not None
        self._replica.messages.reach(self._requests.log.count)
        return super()._apply(verdict)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (_CountsThoseBeyondAGap, "is not available"),
        (_SpoilsAByte, "was sent as"),
        (_HasItsOwnOrder, "digests differ"),
        (_Forgets, "does not become a command"),
    ],
)
def test_a_log_that_breaks_a_promise_is_found(log: type[RequestLog], words: str) -> None:
    assert_found(violations(Build(log=log)), words)


def test_a_rank_that_does_not_wait_for_the_others_is_found() -> None:
    assert_found(violations(Build(cache=_HearsItsOwn)), "digests differ")

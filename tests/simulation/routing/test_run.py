"""A run in virtual time: queues, caches, events on their way, and what a policy sees of them."""

from collections.abc import Sequence

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.disaggregation.groups.router import Group, Prompt
from lockstep.simulation.routing.arrivals import Arrival
from lockstep.simulation.routing.block_cache import PagedPrompt
from lockstep.simulation.routing.policies import Policy, policies
from lockstep.simulation.routing.run import RunSettings, Service, run

PAGE = 100
SERVICE = Service(tokens_per_s=1000.0)
SETTINGS = RunSettings(groups=2, device_pages=10, service=SERVICE)


def arrival(at_s: float, *names: int) -> Arrival:
    keys = tuple(bytes([name]) for name in names)
    return Arrival(at_s, PagedPrompt(PAGE * len(names), PAGE, keys))


class Watching:
    """Sends everything to one group, and keeps what it was told."""

    def __init__(self, group: str = "group-0") -> None:
        self.told: list[tuple[Group, ...]] = []
        self.hits: list[dict[str, int]] = []
        self._group = group
        self.policy = Policy("watching", "", self._choose, asks=True)

    def _choose(self, groups: Sequence[Group], prompt: Prompt) -> str:
        self.told.append(tuple(groups))
        self.hits.append({name: hit.pages for name, hit in prompt.hits.items()})
        return self._group


def test_prompts_of_one_group_are_computed_one_after_the_other() -> None:
    watching = Watching()

    counts = run([arrival(0, 1), arrival(0, 2, 3), arrival(0.25, 4)], SETTINGS, watching.policy)

    assert counts.waits_s == pytest.approx([0.0, 0.1, 0.05])
    assert counts.first_tokens_s == pytest.approx([0.1, 0.3, 0.15])
    assert (counts.busy_s, counts.took_s) == pytest.approx((0.4, 0.4))


def test_what_is_cached_when_a_prompt_begins_is_not_computed() -> None:
    counts = run([arrival(0, 1, 2), arrival(0, 1, 2, 3)], SETTINGS, Watching().policy)

    assert counts.first_tokens_s == pytest.approx([0.2, 0.3])
    assert (counts.hit_tokens, counts.tokens) == (200, 500)
    assert counts.hit_ratio == pytest.approx(0.4)


def test_a_policy_is_told_what_is_left_to_compute() -> None:
    watching = Watching()

    run([arrival(0, 1, 2), arrival(0.05, 3), arrival(0.1, 4)], SETTINGS, watching.policy)

    queued = [
        [(each.queued_requests, each.queued_tokens) for each in told] for told in watching.told
    ]
    assert queued == [[(0, 0), (0, 0)], [(1, 150), (0, 0)], [(2, 200), (0, 0)]]


def test_a_policy_sees_what_a_group_has_once_its_events_have_come() -> None:
    lagging = RunSettings(groups=2, device_pages=10, service=SERVICE, lag_s=0.5)
    watching = Watching("group-1")

    run(
        [arrival(0, 1, 2), arrival(0.69, 1, 2, 3), arrival(0.71, 1, 2, 3)], lagging, watching.policy
    )

    assert watching.hits == [{}, {}, {"group-1": 2}]


def test_times_are_scaled_and_service_is_not() -> None:
    scaled = RunSettings(groups=1, device_pages=10, service=SERVICE, scale=10.0)

    counts = run([arrival(0, 1), arrival(0.1, 2)], scaled, Watching().policy)

    assert counts.took_s == pytest.approx(1.1)


def test_attention_makes_later_tokens_cost_more() -> None:
    service = Service(tokens_per_s=1000.0, attention_tokens=500)

    assert service.seconds(0, 1000) == pytest.approx(2.0)
    assert service.seconds(500, 1000) == pytest.approx(0.5 + 0.75)
    assert service.seconds(0, 500) + service.seconds(500, 1000) == pytest.approx(2.0)


def test_a_prompt_that_fits_nowhere_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="needs 11 pages, and a group has 10"):
        run([arrival(0, *range(11))], SETTINGS, Watching().policy)


@pytest.mark.parametrize("policy", [each.name for each in policies()])
def test_every_policy_lets_all_requests_be_computed_and_repeats_itself(policy: str) -> None:
    arrivals = [arrival(number / 10, number % 3, number % 7 + 10) for number in range(100)]

    def counts() -> list[float]:
        (chosen,) = (each for each in policies() if each.name == policy)
        return run(arrivals, SETTINGS, chosen).first_tokens_s

    assert len(counts()) == 100
    assert counts() == counts()

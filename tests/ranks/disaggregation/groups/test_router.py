"""The router compares times, says why, and refuses by name."""

from dataclasses import replace

import pytest

from lockstep.ranks.disaggregation.groups.prefix_index import Hit
from lockstep.ranks.disaggregation.groups.router import Choice, Group, Prompt, Refusal, Role, route

P0 = Group(name="p0", role=Role.PREFILL, prefill_tokens_per_s=1000.0, transfer_tokens_per_s=1e5)
P1 = replace(P0, name="p1")
D0 = Group(name="d0", role=Role.DECODE, tokens_max=100_000, full_step_s=0.05)
D1 = replace(D0, name="d1")
PROMPT = Prompt(tokens=4000, output_tokens=100, page_tokens=100, hits={})


def chosen(groups: list[Group], prompt: Prompt = PROMPT, *, selfish: bool = False) -> Choice:
    choice = route(groups, prompt, selfish=selfish)
    assert isinstance(choice, Choice), choice
    return choice


def with_hit(group: str, pages: int) -> Prompt:
    return replace(PROMPT, hits={group: Hit(pages, pages)})


def test_with_equal_queues_the_longest_prefix_wins() -> None:
    choice = chosen([P0, P1, D0], with_hit("p1", 30))

    assert (choice.prefill, choice.hit_tokens) == ("p1", 3000)
    assert choice.compute_s == pytest.approx(1.0)
    assert "p1 has 3000 of 4000 tokens" in choice.reason


def test_without_hits_the_shortest_queue_wins() -> None:
    busy = replace(P0, queued_requests=1, queued_tokens=500)

    assert chosen([busy, P1, D0]).prefill == "p1"


def test_a_queue_of_more_seconds_than_a_hit_saves_for_all_outweighs_it() -> None:
    """30 pages save 3 s of compute, which count 1 + 1 + 1/2 times: 7.5 s."""
    short = replace(P0, queued_requests=1, queued_tokens=7400)
    long = replace(P0, queued_requests=1, queued_tokens=7600)

    assert chosen([short, P1, D0], with_hit("p0", 30)).prefill == "p0"
    assert chosen([long, P1, D0], with_hit("p0", 30)).prefill == "p1"


def test_the_more_there_is_to_do_the_more_of_a_queue_a_hit_outweighs() -> None:
    def groups(waiting: int) -> list[Group]:
        hit = replace(P0, queued_requests=waiting, queued_tokens=10_000)
        return [hit, replace(P1, queued_requests=waiting, queued_tokens=1000), D0]

    assert chosen(groups(0), with_hit("p0", 30)).prefill == "p1"
    assert chosen(groups(5), with_hit("p0", 30)).prefill == "p0"


def test_the_request_s_own_time_alone_is_what_a_selfish_router_looks_at() -> None:
    hit = replace(P0, queued_requests=1, queued_tokens=3100)

    choice = chosen([hit, P1, D0], with_hit("p0", 30), selfish=True)

    assert choice.prefill == "p1"
    assert choice.first_token_s == pytest.approx(4.0 + 4000 / 1e5)


def test_a_group_that_the_index_does_not_know_counts_as_without_a_hit() -> None:
    choice = chosen([P0, P1, D0], replace(PROMPT, hits={"gone": Hit(40, 40), "p1": Hit(1, 0)}))

    assert choice.prefill == "p1"


def test_at_least_one_token_is_computed() -> None:
    assert chosen([P0, D0], with_hit("p0", 40)).compute_s == pytest.approx(0.001)


def test_ties_go_to_the_first_name_in_whatever_order_the_groups_are_told() -> None:
    orders = ([P0, P1, D0, D1], [D1, P1, D0, P0])

    assert {(each.prefill, each.decode) for each in map(chosen, orders)} == {("p0", "d0")}


def test_decoding_goes_where_the_pages_are_or_else_where_there_is_the_most_room() -> None:
    fuller = replace(D0, running_tokens=50_000)

    assert chosen([P0, fuller, D1]).decode == "d1"
    assert chosen([P0, fuller, D1], with_hit("d0", 40)).decode == "d0"
    assert chosen([P0, replace(D0, running_tokens=99_000), D1], with_hit("d0", 40)).decode == "d1"


def test_a_group_that_does_both_hands_itself_nothing() -> None:
    both = replace(P0, name="b0", role=Role.BOTH, tokens_max=100_000)

    choice = chosen([both, replace(both, name="b1", queued_tokens=9)])

    assert (choice.prefill, choice.decode, choice.transfer_s) == ("b0", "b0", 0.0)


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ([], Refusal.NO_PREFILL_GROUP),
        ([D0], Refusal.NO_PREFILL_GROUP),
        ([replace(P0, healthy=False), D0], Refusal.NO_PREFILL_GROUP),
        ([P0], Refusal.NO_DECODE_GROUP),
        ([P0, replace(D0, healthy=False)], Refusal.NO_DECODE_GROUP),
        ([P0, replace(D0, running_tokens=96_000)], Refusal.NO_ROOM),
        ([P0, replace(D0, tokens_max=4099)], Refusal.TOO_LONG),
    ],
)
def test_a_request_that_goes_nowhere_is_refused_by_name(
    groups: list[Group], refusal: Refusal
) -> None:
    assert route(groups, PROMPT) is refusal


def test_a_sick_group_is_passed_over() -> None:
    assert chosen([replace(P0, healthy=False), P1, D0], with_hit("p0", 40)).prefill == "p1"

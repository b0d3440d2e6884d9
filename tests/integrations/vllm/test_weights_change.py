"""Weights change while vLLM serves: later requests get no KV of the old weights."""

from collections.abc import Iterable
from random import Random
from time import time_ns
from typing import Any

import pytest

from lockstep.integrations.vllm.weights import InFlight, WeightsChange, WeightsTracker
from lockstep.ranks.protocol.orders import CopyToHost
from lockstep.ranks.replica.tree.node import NO_PERSIST_PREFIX
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.vllm.changing_weights import Counts, RememberingRanks, ScriptedEngine
from tests.kit.vllm.sent_requests import Blocks, CountedBlocks, Scheduled, Sent

CHANGES = 20
PROMPT_PAGES = 4
PROMPTS = [[number] * (PROMPT_PAGES * PAGE_TOKENS) + [1] for number in range(8)]
QUEUE_MAX = 8


class Conversations:
    def __init__(self, seed: int) -> None:
        self.drawn = Random(seed)

    def prompt(self) -> list[int]:
        """Return a prompt of one of 40 groups; prompts of a group share their first pages."""
        group, shared = self.drawn.randrange(40), self.drawn.randrange(1, PROMPT_PAGES)
        own = self.drawn.randrange(1000)
        tokens = [group] * (shared * PAGE_TOKENS) + [100 + own] * (
            (PROMPT_PAGES - shared) * PAGE_TOKENS
        )
        return [*tokens, 1]


def become(engine: ScriptedEngine, drawn: Random, number: int, *, preempting: bool) -> None:
    """Change the engine's weights, in one of the ways that users have."""
    weights = drawn.choice([f"step-{number}", f"step-{max(0, number - 2)}", "default", ""])
    preempts, way = preempting and drawn.random() < 0.3, drawn.randrange(3)
    if way == 0:
        # In one of the three ways, the caches are reset before the weights change.
        engine.reset(preempting=preempts)
    engine.load_weights(weights or f"nobody knows {number}")
    if weights:
        engine.name(weights)
    if way == 1 or not weights:
        engine.reset(preempting=preempts)


def serve(engine: ScriptedEngine, requests: int, *, preempting: bool = False) -> Counts:
    """Send requests while the weights change, until all are answered; a failed test shows its seed."""
    seed = engine.counts.seed = time_ns() % 100_000
    conversations, drawn = Conversations(seed), Random(seed)
    for number in range(CHANGES):
        for _ in range(requests // CHANGES):
            engine.send(conversations.prompt())
            if engine.queue > QUEUE_MAX:
                engine.step()
        become(engine, drawn, number, preempting=preempting)
    answer(engine)
    engine.ranks.check()
    return engine.counts


def engine_of(ranks: int = 2, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(RememberingRanks(ranks, depth=1, host_pages=2000), **settings)


def ask(engine: ScriptedEngine, prompts: Iterable[list[int]]) -> int:
    before = engine.counts.hits
    for prompt in prompts:
        engine.send(prompt)
        answer(engine)
    return engine.counts.hits - before


def answer(engine: ScriptedEngine) -> None:
    while not engine.idle:
        engine.step()


def backed_up(engine: ScriptedEngine, name: str) -> int:
    """Compute a request after a hit of one block in vLLM's prefix cache.

    Return the number of pages that are backed up.
    """
    [side], [memory] = engine.sides, engine.ranks.memories
    request, blocks = Sent(list(PROMPTS[0]), name), range(PROMPT_PAGES)
    side.arrived(request)
    side.hit(request, PAGE_TOKENS)
    side.end_pass(Scheduled({name: request.num_tokens}, None, Blocks(lambda _: (blocks,))))
    return sum(len(each.sources) for order in memory.take(CopyToHost) for each in order.transfers)


def compute(engine: ScriptedEngine, request: Sent) -> None:
    [side], [memory], blocks = engine.sides, engine.ranks.memories, range(90, 90 + PROMPT_PAGES)
    side.hit(request, 0)
    tokens = {request.request_id: request.num_tokens}
    side.end_pass(Scheduled(tokens, None, Blocks(lambda _: (blocks,))))
    memory.take(CopyToHost)
    request.num_computed_tokens = request.num_tokens


def load(engine: ScriptedEngine, prompts: Iterable[list[int]]) -> None:
    for prompt in prompts:
        engine.send(prompt)
    while not engine.loading:
        engine.step()


@pytest.mark.parametrize(("ranks", "requests"), [(1, 2_000), (2, 1_000)])
def test_new_requests_get_nothing_stale_while_the_weights_change_twenty_times(
    ranks: int, requests: int
) -> None:
    """Over twenty weight changes, with or without versions and resets, no request gets stale pages."""
    engine = engine_of(ranks)

    counts = serve(engine, requests, preempting=True)

    assert (counts.requests, counts.stale) == (requests, 0), counts
    assert counts.hits > requests // 2, counts


def test_requests_in_flight_keep_what_they_have() -> None:
    counts = serve(engine_of(), 500)

    assert counts.in_flight > 500, counts
    assert counts.lost == 0, counts


def test_a_load_in_flight_counts_as_failed_where_it_is_to_be_computed() -> None:
    engine = engine_of(in_flight=InFlight.COMPUTE)
    ask(engine, PROMPTS)
    load(engine, PROMPTS)

    engine.load_weights("step-1")
    engine.name("step-1")
    answer(engine)

    assert engine.counts.lost == engine.counts.in_flight > 0
    assert engine.counts.stale == 0


def test_where_weights_change_with_a_name_alone_a_reset_drops_nothing() -> None:
    engine = engine_of(change=WeightsChange.WITH_NAME)
    ask(engine, PROMPTS)
    warm = ask(engine, PROMPTS)

    engine.reset(preempting=True)

    assert ask(engine, PROMPTS) == warm > 0


def test_storage_gets_nothing_of_weights_that_nobody_has_named() -> None:
    engine = engine_of()
    engine.reset()

    ask(engine, PROMPTS)
    warm = ask(engine, PROMPTS)

    assert warm > 0
    assert [memory.store for memory in engine.ranks.memories] == [{}, {}]


def test_a_name_belongs_to_the_reset_before_it_and_to_the_one_right_after_it() -> None:
    weights = WeightsTracker({"default"}, "life")

    assert weights.reset()
    assert weights.named("step-1")
    assert not weights.reset()
    assert weights.name == "step-1"


def test_a_reset_after_something_was_computed_is_for_another_change() -> None:
    weights = WeightsTracker({"default"}, "life")
    weights.named("step-1")
    weights.computed()

    assert weights.reset()
    assert weights.name is None


def test_weights_are_a_part_of_namespaces_and_those_of_the_start_are_none() -> None:
    weights = WeightsTracker({"default", "step-0"}, "life")

    names = [weights.namespace(""), weights.namespace('{"salt": "a"}')]
    weights.named("step-0")
    names.append(weights.namespace(""))
    weights.named("step-1")
    names += [weights.namespace(""), weights.namespace('{"salt": "a"}')]
    weights.reset()
    weights.reset()
    names.append(weights.namespace(""))

    assert names == [
        "",
        '{"salt": "a"}',
        "",
        '{"weights": "step-1"}',
        '{"salt": "a", "weights": "step-1"}',
        NO_PERSIST_PREFIX + '{"weights": ["life", 2]}',
    ]


def test_what_follows_vllm_s_own_blocks_of_former_weights_is_not_kept_for_others() -> None:
    """After a hit in vLLM's blocks of old weights, new KV is not backed up.

    Backups begin again once vLLM has dropped these blocks.
    """
    engine = engine_of(1)
    engine.lending[0].held.pool = pool = CountedBlocks(cached_block_hash_to_block={"a": 1})
    engine.name("step-1")

    before = backed_up(engine, "behind a former block")
    engine.sides[0].finished(Sent(request_id="behind a former block"), ())
    pool.cached_block_hash_to_block = {}
    after = backed_up(engine, "behind a new block")

    assert (before, after) == (0, PROMPT_PAGES)


def test_what_follows_a_part_of_a_former_block_is_not_kept_for_others_either() -> None:
    """If vLLM reuses half a block of old weights, the KV after it is not backed up.

    vLLM reports such a hit as a match of 0.
    """
    engine, request = engine_of(1), Sent(list(PROMPTS[0]), "behind a part of a block")
    engine.lending[0].held.pool = CountedBlocks(cached_block_hash_to_block={"former": 1})
    [side], [memory], blocks = engine.sides, engine.ranks.memories, range(PROMPT_PAGES)
    engine.name("step-1")
    side.arrived(request)

    side.hit(request, 0)
    request.num_computed_tokens = PAGE_TOKENS // 2
    tokens = {request.request_id: request.num_tokens - request.num_computed_tokens}
    side.end_pass(Scheduled(tokens, None, Blocks(lambda _: (blocks,))))

    assert memory.given(CopyToHost) == []


def test_vllm_s_own_blocks_are_of_new_weights_once_it_has_preempted_all_requests() -> None:
    """After vLLM has preempted all requests and dropped its blocks, new KV is backed up again."""
    engine, request = engine_of(1), Sent(list(PROMPTS[1]), "preempted")
    engine.lending[0].held.pool = pool = CountedBlocks()
    engine.sides[0].arrived(request)
    compute(engine, request)

    request.num_computed_tokens = 0
    engine.name("step-1")
    compute(engine, request)
    pool.cached_block_hash_to_block = {"of step 1": 1}

    assert backed_up(engine, "behind a new block") == PROMPT_PAGES


def test_that_vllm_drops_its_own_blocks_shows_also_while_a_request_waits_that_had_found_them() -> (
    None
):
    engine, request = engine_of(1), Sent(list(PROMPTS[1]), "waits")
    engine.lending[0].held.pool = pool = CountedBlocks(cached_block_hash_to_block={"former": 1})
    engine.name("step-1")
    engine.sides[0].arrived(request)
    engine.sides[0].hit(request, PAGE_TOKENS)
    engine.sides[0].end_pass(Scheduled({"another": 1}))

    pool.cached_block_hash_to_block = {}
    compute(engine, request)
    pool.cached_block_hash_to_block = {"of step 1": 1}

    assert backed_up(engine, "behind a new block") == PROMPT_PAGES


def test_that_vllm_drops_its_own_blocks_shows_also_after_the_verdict_of_the_pass_has_come() -> None:
    """If vLLM drops its old blocks after the pass has its verdict, new KV is still backed up again."""
    engine, request = engine_of(1), Sent(list(PROMPTS[1]), "the first one")
    engine.lending[0].held.pool = pool = CountedBlocks(cached_block_hash_to_block={"former": 1})
    engine.name("step-1")
    engine.sides[0].answered()

    pool.cached_block_hash_to_block = {}
    engine.sides[0].arrived(request)
    compute(engine, request)
    pool.cached_block_hash_to_block = {"of step 1": 1}

    assert backed_up(engine, "behind a new block") == PROMPT_PAGES

"""Prefetch as the design tells it, step by step, on two ranks."""

import pytest

from lockstep.coordinator.ballot import Answered, Capped, Landed, Quiesced
from lockstep.ranks.orders import Cancel, Fetch, LookUp

from .ranks_in_turn import PAGE_TOKENS, RanksInTurn


def prompt(pages: int, *, start: int = 0) -> list[int]:
    return list(range(start, start + pages * PAGE_TOKENS))


def test_a_prefetch_told_step_by_step() -> None:
    ranks = RanksInTurn(2)
    tokens = prompt(16)
    ranks.compute("warm", tokens[: 4 * PAGE_TOKENS])
    free = ranks.caches[0].replica.state.pools[1].free

    assert ranks.every(lambda cache: cache.prefetch("7", tokens))
    lookups = [executor.take(LookUp)[0] for executor in ranks.executors]
    operation = lookups[0].operation
    assert len(lookups[0].keys) == 12
    assert ranks.phase(operation) == "QUERY"

    ranks.executors[0].said.append(Answered(operation, 12))
    ranks.step()
    assert ranks.phase(operation) == "QUERY"

    ranks.executors[1].said.append(Answered(operation, 10))
    ranks.step()
    assert ranks.phase(operation) == "TRANSFER"
    assert ranks.caches[0].replica.state.pools[1].free == free - 10
    assert [len(executor.take(Fetch)[0].transfers[0].pages) for executor in ranks.executors] == [
        10,
        10,
    ]

    ranks.executors[0].said.append(Landed(operation, 10))
    ranks.executors[1].said.append(Landed(operation, 7))
    ranks.step()
    assert ranks.phase(operation) == "TRANSFER"

    ranks.executors[1].said += [Landed(operation, 8), Capped(operation, 8)]
    ranks.step()
    assert ranks.phase(operation) == "QUIESCE"
    assert ranks.every(lambda cache: cache.match(tokens).host_tokens) == 12 * PAGE_TOKENS
    assert lookups[0].keys[8] in ranks.caches[0].replica.state.misses
    assert ranks.caches[0].replica.state.pools[1].free == free - 10

    assert [len(executor.take(Cancel)) for executor in ranks.executors] == [1, 1]
    ranks.executors[0].said.append(Quiesced(operation))
    ranks.step()
    assert ranks.phase(operation) == "QUIESCE"

    ranks.executors[1].said.append(Quiesced(operation))
    ranks.step()
    assert ranks.phase(operation) == "DONE"
    assert ranks.caches[0].replica.state.pools[1].free == free - 8


@pytest.mark.parametrize("depth", [0, 1])
def test_what_was_computed_is_restored_from_host_after_eviction(depth: int) -> None:
    ranks = RanksInTurn(2, depth=depth, device_pages=8)
    first, second = prompt(6), prompt(7, start=1000)
    ranks.compute("a", first)
    ranks.compute("b", second)

    match = ranks.every(lambda cache: cache.match(first))
    assert (match.device_tokens, match.host_tokens) == (4, 24)

    admission = ranks.every(lambda cache: cache.load_back("c", first, reserve_tokens=32))
    assert not isinstance(admission, str)
    assert (admission.device_tokens, admission.host_tokens) == (4, 20)
    ranks.settle()
    assert ranks.every(lambda cache: cache.load_state("c")) == "ready"
    assert len(ranks.every(lambda cache: cache.page_table("c").tolist())) == 8
    ranks.every(lambda cache: cache.release("c"))
    ranks.check()

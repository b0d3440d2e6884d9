"""Pages of one rank that change on their way to another group are a miss, never wrong bytes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lockstep.ranks.protocol.outside import Peers
from tests.kit.ranks.flipping_wire import FAR, wires
from tests.kit.ranks.pair import PAGE_TOKENS, Pair
from tests.kit.ranks.served_group import keyed

TOKENS = keyed(3, 12 * PAGE_TOKENS + 7, PAGE_TOKENS)
WHOLE = 12 * PAGE_TOKENS


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (4, 2)], ids=str)
def test_a_request_goes_on_with_right_bytes_while_one_rank_sends_flipped_ones(
    stack: ExitStack, ranks: tuple[int, int]
) -> None:
    pair = Pair(stack, "llama", ranks, peers=Peers(reached_at=FAR))
    ports = [int(each.serving_uri.rpartition(":")[2]) for each in pair.prefill.caches]
    wire = stack.enter_context(wires(ports, flips_at=ranks[0] - 1, every=997, first=4096))
    pair.compute(TOKENS, WHOLE // 2, WHOLE)

    cached = pair.goes_on(TOKENS)

    assert cached < WHOLE
    assert pair.wrong_pages(TOKENS, cached) == 0
    assert wire.flipped > 0

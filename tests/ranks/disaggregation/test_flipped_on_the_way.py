"""Pages of one rank that change on their way to another group are a miss, never wrong bytes."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from lockstep.ranks.outside import Peers
from tests.kit.ranks.flipping_wire import FAR, wires
from tests.kit.ranks.handoffs import Post, compute_and_leave, take_up
from tests.kit.ranks.pair import PAGE_TOKENS, config_of
from tests.kit.ranks.served_group import ServedGroup, keyed

NAME = "r"
TOKENS = keyed(3, 5 * PAGE_TOKENS + 7, PAGE_TOKENS)
CHUNKS = (2 * PAGE_TOKENS, 4 * PAGE_TOKENS)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2), (4, 2)], ids=str)
def test_every_request_goes_on_with_right_bytes_while_one_rank_sends_flipped_ones(
    ranks: tuple[int, int],
) -> None:
    config = replace(config_of("hybrid-all", store=None), peers=Peers(reached_at=FAR))
    with ExitStack() as stack:
        prefill = stack.enter_context(closing(ServedGroup(config, ranks[0])))
        decode = stack.enter_context(closing(ServedGroup(config, ranks[1])))
        ports = [int(each.serving_uri.rpartition(":")[2]) for each in prefill.caches]
        wire = stack.enter_context(wires(ports, flips_at=ranks[0] - 1, every=997, first=4096))
        post = Post({"prefill": prefill, "decode": decode})
        coming = decode.begin(take_up(NAME, TOKENS, post))
        leaving = prefill.begin(compute_and_leave(NAME, TOKENS, CHUNKS, post, directly=True))
        receptions = [each.result(60) for each in coming]
        left = [each.result(60) for each in leaving]

    assert [each.wrong_pages for each in receptions] == [0] * ranks[1]
    assert len({each.outcome for each in receptions}) == 1
    assert left == [{"received": 1}] * ranks[0]
    assert wire.flipped > 0

"""What the plug-in's scheduler half makes of vLLM's passes, on a real cache whose I/O a test tells."""

from ranks_in_turn import PAGE_TOKENS, HostRanksInTurn
from sent_requests import Blocks, Scheduled, Sent

from lockstep.integrations.vllm.scheduler_side import SchedulerSide
from lockstep.ranks.orders import CopyToHost, LookUp

PROMPT = list(range(4 * PAGE_TOKENS + 1))


def scheduler(ranks: HostRanksInTurn, *, backs_up: bool = True) -> SchedulerSide:
    return SchedulerSide(
        ranks.caches[0], page_tokens=PAGE_TOKENS, loads=True, backs_up=backs_up, idle_wait_s=0.001
    )


def computed(request: Sent) -> Scheduled:
    """Return a pass that computes the whole of a request's prompt, in the blocks 0, 1, ..."""
    tokens = request.num_tokens
    return Scheduled({request.request_id: tokens}, None, Blocks(lambda _: (range(tokens),)))


def test_a_request_that_was_preempted_where_nothing_is_backed_up_may_load_again() -> None:
    """With `kv_consumer`, between two passes, where only the second question tells of it."""
    ranks = HostRanksInTurn(ranks=1)
    side, request = scheduler(ranks, backs_up=False), Sent(PROMPT)
    side.arrived(request)
    assert side.hit(request, 0) is None
    ranks.executors[0].obey()
    side.end_pass(Scheduled())
    assert side.hit(request, 0) == 0
    side.end_pass(computed(request))

    side.hit(request, 0)

    assert len(ranks.executors[0].take(LookUp)) == 1


def test_a_pass_backs_up_the_whole_pages_that_it_computes() -> None:
    ranks = HostRanksInTurn(ranks=1)
    side, request = scheduler(ranks), Sent(PROMPT)
    side.arrived(request)

    side.end_pass(computed(request))
    ranks.caches[0].begin_backups()

    [order] = ranks.executors[0].take(CopyToHost)
    assert order.transfers[0].sources == (0, 1, 2, 3)

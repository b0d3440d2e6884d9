"""Slots in SGLang's tree stay locked while a copy on any rank may read them."""

from lockstep.coordinator.ballot import TransferEnded
from lockstep.integrations.sglang.pending_tree_backups import PATIENCE_S, SHARE
from lockstep.ranks.protocol.orders import CopyToHost
from lockstep.ranks.replica.tree.tokens import as_token_bytes
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.sglang.host_tier_ranks import SLOTS, RankBelow, RanksBelow

PROMPT = list(range(4 * PAGE_TOKENS))
OTHER = [100 + each for each in PROMPT]
LOCK = "the lock"


def keep(rank: RankBelow) -> None:
    pages = rank.slots.pages_of(rank.rows(len(PROMPT)))
    rank.backups.keep(as_token_bytes(PROMPT), pages, "", LOCK)
    rank.host.begin_backups()


def save(rank: RankBelow) -> str | None:
    pages = rank.slots.pages_of(rank.rows(len(PROMPT)))
    return rank.backups.save(as_token_bytes(PROMPT), pages, "")


def test_a_lock_is_kept_until_every_rank_has_copied() -> None:
    below = RanksBelow(store=False)
    below.every(keep)
    operation = below.ranks.take_operation(CopyToHost)

    below.ranks.executors[0].reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()
    below.every(lambda rank: rank.backups.collect())
    assert below.every(lambda rank: rank.unlocked) == []
    assert below.every(lambda rank: len(rank.backups)) == 1
    assert below.every(lambda rank: "b1" in rank.backups)
    below.ranks.executors[1].reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()
    below.every(lambda rank: rank.backups.collect())

    assert below.every(lambda rank: rank.unlocked) == [LOCK]
    assert below.every(lambda rank: len(rank.backups)) == 0


def test_what_is_on_the_host_already_is_not_copied_and_nothing_is_awaited_for_it() -> None:
    below = RanksBelow(store=False)
    below.every(keep)
    below.ranks.settle()
    below.every(lambda rank: rank.backups.collect())

    below.every(keep)

    assert below.every(lambda rank: rank.unlocked) == [LOCK, LOCK]
    assert [each.given(CopyToHost) for each in below.ranks.executors] == [[], []]
    assert below.every(save) is None
    assert below.every(lambda rank: (len(rank.backups), rank.backups.retracted)) == (0, 1)


def test_a_request_s_pages_may_be_overwritten_on_a_rank_once_save_has_returned() -> None:
    below = RanksBelow(store=False)

    assert below.every(save) == "b1"

    below.check_copied_before_it_went_on()
    assert below.every(lambda rank: "b1" in rank.backups)
    below.ranks.settle()
    below.every(lambda rank: rank.backups.collect())
    assert not below.every(lambda rank: "b1" in rank.backups)
    assert below.every(lambda rank: rank.unlocked) == [None]


def test_of_a_tree_that_is_gone_no_lock_is_given_back() -> None:
    below = RanksBelow(store=False)
    below.every(keep)

    below.every(lambda rank: rank.backups.drop())
    assert below.every(lambda rank: len(rank.backups)) == 1
    below.ranks.settle()
    below.every(lambda rank: rank.backups.collect())

    assert below.every(lambda rank: rank.unlocked) == [None]


def keep_beside(below: RanksBelow, tokens: list[int], lock: str, first: int) -> None:
    """Back up a prefix whose slots begin at `first`; lock `lock` keeps them in SGLang's tree."""

    def program(rank: RankBelow) -> None:
        pages = rank.slots.pages_of(rank.rows(len(tokens), first))
        rank.backups.keep(as_token_bytes(tokens), pages, "", lock)
        rank.host.begin_backups()

    below.every(program)


def pressed() -> RanksBelow:
    """Return ranks whose host memory is full of one prompt, so that the backup of another one waits."""
    below = RanksBelow(host_pages=4)
    below.every(keep)
    for executor in below.ranks.executors:
        executor.complete_only(CopyToHost)
    below.ranks.step()
    keep_beside(below, OTHER, "another lock", len(PROMPT))
    return below


def go_on(below: RanksBelow) -> None:
    """Run some steps in which all I/O completes."""
    for _ in range(4):
        below.ranks.complete()
        below.every(lambda rank: rank.backups.collect())


def test_a_backup_that_finds_no_room_keeps_its_lock_until_it_is_on_the_host() -> None:
    """Regression (sglang#39444): a backup that found no room was dropped instead of waiting."""
    below = pressed()
    before = below.every(lambda rank: list(rank.unlocked))

    go_on(below)

    assert "another lock" not in before
    assert below.every(lambda rank: sorted(rank.unlocked)) == ["another lock", LOCK]
    assert below.every(lambda rank: rank.host.match(OTHER)).host_tokens == len(OTHER)


def test_a_backup_that_comes_no_further_gives_its_lock_back_and_is_counted() -> None:
    below = pressed()

    below.ranks.now_ms = [now + int(PATIENCE_S * 1000) + 1 for now in below.ranks.now_ms]
    below.ranks.step()
    below.every(lambda rank: rank.backups.collect())

    assert "another lock" in below.every(lambda rank: rank.unlocked)
    lost = below.every(lambda rank: rank.host.stats(rounds=0).left_unwritten_pages)
    assert lost == {"no_host_room": len(OTHER) // PAGE_TOKENS}


def test_a_backup_of_too_large_a_part_of_the_device_does_not_wait() -> None:
    below = pressed()
    longest = SLOTS // SHARE - len(OTHER)

    keep_beside(below, [9, *range(longest + PAGE_TOKENS - 1)], "a third lock", 2 * len(PROMPT))

    assert below.every(lambda rank: rank.unlocked) == ["a third lock"]


def test_locks_that_only_wait_are_given_back_at_once_where_the_device_is_full() -> None:
    below = pressed()

    below.every(lambda rank: rank.backups.give_up())

    assert below.every(lambda rank: rank.unlocked) == ["another lock"]

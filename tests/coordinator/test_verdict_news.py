"""Verdicts that name only changes lead to the same replica as verdicts that name everything."""

from dataclasses import replace
from operator import attrgetter

import pytest

from lockstep.coordinator.collective import Vector
from lockstep.coordinator.lanes import SLOT_LANES, SLOTS_AT, BallotShape, LaneLayout
from lockstep.coordinator.prefetch_slots import NOBODY, OPERATION
from lockstep.coordinator.verdict import Verdict, Verdicts
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.simulation.result import ScheduleResult
from lockstep.simulation.schedule import run_schedule

RANKS = 2

History = list[tuple[int, int, int]]
"""One entry per round and rank: rank number, rolling digest, and digest of the whole state."""


def run(
    monkeypatch: pytest.MonkeyPatch, seed: int, depth: int, profile: str
) -> tuple[ScheduleResult, History, list[int]]:
    """Run a schedule; return its result, the replicas' states, and the slots named in each verdict."""
    history: History = []
    named: list[int] = []
    close_round, read = RankCache.close_round, Verdicts.read

    def close_and_keep(self: RankCache) -> None:
        close_round(self)
        history.append((self.rank, self.inspection.digest, self.inspection.state_digest))

    def read_and_count(self: Verdicts, layout: LaneLayout, folded: Vector) -> Verdict:
        verdict = read(self, layout, folded)
        named.append(len(verdict.prefetch_slots))
        return verdict

    with monkeypatch.context() as patched:
        patched.setattr(RankCache, "close_round", close_and_keep)
        patched.setattr(Verdicts, "read", read_and_count)
        return run_schedule(seed, ranks=RANKS, depth=depth, profile=profile), history, named


def name_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make verdicts name every prefetch slot in use, not only those changed since the last round."""
    read = Verdicts.read

    def read_everything(self: Verdicts, layout: LaneLayout, folded: Vector) -> Verdict:
        rows = layout.prefetch_slots.rows.tolist()
        Verdicts.__init__(self, BallotShape(world_size=RANKS, prefetch_slots=len(rows)))
        verdict = read(self, layout, folded)
        votes = folded[SLOTS_AT:].reshape(-1, SLOT_LANES).tolist()
        prefetch_slots = [
            self._read_slot(row, vote)  # pyright: ignore[reportPrivateUsage]
            for row, vote in zip(rows, votes, strict=True)
            if row[OPERATION] != NOBODY
        ]
        return replace(
            verdict, prefetch_slots=tuple(sorted(prefetch_slots, key=attrgetter("operation")))
        )

    monkeypatch.setattr(Verdicts, "read", read_everything)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("seed", "profile"),
    [(1, "llama"), (2, "gemma"), (3, "qwen-next"), (4, "hybrid-all"), (5, "qwen-next")],
)
def test_a_replica_is_the_same_whether_all_is_applied_again_or_what_is_new(
    monkeypatch: pytest.MonkeyPatch, seed: int, profile: str, depth: int
) -> None:
    result, history, named = run(monkeypatch, seed, depth, profile)
    name_everything(monkeypatch)
    everything, whole_history, all_named = run(monkeypatch, seed, depth, profile)

    assert result.violation is None, result.violation
    assert everything.violation is None, everything.violation
    assert history == whole_history
    assert result.outcomes == everything.outcomes
    assert 0 < sum(named) < sum(all_named)

"""The index has what the replicas have, whatever of their events is lost, repeated or late."""

import pytest

from lockstep.ranks.disaggregation.groups.kv_events import EventBatch, Snapshot
from lockstep.ranks.disaggregation.groups.prefix_index import PrefixIndex
from lockstep.simulation.checkers.findings.finding import Violated
from lockstep.simulation.routing.event_schedules import run_event_schedules


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 2000), marks=pytest.mark.slow)], ids=str
)
def test_whenever_the_index_says_that_it_is_exact_it_is(seeds: range) -> None:
    counts = run_event_schedules(seeds)

    # All of it was met, or it would say nothing.
    met = {name for name, count in counts.items() if count > 100}
    assert met >= {"batches", "exact", "unknown", "hits", "lost", "repeated", "late", "lives"}
    assert met >= {"replays", "snapshots", "BlockStored", "BlockRemoved", "AllBlocksCleared"}


class OverlooksGaps(PrefixIndex):
    """Takes the next batch that comes for the next one that was told."""

    def apply(self, group: str, batch: EventBatch) -> bool:
        through = self.standing(group).through
        empty = Snapshot(life=batch.life, sequence=batch.sequence - 1, held={})
        if batch.sequence > through + 1 and self.standing(group).exact:
            kept = {tier: tuple(keys) for tier, keys in self.held(group).items()}
            empty = Snapshot(life=batch.life, sequence=batch.sequence - 1, held=kept)
            self.restore(group, empty)
        return super().apply(group, batch)


class AnswersWhenUnknown(PrefixIndex):
    """Goes on counting hits of a group after a gap."""

    def _judge(self, part: object) -> bool:
        exact = super()._judge(part)  # type: ignore[arg-type]
        self._exact = (1 << 64) - 1
        return exact


class ForgetsNothing(PrefixIndex):
    """Keeps what a group had when it begins anew."""

    def _clear(self, part: object) -> None:
        del part


@pytest.mark.parametrize("index", [OverlooksGaps, AnswersWhenUnknown, ForgetsNothing])
def test_an_index_that_is_wrong_is_found_and_its_seed_told(
    index: type[PrefixIndex], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Violated):
        run_event_schedules(range(50), index)

    told = capsys.readouterr().out
    assert "replay: python -m lockstep.simulation.routing.event_schedules " in told

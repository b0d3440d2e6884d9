"""Deadlines of a rank's operations in flight."""

from lockstep.coordinator.ballot import Answered, QuiesceExpired, TransferEnded
from lockstep.ranks.executor.flights import Flights
from lockstep.ranks.protocol.orders import CopyToHost, LookUp


def test_a_deadline_passes_once_and_the_newest_counts() -> None:
    flights = Flights(lent=False)
    flights.begin(CopyToHost(1, (), timeout_s=5.0), 0.0)
    flights.begin(CopyToHost(2, (), timeout_s=3.0), 0.0)
    flights.begin(LookUp(3, 0, (), timeout_s=4.0), 0.0)
    flights.cancel(1, 9.0)
    flights.note(Answered(3, 0))

    assert flights.next_deadline() == 3.0
    flights.pass_until(6.0)
    assert flights.collect() == [Answered(3, 0), TransferEnded(2, ok=False)]
    flights.pass_until(9.0)
    assert flights.collect() == [QuiesceExpired(1)]
    flights.pass_until(99.0)
    assert (flights.collect(), flights.next_deadline()) == ([], None)

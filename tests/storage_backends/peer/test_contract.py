"""`peer://` keeps the contract of read-only stores, with each kind of transfer."""

from collections.abc import Iterator

import pytest

from tests.kit.storage.contract import StorageContract
from tests.kit.storage.peer import FedStore

WRITES = "it is about writers, and this store only reads"
AGAIN = (
    "it has what is bad be missing from then on, and here it is CORRUPT each time: nobody but the"
    " group that serves a page can take it away (tests/storage_backends/peer/test_reads.py)"
)
EXEMPT = {
    "test_s1_a_call_gives_one_outcome_for_each_key_in_its_order": WRITES,
    "test_s1_a_buffer_that_does_not_fit_costs_its_own_key_alone_in_a_write": WRITES,
    "test_s4_a_corrupt_page_is_a_miss_and_never_data": AGAIN,
    "test_s6_the_first_writer_wins_and_a_later_one_learns_it": WRITES,
    "test_s6_of_many_writers_at_once_exactly_one_wins": WRITES,
    "test_s8_a_fuller_object_takes_the_place_of_one_that_lacks_columns": WRITES,
    "test_s8_columns_that_two_writers_bring_come_together_in_one_object": WRITES,
    "test_s8_a_column_without_bytes_is_a_column_like_the_others": WRITES,
    "test_s8_what_is_not_sound_is_not_carried_over_into_a_fuller_object": WRITES,
    "test_s8_a_reader_finds_a_whole_object_all_the_time_that_it_is_replaced": WRITES,
    "test_s8_of_many_writers_at_once_no_column_is_lost": WRITES,
    "test_s8_a_bit_that_is_wrong_is_found_by_whoever_wants_its_part": AGAIN,
    "test_s8_an_object_in_other_parts_is_never_served": AGAIN,
}
"""Contract tests that do not apply to `peer://`, and why."""


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[FedStore]:
    fed = FedStore(by_engine=request.cls is TestTransferEngineContract)
    yield fed
    fed.close()


class TestPeerContract(StorageContract):
    """The storage contract, with pages in the host memory of ranks that serve them."""


class TestTransferEngineContract(StorageContract):
    """The storage contract over Mooncake's transfer engine on TCP, without the exempt tests."""


for exempt in EXEMPT:
    # Remove an exempt test: pytest does not collect an attribute that is None.
    setattr(TestPeerContract, exempt, None)
    setattr(TestTransferEngineContract, exempt, None)


def test_every_clause_that_is_exempt_is_one_of_the_contract() -> None:
    assert [name for name in EXEMPT if not callable(getattr(StorageContract, name, None))] == []

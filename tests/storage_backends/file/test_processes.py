"""`file://` among processes: of those that write a name at once, one wins."""

import pytest

from lockstep.storage_backends.base import ReadOutcome
from tests.kit.storage.calls import get_many, opened, page
from tests.kit.storage.files import FileStore
from tests.kit.storage.racing import PAGE_BYTES, finish, start


@pytest.mark.parametrize("names", [48, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["unnamed", "named"])
async def test_of_two_processes_that_write_a_name_exactly_one_wins(
    store: FileStore, mode: str, names: int
) -> None:
    writers = [
        start("tests.kit.storage.racing", store.root, mode, writer, names) for writer in range(2)
    ]
    wins = [int(finish(writer)) for writer in writers]

    async with opened(store) as backend:
        read = await get_many(backend, range(names), PAGE_BYTES)
    found = [read.count((ReadOutcome.OK, page(writer, PAGE_BYTES))) for writer in range(2)]
    assert wins == found
    assert sum(wins) == names

"""Fixtures for the page server's tests: a stack that closes resources, and raw readers."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lockstep.storage_backends.peer.wire import Hello
from tests.kit.ranks.page_servers import Connect, RawReader, ServedGroup, raw_reader


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(stack: ExitStack) -> Connect:
    def make(group: ServedGroup) -> RawReader:
        reader = stack.enter_context(raw_reader(group.servers[0].address))
        message, _ = reader.receive()
        assert isinstance(message, Hello)
        return reader

    return make

"""Peers without the secret: their data is not used, they occupy no slots, and log lines are few."""

import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor import sources
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.config import Bounds, CacheConfig
from lockstep.ranks.protocol.network_config import Peers
from lockstep.storage_backends.handshake import UNPROVEN_S
from tests.kit.ranks.relay import Relay
from tests.kit.servers.ports import free_port

SECRET = "sixteen random bytes"  # noqa: S105 - of these tests alone.
PROMPT = np.arange(1, 65, dtype=np.int32)
LAYOUT = PageLayout(
    page_tokens=4, columns=(Column(name="kv", layers=1, heads=1, elements=8, dtype="uint8"),)
)
STEPS_MAX = 4000


def opened(peers: Peers) -> Cache:
    config = CacheConfig(
        model="m",
        layout=LAYOUT,
        device_pages=32,
        host_pages=256,
        peers=peers,
        pipeline_depth=0,
        bounds=Bounds(prefetches=2 * sources.SOURCES_MAX),
    )
    return Cache.open(config, InProcessGroup(1).member(0))


@contextmanager
def served(peers: Peers) -> Generator[str]:
    """Yield the URI at which a cache serves the prompt."""
    with closing(opened(peers)) as cache:
        admitted = cache.load_back("served", PROMPT[:0], reserve_tokens=len(PROMPT))
        assert isinstance(admitted, Admission)
        cache.insert("served", PROMPT)
        steps(cache, lambda: not cache.inspection.in_flight)
        assert cache.serve("served", PROMPT, ttl_s=600) == len(PROMPT)
        cache.step()
        yield cache.serving_uri


def steps(cache: Cache, done: Callable[[], bool]) -> None:
    for _ in range(STEPS_MAX):
        if done():
            return
        cache.step(idle_s=0.005)
    raise AssertionError(f"not done after {STEPS_MAX} steps")


def found(cache: Cache, source: str, request: str = "read") -> int:
    """Prefetch the prompt from a source; return how many prompt tokens are then in host memory."""
    cache.prefetch(request, PROMPT, source=source)
    steps(cache, lambda: cache.prefetch_done(request))
    cache.abort(request)
    return cache.match(PROMPT).host_tokens


@pytest.mark.parametrize(("left_alone_s", "connections"), [(UNPROVEN_S, 1), (0.0, 4)])
def test_a_relay_is_a_miss_and_is_left_alone_for_a_while(
    left_alone_s: float,
    connections: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sources, "UNPROVEN_S", left_alone_s)
    with (
        served(Peers(secret=SECRET)) as uri,
        Relay(uri.removeprefix("peer://")) as relay,
        closing(opened(Peers(secret=SECRET))) as reader,
    ):
        seen = [found(reader, f"peer://{relay.address}", f"r{number}") for number in range(4)]

    assert seen == [0] * 4
    assert relay.connections == connections
    assert f"nothing is read from 'peer://{relay.address}', which counts as missing" in caplog.text


def test_an_address_that_is_not_allowed_is_a_miss_and_is_not_connected_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peers = Peers(secret=SECRET, allow_sources=("10.0.0.0/8",))
    with (
        served(Peers(secret=SECRET)) as uri,
        Relay(uri.removeprefix("peer://")) as relay,
        closing(opened(peers)) as reader,
    ):
        assert found(reader, f"peer://{relay.address}") == 0

    assert relay.connections == 0
    assert "is not an allowed source" in caplog.text


@pytest.mark.parametrize("aborted", [True, False])
def test_requests_that_name_addresses_where_nobody_answers_cost_no_other_request_its_source(
    aborted: bool,
) -> None:
    with ExitStack() as stack:
        uri = stack.enter_context(served(Peers(secret=SECRET)))
        reader = stack.enter_context(closing(opened(Peers(secret=SECRET))))
        for number in range(sources.SOURCES_MAX):
            hole = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            source = f"peer://127.0.0.1:{hole.getsockname()[1]}"
            reader.prefetch(f"hole {number}", PROMPT[number : number + 4], source=source)
        reader.step()
        assert len(reader.inspection.in_flight) == sources.SOURCES_MAX
        for number in range(sources.SOURCES_MAX if aborted else 0):
            reader.abort(f"hole {number}")
        reader.step()

        assert found(reader, uri) == len(PROMPT)


def test_an_address_that_readers_cannot_reach_is_told_in_the_log_of_the_first_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        served(Peers(reached_at=f"127.0.0.1:{free_port()}")) as uri,
        closing(opened(Peers())) as reader,
    ):
        assert found(reader, uri) == 0

    (message,) = [each for each in caplog.messages if each.startswith("nothing is read from")]
    assert f"nothing is read from '{uri}', which counts as missing: " in message
    assert "Connect call failed" in message


def refused(address: str) -> None:
    """Connect without the secret; wait until the server has logged the refusal and closed."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(44))
        while stranger.recv(64):
            pass


def test_strangers_get_a_line_now_and_then_and_not_one_for_each_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served(Peers(secret=SECRET)) as uri:
        for _ in range(20):
            refused(uri.removeprefix("peer://"))

    assert len([each for each in caplog.messages if "is refused" in each]) == 1


def test_a_source_with_a_line_in_it_makes_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(opened(Peers())) as reader:
        assert found(reader, "peer://x:1\nforged") == 0

    (message,) = [each for each in caplog.messages if each.startswith("nothing is read from")]
    assert "\n" not in message

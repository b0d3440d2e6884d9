"""How `lockstep top` asks ranks for their numbers, and what else may answer."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from lockstep.launch.top.findings import findings
from lockstep.launch.top.sighting import look
from lockstep.launch.top.window import Window
from lockstep.ranks.group.decider.deciding import decide
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.telemetry.port import watch
from tests.kit.launch.in_process import Run, refusal
from tests.kit.ranks.in_turn import HostRanksInTurn
from tests.kit.servers.ports import free_ports

Answer = Callable[[socket.socket], object]
Serve = Callable[[Answer], str]
"""Has a server answer one connection; returns its port."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:

        def begin(answer: Answer) -> str:
            def once() -> None:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.recv(4096)
                    answer(connection)

            threads.submit(once)
            return str(listening.getsockname()[1])

        yield begin


def raw(answer: bytes) -> Answer:
    return lambda connection: connection.sendall(answer)


def http(body: str) -> Answer:
    return raw(f"HTTP/1.1 200 OK\r\n\r\n{body}".encode())


def drip(connection: socket.socket) -> None:
    """Send a byte twenty times a second, until the other side has gone."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.settimeout(0.05)
    while True:
        connection.sendall(b"#")
        with suppress(TimeoutError):
            connection.recv(1)


def test_whoever_drips_bytes_has_not_answered(
    serve: Serve, lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.top.sighting._TIMEOUT_S", 0.3)

    assert "nobody answers at 127.0.0.1:" in refusal(lockstep, "top", serve(drip))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (raw(b"\xff\0" * 100), r"it answered b'\xff\x00"),
        (http("up 1\n"), "is no rank of Lockstep: it names world sizes []; name a --metrics-port"),
        (
            http('lockstep_info{world_size="1"} 1\n'),
            "is no rank of Lockstep: invalid literal for int()",
        ),
        (
            http('lockstep_info{rank="0",world_size="many"} 1\n'),
            "is no rank of Lockstep: invalid literal",
        ),
        (
            http('lockstep_info{rank="0",world_size="99999999"} 1\n'),
            "it names world sizes [99999999]",
        ),
        (
            http('lockstep_x_bucket{rank="0",le="x"} 1\n'),
            "is no rank of Lockstep: could not convert",
        ),
        (
            http('lockstep_x{rank="0",store="\x1b[2J"} 1\n'),
            "lockstep_x has a label that no rank has",
        ),
    ],
)
def test_what_is_no_rank_is_refused_in_one_line(
    serve: Serve, lockstep: Run, answer: Answer, complaint: str
) -> None:
    assert complaint in refusal(lockstep, "top", serve(answer))


def test_numbers_that_are_none_are_left_out(serve: Serve) -> None:
    info = 'lockstep_info{rank="0",world_size="1"} 1\n'
    port = serve(http(f'{info}lockstep_x{{rank="0"}} nan\n'))

    (numbers,) = look([f"127.0.0.1:{port}"], 0.0).ranks.values()

    assert {name for name, _ in numbers} == {"lockstep_info"}


def test_one_scheduler_answers_for_all_ranks(lockstep: Run) -> None:
    config = HostRanksInTurn(ranks=1).caches[0].config
    replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
    cache = decide([Opened(rank, 2, config, replica, "") for rank in range(2)])
    port = free_ports(1)
    watch(cache, port)
    with closing(cache):
        status, output, _ = lockstep("top", str(port), "--once", "--every", "0.2")
        sighting = look([f"127.0.0.1:{port}"], 0.0)

    assert status == 0
    assert "one scheduler for 2 ranks" in output
    assert "nobody answers" not in output
    assert [each.what for each in findings(Window(sighting))] == ["no request was admitted"]


def test_a_port_tells_of_each_rank_that_it_has_numbers_of(serve: Serve) -> None:
    info = 'lockstep_info{rank="0",transport="engine",world_size="2"} 1\n'
    told = "".join(
        f'lockstep_corrupt_pages_total{{rank="{rank}"}} {pages}\n'
        for rank, pages in ((0, 1), (1, 4))
    )
    sighting = look([f"127.0.0.1:{serve(http(info + told))}"], 0.0)

    assert Window(sighting).grew_everywhere("corrupt_pages_total") == 5

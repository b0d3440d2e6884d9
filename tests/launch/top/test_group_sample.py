"""How `lockstep top` scrapes the ranks' metrics, and its handling of other servers."""

import io
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Thread
from typing import cast

import pytest
from rich.console import Console

from lockstep.launch.top.findings import findings
from lockstep.launch.top.group_sample import GroupSample, look, numbers_in
from lockstep.launch.top.screen import screen
from lockstep.launch.top.top_command import GroupHistory
from lockstep.launch.top.window import Window
from lockstep.ranks.group.one_scheduler.scheduler_cache import decide
from lockstep.ranks.protocol.dispatch import Opened
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.telemetry.port import watch
from tests.kit.launch.in_process import Run, refusal
from tests.kit.ranks.in_turn import HostRanksInTurn
from tests.kit.servers.ports import free_ports

Answer = Callable[[socket.socket], object]
Serve = Callable[[Answer], str]
"""Starts a server that answers one connection; returns its port."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:

        def begin(answer: Answer) -> str:
            def once() -> None:
                with suppress(OSError), listening.accept()[0] as connection:
                    connection.recv(4096)
                    answer(connection)

            threads.submit(once)
            return str(listening.getsockname()[1])

        yield begin
        listening.shutdown(socket.SHUT_RDWR)  # Unblock `accept` after a failed test.


def raw(answer: bytes) -> Answer:
    return lambda connection: connection.sendall(answer)


def http(body: str) -> Answer:
    return raw(f"HTTP/1.1 200 OK\r\n\r\n{body}".encode())


def drip(connection: socket.socket) -> None:
    """Send a byte twenty times a second until the other side closes the connection."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.settimeout(0.05)
    while True:
        connection.sendall(b"#")
        with suppress(TimeoutError):
            connection.recv(1)


def test_whoever_drips_bytes_has_not_answered(
    serve: Serve, lockstep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.top.group_sample._TIMEOUT_S", 0.3)

    assert "no rank answers at 127.0.0.1:" in refusal(lockstep, "top", serve(drip))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (raw(b"\xff\0" * 100), r"answered b'\xff\x00"),
        (
            http("up 1\n"),
            "(answered with world sizes []); the group has ended (see its log) or uses another port: ",
        ),
        (
            http('lockstep_info{world_size="1"} 1\n'),
            "(invalid literal for int()",
        ),
        (
            http('lockstep_info{rank="0",world_size="many"} 1\n'),
            "(invalid literal",
        ),
        (
            http('lockstep_info{rank="0",world_size="99999999"} 1\n'),
            "answered with world sizes [99999999]",
        ),
        (
            http('lockstep_x_bucket{rank="0",le="x"} 1\n'),
            "(could not convert",
        ),
        (
            http('lockstep_x{rank="0",store="\x1b[2J"} 1\n'),
            "lockstep_x has an unprintable label",
        ),
    ],
)
def test_what_is_no_rank_is_refused_in_one_line(
    serve: Serve, lockstep: Run, answer: Answer, complaint: str
) -> None:
    assert complaint in refusal(lockstep, "top", serve(answer))


def test_what_else_answers_sends_nothing_to_the_terminal(serve: Serve) -> None:
    port = serve(http("lockstep_x{,\x1b[2J} 1\n"))
    sample = look([f"127.0.0.1:{port}"], 0.0)

    assert list(sample.silent.values()) == [r"Invalid labels: ,\x1b[2J"]


@pytest.mark.parametrize("number", ["nan", "inf", "1.7e308", "-5"])
def test_numbers_that_nobody_counts_are_left_out(serve: Serve, number: str) -> None:
    info = 'lockstep_info{rank="0",world_size="1"} 1\n'
    port = serve(http(f'{info}lockstep_x{{rank="0"}} {number}\n'))

    (numbers,) = look([f"127.0.0.1:{port}"], 0.0).ranks.values()

    assert {name for name, _ in numbers} == {"lockstep_info"}


def test_names_from_a_port_are_shown_as_they_are() -> None:
    pages = 'lockstep_pool_pages{rank="0",pool="[/x]",tier="host",state="free"} 5\n'
    console = Console(file=io.StringIO(), width=120)

    console.print(screen([Window(GroupSample(0.0, {0: numbers_in(pages)}))]))

    assert "[/x], host" in cast("io.StringIO", console.file).getvalue()


def test_one_scheduler_answers_for_all_ranks_until_it_is_gone(lockstep: Run) -> None:
    config = HostRanksInTurn(ranks=1).caches[0].config
    replica = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"model")
    cache = decide([Opened(rank, 2, config, replica, "") for rank in range(2)])
    port = free_ports(1)
    watch(cache, port)
    with closing(cache):
        status, output, _ = lockstep("top", str(port), "--once", "--every", "0.2")
        history = GroupHistory([str(port)])
        history.look()
        answered = history.windows()
    history.look()
    (gone, *_) = findings(history.windows()[0])

    assert status == 0
    assert "one scheduler for 2 ranks" in output
    assert "no rank answers" not in output
    assert [each.what for each in findings(answered[0])] == ["no request was admitted"]
    assert gone.what.startswith(f"no rank answers at 127.0.0.1:{port} (last answer ")


def test_a_port_tells_of_each_rank_that_it_has_numbers_of(serve: Serve) -> None:
    info = 'lockstep_info{rank="0",transport="engine",world_size="2"} 1\n'
    metrics = "".join(
        f'lockstep_corrupt_pages_total{{rank="{rank}"}} {pages}\n'
        for rank, pages in ((0, 1), (1, 4))
    )
    sample = look([f"127.0.0.1:{serve(http(info + metrics))}"], 0.0)

    assert Window(sample).grew_on_every_rank("corrupt_pages_total") == 5


def exposed(world_size: int, **counters: int) -> Answer:
    lines = [f'lockstep_info{{rank="0",world_size="{world_size}"}} 1\n']
    lines += [f'lockstep_{each}_total{{rank="0"}} {n}\n' for each, n in counters.items()]
    return http("".join(lines))


def test_a_group_that_was_away_is_counted_anew(serve: Serve) -> None:
    history = GroupHistory([serve(exposed(1, rounds=9, asked_tokens=900, hit_tokens=800))])
    history.look()
    serve(raw(b"HTTP/1.0 500 "))
    history.look()
    (silent, *_) = findings(history.windows()[0])
    # The rank answers again, with more requested tokens but fewer hit tokens than before.
    serve(exposed(1, rounds=8, asked_tokens=1000, hit_tokens=500))
    history.look()
    back = history.windows()
    serve(exposed(1, rounds=9, asked_tokens=1100, hit_tokens=550))
    history.look()
    (recent, whole) = history.windows()

    assert silent.what.startswith("no rank answers at 127.0.0.1:")
    assert "(answered b'HTTP/1.0 500 ', last answer " in silent.what
    assert [window.before for window in back] == [None]
    assert [each.grew("hit_tokens_total") for each in (recent, whole)] == [50, 550]
    assert [each.grew("asked_tokens_total") for each in (recent, whole)] == [100, 1100]


def test_ranks_that_a_group_has_no_more_are_not_missed(serve: Serve) -> None:
    history = GroupHistory([serve(exposed(2))])
    # A port that was just found is scraped at once, without waiting for the next interval.
    serve(exposed(2))
    history.look()
    missed = [len(each.now.silent) for each in history.windows()]
    for _ in range(2):
        serve(exposed(1))
        history.look()

    assert missed == [1]
    assert not history.windows()[0].now.silent


def test_all_ranks_are_asked_by_a_few_threads_and_each_has_its_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.top.group_sample._TIMEOUT_S", 1.0)
    monkeypatch.setattr("lockstep.launch.top.group_sample._THREADS", 1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = f"127.0.0.1:{deaf.getsockname()[1]}"
        sample = look([silent, f"127.0.0.1:{serve(exposed(1))}"], 0.0)

    assert (list(sample.ranks), list(sample.silent)) == ([0], [silent])


def test_no_thread_is_started_for_each_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Thread] = []

    class Counted(Thread):
        def start(self) -> None:
            started.append(self)
            super().start()

    monkeypatch.setattr("lockstep.launch.top.group_sample.Thread", Counted)
    look([f"127.0.0.1:{free_ports(1)}"] * 256, 0.0)

    assert 0 < len(started) <= 64

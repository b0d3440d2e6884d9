"""The control socket: permissions, refused requests and paths, and errors without a listener."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep import ConfigError, LockstepError, UsageError, ask
from lockstep.ranks.group.control.client import LINE_BYTES_MAX, connected
from lockstep.ranks.group.control.port import ControlPort


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def echo(path: Path) -> Iterator[Path]:
    """A control port that echoes each request in its answer."""
    port = ControlPort(path)
    port.serve(lambda request: {"asked": request})
    yield path
    port.close()


def reply_to(path: Path, line: bytes) -> dict[str, object]:
    with connected(path, 10.0) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        answer: dict[str, object] = json.loads(connection.makefile("rb").readline())
    return answer


def test_a_request_is_a_line_of_json_and_so_is_its_answer(echo: Path) -> None:
    assert reply_to(echo, b'{"ask": "list"}\n') == {"answer": {"asked": {"ask": "list"}}}
    assert ask(echo, "drop", namespace="t") == {"asked": {"ask": "drop", "namespace": "t"}}


@pytest.mark.parametrize("line", [b"", b"drop\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_json_is_refused_and_the_port_goes_on(echo: Path, line: bytes) -> None:
    answer = reply_to(echo, line)

    assert answer["type"] == "UsageError"
    assert "the request is not a line of JSON" in str(answer["error"])
    assert ask(echo, "list") == {"asked": {"ask": "list"}}


def test_a_request_that_is_too_long_is_not_sent(echo: Path) -> None:
    with pytest.raises(LockstepError, match="must not exceed 16 MiB"):
        ask(echo, "pin", name="x" * LINE_BYTES_MAX)


def test_a_socket_that_nobody_listens_at_any_more_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()

    port = ControlPort(path)
    port.serve(lambda request: {"new": request})
    answer = ask(path, "list")
    port.close()

    assert answer == {"new": {"ask": "list"}}


def test_of_two_groups_that_replace_a_socket_at_once_one_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    others: list[Future[ControlPort]] = []

    def refused_meanwhile(at: Path, timeout_s: float) -> socket.socket:
        """Start a second group between the first group's check for a listener and its bind."""
        monkeypatch.setattr("lockstep.ranks.group.control.port.connected", connected)
        others.append(pool.submit(ControlPort, path))
        with suppress(TimeoutError):
            others[0].exception(timeout=0.1)
        raise ConnectionRefusedError

    monkeypatch.setattr("lockstep.ranks.group.control.port.connected", refused_meanwhile)
    with ThreadPoolExecutor(1) as pool:
        first = ControlPort(path)
        with pytest.raises(ConfigError, match="another group listens"):
            others[0].result()
    first.close()


def test_a_group_that_ends_leaves_the_socket_of_another_one(path: Path) -> None:
    first = ControlPort(path)
    path.unlink()
    second = ControlPort(path)
    second.serve(lambda request: {"asked": request})

    first.close()

    assert ask(path, "list") == {"asked": {"ask": "list"}}
    second.close()
    assert not path.exists()


def test_whoever_connects_before_the_group_serves_is_answered_then(path: Path) -> None:
    port = ControlPort(path)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, path, "list")
        port.serve(lambda request: {"late": request})
        answer = asking.result(30)
    port.close()

    assert answer == {"late": {"ask": "list"}}


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("notes")

    with pytest.raises(ConfigError, match="exists and is not a socket"):
        ControlPort(path)
    assert path.read_text() == "notes"


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_refused(path: Path, mode: int) -> None:
    path.parent.chmod(mode)

    with pytest.raises(ConfigError, match="other users can write to"):
        ControlPort(path)


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the folder a foreign owner, because only folders of this user or of root are trusted."""
    if os.geteuid():
        monkeypatch.setattr("os.geteuid", lambda: 4711)
    else:
        os.chown(folder, 4711, -1)


def test_a_folder_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(path.parent, monkeypatch)

    with pytest.raises(ConfigError, match="other users can write to"):
        ControlPort(path)


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 100, "exceeds 107 bytes"), ("no/such/folder", "No such file")]
)
def test_a_path_that_cannot_be_had_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ControlPort(tmp_path / name)


def test_a_path_without_a_socket_says_how_to_open_one(path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"start the group with .*--control {path}"):
        ask(path, "list")


def test_a_socket_whose_group_has_died_says_so(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with pytest.raises(ConfigError, match=r"no process listens at .*; its group has ended"):
        ask(path, "list")


def test_a_file_that_is_no_socket_is_not_asked(path: Path) -> None:
    path.write_text("notes")

    with pytest.raises(ConfigError, match="is not a socket"):
        ask(path, "list")


def test_a_socket_of_another_user_is_not_asked(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = echo.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(ConfigError, match=f"belongs to user {owner}; only that user can control"):
        ask(echo, "list")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "has ended before it answered"),
        (b"hello\n", "is not a group"),
        (b'{"answer": 5}\n', r"is not a group: .* at `\$\.answer`: it answers"),
        (b'{"error": "its words", "type": "__name__"}\n', "^its words$"),
    ],
)
def test_what_is_no_answer_is_told_as_such(path: Path, answer: bytes, why: str) -> None:
    with socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(str(path))
        server.listen()
        asking = pool.submit(ask, path, "list")
        connection, _ = server.accept()
        connection.recv(1 << 16)
        connection.sendall(answer)
        connection.close()

        with pytest.raises(LockstepError, match=why):
            asking.result(30)


def test_an_answer_that_does_not_come_is_not_waited_for_without_end(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        with pytest.raises(LockstepError, match=r"no answer at .* within 0\.05 s"):
            ask(path, "list", timeout_s=0.05)


def send_until(connection: socket.socket, asking: "Future[object]", piece: bytes) -> None:
    """Send the same bytes repeatedly until the client returns or closes the connection."""
    with suppress(OSError):
        while not asking.done():
            connection.sendall(piece)


@pytest.mark.parametrize("end_s", [0.1, 30.0])
def test_whoever_sends_bytes_without_end_is_not_listened_to_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, end_s: float
) -> None:
    """A client stops reading an endless answer at its deadline or after a maximum number of bytes."""
    monkeypatch.setattr("lockstep.ranks.group.control.client.ANSWER_BYTES_MAX", 1 << 20)
    with socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(str(path))
        server.listen()
        asking = pool.submit(ask, path, "list", timeout_s=end_s)
        connection, _ = server.accept()
        connection.setblocking(True)
        with connection:
            send_until(connection, asking, b" " * (1 << 16 if end_s > 1 else 1))

        with pytest.raises(LockstepError, match=r"no answer|has ended before"):
            asking.result(30)


@pytest.mark.parametrize(
    ("where", "what", "fields"),
    [
        (None, "list", {}),
        ("a\0b", "list", {}),
        ("half \ud800", "list", {}),
        ("/", 5, {}),
        ("/", ["list"], {}),
        ("/", "pin", {"tokens": b"x"}),
        ("/", "pin", {"tokens": {(1,): 2}}),
        ("/", "list", {"timeout_s": -1}),
        ("/", "list", {"timeout_s": float("nan")}),
        ("/", "list", {"timeout_s": "5"}),
    ],
)
def test_what_cannot_be_asked_is_refused(where: Any, what: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ask(where, what, **fields)

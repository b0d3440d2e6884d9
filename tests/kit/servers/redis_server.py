"""A real redis-server for tests, on a socket in a temporary directory.

A test module imports the fixture `redis_server`, or starts a `RedisServer` of its own.
"""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.kit.servers.processes import stopped_process

SERVERS = ("redis-server", "valkey-server")
START_TIMEOUT_S = 30.0


def server_program() -> str:
    """Return the program to start; skips the test where there is none."""
    for name in SERVERS:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip("needs redis-server (apt-get install redis-server)")


class RedisServer:
    """One server that keeps nothing, reached through a socket, killed at the end."""

    def __init__(self) -> None:
        self._program = server_program()
        # A socket's path may have no more than 107 characters, so not below pytest's directories.
        self._directory = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = Path(self._directory.name) / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: int = 0) -> str:
        """Return the address for redis-py."""
        return f"unix://{self.socket}?db={database}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [self._program, "--port", "0", "--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", self._directory.name]
        log = (Path(self._directory.name) / "log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        give_up = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                output = (Path(self._directory.name) / "log").read_text(errors="replace")
                self.stop()
                raise AssertionError(f"redis-server did not start:\n{output}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, losing what it had."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self.socket.unlink(missing_ok=True)

    def standing_still(self) -> AbstractContextManager[None]:
        """It answers nobody while in here, and loses nothing."""
        assert self._process is not None
        return stopped_process(self._process.pid)

    def stop(self) -> None:
        """Kill it, and remove its directory."""
        self.kill()
        self._directory.cleanup()

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(START_TIMEOUT_S)
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@pytest.fixture(scope="module")
def redis_server() -> Generator[RedisServer]:
    """One server for the tests of a module."""
    with RedisServer() as server:
        yield server

"""Where an operator of this machine reaches a group: a Unix socket of rank 0, for its own user alone.

A connection brings one request, a line of JSON, and gets one line back: a map with `answer`, or with
`error` and the `type` of it.
"""

import json
import os
import socketserver
import stat
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

from ....errors import ConfigError, LockstepError, UsageError
from ....storage_backends.file.turns import Lock, try_to_lock
from .client import LINE_BYTES_MAX, connected, unreached

PATH_BYTES_MAX: Final = 107
"""What the system takes for the path of a socket."""
_LINE_S: Final = 10.0
"""How long whoever has connected may take to say what it wants."""
_ALONE_S: Final = 5.0
"""Longer than another group takes to make its socket."""
_ENDS_S: Final = 0.1
"""How often the thread that listens looks whether it is to end."""

Answered = Callable[[object], Mapping[str, object]]
"""Returns what became of a request; raises `LockstepError`."""


class ControlPort:
    """Takes requests once it serves, until it is closed, on threads of its own. For rank 0."""

    def __init__(self, path: Path) -> None:
        """Whoever connects waits until `serve`.

        Raises `ConfigError` where `path` cannot be listened at, somebody else listens there, or others
        could put a socket of theirs in its place.
        """
        self.path = path
        self._server = _listening(path)
        self._identity = _identity(path)
        self._thread: threading.Thread | None = None

    def serve(self, answered: Answered) -> None:
        """Begin to answer."""
        self._server.answered = answered
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_ENDS_S,), name="lockstep-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and remove the socket, unless another group's is there now. Idempotent."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        with suppress(OSError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    answered: Answered


class _Handler(socketserver.StreamRequestHandler):
    timeout = _LINE_S

    def handle(self) -> None:
        try:
            line = self.rfile.readline(LINE_BYTES_MAX + 1)
        except OSError:
            return
        told: Mapping[str, Any]
        try:
            told = {"answer": cast("_Server", self.server).answered(_parsed(line))}
        except LockstepError as error:
            told = {"error": str(error), "type": type(error).__name__}
        with suppress(OSError):
            self.wfile.write(json.dumps(told).encode() + b"\n")


def _identity(path: Path) -> tuple[int, int]:
    """Return what a socket has for itself, as long as it is there."""
    seen = path.lstat()
    return seen.st_dev, seen.st_ino


def _parsed(line: bytes) -> object:
    if len(line) > LINE_BYTES_MAX:
        raise UsageError(f"a request has {LINE_BYTES_MAX >> 20} MiB at most")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a request is a line of JSON: {error}") from error


def _listening(path: Path) -> _Server:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"{path} has more bytes than a socket's path may have, {PATH_BYTES_MAX}; choose a shorter"
        )
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _require_private(path.parent)
        # A socket at which nobody listens yet looks like one at which nobody listens any more.
        with _alone_in(path.parent):
            _require_free(path)
            server = _Server(str(path), _Handler, bind_and_activate=False)
            try:
                server.server_bind()
                # No client can connect before it listens, and afterwards only its own user can.
                path.chmod(0o600)
                server.server_activate()
            except OSError:
                server.server_close()
                raise
    except OSError as error:
        raise ConfigError(
            f"no socket for control can be made at {path}: {error.strerror or error}"
        ) from error
    return server


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """Let no other group make a socket in a folder meanwhile.

    Others may be able to lock the folder, so that is not waited for without end.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _ALONE_S
        while try_to_lock(fd) is Lock.TAKEN and time.monotonic() < until:
            time.sleep(_ENDS_S / 10)
        yield
    finally:
        os.close(fd)


def _require_private(folder: Path) -> None:
    """Raise `ConfigError` where other users could put a socket of theirs in the place of ours.

    The owner of a folder with the sticky bit could, too; root may.
    """
    seen = folder.stat()
    others_write = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not seen.st_mode & stat.S_ISVTX
    if others_write or seen.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"other users can write to {folder}, and could put a socket of theirs in the place of the"
            " group's; choose a folder of your own for control, with mode 0700"
        )


def _require_free(path: Path) -> None:
    """Remove a socket that nobody listens at any more; raise `ConfigError` for anything else."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is there and no socket; choose another path for control")
    try:
        connected(path, 1.0).close()
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(unreached(path, error)) from error
    else:
        raise ConfigError(f"another group listens at {path}; choose another path for control")

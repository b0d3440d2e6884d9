"""The control socket: a Unix socket of rank 0, accessible to its user only.

On each connection the client sends one control request as a line of JSON. Rank 0 replies with one line
of JSON: a map with `answer`, or with `error` and its `type`.
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
from ....storage_backends.file.write_lock_slots import Lock, try_to_lock
from .client import LINE_BYTES_MAX, connected, unreached

PATH_BYTES_MAX: Final = 107
"""Maximum length in bytes that the kernel allows for a socket's path."""
_LINE_S: Final = 10.0
"""Seconds that a client may take to send its control request after connecting."""
_ALONE_S: Final = 5.0
"""Maximum seconds to wait for the lock on the socket's folder. Another group holds this lock only while
it creates its socket."""
_ENDS_S: Final = 0.1
"""Seconds after which the listening thread checks again whether it should stop."""

Answered = Callable[[object], Mapping[str, object]]
"""Function that executes a control request and returns its result, or raises `LockstepError`."""


class ControlPort:
    """Accepts control requests on rank 0, each on a separate thread, from `serve` until `close`."""

    def __init__(self, path: Path) -> None:
        """Bind the socket and listen. Clients can connect, but get no answer before `serve`.

        Raises `ConfigError` if the socket cannot be created at `path`, another group listens there, or
        other users could replace the socket.
        """
        self.path = path
        self._server = _listening(path)
        self._identity = _identity(path)
        self._thread: threading.Thread | None = None

    def serve(self, answered: Answered) -> None:
        """Start to answer control requests."""
        self._server.answered = answered
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_ENDS_S,), name="lockstep-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Remove the socket unless another group has replaced it. Idempotent."""
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
        reply: Mapping[str, Any]
        try:
            reply = {"answer": cast("_Server", self.server).answered(_parsed(line))}
        except LockstepError as error:
            reply = {"error": str(error), "type": type(error).__name__}
        with suppress(OSError):
            self.wfile.write(json.dumps(reply).encode() + b"\n")


def _identity(path: Path) -> tuple[int, int]:
    """Return (device, inode) of a socket file, which identify the file as long as it exists."""
    seen = path.lstat()
    return seen.st_dev, seen.st_ino


def _parsed(line: bytes) -> object:
    if len(line) > LINE_BYTES_MAX:
        raise UsageError(f"a request must not exceed {LINE_BYTES_MAX >> 20} MiB")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request is not a line of JSON: {error}") from error


def _listening(path: Path) -> _Server:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"{path} exceeds {PATH_BYTES_MAX} bytes, the limit of a socket's path; choose another"
        )
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _require_private(path.parent)
        # Lock the folder, so that no other group removes this socket, which looks abandoned while it is
        # bound but does not listen yet.
        with _alone_in(path.parent):
            _require_free(path)
            server = _Server(str(path), _Handler, bind_and_activate=False)
            try:
                server.server_bind()
                # Restrict access before the socket listens, because no client can connect before that.
                path.chmod(0o600)
                server.server_activate()
            except OSError:
                server.server_close()
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot create the control socket at {path}: {error.strerror or error}; name a path in a"
            " folder that exists and that this user can write to"
        ) from error
    return server


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """Hold a lock on a folder, so that no other group creates a socket in the folder meanwhile.

    Waits a few seconds at most for the lock, then goes on without it, because another user's process
    could hold the lock forever.
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
    """Raise `ConfigError` if other users could replace the socket in this folder.

    Others must not have write permission unless the sticky bit is set. The folder's owner must be this
    user or root, because an owner can replace files in spite of the sticky bit.
    """
    seen = folder.stat()
    others_write = seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not seen.st_mode & stat.S_ISVTX
    if others_write or seen.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"other users can write to {folder} and could replace the group's socket; choose a private"
            " folder for control, with mode 0700"
        )


def _require_free(path: Path) -> None:
    """Remove an abandoned socket; raise `ConfigError` if anything else exists at `path`."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket; choose another path for control")
    try:
        connected(path, 1.0).close()
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(unreached(path, error)) from error
    else:
        raise ConfigError(f"another group listens at {path}; choose another path for control")

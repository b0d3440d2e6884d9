"""Client of a group's control socket, for an operator's process."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from .... import errors
from ....coordinator.validated_settings import Seconds
from ....errors import ConfigError, LockstepError, UsageError

ANSWERED_S: Final = 30.0
"""Default seconds to wait for the answer to a control request that does not wait for a store."""
WAITED_S: Final = 900.0
"""Default seconds to wait for the answer to a control request that waits for a store: flush, attach or
detach."""
_WAITING: Final = frozenset({"flush", "attach", "detach"})
LINE_BYTES_MAX: Final = 16 << 20
"""Maximum size of a control request in bytes. A control request with a prompt of a million tokens takes
7 MB."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""Maximum size in bytes of the answer to a control request. The largest answer lists every namespace.
"""


def ask(path: Path | str, what: str, *, timeout_s: float | None = None, **fields: object) -> Any:
    """Send a control request to the group that listens at `path`; return the result.

    `what` is the kind of control request, and `fields` are its fields (docs/admin-api.md). Any
    process of the group's user may call this function, but not the engine's thread of rank 0, which
    would deadlock.

    Raises the group's error with its text: `UsageError` if the control request is refused,
    `StorageError` if a store could not be opened, `LockstepError` if the ranks did not agree in time.
    Raises `ConfigError` if no group of this user listens at `path`.
    """
    line = _line_of({**fields, "ask": what})
    if timeout_s is None:
        timeout_s = WAITED_S if what in _WAITING else ANSWERED_S
    try:
        until_s = time.monotonic() + msgspec.convert(timeout_s, Seconds)
    except msgspec.ValidationError as error:
        raise UsageError(f"timeout_s is {timeout_s!r}: {error}; give seconds") from None
    try:
        path = Path(path)
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL character")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path!r} is not a valid socket path: {error}") from None
    _require_reachable(path)
    try:
        with connected(path, timeout_s) as connection:
            connection.sendall(line)
            reply = _answered(connection, until_s)
    except TimeoutError as error:
        raise LockstepError(f"no answer at {path} within {timeout_s:g} s") from error
    except OSError as error:
        raise ConfigError(unreached(path, error)) from error
    return _answer_in(reply, path)


def _line_of(request: dict[str, object]) -> bytes:
    try:
        line = json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the request cannot be encoded as JSON: {error}") from None
    if not isinstance(request["ask"], str):
        raise UsageError(f"a request is {request['ask']!r:.80}, must be text")
    if len(line) > LINE_BYTES_MAX:
        raise UsageError(f"a request must not exceed {LINE_BYTES_MAX >> 20} MiB")
    return line


def _answered(connection: socket.socket, until_s: float) -> bytes:
    """Read one line from the connection; raise `TimeoutError` at the monotonic time `until_s`.

    Returns an incomplete line if the peer closes early. Time and size are bounded, because a client
    that runs as root may connect to the socket of an untrusted user.
    """
    received = bytearray()
    while not received.endswith(b"\n") and len(received) <= ANSWER_BYTES_MAX:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(1 << 16)
        if not piece:
            break
        received += piece
    return bytes(received)


def connected(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket; raise `OSError` on failure."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def unreached(path: Path, error: OSError) -> str:
    """Return the text of an error that says why a group's control socket cannot be reached."""
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens at {path}; its group has ended"
    return f"{path} cannot be reached: {error.strerror or error}"


def _require_reachable(path: Path) -> None:
    try:
        owner = path.stat().st_uid
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no socket at {path}; start the group with `control`, as `lockstep replay"
            f" --control {path}` does"
        ) from error
    except OSError as error:
        raise ConfigError(unreached(path, error)) from error
    if not path.is_socket():
        raise ConfigError(f"{path} is not a socket; give the path that the group was started with")
    if os.geteuid() not in {0, owner}:
        raise ConfigError(f"{path} belongs to user {owner}; only that user can control the group")


class _Reply(msgspec.Struct):
    """The reply to a control request: a result, or the text and type of an error."""

    answer: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    error: str | None = None
    type: str = ""


def _answer_in(reply: bytes, path: Path) -> Any:
    if not reply.endswith(b"\n"):
        raise LockstepError(f"the group at {path} has ended before it answered")
    try:
        found = msgspec.json.decode(reply, type=_Reply)
    except ValueError as error:
        detail = f"{error}: it answers {reply[:80]!r}"
        raise UsageError(f"the process that listens at {path} is not a group: {detail}") from error
    if found.error is None:
        return found.answer
    kind = getattr(errors, found.type, None)
    if not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        kind = LockstepError
    raise kind(found.error)

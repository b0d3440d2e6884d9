"""Mutual authentication of two processes by a shared secret, before they send any other message.

    both sides      greeting: magic (8 bytes), version (2), zeros (2), nonce (32)
    connecting side length (2) and text of the addresses that it dialled, as configured and as
                    resolved, separated by a space; then its proof (32): the HMAC-SHA256, keyed with the
                    secret, of "connecting", its own greeting, the other side's greeting and that text
    listening side  verdict (1), then its proof (32): the HMAC-SHA256 of "listening", the verdict, and
                    the same greetings and text; zeros if the secrets differ

Fresh nonces prevent replay, and the role in each proof prevents reflection. The magic names the purpose
of the connection, so a proof for one purpose is invalid for another. The listening side admits a
connection only if one of the dialled addresses is its own, so a relay at another address is refused.
Both sides derive one key per direction (`SessionKeys`) to authenticate later messages.

Without a configured secret both sides use an empty one. The proofs then prove nothing, and the
listening side does not check the dialled addresses.
"""

import hmac
import secrets
import struct
from collections.abc import Container, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from ..errors import ConfigError, LockstepError

_GREETING: Final = struct.Struct(">8sHH32s")
_LENGTH: Final = struct.Struct(">H")
_PROOF_BYTES: Final = 32
_MEANT_BYTES_MAX: Final = 1024
_WELCOME, _WRONG_SECRET, _FULL, _WRONG_ADDRESS = b"\0", b"\1", b"\2", b"\3"
_UNEQUAL: Final = "the other side has another secret; give both the same one"


class RefusalReason(Enum):
    """The reasons for which a handshake fails."""

    STRANGER = auto()
    """The two sides want to connect for different purposes: their magics differ."""
    VERSION = auto()
    """The other side speaks another version of the protocol."""
    SECRET = auto()
    """The other side has another secret."""
    FULL = auto()
    """The listening side has reached its limit of connections."""
    ADDRESS = auto()
    """None of the addresses that the connecting side dialled belongs to the listening side."""


class NotAdmitted(LockstepError):
    """The handshake failed; the message states the reason and the remedy."""

    def __init__(self, why: RefusalReason, sentence: str) -> None:
        super().__init__(sentence)
        self.why = why


UNPROVEN_S: Final = 60.0
"""If the process at an address has failed to prove its identity, the connecting side does not try that
address again for this number of seconds."""


class UnprovenError(ConfigError):
    """The process at an address failed to prove that it knows the secret and owns the address."""


class SessionKeys(NamedTuple):
    """The keys that authenticate the messages of one connection: one key for each direction."""

    connecting: bytes
    listening: bytes


class ByteStream(Protocol):
    """The byte stream on which a handshake runs."""

    async def read(self, count: int) -> bytes:
        """Return exactly `count` bytes. Raises `OSError` or `EOFError` if fewer arrive."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        ...


async def introduce(
    stream: ByteStream, *, magic: bytes, version: int, secret: bytes, meant: Sequence[str]
) -> SessionKeys:
    """Run the connecting side of the handshake; `meant` lists the addresses that this side dialled.

    Raises `NotAdmitted` if either side refuses the other.
    """
    ours = greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    # Replace spaces in host names, because a space separates two addresses in the message.
    text = " ".join(each.replace(" ", "_") for each in meant).encode()
    transcript = ours + theirs + text
    await stream.write(_LENGTH.pack(len(text)) + text + _digest(secret, b"connecting", transcript))
    answer = await stream.read(1 + _PROOF_BYTES)
    verdict, proof = answer[:1], answer[1:]
    if not hmac.compare_digest(proof, _digest(secret, b"listening" + verdict, transcript)):
        raise NotAdmitted(RefusalReason.SECRET, _UNEQUAL)
    if verdict == _FULL:
        raise NotAdmitted(RefusalReason.FULL, "the other side has reached its limit of connections")
    if verdict != _WELCOME:
        raise NotAdmitted(
            RefusalReason.ADDRESS,
            f"the process that answers knows the secret, but {meant[0]} is not its address; either it"
            " is not configured to be reached there, or another process relays connections to it",
        )
    return _keys(secret, transcript)


async def admit(
    stream: ByteStream,
    *,
    magic: bytes,
    version: int,
    secret: bytes,
    own: Container[str],
    full: bool = False,
) -> SessionKeys:
    """Run the listening side of the handshake. Raises `NotAdmitted` if either side refuses the other.

    `own` are the addresses of the listening side, and `full` says that it accepts no more connections.
    A peer that does not know the secret learns neither that it dialled a wrong address nor that the
    listening side is full.
    """
    ours = greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size))
    if length > _MEANT_BYTES_MAX:
        raise NotAdmitted(
            RefusalReason.STRANGER,
            f"it dialled an address of {length} bytes, more than {_MEANT_BYTES_MAX}",
        )
    text = await stream.read(length)
    transcript = theirs + ours + text
    proof = await stream.read(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _digest(secret, b"connecting", transcript)):
        await stream.write(_WRONG_SECRET + bytes(_PROOF_BYTES))
        raise NotAdmitted(RefusalReason.SECRET, _UNEQUAL)
    meant = text.decode(errors="replace").split(" ")
    verdict = _FULL if full else _WELCOME
    if secret and not any(each in own for each in meant):
        verdict = _WRONG_ADDRESS
    await stream.write(verdict + _digest(secret, b"listening" + verdict, transcript))
    if verdict == _WRONG_ADDRESS:
        raise NotAdmitted(
            RefusalReason.ADDRESS,
            f"the other side dialled {meant[0]!r:.300}, which is not an address of this side; either"
            " this side is not configured to be reached there, or another process relays connections to"
            " it",
        )
    if verdict == _FULL:
        raise NotAdmitted(RefusalReason.FULL, "the limit of connections is reached")
    return _keys(secret, transcript)


def _require_equal(received: bytes, magic: bytes, version: int) -> None:
    their_magic, theirs, _, _ = _GREETING.unpack(received)
    if their_magic != magic:
        raise NotAdmitted(
            RefusalReason.STRANGER,
            "the other side is not a peer of the expected kind; check host and port",
        )
    if theirs != version:
        raise NotAdmitted(
            RefusalReason.VERSION,
            f"the other side speaks version {theirs} of the protocol, and this one {version}; run the"
            " same version of Lockstep in both",
        )


def greeting(magic: bytes, version: int) -> bytes:
    """Return a greeting, the first message of a handshake, with a new nonce."""
    return _GREETING.pack(magic, version, 0, secrets.token_bytes(32))


def _keys(secret: bytes, transcript: bytes) -> SessionKeys:
    both = (
        _digest(secret, b"key of " + role, transcript) for role in (b"connecting", b"listening")
    )
    return SessionKeys(*both)


def _digest(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, purpose + transcript, "sha256")

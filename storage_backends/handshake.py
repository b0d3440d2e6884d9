"""How two processes show each other that they know the same secret, before anything else is said.

    both       greeting: magic (8 bytes), version (2), zeros (2), nonce (32)
    connecting proof (32): HMAC-SHA256 by the secret, of "connecting" and both greetings, its own first
    listening  verdict (1) and its own proof (32), of "listening" and both greetings; zeros where it
               refuses

Nonces are new for each connection, so nothing that was heard once proves anything; and a side cannot
hand back the proof that it was shown, since each names its role. The magic says what the connection is
for, so that a proof for one purpose is none for another. Where no secret is set it is empty, and the
same is done. What follows the handshake is neither encrypted nor signed: it is for networks in which
nobody changes what others send.
"""

import hmac
import secrets
import struct
from enum import Enum, auto
from typing import Final, Protocol

from ..errors import LockstepError

_GREETING: Final = struct.Struct(">8sHH32s")
_PROOF_BYTES: Final = 32
_WELCOME, _WRONG_SECRET, _FULL = b"\0", b"\1", b"\2"


class Why(Enum):
    """The reasons why two sides do not go on."""

    STRANGER = auto()
    """The other side is there for something else."""
    VERSION = auto()
    """It speaks another version of the protocol."""
    SECRET = auto()
    """It has another secret."""
    FULL = auto()
    """The side that listens has as many connections as it may have."""


class NotAdmitted(LockstepError):
    """Two sides do not go on; the sentence says what was found, and the remedy."""

    def __init__(self, why: Why, sentence: str) -> None:
        super().__init__(sentence)
        self.why = why


class ByteStream(Protocol):
    """What a handshake needs of a connection."""

    async def read(self, count: int) -> bytes:
        """Return exactly so many bytes. Raises `OSError` or `EOFError` if there are not so many."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        ...


async def introduce(stream: ByteStream, *, magic: bytes, version: int, secret: bytes) -> None:
    """Do the part of the side that has connected.

    Raises `NotAdmitted` where nothing comes of it.
    """
    ours = greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    await stream.write(_proof(secret, b"connecting", ours, theirs))
    answer = await stream.read(1 + _PROOF_BYTES)
    if answer[:1] == _FULL:
        raise NotAdmitted(Why.FULL, "the other side has as many connections as it may have")
    known = hmac.compare_digest(answer[1:], _proof(secret, b"listening", ours, theirs))
    if answer[:1] != _WELCOME or not known:
        raise NotAdmitted(Why.SECRET, "the other side has another secret; give both the same one")


async def admit(
    stream: ByteStream, *, magic: bytes, version: int, secret: bytes, full: bool = False
) -> None:
    """Do the part of the side that listens; raises `NotAdmitted` as `introduce` does.

    Where it is `full`, that is said to whoever knows the secret, and to nobody else.
    """
    ours = greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    proof = await stream.read(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"connecting", theirs, ours)):
        await stream.write(_WRONG_SECRET + bytes(_PROOF_BYTES))
        raise NotAdmitted(Why.SECRET, "the other side has another secret; give both the same one")
    if full:
        await stream.write(_FULL + bytes(_PROOF_BYTES))
        raise NotAdmitted(Why.FULL, "there are as many connections as there may be")
    await stream.write(_WELCOME + _proof(secret, b"listening", theirs, ours))


def _require_equal(said_first: bytes, magic: bytes, version: int) -> None:
    said, theirs, _, _ = _GREETING.unpack(said_first)
    if said != magic:
        raise NotAdmitted(
            Why.STRANGER, "the other side is not what this one looks for; check host and port"
        )
    if theirs != version:
        raise NotAdmitted(
            Why.VERSION,
            f"the other side speaks version {theirs} of the protocol, and this one {version}; run the"
            " same version of Lockstep in both",
        )


def greeting(magic: bytes, version: int) -> bytes:
    """Return a new greeting."""
    return _GREETING.pack(magic, version, 0, secrets.token_bytes(32))


def _proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, role + connecting + listening, "sha256")

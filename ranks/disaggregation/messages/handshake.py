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
import ipaddress
import secrets
import struct
from typing import Final, Protocol

from ....errors import ConfigError
from ..refusal import Refusal, Refused

_GREETING: Final = struct.Struct(">8sHH32s")
_PROOF_BYTES: Final = 32
_WELCOME, _WRONG_SECRET = b"\0", b"\1"

SECRET_BYTES_MIN: Final = 16
"""A shorter secret can be guessed by whoever has heard one handshake."""


class ByteStream(Protocol):
    """What a handshake needs of a connection."""

    async def read(self, count: int) -> bytes:
        """Return exactly so many bytes. Raises `OSError` or `EOFError` if there are not so many."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        ...


def require_secret(host: str, secret: bytes) -> None:
    """Raise `ConfigError` for a secret that is too short, or none where a host is not this machine."""
    if secret and len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the secret of messages has {len(secret)} bytes, must be {SECRET_BYTES_MIN} or more"
        )
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine alone, and messages have no secret; give all groups and"
            " routers the same one, or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Say whether only this machine can be meant by a host. A name other than `localhost` is not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


async def introduce(stream: ByteStream, *, magic: bytes, version: int, secret: bytes) -> None:
    """Do the part of the side that has connected.

    Raises `Refused`: MALFORMED where something else listens, VERSION, or SECRET.
    """
    ours = _greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    await stream.write(_proof(secret, b"connecting", ours, theirs))
    answer = await stream.read(1 + _PROOF_BYTES)
    known = hmac.compare_digest(answer[1:], _proof(secret, b"listening", ours, theirs))
    if answer[:1] != _WELCOME or not known:
        raise Refused(Refusal.SECRET, "the other side has another secret; give both the same one")


async def admit(stream: ByteStream, *, magic: bytes, version: int, secret: bytes) -> None:
    """Do the part of the side that listens; raises `Refused` as `introduce` does."""
    ours = _greeting(magic, version)
    await stream.write(ours)
    theirs = await stream.read(_GREETING.size)
    _require_equal(theirs, magic, version)
    proof = await stream.read(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"connecting", theirs, ours)):
        await stream.write(_WRONG_SECRET + bytes(_PROOF_BYTES))
        raise Refused(Refusal.SECRET, "the other side has another secret; give both the same one")
    await stream.write(_WELCOME + _proof(secret, b"listening", theirs, ours))


def _require_equal(greeting: bytes, magic: bytes, version: int) -> None:
    said, theirs, _, _ = _GREETING.unpack(greeting)
    if said != magic:
        raise Refused(
            Refusal.MALFORMED, "the other side is not what this one looks for; check host and port"
        )
    if theirs != version:
        raise Refused(
            Refusal.VERSION,
            f"the other side speaks version {theirs} of the protocol, and this one {version}; run the"
            " same version of Lockstep in both",
        )


def _greeting(magic: bytes, version: int) -> bytes:
    return _GREETING.pack(magic, version, 0, secrets.token_bytes(32))


def _proof(secret: bytes, role: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, role + connecting + listening, "sha256")

"""The handshake: both sides show that they know one secret, and nothing that can be used again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lockstep.ranks.disaggregation.messages.handshake import admit, introduce, is_loopback
from lockstep.ranks.disaggregation.refusal import Refusal, Refused
from tests.kit.disaggregation.inboxes import SECRET, run

MAGIC = b"LOCKTEST"
GREETING_BYTES = 44
PROOF_BYTES = 32


class Pipe:
    """One side of a connection in memory, which keeps what it was sent."""

    def __init__(self, received: asyncio.StreamReader, sent: asyncio.StreamReader) -> None:
        self._received, self._sent = received, sent
        self.said = b""

    async def read(self, count: int) -> bytes:
        return await self._received.readexactly(count)

    async def write(self, data: bytes) -> None:
        self.said += data
        self._sent.feed_data(data)


Side = Callable[[Pipe], Awaitable[None]]


def connecting(secret: bytes = SECRET, *, version: int = 1, magic: bytes = MAGIC) -> Side:
    return lambda pipe: introduce(pipe, magic=magic, version=version, secret=secret)


def listening(secret: bytes = SECRET, *, version: int = 1, magic: bytes = MAGIC) -> Side:
    return lambda pipe: admit(pipe, magic=magic, version=version, secret=secret)


def meet(one: Side, other: Side) -> tuple[list[Refusal | None], list[bytes]]:
    """Let two sides meet; return by which name each is refused, and what each has said."""

    async def side(work: Side, pipe: Pipe, reader: asyncio.StreamReader) -> Refusal | None:
        try:
            await work(pipe)
        except Refused as refused:
            return refused.refusal
        except EOFError:
            return None
        finally:
            reader.feed_eof()
        return None

    async def both() -> tuple[list[Refusal | None], list[bytes]]:
        there, back = asyncio.StreamReader(), asyncio.StreamReader()
        pipes = Pipe(back, there), Pipe(there, back)
        outcomes = await asyncio.gather(side(one, pipes[0], there), side(other, pipes[1], back))
        return list(outcomes), [pipe.said for pipe in pipes]

    return run(both())


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_sides_with_one_secret_admit_each_other(secret: bytes) -> None:
    outcomes, _ = meet(connecting(secret), listening(secret))

    assert outcomes == [None, None]


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, b""), (b"", SECRET), (SECRET, SECRET[::-1])])
def test_sides_with_different_secrets_refuse_each_other(mine: bytes, theirs: bytes) -> None:
    outcomes, _ = meet(connecting(mine), listening(theirs))

    assert outcomes == [Refusal.SECRET, Refusal.SECRET]


def test_another_version_is_refused_by_name_before_anything_is_proved() -> None:
    outcomes, said = meet(connecting(version=2), listening(version=1))

    assert outcomes == [Refusal.VERSION, Refusal.VERSION]
    assert {len(each) for each in said} == {GREETING_BYTES}


def test_a_connection_for_another_purpose_is_refused() -> None:
    outcomes, said = meet(connecting(magic=b"LOCKPEER"), listening())

    assert outcomes == [Refusal.MALFORMED, Refusal.MALFORMED]
    assert {len(each) for each in said} == {GREETING_BYTES}


def test_nothing_that_was_said_once_is_said_again() -> None:
    """Nonces are new, so whoever has heard a handshake cannot repeat it."""
    spoken = [each for _ in range(3) for each in meet(connecting(), listening())[1]]

    assert len({each[12:GREETING_BYTES] for each in spoken}) == 6
    assert len({each[-PROOF_BYTES:] for each in spoken}) == 6


async def echo(pipe: Pipe) -> None:
    """Say what was said, and claim that the other side is welcome."""
    await pipe.write(await pipe.read(GREETING_BYTES))
    await pipe.write(b"\0" + await pipe.read(PROOF_BYTES))


async def claim(pipe: Pipe) -> None:
    """Show what was heard in place of a proof of one's own."""
    await pipe.write(await pipe.read(GREETING_BYTES))
    await pipe.write(bytes(PROOF_BYTES))
    await pipe.read(1 + PROOF_BYTES)


def test_a_listener_that_hands_back_the_proof_that_it_was_shown_is_refused() -> None:
    """A proof names the role of who shows it."""
    outcomes, _ = meet(connecting(), echo)

    assert outcomes[0] is Refusal.SECRET


def test_whoever_connects_without_the_secret_is_shown_no_proof() -> None:
    outcomes, said = meet(claim, listening())

    assert outcomes[1] is Refusal.SECRET
    assert said[1][GREETING_BYTES:] == b"\1" + bytes(PROOF_BYTES)


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - nothing is bound.
        ("::", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.com", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_only_what_no_other_machine_can_reach_counts_as_this_machine(
    host: str, alone: bool
) -> None:
    assert is_loopback(host) is alone

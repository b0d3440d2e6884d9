"""The handshake: both sides prove that they know one secret, and no proof can be replayed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.protocol.host_port import (
    canonical_address,
    is_loopback,
    joined_address,
    split_address,
    split_host,
)
from lockstep.storage_backends.handshake import (
    NotAdmitted,
    RefusalReason,
    SessionKeys,
    admit,
    introduce,
)
from tests.kit.storage.calls import run

SECRET = b"known to both sides"
MAGIC = b"LOCKTEST"
ADDRESS, PLACE = "prefill:7001", "10.0.0.4:7001"
GREETING_BYTES = 44
PROOF_BYTES = 32


class Pipe:
    """One side of a connection in memory, which records the bytes it sent."""

    def __init__(self, received: asyncio.StreamReader, sent: asyncio.StreamReader) -> None:
        self._received, self._sent = received, sent
        self.written = b""

    async def read(self, count: int) -> bytes:
        return await self._received.readexactly(count)

    async def write(self, data: bytes) -> None:
        self.written += data
        self._sent.feed_data(data)


Side = Callable[[Pipe], Awaitable[object]]
Introduction = Callable[[Pipe], Awaitable[SessionKeys]]


def connecting(
    secret: bytes = SECRET,
    *,
    version: int = 1,
    magic: bytes = MAGIC,
    meant: Sequence[str] = (ADDRESS, PLACE),
) -> Introduction:
    return lambda pipe: introduce(pipe, magic=magic, version=version, secret=secret, meant=meant)


def listening(
    secret: bytes = SECRET, *, version: int = 1, full: bool = False, own: Sequence[str] = (PLACE,)
) -> Introduction:
    return lambda pipe: admit(pipe, magic=MAGIC, version=version, secret=secret, own=own, full=full)


def meet(one: Side, other: Side) -> tuple[list[RefusalReason | None], list[bytes]]:
    """Connect two sides; return each side's reason for a refusal, or None, and each side's bytes."""

    async def side(work: Side, pipe: Pipe, reader: asyncio.StreamReader) -> RefusalReason | None:
        try:
            await work(pipe)
        except NotAdmitted as refused:
            return refused.why
        except EOFError:
            return None
        finally:
            reader.feed_eof()
        return None

    async def both() -> tuple[list[RefusalReason | None], list[bytes]]:
        there, back = asyncio.StreamReader(), asyncio.StreamReader()
        pipes = Pipe(back, there), Pipe(there, back)
        outcomes = await asyncio.gather(side(one, pipes[0], there), side(other, pipes[1], back))
        return list(outcomes), [pipe.written for pipe in pipes]

    return run(both())


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_sides_with_one_secret_admit_each_other(secret: bytes) -> None:
    outcomes, _ = meet(connecting(secret), listening(secret))

    assert outcomes == [None, None]


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, b""), (b"", SECRET), (SECRET, SECRET[::-1])])
def test_sides_with_different_secrets_refuse_each_other(mine: bytes, theirs: bytes) -> None:
    outcomes, _ = meet(connecting(mine), listening(theirs))

    assert outcomes == [RefusalReason.SECRET, RefusalReason.SECRET]


def test_another_version_is_refused_by_name_before_anything_is_proved() -> None:
    outcomes, written = meet(connecting(version=2), listening(version=1))

    assert outcomes == [RefusalReason.VERSION, RefusalReason.VERSION]
    assert {len(each) for each in written} == {GREETING_BYTES}


def test_a_connection_for_another_purpose_is_refused() -> None:
    outcomes, written = meet(connecting(magic=b"LOCKPEER"), listening())

    assert outcomes == [RefusalReason.STRANGER, RefusalReason.STRANGER]
    assert {len(each) for each in written} == {GREETING_BYTES}


@pytest.mark.parametrize(
    ("secret", "reason"), [(SECRET, RefusalReason.FULL), (SECRET[::-1], RefusalReason.SECRET)]
)
def test_that_there_is_no_room_is_told_to_those_who_know_the_secret(
    secret: bytes, reason: RefusalReason
) -> None:
    outcomes, _ = meet(connecting(secret), listening(full=True))

    assert outcomes == [reason, reason]


@pytest.mark.parametrize(
    ("secret", "own", "refused"),
    [
        (SECRET, [ADDRESS], None),
        (SECRET, [PLACE], None),
        (SECRET, ["prefill:7002", "10.0.0.5:7001"], RefusalReason.ADDRESS),
        (SECRET, [], RefusalReason.ADDRESS),
        (b"", [], None),
    ],
)
def test_a_side_admits_only_who_means_one_of_its_addresses_if_there_is_a_secret(
    secret: bytes, own: list[str], refused: RefusalReason | None
) -> None:
    outcomes, _ = meet(connecting(secret), listening(secret, own=own))

    assert outcomes == [refused, refused]


def test_a_name_with_a_space_in_it_is_not_two_addresses() -> None:
    """A dialled name with a space is one address, even if its second word is the listener's address."""
    outcomes, _ = meet(connecting(meant=[f"10.9.9.9 {ADDRESS}"]), listening(own=[ADDRESS]))

    assert outcomes == [RefusalReason.ADDRESS, RefusalReason.ADDRESS]


def test_both_sides_have_the_same_two_keys_which_no_other_connection_has() -> None:
    keys: list[SessionKeys] = []

    async def keep(work: Awaitable[SessionKeys]) -> None:
        keys.append(await work)

    for _ in range(2):
        meet(lambda pipe: keep(connecting()(pipe)), lambda pipe: keep(listening()(pipe)))

    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len({*keys[0], *keys[2]}) == 4


def test_what_was_said_once_admits_nobody_again() -> None:
    _, (written, _) = meet(connecting(), listening())

    async def repeat(pipe: Pipe) -> None:
        await pipe.write(written)

    outcomes, _ = meet(repeat, listening())

    assert outcomes[1] is RefusalReason.SECRET


async def echo(pipe: Pipe) -> None:
    """Send the other side's greeting and proof back to it, as a peer without the secret could."""
    await pipe.write(await pipe.read(GREETING_BYTES))
    await pipe.read(2 + len(f"{ADDRESS} {PLACE}"))
    await pipe.write(b"\0" + await pipe.read(PROOF_BYTES))


async def claim(pipe: Pipe) -> None:
    """Send zeros instead of a proof of the secret."""
    await pipe.write(await pipe.read(GREETING_BYTES))
    await pipe.write(bytes(2 + PROOF_BYTES))
    await pipe.read(1 + PROOF_BYTES)


def test_a_listener_that_hands_back_the_proof_that_it_was_shown_is_refused() -> None:
    """A proof echoed to its sender is refused, because a proof contains the sender's role."""
    outcomes, _ = meet(connecting(), echo)

    assert outcomes[0] is RefusalReason.SECRET


def test_whoever_connects_without_the_secret_is_shown_no_proof() -> None:
    outcomes, written = meet(claim, listening())

    assert outcomes[1] is RefusalReason.SECRET
    assert written[1][GREETING_BYTES:] == b"\1" + bytes(PROOF_BYTES)


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


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("h", 1, "h:1"), ("127.0.0.1", 0, "127.0.0.1:0"), ("::1", 9, "[::1]:9")],
)
def test_addresses_are_put_together_and_taken_apart(host: str, port: int, address: str) -> None:
    assert joined_address(host, port) == address
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "h", "h:", ":1", "h:x", "h:65536", "::1:9", "[::1:9", "h:-1", "h:²"]
)
def test_what_is_no_address_is_told_from_one(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address|the port of"):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("Prefill-0.Example.", "prefill-0.example:7"),
        ("127.0.0.1", "127.0.0.1:7"),
        ("::FFFF:127.0.0.1", "127.0.0.1:7"),
        ("0:0::1", "[::1]:7"),
        ("fe80::1%eth0", "[fe80::1]:7"),
    ],
)
def test_an_address_is_compared_as_one_text_however_it_is_written(host: str, address: str) -> None:
    assert canonical_address(host, 7) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-7", "gpu-7", None),
        ("gpu-7:80", "gpu-7", 80),
        ("10.0.0.4:80", "10.0.0.4", 80),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[::1]:80", "::1", 80),
    ],
)
def test_a_host_may_be_given_with_or_without_a_port(text: str, host: str, port: int | None) -> None:
    assert split_host(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "a host", "::1%", "peer://x", "[[::1]]", "host:", "host:x", "a,b", "10.0.0.0/8"]
)
def test_what_is_no_host_is_told_from_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a host|is not an address|the port of"):
        split_host(text)

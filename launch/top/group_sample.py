"""One reading of a group's metrics: the samples of all ranks at about the same time."""

import re
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Final

from ...coordinator.collectives.engine_channel import EngineChannel
from ...errors import ConfigError
from ...ranks.protocol.host_port import joined_address, split_address
from ...telemetry.families import PREFIX
from ...telemetry.port import LOOPBACK, MISSING, PORT_MAX
from ..cli.amounts import printable

_TIMEOUT_S: Final = 2.0
"""Maximum seconds until a rank's whole answer has arrived, even if its bytes arrive slowly."""
_BYTES_MAX: Final = 16 << 20
"""Maximum bytes of an answer: more than the metrics of any rank. Another program at the address may
send a longer answer."""
_RANKS_MAX: Final = 4096
_THREADS: Final = 64
_COUNTED: Final = ("_total", "_bucket", "_count", "_sum")
_NUMBER_MAX: Final = 1e30
"""Maximum value of a sample: larger than any real count, and small enough that sums are finite."""
_OK: Final = re.compile(rb"HTTP/1\.[01] 200 ")

Key = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""
Numbers = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One reading of the metrics of a group's ranks."""

    at_s: float
    ranks: Mapping[int, Numbers]
    """Samples by rank; a single scheduler answers for all its ranks."""
    silent: Mapping[str, str] = field(default_factory=dict[str, str])
    """By address at which no rank answered: a description of another program's answer, or "" if there
    was no answer."""
    last_answer_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time of the last answer of a rank, by address; in seconds, on the clock of `at_s`."""

    @property
    def any_rank(self) -> Numbers:
        """Samples of the lowest rank that answered, for values that are equal on all ranks."""
        return self.ranks[min(self.ranks)] if self.ranks else {}

    @property
    def world_size(self) -> int:
        """The group's world size; 0 if no rank answered."""
        return int(self._info("world_size") or 0)

    def goes_on_from(self, before: "GroupSample") -> bool:
        """Return whether this reading is from the same run as `before`: no counter has decreased."""
        return not any(
            self.ranks[rank].get(key, 0.0) < value
            for rank in self.ranks.keys() & before.ranks.keys()
            for key, value in before.ranks[rank].items()
            if key[0].endswith(_COUNTED)
        )

    @property
    def has_one_scheduler(self) -> bool:
        """Whether one scheduler serves the metrics of all ranks, so only its port must answer."""
        return self._info("transport") == EngineChannel.transport

    def _info(self, label: str) -> str:
        return next((label_of(key, label) for key in self.any_rank if _is_info(key)), "")


def numbers_in(text: str) -> dict[Key, float]:
    """Return the samples of a text in Prometheus format.

    Raises `ValueError` for any other text, and `ConfigError` if `prometheus_client` is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(MISSING) from error

    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if 0 <= sample.value < _NUMBER_MAX and float(sample.labels.get("le", 0)) >= 0
    }


def label_of(key: Key, name: str) -> str:
    """Return the value of a label, or "" if the label is missing."""
    return dict(key[1]).get(name, "")


def addresses_of(first: Sequence[str], world_size: int) -> list[str]:
    """Return the addresses of all ranks.

    If only one address is given, the other ranks are expected at the next ports.
    """
    given = [f"{LOOPBACK}:{each}" if each.isdigit() else each for each in first]
    (host, port), *others = map(split_address, given)
    if others:
        return given
    ports = range(port, min(port + max(1, world_size), PORT_MAX + 1))
    return [joined_address(host, each) for each in ports]


def look(addresses: Sequence[str], at_s: float, before: GroupSample | None = None) -> GroupSample:
    """Read the metrics at all addresses in parallel; `before` is the previous reading."""
    answers: dict[str, bytes] = {}
    until_s = time.monotonic() + _TIMEOUT_S
    waiting = deque(addresses)
    # Use daemon threads, because a thread that still resolves a host name must not delay the exit.
    threads = [
        Thread(target=_ask_waiting, args=(waiting, until_s, answers), daemon=True)
        for _ in addresses[:_THREADS]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    ranks: dict[int, Numbers] = {}
    silent: dict[str, str] = {}
    last_answer_s = {} if before is None else dict(before.last_answer_s)
    # Copy the answers, because threads may add further answers after the timeout.
    in_time = answers.copy()
    for address in addresses:
        try:
            ranks |= _ranks_in(in_time.get(address, b""))
            last_answer_s[address] = at_s
        except ValueError as error:
            silent[address] = printable(str(error))
    return GroupSample(at_s, ranks, silent, last_answer_s)


def _ask_waiting(waiting: deque[str], until_s: float, answers: dict[str, bytes]) -> None:
    """Query the waiting addresses one by one; divide the time until `until_s` equally among them."""
    with suppress(IndexError):
        while (now_s := time.monotonic()) < until_s:
            address = waiting.popleft()
            turns = 1 + len(waiting) // _THREADS
            _ask(address, now_s + (until_s - now_s) / turns, answers)


def _ask(address: str, until_s: float, answers: dict[str, bytes]) -> None:
    """Store the answer from an address; drop an answer that is incomplete at the deadline."""
    answer = bytearray()
    try:
        # After the deadline, `left_s` is negative, and `create_connection` raises `ValueError`. No
        # answer is stored then.
        left_s = until_s - time.monotonic()
        with socket.create_connection(split_address(address), left_s) as connection:
            # Send HTTP/1.0, so that the answer is not chunked, and ends when the server closes the
            # connection.
            connection.sendall(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            while len(answer) < _BYTES_MAX:
                connection.settimeout(until_s - time.monotonic())
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                answer += piece
    except (OSError, ValueError):
        return
    answers[address] = bytes(answer)


def _ranks_in(answer: bytes) -> dict[int, Numbers]:
    """Return the samples by rank in an HTTP answer.

    Raises `ValueError` if the answer is not from a rank. The error's text is the reason, or "" for an
    empty answer.
    """
    if not answer:
        raise ValueError
    head, _, body = answer.partition(b"\r\n\r\n")
    if not _OK.match(head):
        raise ValueError(f"answered {head[:40]!r}")
    ranks: defaultdict[int, dict[Key, float]] = defaultdict(dict)
    numbers = numbers_in(body.decode())
    for key, number in numbers.items():
        if key[0].startswith(PREFIX):
            if not all(value.isprintable() for _, value in key[1]):
                raise ValueError(f"{key[0]} has an unprintable label")
            ranks[int(label_of(key, "rank"))][key] = number
    sizes = [int(label_of(key, "world_size")) for key in numbers if _is_info(key)]
    if not sizes or not 0 < max(sizes) <= _RANKS_MAX:
        raise ValueError(f"answered with world sizes {sizes}")
    return dict(ranks)


def _is_info(key: Key) -> bool:
    return key[0] == f"{PREFIX}info"

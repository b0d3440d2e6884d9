"""One look at a group: the numbers that each of its ranks exposes, at one moment."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from ...errors import ConfigError
from ...ranks.protocol.host_port import joined_address, split_address
from ...telemetry.port import LOOPBACK, MISSING

_TIMEOUT_S: Final = 2.0
_BYTES_MAX: Final = 16 << 20
"""More than any rank exposes; whatever else listens at the port fills no memory."""

Key = tuple[str, frozenset[tuple[str, str]]]
"""The name of a sample, and its labels."""
Numbers = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of the ranks at a moment."""

    at_s: float
    ranks: Mapping[int, Numbers]
    """The numbers of each rank that answered."""
    silent: tuple[str, ...] = ()
    """The addresses at which nobody answered."""

    @property
    def any_rank(self) -> Numbers:
        """The numbers of the first rank that answered; what is replicated is equal on all."""
        return self.ranks[min(self.ranks)] if self.ranks else {}

    @property
    def world_size(self) -> int:
        """How many ranks the group says it has; 0 where nobody answered."""
        return next((int(label_of(key, "world_size")) for key in self.any_rank if _is_info(key)), 0)


def numbers_in(text: str) -> dict[Key, float]:
    """Return the samples of a text in the format of Prometheus.

    Raises `ValueError` for another text, and `ConfigError` where nothing is installed that reads it.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(MISSING) from error

    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def label_of(key: Key, name: str) -> str:
    """Return the value of a label, or nothing."""
    return dict(key[1]).get(name, "")


def addresses_of(first: Sequence[str], world_size: int) -> list[str]:
    """Return where the ranks are: as given, or, where one is given, at the ports from it on."""
    given = [f"{LOOPBACK}:{each}" if each.isdigit() else each for each in first]
    host, port = split_address(given[0])
    if len(given) > 1:
        return given
    return [joined_address(host, port + rank) for rank in range(max(1, world_size))]


def look(addresses: Sequence[str], at_s: float) -> Sighting:
    """Ask the ranks at these addresses for their numbers, side by side.

    Raises `ConfigError` if something else listens there.
    """
    with ThreadPoolExecutor(min(32, len(addresses))) as threads:
        texts = list(threads.map(_text_at, addresses))
    ranks: dict[int, Numbers] = {}
    silent: list[str] = []
    for address, text in zip(addresses, texts, strict=True):
        if text is None:
            silent.append(address)
            continue
        numbers = _numbers_at(address, text)
        ranks[_rank_in(address, numbers)] = numbers
    return Sighting(at_s, ranks, tuple(silent))


def _text_at(address: str) -> str | None:
    try:
        with urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            read: bytes = answer.read(_BYTES_MAX)
            return read.decode("utf-8", "replace")
    except (URLError, OSError, ValueError):
        return None


def _numbers_at(address: str, text: str) -> dict[Key, float]:
    try:
        return numbers_in(text)
    except ValueError as error:
        raise ConfigError(f"what listens at {address} exposes no metrics: {error}") from error


def _rank_in(address: str, numbers: Numbers) -> int:
    for key in numbers:
        if _is_info(key):
            return int(label_of(key, "rank"))
    raise ConfigError(f"what listens at {address} is no rank of Lockstep; name a --metrics-port")


def _is_info(key: Key) -> bool:
    return key[0] == "lockstep_info"

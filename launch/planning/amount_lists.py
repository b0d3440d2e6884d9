"""Lists of amounts on the command line, such as `--device-gib 20,40`."""

from collections.abc import Callable
from math import inf
from typing import TypeVar

from ...errors import ConfigError
from .settings import Size

T = TypeVar("T")
_POINTS_MAX = 10_000
_GIB_MAX = 1 << 30


def parse_gib(option: str, text: str, *, endless: bool = False) -> list[float]:
    """Return amounts of GiB; `inf` is one where there need be no bound."""
    wanted = "numbers with commas, for example 20,40"
    amounts = _parse(option, text, float, wanted)
    for each in amounts:
        # Written so that it refuses what is not a number, too.
        if not (0 <= each <= _GIB_MAX or (endless and each == inf)):
            raise ConfigError(f"{option} has {each:g}, must be from 0 to {_GIB_MAX}")
    return amounts


def parse_tokens(option: str, text: str) -> list[int]:
    """Return whole numbers."""
    return _parse(option, text, int, "whole numbers with commas, for example 16,64")


def parse_words(option: str, text: str) -> list[str]:
    """Return words."""
    return _parse(option, text, str, "words with commas, for example lru,lfu")


def parse_share(option: str, text: str) -> float:
    """Return a share, written as 0.3 or 30%."""
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 < share <= 1:
        raise ConfigError(f"{option} is {text!r}, must be a share such as 0.3 or 30%")
    return share


def sizes_of(
    device: list[float],
    host: list[float],
    storage: list[float],
    page_tokens: list[int],
    policies: list[str],
) -> list[Size]:
    """Return every combination."""
    count = len(device) * len(host) * len(storage) * len(page_tokens) * len(policies)
    if count > _POINTS_MAX:
        raise ConfigError(f"these are {count:,} points, and a sweep has {_POINTS_MAX:,} at most")
    return [
        Size(device_gib=a, host_gib=b, storage_gib=c, page_tokens=tokens, policy=policy)
        for policy in policies
        for tokens in page_tokens
        for a in device
        for b in host
        for c in storage
    ]


def _parse(option: str, text: str, kind: Callable[[str], T], wanted: str) -> list[T]:
    try:
        found = [kind(each.strip()) for each in text.split(",") if each.strip()]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}, must be {wanted}") from error
    if not found:
        raise ConfigError(f"{option} is empty, must be {wanted}")
    return list(dict.fromkeys(found))

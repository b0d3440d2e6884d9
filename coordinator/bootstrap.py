"""Group bootstrap: check that all ranks have equal settings, and stop all ranks if one cannot start.

The bootstrap runs before the first round. Only the bootstrap, teardown and the error path use
collectives outside of rounds.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias, cast

import msgspec

from ..errors import ConfigError
from .codec import Codec
from .collective import Collective

Scalar = str | int | float | bool | None
Fingerprint: TypeAlias = dict[str, tuple[str, bytes]]
_SETTINGS: Final[Codec[tuple[Fingerprint, dict[str, int]]]] = Codec(
    tuple[Fingerprint, dict[str, int]]
)
_PROBLEMS: Final[Codec[str | None]] = Codec(str | None)
_VARYING: Final = re.compile(r"\b(?:[0-9a-f]{16,}|[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s))\b")
"""Matches the parts of an error text that differ between ranks with the same problem: random names and
durations."""


def flatten(value: object) -> dict[str, Scalar]:
    """Return the scalars in nested settings, keyed by dotted path. Enum members become their values."""
    return dict(_leaves("", msgspec.to_builtins(value)))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict):
        for name, each in cast("dict[str, object]", value).items():
            yield from _leaves(f"{path}.{name}" if path else name, each)
    elif isinstance(value, list | tuple):
        yield f"{path}.length", len(cast("Sequence[object]", value))
        for index, each in enumerate(cast("Sequence[object]", value)):
            yield from _leaves(f"{path}[{index}]", each)
    else:
        yield path, value


def fingerprint(settings: Mapping[str, Scalar], shown: Callable[[str], str]) -> Fingerprint:
    """Return, by setting name, (text, digest): the printable value, and a digest of the full value.

    `shown` removes secrets from a text. The digest includes them, so passwords are compared but never
    printed.
    """
    return {
        name: (
            repr(shown(value) if isinstance(value, str) else value),
            sha256(repr(value).encode()).digest(),
        )
        for name, value in settings.items()
    }


def differences(fingerprints: Sequence[Fingerprint]) -> list[str]:
    """Return one clause for each setting that differs between ranks, with the values and their ranks.

    Digests are compared but never printed, because the digest of a short password reveals it.
    """
    clauses: list[str] = []
    names = sorted({name for each in fingerprints for name in each})
    for name in names:
        ranks_by_value: dict[tuple[str, bytes], list[int]] = {}
        for rank, each in enumerate(fingerprints):
            ranks_by_value.setdefault(each.get(name, ("absent", b"")), []).append(rank)
        if len(ranks_by_value) > 1:
            seen: set[str] = set()
            phrases: list[str] = []
            for (text, _), ranks in ranks_by_value.items():
                what = "equal except for a secret" if text in seen else text
                phrases.append(
                    f"{what} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                )
                seen.add(text)
            clauses.append(f"{name} is {', '.join(phrases)}")
    return clauses


def agree_on_settings(
    collective: Collective,
    equal: Mapping[str, Scalar],
    smallest: Mapping[str, int],
    timeout_s: float,
    *,
    shown: Callable[[str], str],
) -> dict[str, int]:
    """Raise `ConfigError` unless all ranks have the same `equal`; return the minima of `smallest`.

    Each minimum, returned by name, is taken over the ranks. Every rank must call this function during
    the bootstrap. If values of `equal` differ, every rank raises the same `ConfigError`, which names
    the first differing fields and their ranks, with values as `shown` prints them.
    """
    payload = _SETTINGS.encode((fingerprint(equal, shown), dict(smallest)))
    gathered = [_SETTINGS.decode(each) for each in collective.gather(payload, timeout_s)]
    clauses = differences([each[0] for each in gathered])
    if clauses:
        listed = "; ".join(clauses[:3]) + (f"; and {len(clauses) - 3} more" * (len(clauses) > 3))
        raise ConfigError(f"the ranks were started with different settings: {listed}")
    return {name: min(each[1][name] for each in gathered) for name in smallest}


def agree_that_all_are_ready(collective: Collective, problem: str | None, timeout_s: float) -> None:
    """Exchange start-up problems between all ranks; raise on every rank if any rank has one.

    Every rank must call this function during the bootstrap. All ranks raise the same `ConfigError`,
    which names the ranks and their problems, so that no rank waits for one that failed. Problems that
    differ only in random names and durations are printed once.
    """
    payload = _PROBLEMS.encode(problem)
    problems = [_PROBLEMS.decode(each) for each in collective.gather(payload, timeout_s)]
    words: dict[str, str] = {}
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, each in enumerate(problems):
        if each is not None:
            alike = _VARYING.sub("", each)
            words.setdefault(alike, each)
            ranks_by_problem.setdefault(alike, []).append(rank)
    if not ranks_by_problem:
        return
    if len(ranks_by_problem) == 1 and None not in problems:
        raise ConfigError(next(iter(words.values())))
    raise ConfigError(
        "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words[alike]}"
            for alike, ranks in ranks_by_problem.items()
        )
    )

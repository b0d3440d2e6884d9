"""What a user may write into one entry of `secondary_tiers`, checked once, when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from ....errors import ConfigError
from ...settings import number, one_of, require_known, text, truth

WHERE: Final = "secondary_tiers"
TIMEOUT_S_MAX: Final = 86_400.0
_MIB_MAX: Final = float(1 << 20)
_LOCALITIES: Final = ("LOCAL", "REMOTE")


class OnReset(StrEnum):
    """What a reset of vLLM's connector means. It comes with other weights, and also with sleep."""

    LEAVE = "leave"
    """The weights may be others now: the store is neither read nor written until the next start."""
    KEEP = "keep"
    """The weights are the same: what is stored is served, as vLLM's own tiers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The configuration of one tier."""

    store: str
    """The URI of a store."""
    model: str | None = None
    """The model's name in keys; by default the one that the engine was given, which may be a path."""
    weights_version: str | None = None
    """Stands for the weights in keys, and under vLLM's own connector for all options of the engine."""
    weight_digests: str | None = None
    """The folder in which digests of files of weights are remembered; by default in vLLM's cache."""
    quota_gib: float | None = None
    """How much this model with these weights may keep in the store; None for no bound of its own."""
    in_flight_mib: float = 256.0
    """Memory for chunks on their way from the store, and as much for those on their way to it."""
    open_timeout_s: float = 60.0
    """How long the store may take to open."""
    lookup_timeout_s: float = 2.0
    """Each lookup. What is not known by then is a miss."""
    read_timeout_s: float = 10.0
    """Each job that reads. What is not there by then is a miss."""
    write_timeout_s: float = 60.0
    """Each job that writes. What is not stored by then has failed."""
    close_timeout_s: float = 5.0
    """How long the end waits for jobs, and then for the store."""
    on_reset: OnReset = OnReset.LEAVE
    """What becomes of the store when vLLM resets its connector."""
    enable_kv_events: bool = False
    """Tell of chunks that were stored or found lost, where vLLM publishes KV events."""
    locality: str | None = None
    """Where the store is, for those events and for filters of requests: LOCAL or REMOTE."""


def parse(given: Mapping[str, Any]) -> TierSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    require_known(WHERE, given, {each.name for each in fields(TierSettings)})
    values = {key: _value(f"{WHERE}: {key}", key, value) for key, value in given.items()}
    if "store" not in values:
        raise ConfigError(f'{WHERE}: give "store", a URI such as "file:///mnt/kv"')
    return TierSettings(**values)


def _value(where: str, key: str, value: object) -> Any:
    if key.endswith("_s"):
        return _within(where, value, TIMEOUT_S_MAX, "seconds")
    if key.endswith("_mib") or (key == "quota_gib" and value is not None):
        return _within(where, value, _MIB_MAX, key[-3].upper() + "iB")
    if key == "on_reset":
        return one_of(where, OnReset, value)
    if key == "enable_kv_events":
        return truth(where, value)
    if value is None and key != "store":
        return None
    if key == "locality" and value not in _LOCALITIES:
        # vLLM's own tiers name the type that they expect.
        raise ConfigError(
            f"{where} is {value!r}, which is no Locality; known: {', '.join(_LOCALITIES)}"
        )
    return text(where, value)


def _within(where: str, value: object, most: float, unit: str) -> float:
    given = number(where, value)
    if not 0 < given <= most:
        raise ConfigError(f"{where} is {given:g} {unit}, must be more than 0 and at most {most:g}")
    return given

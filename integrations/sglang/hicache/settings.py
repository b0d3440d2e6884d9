"""What a user may write into `hicache-storage-backend-extra-config`, checked once, at the start.

SGLang takes its own keys out before (`prefetch_threshold`, `prefetch_timeout_base` and the like).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ....errors import ConfigError

WHERE: Final = "hicache-storage-backend-extra-config"
TIMEOUT_S_MAX: Final = 86_400.0
_OF_SGLANG: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""What SGLang reads of it to find this package, and leaves in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """The extra configuration of the storage under HiCache; equal on every rank."""

    store: str
    """The URI of a store, the same on every rank."""
    weights_version: str = ""
    """Stands for the weights in keys: change it whenever they change under the same model name."""
    open_timeout_s: float = 60.0
    """How long the store may take to open, and to close."""
    exists_timeout_s: float = 2.0
    """Each lookup. What is not known by then is a miss."""
    read_timeout_s: float = 10.0
    """Each call that reads, of up to 128 pages. What is not there by then is a miss."""
    write_timeout_s: float = 60.0
    """Each call that writes, of up to 128 pages. What is not stored by then has failed."""
    clear_timeout_s: float = 60.0
    """Each `clear`, for which SGLang's scheduler waits."""


def parse(extra: Mapping[str, Any]) -> StorageSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    known = [each.name for each in fields(StorageSettings)]
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if key in _OF_SGLANG:
            continue
        if key not in known:
            raise ConfigError(f"{WHERE}: there is no key {key!r}; known: {', '.join(known)}")
        values[key] = _seconds(key, value) if key.endswith("_s") else _text(key, value)
    if "store" not in values:
        raise ConfigError(f'{WHERE}: give "store", a URI such as "file:///mnt/kv"')
    return StorageSettings(**values)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{WHERE}: {key} must be text, not {value!r}")
    return value


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{WHERE}: {key} must be a number of seconds, not {value!r}")
    if not 0 < value <= TIMEOUT_S_MAX:
        raise ConfigError(
            f"{WHERE}: {key} is {value}, must be more than 0 and at most {TIMEOUT_S_MAX:.0f}"
        )
    return float(value)

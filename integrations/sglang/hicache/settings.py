"""What a user may write into `hicache-storage-backend-extra-config`, checked once, at the start.

SGLang takes its own keys out before (`prefetch_threshold`, `prefetch_timeout_base` and the like).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from ....coordinator.settings import Settings, Text, read_settings
from ..engine.settings import NAMES_A_BACKEND

WHERE: Final = "hicache-storage-backend-extra-config"

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


@dataclass(frozen=True, kw_only=True)
class StorageSettings(Settings):
    """The extra configuration of the storage under HiCache; equal on every rank."""

    store: Text
    """The URI of a store, such as `file:///mnt/kv`, the same on every rank."""
    weights_version: str = ""
    """Stands for the weights in keys: change it whenever they change under the same model name."""
    open_timeout_s: _Seconds = 60.0
    """How long the store may take to open, and to close."""
    exists_timeout_s: _Seconds = 2.0
    """Each lookup. What is not known by then is a miss."""
    read_timeout_s: _Seconds = 10.0
    """Each call that reads, of up to 128 pages. What is not there by then is a miss."""
    write_timeout_s: _Seconds = 60.0
    """Each call that writes, of up to 128 pages. What is not stored by then has failed."""
    clear_timeout_s: _Seconds = 60.0
    """Each `clear`, for which SGLang's scheduler waits."""


def parse(extra: Mapping[str, Any]) -> StorageSettings:
    """Return the settings; raises `ConfigError` with the key that is wrong and what it may be."""
    ours = {key: value for key, value in extra.items() if key not in NAMES_A_BACKEND}
    return read_settings(StorageSettings, ours, WHERE)

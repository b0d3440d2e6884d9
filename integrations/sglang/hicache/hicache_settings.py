"""Settings in `hicache-storage-backend-extra-config` for the HiCache storage, checked at startup.

SGLang removes the keys that it defines itself (`prefetch_threshold`, `prefetch_timeout_base` and
similar) before Lockstep gets the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from ....coordinator.validated_settings import Settings, Text, read_settings
from ..engine.sglang_settings import NAMES_A_BACKEND

WHERE: Final = "hicache-storage-backend-extra-config"

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


@dataclass(frozen=True, kw_only=True)
class StorageSettings(Settings):
    """The HiCache storage's settings in the extra configuration; equal on every rank."""

    store: Text
    """The store's URI, such as `file:///mnt/kv`; the same on every rank."""
    weights_version: str = ""
    """The user's version of the weights; part of page keys. Users must change it whenever they change
    the weights under one model name."""
    open_timeout_s: _Seconds = 60.0
    """Timeout in seconds for opening the store, and for closing it."""
    exists_timeout_s: _Seconds = 2.0
    """Timeout of each lookup in seconds. Pages without an answer by then are misses."""
    read_timeout_s: _Seconds = 10.0
    """Timeout in seconds of each read call of up to 128 pages. Pages not read by then are misses."""
    write_timeout_s: _Seconds = 60.0
    """Timeout in seconds of each write call of up to 128 pages. Pages not stored by then have failed.
    """
    clear_timeout_s: _Seconds = 60.0
    """Timeout in seconds of each `clear`, which blocks SGLang's scheduler."""


def parse(extra: Mapping[str, Any]) -> StorageSettings:
    """Return the settings; raise `ConfigError` with the invalid key and its allowed values."""
    ours = {key: value for key, value in extra.items() if key not in NAMES_A_BACKEND}
    return read_settings(StorageSettings, ours, WHERE)

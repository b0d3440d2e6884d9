"""The sizes of a `3fs://` store, which its index knows and everybody who uses it agrees on."""

from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ...page_format.object_header import HEADER_BYTES
from ..records.manifest import MANIFEST_BYTES
from ..uri import StoreUri
from .page_index import PageIndex, Settings

SLOT_BYTES: Final = (4 << 20) + HEADER_BYTES
SLOT_BYTES_MIN: Final = HEADER_BYTES + MANIFEST_BYTES
"""Whoever uses a store needs the manifest of its model there, and it is the longest record."""
SLOT_BYTES_MAX: Final = 1 << 30
FILE_SLOTS: Final = 1024
FILE_SLOTS_MAX: Final = 1 << 20


def sizes_of(uri: StoreUri) -> tuple[int | None, int | None]:
    """Return `slot_bytes` and `file_slots` as the URI has them; None asks for nothing."""
    limits = {
        "slot_bytes": (SLOT_BYTES_MIN, SLOT_BYTES_MAX),
        "file_slots": (1, FILE_SLOTS_MAX),
    }
    slot_bytes, file_slots = (
        uri.number(name, 0, low=low, high=high) if name in uri.options else None
        for name, (low, high) in limits.items()
    )
    return slot_bytes, file_slots


def slot_bytes_for(payload_bytes: int) -> int:
    """Return the least `slot_bytes` for objects of so many bytes, and for what every store has."""
    return max(SLOT_BYTES_MIN, HEADER_BYTES * (1 + -(-payload_bytes // HEADER_BYTES)))


def agree_on_sizes(
    root: Path, index: PageIndex, slot_bytes: int | None, file_slots: int | None
) -> Settings:
    """Return the sizes of the store; those asked for, if it is new. None asks for nothing.

    Raises `ConfigError` if the store has others than were asked for, or the index says what no store
    can have, and `StorageError` if it says no number.
    """
    ours = Settings(
        slot_bytes=SLOT_BYTES if slot_bytes is None else slot_bytes,
        file_slots=FILE_SLOTS if file_slots is None else file_slots,
    )
    settings = index.agree(ours)
    if not _are_possible(settings):
        raise ConfigError(
            f"store {root}: index {index.text} says slot_bytes={settings.slot_bytes} and "
            f"file_slots={settings.file_slots}, which no store has; it is damaged or belongs to "
            "something else, so give a new index"
        )
    for name, asked, there in (
        ("slot_bytes", slot_bytes, settings.slot_bytes),
        ("file_slots", file_slots, settings.file_slots),
    ):
        if asked is not None and asked != there:
            raise ConfigError(
                f"store {root}: {name} is {there} in the store and {asked} here; use "
                f"{name}={there}, or another directory and index"
            )
    return settings


def _are_possible(settings: Settings) -> bool:
    slot_bytes = settings.slot_bytes
    return (
        SLOT_BYTES_MIN <= slot_bytes <= SLOT_BYTES_MAX
        and not slot_bytes % HEADER_BYTES
        and 1 <= settings.file_slots <= FILE_SLOTS_MAX
    )

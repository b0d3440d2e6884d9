"""The slot sizes of a `3fs://` store, which its index records and all its users share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError
from ...page_format.object_header import HEADER_BYTES
from ..file.trust import Trust
from ..records.manifest import MANIFEST_BYTES
from .files import FILES_MAX
from .page_index import PageIndex, SlotSizes

SLOT_BYTES: Final = (4 << 20) + HEADER_BYTES
SLOT_BYTES_MIN: Final = HEADER_BYTES + MANIFEST_BYTES
"""Minimum bytes of a slot. Every slot must be able to hold a model's manifest, which is the longest
record."""
SLOT_BYTES_MAX: Final = 1 << 30
FILE_SLOTS: Final = 1024
FILE_SLOTS_MAX: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ThreeFsOptions(Settings):
    """The options of a `3fs://` URI."""

    index: str = ""
    slot_bytes: Annotated[int, Meta(ge=SLOT_BYTES_MIN, le=SLOT_BYTES_MAX)] | None = None
    """Bytes per slot. None means the slot size of the existing store, or the default for a new store.
    """
    file_slots: Annotated[int, Meta(ge=1, le=FILE_SLOTS_MAX)] | None = None
    files: Annotated[int, Meta(ge=1, le=FILES_MAX)] = 4
    rings: Annotated[int, Meta(ge=1, le=64)] = 4
    trust: Trust = Trust.OWNER
    read_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slot_bytes is not None and self.slot_bytes % HEADER_BYTES:
            raise ConfigError(
                f"slot_bytes is {self.slot_bytes}, must be a multiple of {HEADER_BYTES}"
            )


def slot_bytes_for(payload_bytes: int) -> int:
    """Return the smallest `slot_bytes` that is enough for payloads of this size and for records."""
    return max(SLOT_BYTES_MIN, HEADER_BYTES * (1 + -(-payload_bytes // HEADER_BYTES)))


def agree_on_sizes(root: Path, index: PageIndex, options: ThreeFsOptions) -> SlotSizes:
    """Return the slot sizes of the store; a new store adopts those in `options`, or the defaults.

    Raises `ConfigError` if the store has other sizes than `options` demands, or the index contains
    impossible ones. Raises `StorageError` if a size in the index is not a number.
    """
    ours = SlotSizes(
        slot_bytes=options.slot_bytes or SLOT_BYTES, file_slots=options.file_slots or FILE_SLOTS
    )
    settings = index.agree(ours)
    try:
        ThreeFsOptions(slot_bytes=settings.slot_bytes, file_slots=settings.file_slots)
    except ConfigError:
        raise ConfigError(
            f"store {root}: index {index.text} says slot_bytes={settings.slot_bytes} and "
            f"file_slots={settings.file_slots}, which no store has; it is damaged or belongs to "
            "something else, so give a new index"
        ) from None
    for name, requested, there in (
        ("slot_bytes", options.slot_bytes, settings.slot_bytes),
        ("file_slots", options.file_slots, settings.file_slots),
    ):
        if requested is not None and requested != there:
            raise ConfigError(
                f"store {root}: {name} is {there} in the store and {requested} here; use "
                f"{name}={there}, or another directory and index"
            )
    return settings

"""The manifest: the page layouts that all users of a store must share for one model.

For each model and weights version a store has one small object, the manifest, which lists the pools and
the layout of their pages. The first user writes the manifest, and a user with other pools or another
layout is refused. Without a manifest, groups with different layouts would fill one store with pages
that the other groups cannot use. The manifest contains neither the TP size nor the optional columns
that a group stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ...errors import ConfigError, StorageError
from ...page_format.namespace import layouts_record, model_digest
from ...page_format.object_name import MANIFEST_POOL, ObjectName
from ...page_format.object_shape import ObjectShape
from ...page_format.page_layout import Column, PageLayout
from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome

MANIFEST_BYTES: Final = 16 << 10
"""Bytes of every encoded manifest, the same for all so that a reader knows how many bytes to read."""
_SHAPE: Final = ObjectShape.whole(MANIFEST_BYTES)
_FORMAT: Final = 2
_LENGTH_BYTES: Final = 4
_ATTEMPTS: Final = 8
"""Maximum number of attempts to claim a store (to write the manifest or compare with it). An attempt
fails only if another process wrote the manifest meanwhile, or if a corrupt manifest was removed."""
_CAUSES: Final = {
    "FAILED": "the store refuses it; check the warnings before this error, the store's free space and "
    "its permissions",
    "TIMED_OUT": "the store does not answer in time; check whether it can be reached",
}


class _StoredColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    layers: int
    heads: int
    elements: int
    dtype: str
    replicated: bool
    optional: bool = False
    """Whether the column is optional. The manifest contains this field only if the value is True."""


_DECODER: Final = msgspec.msgpack.Decoder(
    tuple[int, str, str, list[tuple[str, tuple[int, list[_StoredColumn]]]]]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of one model: its name, weights version, and page layouts."""

    model: str
    weights_version: str
    layouts: Mapping[str, PageLayout]
    """The page layouts by pool name, in any order."""
    name: ObjectName = field(init=False)
    """The name of the object in which the manifest is stored."""

    def __post_init__(self) -> None:
        digest = model_digest(self.model, self.weights_version)
        name = ObjectName(namespace=digest, key=digest, pool=MANIFEST_POOL, shard="all")
        object.__setattr__(self, "name", name)

    def encode(self) -> bytes:
        """Return the manifest as `MANIFEST_BYTES` bytes."""
        record = [_FORMAT, self.model, self.weights_version, layouts_record(self.layouts)]
        packed = msgspec.msgpack.encode(record)
        if len(packed) > MANIFEST_BYTES - _LENGTH_BYTES:
            raise ConfigError(
                f"the names, pools and columns of model {self.model[:80]!r} make a manifest of "
                f"{len(packed)} bytes; the limit is {MANIFEST_BYTES - _LENGTH_BYTES}"
            )
        content = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
        return content.ljust(MANIFEST_BYTES, b"\0")


async def claim_model(
    backend: StorageBackend,
    model: str,
    weights_version: str,
    layouts: Mapping[str, PageLayout],
    deadline: float,
    *,
    store: str = "",
) -> None:
    """Ensure that all users of `backend` for this model and weights version use `layouts`.

    `layouts` is by pool name. Any number of ranks and groups may call this at the same time. On return
    all of them use the same layouts, or the store is read-only and has no manifest. Raises
    `ConfigError` with the pool, the field and both values if the store has other layouts. Raises
    `StorageError` if the store does not answer by `deadline` (a value of `time.monotonic`). Errors
    contain `store`, the store's name without secrets.
    """
    subject = f"store {store}: " if store else ""
    subject += f"the manifest of model {model!r}"
    ours = Manifest(model=model, weights_version=weights_version, layouts=layouts)
    encoded = ours.encode()
    for _ in range(_ATTEMPTS):
        buffer = bytearray(MANIFEST_BYTES)
        (read,) = await backend.read(
            [Read(ours.name, (memoryview(buffer),), _SHAPE)], deadline=deadline
        )
        if read is ReadOutcome.OK:
            # Compare with the manifest in the store even after writing it, because another process may
            # have written first.
            if bytes(buffer) != encoded:
                refuse_other_layouts(ours, decode_manifest(bytes(buffer)))
            return
        if read in (ReadOutcome.FAILED, ReadOutcome.TIMED_OUT):
            raise StorageError(f"{subject} could not be read: {read.name}; {_CAUSES[read.name]}")
        if not backend.capabilities.writes:
            # Accept a read-only store without a manifest. If its pages have another layout, they also
            # have other names, so reads of this rank only miss.
            return
        (wrote,) = await backend.write(
            [Write(ours.name, (memoryview(encoded),), _SHAPE)], deadline=deadline
        )
        if wrote in (WriteOutcome.FAILED, WriteOutcome.TIMED_OUT):
            raise StorageError(
                f"{subject} could not be written: {wrote.name}; {_CAUSES[wrote.name]}"
            )
    raise StorageError(
        f"{subject} could not be read back after {_ATTEMPTS} attempts; another process removes or"
        " corrupts it"
    )


def decode_manifest(content: bytes) -> Manifest | None:
    """Decode a manifest whose bytes are verified; return None if this version cannot decode it."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        version, model, weights_version, pools = _DECODER.decode(
            content[_LENGTH_BYTES : _LENGTH_BYTES + length]
        )
        layouts = {
            pool: PageLayout(
                page_tokens=page_tokens,
                columns=tuple(Column(**msgspec.structs.asdict(each)) for each in columns),
            )
            for pool, (page_tokens, columns) in pools
        }
    except ValueError:
        return None
    if version != _FORMAT:
        return None
    return Manifest(model=model, weights_version=weights_version, layouts=layouts)


def refuse_other_layouts(ours: Manifest, theirs: Manifest | None) -> None:
    """Raise `ConfigError` that names the first difference between two manifests of a model.

    `theirs` is the store's manifest, or None if this version cannot read it.
    """
    subject = f"model {ours.model!r} with weights version {ours.weights_version!r}"
    if theirs is None:
        raise ConfigError(
            f"{subject}: the store's manifest was written by another version of Lockstep; use "
            "another store"
        )
    for pool in [*ours.layouts, *theirs.layouts]:
        if pool not in theirs.layouts:
            raise ConfigError(
                f"{subject}: the store does not keep the pool {pool!r}, which is configured here;"
                " use another store"
            )
        if pool not in ours.layouts:
            raise ConfigError(
                f"{subject}: the store keeps the pool {pool!r}, which is not configured here; use"
                " another store"
            )
    for pool, layout in ours.layouts.items():
        _refuse_layout(f"{subject}, pool {pool!r}", layout, theirs.layouts[pool])
    raise ConfigError(f"{subject}: the store's manifest is not in its canonical form")


def _refuse_layout(subject: str, mine: PageLayout, stored: PageLayout) -> None:
    """Raise `ConfigError` for the first difference between two layouts of one pool, if any."""
    if stored.page_tokens != mine.page_tokens:
        raise ConfigError(
            f"{subject}: page_tokens is {stored.page_tokens} in the store and {mine.page_tokens} "
            f"here; use another store, or pages of {stored.page_tokens} tokens (--page-tokens, "
            "--block-size, --page-size)"
        )
    stored_names = ", ".join(column.name for column in stored.columns)
    names = ", ".join(column.name for column in mine.columns)
    if stored_names != names:
        raise ConfigError(
            f"{subject}: the columns are {stored_names} in the store and {names} here; use another "
            "store"
        )
    for old, new in zip(stored.columns, mine.columns, strict=True):
        for each in _StoredColumn.__struct_fields__:
            was, now = getattr(old, each), getattr(new, each)
            if was != now:
                raise ConfigError(
                    f"{subject}: {each} of column {new.name!r} is {was} in the store and {now} "
                    "here; use another store"
                )

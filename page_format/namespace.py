"""Namespaces: everything that must match before two replicas may share pages, and its digest.

The digest of a `Namespace` is the first part of every object's name, so caches that differ in any field
cannot see each other's objects. TP size and rank are not in the namespace. They select a shard of the
page. The shard is the last part of the object's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from .page_layout import Column, PageLayout

ColumnRecord = list[str | int | bool]
"""A column as a plain list: name, layers, heads, elements, dtype, replicated. The counts are those of
the whole model.

For an optional column, a further element True follows.
"""
LayoutRecord = list[int | list[ColumnRecord]]
"""A page layout as a plain list: the number of tokens per page, and the columns in order."""
PoolRecord = list[str | LayoutRecord]
"""A pool as a plain list: its name, and the layout of its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One model with one set of weights, the layout of each pool, and a tenant or adapter name."""

    model: str
    weights_version: str
    layouts: Mapping[str, PageLayout]
    """The page layout of each pool, by pool name. The order of the pools does not matter."""
    name: str = ""
    """Separates caches that must not share bytes: a tenant's salt, an adapter, or both."""

    def digest(self) -> str:
        """Return the namespace's digest as 64 hex digits. Not cached, so callers should keep it."""
        return _digest(
            "lockstep-namespace-2",
            self.model,
            self.weights_version,
            layouts_record(self.layouts),
            self.name,
        )


def model_digest(model: str, weights_version: str) -> str:
    """Return the digest of a model's name and weights version, without layouts, as 64 hex digits."""
    return _digest("lockstep-model-2", model, weights_version)


def layouts_record(layouts: Mapping[str, PageLayout]) -> list[PoolRecord]:
    """Return the layouts of pools as plain lists, numbers and strings, sorted by pool name."""
    return [[pool, _layout_record(layout)] for pool, layout in sorted(layouts.items())]


def _layout_record(layout: PageLayout) -> LayoutRecord:
    return [layout.page_tokens, [_column_record(column) for column in layout.columns]]


def _column_record(column: Column) -> ColumnRecord:
    record: ColumnRecord = [
        column.name,
        column.layers,
        column.heads,
        column.elements,
        column.dtype,
        column.replicated,
    ]
    # Add the optional flag only if it is True, because a further element would change the digest of
    # every existing layout.
    return [*record, True] if column.optional else record


def _digest(*parts: str | list[PoolRecord]) -> str:
    # msgpack encodes lists, strings, integers and booleans in exactly one way and states every length,
    # so two values have equal bytes only if they are equal.
    return sha256(msgspec.msgpack.encode(parts)).hexdigest()

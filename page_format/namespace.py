"""Namespaces: all that must agree before two replicas may share bytes, and its digest.

The digest of a `Namespace` is the first part of every object's name. Two caches that differ in
anything that it covers cannot see each other's objects at all. TP size and rank are no part of it:
they say which shard of a page an object is, and stand in the last part of its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from .page_layout import Column, PageLayout

ColumnRecord = list[str | int | bool]
"""Name, layers, heads, elements, dtype, replicated, in units of the whole model; and True, if it is
optional."""
LayoutRecord = list[int | list[ColumnRecord]]
"""Tokens of a page, and its columns in order."""
PoolRecord = list[str | LayoutRecord]
"""The name of a pool, and the layout of its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One model with one set of weights, in one layout of each pool, for one tenant or adapter."""

    model: str
    weights_version: str
    layouts: Mapping[str, PageLayout]
    """The layout of each pool by the pool's name, in any order."""
    name: str = ""
    """Keeps apart what must not be shared: a tenant's salt, an adapter, or both."""

    def digest(self) -> str:
        """Return the digest as 64 hex digits: equal exactly if all fields are. Worth keeping."""
        return _digest(
            "lockstep-namespace-2",
            self.model,
            self.weights_version,
            layouts_record(self.layouts),
            self.name,
        )


def model_digest(model: str, weights_version: str) -> str:
    """Return the digest of a model with its weights, whatever its layout, as 64 hex digits."""
    return _digest("lockstep-model-2", model, weights_version)


def layouts_record(layouts: Mapping[str, PageLayout]) -> list[PoolRecord]:
    """Return the layouts of pools as plain lists, numbers and strings, in one order."""
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
    # Not said where it is not so, because that would be another digest for every layout there was.
    return [*record, True] if column.optional else record


def _digest(*parts: str | list[PoolRecord]) -> str:
    # Lists, strings, integers and booleans have exactly one encoding each, so equal values give
    # equal bytes; and the encoding states every length, so different values give different ones.
    return sha256(msgspec.msgpack.encode(parts)).hexdigest()

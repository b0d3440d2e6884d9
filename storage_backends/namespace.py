"""What must agree before two replicas may share bytes, and the digest that stands for it.

The digest of a `Namespace` is the first part of every object's name. Two caches that differ in
anything that it covers cannot see each other's objects at all. TP size and rank are no part of it:
they say which shard of a page an object is, and stand in the last part of its name.
"""

from dataclasses import dataclass
from hashlib import sha256

import msgpack

from ..ranks.page_layout import Column, PageLayout

ColumnRecord = list[str | int | bool]
"""Name, layers, heads, elements, dtype, replicated; in units of the whole model."""
LayoutRecord = list[int | list[ColumnRecord]]
"""Tokens of a page, and its columns in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One model with one set of weights, in one page layout, for one tenant or adapter."""

    model: str
    weights_version: str
    layout: PageLayout
    name: str = ""
    """Keeps apart what must not be shared: a tenant's salt, an adapter, or both."""

    def digest(self) -> str:
        """Return the digest as 64 hex digits: equal exactly if all fields are. Worth keeping."""
        return _digest(
            "lockstep-namespace-1",
            self.model,
            self.weights_version,
            layout_record(self.layout),
            self.name,
        )


def model_digest(model: str, weights_version: str) -> str:
    """Return the digest of a model with its weights, whatever its layout, as 64 hex digits."""
    return _digest("lockstep-model-1", model, weights_version)


def layout_record(layout: PageLayout) -> LayoutRecord:
    """Return the layout as plain lists, numbers and strings."""
    return [layout.page_tokens, [_column_record(column) for column in layout.columns]]


def _column_record(column: Column) -> ColumnRecord:
    return [
        column.name,
        column.layers,
        column.heads,
        column.elements,
        column.dtype,
        column.replicated,
    ]


def _digest(*parts: str | LayoutRecord) -> str:
    # Lists, strings, integers and booleans have exactly one encoding each, so equal values give
    # equal bytes; and the encoding states every length, so different values give different ones.
    packed: bytes = msgpack.packb(list(parts), use_bin_type=True)
    return sha256(packed).hexdigest()

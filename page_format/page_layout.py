"""The arrangement of a page's bytes on every tier.

A page holds one component's data for `page_tokens` consecutive tokens; a recurrent state is laid out as
a page of one token. A page consists of *columns* (keys, values, and other per-token data). On the
device a column is one tensor [layer, page, head, token, element], because kernels read by layer. On the
host and in storage a page is one contiguous run of bytes:

    replicated columns:                layer, head, token, element
    divided columns, unit by unit:     column, layer, head of the unit, token, element
    then each optional column, in one of these two orders

A *unit* is the smallest range of KV heads that a rank of any TP size can hold. The number of units is
the greatest common divisor of the columns' head counts, or a divisor of it if an object would have too
many parts. Each rank's share is a run of units, so ranks of different TP sizes can share and verify
objects.

`PageLayout` is the same on every rank, independent of TP size and stages, and part of every key's
namespace. `ShardLayout` is one rank's share: a contiguous range of heads of each divided column, and
the layers of its pipeline stage.

A column may be *optional*, such as the KV of a draft model that only some engines run. Each engine
keeps the column on all of its ranks or on none. The layout always lists the column; an engine without
it has shorter pages. An object's presence bits record its optional columns.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd
from operator import index
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
from .object_shape import PART_BYTES_MAX, PARTS_MAX, ObjectShape, Part

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
"""The element types of columns, by torch's names, with their sizes in bytes."""
OPTIONAL_COLUMNS_MAX = 16
"""The maximum number of optional columns in a layout. The number is bounded because each optional
column adds parts to the objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One kind of per-token data in a page. All counts are those of the whole model.

    `heads` counts KV heads over all ranks. A `replicated` column is the same on every rank and is not
    divided. `elements` is the number of elements per token, head and layer. Engines may leave out an
    `optional` column.
    """

    name: str
    layers: int
    heads: int
    elements: int
    dtype: str = "bfloat16"
    replicated: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, f"column {self.name!r}: ")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(sorted(DTYPE_BYTES))
            raise ConfigError(f"column {self.name!r}: unknown dtype {self.dtype!r}; known: {known}")


_WANTED: dict[Any, str] = {
    int: "a whole number",
    str: "text in UTF-8",
    bool: "true or false",
    tuple[Column, ...]: "a tuple of Column",
}
"""The expected value of a field by the field's type, for error messages."""


def _check_fields(settings: Any, whose: str = "") -> None:
    """Convert each field of the dataclass `settings` to the field's type.

    Raises `ConfigError` for a wrong value. The error's text begins with `whose`.
    """
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.type is int and not isinstance(value, bool):
            # Convert numpy and torch scalars to int. Arrays of several numbers are refused below.
            with suppress(TypeError, RuntimeError):
                value = index(value)
        try:
            object.__setattr__(settings, each.name, msgspec.convert(value, each.type))
            str(value).encode()
        except (msgspec.ValidationError, UnicodeEncodeError):
            message = f"{whose}{each.name} is {value!r:.100}, must be {_WANTED[each.type]}"
            raise ConfigError(message) from None
        if each.type is int and value < 1:
            raise ConfigError(f"{whose}{each.name} is {value}, must be 1 or more")


class ShardPlace(NamedTuple):
    """The TP rank and pipeline stage that determine a rank's share of each page."""

    tp_rank: int
    tp_size: int
    stage: int = 0
    stages: int = 1

    @staticmethod
    def of(rank: int, world_size: int, stages: int = 1) -> "ShardPlace":
        """Return the `ShardPlace` of a rank; the ranks of one pipeline stage are consecutive."""
        if stages < 1 or world_size % stages:
            raise ConfigError(
                f"{world_size} ranks cannot be divided into {stages} pipeline stages evenly"
            )
        tp_size = world_size // stages
        return ShardPlace(rank % tp_size, tp_size, rank // tp_size, stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShard:
    """One rank's share of one column, and its location within the page's bytes."""

    column: Column
    head_first: int
    heads: int
    layer_first: int
    layers: int
    units: int
    """The number of byte runs of the share: one per unit of heads, or 1 for a replicated column."""
    offset_bytes: int
    """The offset of the share's first byte run in the page, in bytes."""
    stride_bytes: int
    """The distance from the start of one byte run to the start of the next, in bytes."""
    nbytes: int
    """The total length of the share's byte runs, in bytes."""

    @property
    def unit_layer_bytes(self) -> int:
        """The size in bytes of one layer of one unit, which is contiguous on every tier."""
        return self.nbytes // (self.units * self.layers)


PartKey = tuple[int, int]
"""The key of a part of a page: (presence bit, unit).

The presence bit is that of an optional column, or -1 for required columns. The unit is -1 for
replicated columns.
"""


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The layout of a page: its tokens and columns, the same on every rank."""

    page_tokens: int
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.columns:
            raise ConfigError("a page layout needs at least one column")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ConfigError(f"column names must differ: {', '.join(names)}")
        self._check_optional()

    @property
    def optional_columns(self) -> tuple[Column, ...]:
        """The columns that an engine may leave out, in the order of their presence bits."""
        return tuple(column for column in self.columns if column.optional)

    @property
    def optional_names(self) -> tuple[str, ...]:
        """The names of the optional columns."""
        return tuple(column.name for column in self.optional_columns)

    def kept(self, absent: Collection[str]) -> tuple[Column, ...]:
        """Return the page's columns without those optional ones that `absent` names.

        Names in `absent` that are not optional columns are ignored.
        """
        return tuple(
            column for column in self.columns if not (column.optional and column.name in absent)
        )

    @cached_property
    def units(self) -> int:
        """The number of units into which the heads of the whole model are divided."""
        whole = self._units_wanted
        # Prefer a number of units that a high power of two divides, because group sizes are usually
        # powers of two.
        fitting = [
            units
            for units in range(1, min(whole, PARTS_MAX) + 1)
            if not whole % units and self._parts_max(units) <= PARTS_MAX
        ]
        return max(fitting, key=lambda units: (units & -units, units), default=1)

    @property
    def _units_wanted(self) -> int:
        """The greatest number of units, ignoring the limit on an object's number of parts."""
        divided = [column.heads for column in self.columns if not column.replicated]
        required = [c.heads for c in self.columns if not (c.replicated or c.optional)]
        return max(1, gcd(*(required or divided)))

    def shard(
        self, rank: int, world_size: int, *, absent: Collection[str] = (), stages: int = 1
    ) -> "ShardLayout":
        """Return the share of `rank` of `world_size`; heads are divided into contiguous ranges.

        `absent` lists the optional columns that the engine does not keep. With pipeline stages the
        ranks of a stage are consecutive and hold only the layers of that stage.
        """
        place = ShardPlace.of(rank, world_size, stages)
        kept = self.kept(absent)
        # Check all columns on every rank. If an error were raised only in a pipeline stage that has
        # none of a column's layers, the ranks of the other stages would wait for that stage.
        for column in kept:
            if column.layers < place.stages:
                raise _too_few_layers(column, place)
        groups = [[column for column in kept if column.replicated and not column.optional]]
        groups.append([column for column in kept if not (column.replicated or column.optional)])
        groups += [[column] for column in kept if column.optional]
        shards: dict[str, ColumnShard] = {}
        offset = 0
        for group in groups:
            offset = self._lay_out(group, place, offset, shards)
        parts = list(self.parts(place))
        largest = max(part.nbytes for _, part in parts)
        if largest > PART_BYTES_MAX:
            raise ConfigError(
                f"a page of {self.page_tokens} tokens has a part of {largest} bytes, must be"
                f" {PART_BYTES_MAX} at most; use fewer tokens per page"
            )
        keys = [key for key, _ in parts]
        absent_bits = {self._bit(column) for column in self.optional_columns if column not in kept}
        held = tuple(at for at, key in enumerate(keys) if key[0] not in absent_bits)
        return ShardLayout(
            page_tokens=self.page_tokens,
            columns=tuple(shards[column.name] for column in kept),
            page_bytes=offset,
            name=self.shard_name(place),
            replicated=all(unit < 0 for _, unit in keys),
            shape=ObjectShape(tuple(part for _, part in parts), held),
        )

    def tp_sizes(self) -> list[int]:
        """Return the TP sizes that divide the number of units evenly, ascending."""
        return [size for size in range(1, self.units + 1) if not self.units % size]

    def can_be_held(self, tp_size: int) -> bool:
        """Return whether ranks of a TP size can hold the layout's required columns."""
        required = any(not (column.replicated or column.optional) for column in self.columns)
        return not (required and self.units % tp_size)

    def parts(self, place: ShardPlace) -> Iterator[tuple[PartKey, Part]]:
        """Yield (key, part) for each part that an object written at `place` may have, in order.

        `place` is a TP rank and stage. Omits an optional column that has no layers in the stage. Raises
        `ConfigError` if a required column has no layers there.
        """
        required = [column for column in self.columns if not column.optional]
        same = sum(
            self._bytes(column, column.heads, place) for column in required if column.replicated
        )
        if same:
            yield (-1, -1), Part(same)
        divided = [column for column in required if not column.replicated]
        for unit in self._units_of(place, self.units) if divided else ():
            nbytes = sum(self._bytes(each, each.heads // self.units, place) for each in divided)
            yield (-1, unit), Part(nbytes)
        for column in self.optional_columns:
            bit = self._bit(column)
            first, last = _layers_of(column.layers, place)
            if first == last:
                continue
            if column.replicated:
                yield (bit, -1), Part(self._bytes(column, column.heads, place), bit)
                continue
            units = gcd(column.heads, self.units)
            for unit in self._units_of(place, units):
                yield (bit, unit), Part(self._bytes(column, column.heads // units, place), bit)

    def _units_of(self, place: ShardPlace, units: int) -> range:
        """Return the range of units that `place` (a TP rank and stage) holds.

        Empty if the TP size does not divide `units`.
        """
        if units % place.tp_size:
            return range(0)
        each = units // place.tp_size
        return range(place.tp_rank * each, (place.tp_rank + 1) * each)

    def _lay_out(
        self, group: list[Column], place: ShardPlace, offset: int, shards: dict[str, ColumnShard]
    ) -> int:
        """Add the byte location of each column of `group` to `shards`.

        The group's columns are laid out unit by unit, from byte `offset` on. Returns the offset after
        the group.
        """
        units = range(1)
        whole = 1
        if group and not group[0].replicated:
            whole = gcd(group[0].heads, self.units) if group[0].optional else self.units
            units = self._units_of(place, whole)
        if not units:
            raise self._not_divided(group, whole, place.tp_size)
        sizes = [self._bytes(column, column.heads // whole, place) for column in group]
        stride = sum(sizes)
        for column, size in zip(group, sizes, strict=True):
            per_unit = column.heads // whole
            first, last = self._layers(column, place)
            shards[column.name] = ColumnShard(
                column=column,
                head_first=units.start * per_unit,
                heads=len(units) * per_unit,
                layer_first=first,
                layers=last - first,
                units=len(units),
                offset_bytes=offset,
                stride_bytes=stride,
                nbytes=len(units) * size,
            )
            offset += size
        return offset + (len(units) - 1) * stride

    def _not_divided(self, group: Sequence[Column], units: int, tp_size: int) -> ConfigError:
        """Build the error for a TP size that does not divide the heads of a group of columns."""
        for column in group:
            if column.heads % tp_size:
                return ConfigError(
                    f"column {column.name!r} has {column.heads} KV heads, which {tp_size} ranks "
                    "cannot divide evenly; choose a number of ranks that divides them"
                )
        column = group[0]
        # Search the optional columns, too, because their heads also determine the number of units. One
        # of them may be the reason why the TP size does not divide that number.
        for other in self.optional_columns if self._units_wanted % tp_size else ():
            if not other.replicated and other.heads % tp_size:
                return ConfigError(
                    f"column {column.name!r} is kept in {units} units, which it has in common with "
                    f"column {other.name!r}, whose {other.heads} KV heads {tp_size} ranks cannot "
                    f"divide evenly; choose a number of ranks that divides {units}, or name "
                    f"{column.name!r} in absent_columns"
                )
        return ConfigError(
            f"the {column.heads} KV heads of column {column.name!r} are kept in {units} units, "
            f"because an object has at most {PARTS_MAX} parts, and {tp_size} ranks cannot divide these "
            f"evenly; choose a number of ranks that divides {units}"
        )

    def _bytes(self, column: Column, heads: int, place: ShardPlace) -> int:
        first, last = self._layers(column, place)
        per_head = self.page_tokens * column.elements * DTYPE_BYTES[column.dtype]
        return (last - first) * heads * per_head

    def _layers(self, column: Column, place: ShardPlace) -> tuple[int, int]:
        """Return a column's layer range (first, end) in a stage; raise `ConfigError` if it is empty."""
        first, last = _layers_of(column.layers, place)
        if first == last:
            raise _too_few_layers(column, place)
        return first, last

    def shard_name(self, place: ShardPlace) -> str:
        """Return the shard field of the name of an object written by the TP rank and stage `place`."""
        # Columns with different numbers of layers are split at different layers, so list one layer
        # range for each distinct number of layers.
        counts = sorted({column.layers for column in self.columns}, reverse=True)
        ranges = [_layers_of(count, place) for count in counts[: None if place.stages > 1 else 1]]
        layers = ".".join(f"l{first}-{last}" for first, last in ranges)
        for column in self.columns:
            first, last = _layers_of(column.layers, place)
            if column.replicated or first == last:
                continue
            whole = gcd(column.heads, self.units) if column.optional else self.units
            units = self._units_of(place, whole)
            if units:
                heads = column.heads // whole
                return f"{layers}.h{units.start * heads}-{units.stop * heads}"
        return f"{layers}.all"

    def _bit(self, column: Column) -> int:
        return self.optional_columns.index(column)

    def _parts_max(self, units: int) -> int:
        divided = any(not (column.replicated or column.optional) for column in self.columns)
        optional = sum(
            1 if column.replicated else gcd(column.heads, units) for column in self.optional_columns
        )
        return 1 + (units if divided else 0) + optional

    def _check_optional(self) -> None:
        optional = [column.name for column in self.optional_columns]
        last = [column.name for column in self.columns[len(self.columns) - len(optional) :]]
        if optional != last:
            raise ConfigError(
                f"optional columns must come last in a page, but {last[-1]!r} follows "
                f"{optional[0]!r}; move {', '.join(map(repr, optional))} to the end"
            )
        if len(optional) == len(self.columns):
            raise ConfigError(
                f"all columns are optional ({', '.join(optional)}); a page layout needs at least one "
                "that every engine keeps"
            )
        if len(optional) > OPTIONAL_COLUMNS_MAX:
            raise ConfigError(
                f"{len(optional)} columns are optional, must be at most {OPTIONAL_COLUMNS_MAX}"
            )


def _layers_of(count: int, place: ShardPlace) -> tuple[int, int]:
    """Return the layer range (first, end) of a pipeline stage, for a column of `count` layers."""
    return count * place.stage // place.stages, count * (place.stage + 1) // place.stages


def _too_few_layers(column: Column, place: ShardPlace) -> ConfigError:
    layers = f"{column.layers} layer{'' if column.layers == 1 else 's'}"
    remedy = ", or name it in absent_columns" if column.optional else ""
    return ConfigError(
        f"column {column.name!r} has {layers} for {place.stages} pipeline stages; use fewer stages"
        f"{remedy}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One rank's share of a page: `page_bytes` contiguous bytes on the host and in storage."""

    page_tokens: int
    columns: tuple[ColumnShard, ...]
    """The columns kept on this rank, in the order of the layout."""
    page_bytes: int
    name: str
    """The shard field of this rank's object names: layer range and head range in the whole layout.

    It does not depend on which optional columns are kept. With pipeline stages, columns with different
    numbers of layers have different layer ranges, and the field lists all of these ranges.
    """
    replicated: bool
    """Whether a page is the same on every rank, because all columns of the layout are replicated."""
    shape: ObjectShape
    """The shape of this rank's objects: their parts, and which of the parts this rank's pages have."""

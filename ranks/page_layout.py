"""How the bytes of one page are arranged, on every tier.

A page holds what the layers of one component keep for `page_tokens` consecutive tokens; a recurrent
state has the layout of a page of one. It consists of *columns* (keys, values, and whatever else
exists for each token). On the host and in storage a page is one contiguous run of bytes, ordered
column, layer, head, token, element; so the bytes of one KV head of one layer are contiguous, which is
the unit in which ranks of different TP sizes can share and verify objects. On the device a column is
one tensor [layer, page, head, token, element], because kernels read by layer.

`PageLayout` is the same on every rank and is part of the namespace of every key. `ShardLayout` is
what one rank holds of it: of each sharded column a contiguous range of heads. The TP size is a
property of the shard and never of the layout.

A column may be *optional*: engines that share a store keep it or not, all ranks of one alike, as the
KV of a draft model that only some of them run. The layout lists it for all; the shard of an engine
that does not keep it has shorter pages without it. What is in an object is told by its presence bits.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
"""Element types that a column may have, with their size in bytes; the names are torch's."""
OPTIONAL_COLUMNS_MAX = 64
"""A page object's header has so many presence bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One kind of per-token content, in units of the whole model.

    `heads` counts KV heads over all ranks. A `replicated` column is the same on every rank and is
    not divided. `elements` is the number of elements for one token of one head of one layer. An
    `optional` column need not be kept by every engine.
    """

    name: str
    layers: int
    heads: int
    elements: int
    dtype: str = "bfloat16"
    replicated: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        for field, value in (
            ("layers", self.layers),
            ("heads", self.heads),
            ("elements", self.elements),
        ):
            if value < 1:
                raise ConfigError(f"column {self.name!r}: {field} is {value}, must be 1 or more")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(sorted(DTYPE_BYTES))
            raise ConfigError(f"column {self.name!r}: unknown dtype {self.dtype!r}; known: {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShard:
    """The part of one column that one rank holds, and where it lies within the page's bytes."""

    column: Column
    head_first: int
    heads: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The columns of a page of `page_tokens` tokens, the same on every rank."""

    page_tokens: int
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ConfigError(f"page_tokens is {self.page_tokens}, must be 1 or more")
        if not self.columns:
            raise ConfigError("a page layout needs at least one column")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ConfigError(f"column names must differ: {', '.join(names)}")
        self._check_optional()

    @property
    def optional_columns(self) -> tuple[Column, ...]:
        """The columns that an engine need not keep, in the order of their presence bits."""
        return tuple(column for column in self.columns if column.optional)

    def kept(self, absent: Collection[str]) -> tuple[Column, ...]:
        """Return the columns without the optional ones that `absent` names, which may name others."""
        return tuple(
            column for column in self.columns if not (column.optional and column.name in absent)
        )

    def shard(self, rank: int, world_size: int, *, absent: Collection[str] = ()) -> "ShardLayout":
        """Return what `rank` of `world_size` holds; heads are divided in contiguous ranges.

        `absent` names optional columns that are not kept, as for `kept`.
        """
        kept = self.kept(absent)
        shards: list[ColumnShard] = []
        divided: ColumnShard | None = None
        optional_bytes: list[int] = []
        present = offset = 0
        for column in self.columns:
            shard = self._column_shard(column, rank, world_size, offset, must_divide=column in kept)
            if column in kept:
                shards.append(shard)
                offset += shard.nbytes
                present |= column.optional << len(optional_bytes)
            if column.optional:
                optional_bytes.append(shard.nbytes)
            if shard.nbytes and not column.replicated:
                divided = divided or shard
        layers = max(column.layers for column in self.columns)
        heads = f"h{divided.head_first}-{divided.head_first + divided.heads}" if divided else "all"
        return ShardLayout(
            page_tokens=self.page_tokens,
            columns=tuple(shards),
            page_bytes=offset,
            name=f"l0-{layers}.{heads}",
            replicated=divided is None,
            optional_bytes=tuple(optional_bytes),
            present=present,
        )

    def _column_shard(
        self, column: Column, rank: int, world_size: int, offset: int, *, must_divide: bool
    ) -> ColumnShard:
        """Return the rank's part of a column, at `offset`.

        It is empty where the ranks cannot divide a column that they do not keep: then no engine of
        this size keeps it, and no object of such a shard has it.
        """
        if column.replicated:
            first, heads = 0, column.heads
        elif column.heads % world_size == 0:
            heads = column.heads // world_size
            first = rank * heads
        elif must_divide:
            raise ConfigError(
                f"column {column.name!r} has {column.heads} KV heads, which {world_size} ranks "
                "cannot divide evenly; choose a number of ranks that divides them"
            )
        else:
            first = heads = 0
        per_head = self.page_tokens * column.elements * DTYPE_BYTES[column.dtype]
        return ColumnShard(
            column=column,
            head_first=first,
            heads=heads,
            offset_bytes=offset,
            nbytes=column.layers * heads * per_head,
        )

    def _check_optional(self) -> None:
        optional = [column.name for column in self.optional_columns]
        last = [column.name for column in self.columns[len(self.columns) - len(optional) :]]
        if optional != last:
            raise ConfigError(
                f"optional columns come last in a page, and here {last[-1]!r} follows "
                f"{optional[0]!r}; move {', '.join(map(repr, optional))} to the end"
            )
        if len(optional) == len(self.columns):
            raise ConfigError(
                f"all columns are optional ({', '.join(optional)}); a page layout needs at least one "
                "that every engine keeps"
            )
        if len(optional) > OPTIONAL_COLUMNS_MAX:
            raise ConfigError(
                f"{len(optional)} columns are optional; {OPTIONAL_COLUMNS_MAX} is the most"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One rank's part of a page: `page_bytes` contiguous bytes on the host and in storage."""

    page_tokens: int
    columns: tuple[ColumnShard, ...]
    """Those that are kept here."""
    page_bytes: int
    name: str
    """The shard's part of an object name: the layer range and head range of the whole layout,
    whichever of its columns are kept."""
    replicated: bool
    """Whether a page is the same on every rank: all columns of the layout are replicated."""
    optional_bytes: tuple[int, ...]
    """How long each optional column of the layout is in this shard, kept or not."""
    present: int
    """The presence bits of what is kept here: bit i is set if the i-th optional column is."""

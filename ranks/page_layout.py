"""How the bytes of one page are arranged, on every tier.

A page holds the KV of `page_tokens` consecutive tokens. It consists of *columns* (keys, values, and
whatever else exists for each token). On the host and in storage a page is one contiguous run of
bytes, ordered column, layer, head, token, element; so the bytes of one KV head of one layer are
contiguous, which is the unit in which ranks of different TP sizes can share and verify objects. On
the device a column is one tensor [layer, page, head, token, element], because kernels read by layer.

`PageLayout` is the same on every rank and is part of the namespace of every key. `ShardLayout` is
what one rank holds of it: all columns, and of each sharded column a contiguous range of heads. The
TP size is a property of the shard and never of the layout.
"""

from dataclasses import dataclass

from ..errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
"""Element types that a column may have, with their size in bytes; the names are torch's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One kind of per-token content, in units of the whole model.

    `heads` counts KV heads over all ranks. A `replicated` column is the same on every rank and is
    not divided. `elements` is the number of elements for one token of one head of one layer.
    """

    name: str
    layers: int
    heads: int
    elements: int
    dtype: str = "bfloat16"
    replicated: bool = False

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

    def shard(self, rank: int, world_size: int) -> "ShardLayout":
        """Return what `rank` of `world_size` holds; heads are divided in contiguous ranges."""
        shards: list[ColumnShard] = []
        offset = 0
        for column in self.columns:
            if column.replicated:
                first, heads = 0, column.heads
            elif column.heads % world_size:
                raise ConfigError(
                    f"column {column.name!r} has {column.heads} KV heads, which {world_size} ranks "
                    "cannot divide evenly; choose a number of ranks that divides them"
                )
            else:
                heads = column.heads // world_size
                first = rank * heads
            per_head = self.page_tokens * column.elements * DTYPE_BYTES[column.dtype]
            nbytes = column.layers * heads * per_head
            shards.append(
                ColumnShard(
                    column=column,
                    head_first=first,
                    heads=heads,
                    offset_bytes=offset,
                    nbytes=nbytes,
                )
            )
            offset += nbytes
        return ShardLayout(page_tokens=self.page_tokens, columns=tuple(shards), page_bytes=offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One rank's part of a page: `page_bytes` contiguous bytes on the host and in storage."""

    page_tokens: int
    columns: tuple[ColumnShard, ...]
    page_bytes: int

    @property
    def name(self) -> str:
        """The shard's part of an object name: its layer range and its head range."""
        layers = max(shard.column.layers for shard in self.columns)
        sharded = [shard for shard in self.columns if not shard.column.replicated]
        if not sharded:
            return f"l0-{layers}.all"
        first = sharded[0]
        return f"l0-{layers}.h{first.head_first}-{first.head_first + first.heads}"

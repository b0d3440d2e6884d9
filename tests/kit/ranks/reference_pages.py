"""Builds the expected bytes of pages, independently of the library: head by head and layer by layer."""

from collections.abc import Collection
from hashlib import shake_128
from math import gcd

from lockstep.page_format.page_layout import DTYPE_BYTES, Column, PageLayout, ShardPlace

SIZES = (1, 2, 4, 8)
"""TP sizes with which the tests run."""

K = Column(name="k", layers=4, heads=8, elements=3)
V = Column(name="v", layers=4, heads=8, elements=2, dtype="float32")
INDEX = Column(name="index", layers=2, heads=1, elements=5, dtype="int8", replicated=True)
LATENT = Column(name="latent", layers=4, heads=1, elements=6, replicated=True)
DRAFT = Column(name="draft", layers=2, heads=4, elements=3, optional=True)
NARROW = Column(name="narrow", layers=2, heads=2, elements=1, optional=True)
FLAGS = Column(
    name="flags", layers=2, heads=1, elements=3, dtype="uint8", replicated=True, optional=True
)

LAYOUTS = {
    "divided": PageLayout(page_tokens=2, columns=(K, V)),
    "replicated between": PageLayout(page_tokens=2, columns=(K, INDEX, V)),
    "optional": PageLayout(page_tokens=2, columns=(K, INDEX, DRAFT, FLAGS, NARROW)),
    "replicated": PageLayout(page_tokens=2, columns=(LATENT, INDEX)),
    "replicated with a draft": PageLayout(page_tokens=2, columns=(LATENT, NARROW)),
}


def place_of(rank: int, tp_size: int, stage: int = 0, stages: int = 1) -> ShardPlace:
    return ShardPlace(rank, tp_size, stage, stages)


def head_bytes(layout: PageLayout, column: Column, layer: int, head: int, page: int) -> bytes:
    """Return the bytes of one head in one layer of a page. Every rank computes the same bytes."""
    nbytes = layout.page_tokens * column.elements * DTYPE_BYTES[column.dtype]
    return shake_128(f"{page}/{column.name}/{layer}/{head}".encode()).digest(nbytes)


def reference_page(
    layout: PageLayout, place: ShardPlace, absent: Collection[str] = (), page: int = 0
) -> bytes:
    """Return the bytes of one rank's shard of a page, in the order documented in `page_layout`."""
    kept = [column for column in layout.columns if column.name not in absent]
    required = [column for column in kept if not column.optional]
    content = b""
    for column in required:
        if column.replicated:
            content += _heads(layout, column, place, range(column.heads), page)
    divided = [column for column in required if not column.replicated]
    content += _units(layout, divided, layout.units, place, page)
    for column in kept:
        if column.optional and column.replicated:
            content += _heads(layout, column, place, range(column.heads), page)
        elif column.optional:
            units = gcd(column.heads, layout.units)
            content += _units(layout, [column], units, place, page)
    return content


def unheld(layout: PageLayout, tp_size: int) -> tuple[str, ...]:
    """Return the optional columns whose heads cannot be divided among the ranks of a TP size."""
    return tuple(
        column.name
        for column in layout.optional_columns
        if not column.replicated and gcd(column.heads, layout.units) % tp_size
    )


def _units(
    layout: PageLayout, columns: list[Column], units: int, place: ShardPlace, page: int
) -> bytes:
    """Return the bytes of a rank's sharded columns, ordered by unit of heads and then by column."""
    assert units % place.tp_size == 0 or not columns
    each = units // place.tp_size
    content = b""
    for unit in range(place.tp_rank * each, (place.tp_rank + 1) * each):
        for column in columns:
            heads = column.heads // units
            of_unit = range(unit * heads, (unit + 1) * heads)
            content += _heads(layout, column, place, of_unit, page)
    return content


def _heads(layout: PageLayout, column: Column, place: ShardPlace, heads: range, page: int) -> bytes:
    first = column.layers * place.stage // place.stages
    last = column.layers * (place.stage + 1) // place.stages
    return b"".join(
        head_bytes(layout, column, layer, head, page)
        for layer in range(first, last)
        for head in heads
    )

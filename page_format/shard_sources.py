"""The objects of a group of another TP size in which a rank finds its own part of a page.

A page is laid out in units that ranks of all TP sizes have in common (see `page_layout`), and each is
a part of an object that can be read and verified alone. So a rank of a larger group finds its units
within one object of a smaller group's, and a rank of a smaller group needs several of a larger one's.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .object_shape import ObjectShape
from .page_layout import PageLayout, PartKey, ShardPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """An object of another rank, and the bytes of a page that are in it."""

    name: str
    """The shard's part of the object's name."""
    shape: ObjectShape
    """The shape of a caller that holds the parts of the object that belong to the page."""
    slices: tuple[slice, ...]
    """The slices of the page's bytes that these parts fill, in order."""


def sources_of(
    layout: PageLayout, mine: ShardPlace, tp_size: int, *, absent: Collection[str] = ()
) -> tuple[ShardSource, ...]:
    """Return the objects of ranks of another TP size that together have the page of a rank.

    These ranks are of the same pipeline stage. `absent` names optional columns that the page does not
    have. Empty if the objects lack some of the page, or if all of it is in the object that has the
    name of this rank's own.
    """
    kept = layout.kept(absent)
    wanted: dict[PartKey, slice] = {}
    at = 0
    for key, part in layout.parts(mine):
        if key[0] < 0 or layout.optional_columns[key[0]] in kept:
            wanted[key] = slice(at, at + part.nbytes)
            at += part.nbytes
    # What is the same on every rank comes out of the first object that is needed for its units.
    others = [mine._replace(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    needed = [
        each for each in others if any(k in wanted and k[1] >= 0 for k, _ in layout.parts(each))
    ]
    sources: list[ShardSource] = []
    for place in needed or others:
        theirs = list(layout.parts(place))
        held = [number for number, (key, _) in enumerate(theirs) if key in wanted]
        if not held:
            continue
        slices = [wanted.pop(theirs[number][0]) for number in held]
        sources.append(
            ShardSource(
                name=layout.shard_name(place),
                shape=ObjectShape(tuple(part for _, part in theirs), tuple(held)),
                slices=tuple(_merged(slices)),
            )
        )
    if wanted or [source.name for source in sources] == [layout.shard_name(mine)]:
        return ()
    return tuple(sources)


def _merged(slices: list[slice]) -> Iterator[slice]:
    """Yield the slices, with those that touch each other as one."""
    run = slices[0]
    for each in slices[1:]:
        if each.start == run.stop:
            run = slice(run.start, each.stop)
        else:
            yield run
            run = each
    yield run

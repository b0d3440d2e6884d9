"""Finds a rank's share of a page in the objects of a group with another TP size.

Pages are laid out in units common to all TP sizes (see `page_layout`). Each unit is a part of an object
that can be verified separately. A rank of a larger group finds its units within one object of a smaller
group; a rank of a smaller group needs several objects of a larger one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .object_shape import ObjectShape
from .page_layout import PageLayout, PartKey, ShardPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """An object of another rank, and the byte ranges of this rank's page that the object supplies."""

    name: str
    """The shard field of the object's name."""
    shape: ObjectShape
    """The parts of the object. Those that belong to the page are marked as held."""
    slices: tuple[slice, ...]
    """The byte ranges of the page, in order, into which the object's held parts are copied."""


def sources_of(
    layout: PageLayout, mine: ShardPlace, tp_size: int, *, absent: Collection[str] = ()
) -> tuple[ShardSource, ...]:
    """Return the objects of a group of another TP size that together contain a rank's page.

    All objects are of the rank's own pipeline stage. `absent` lists optional columns that the page does
    not have. Returns an empty tuple if the objects lack a part of the page, or if the only object has
    the same name as this rank's own object.
    """
    kept = layout.kept(absent)
    wanted: dict[PartKey, slice] = {}
    at = 0
    for key, part in layout.parts(mine):
        if key[0] < 0 or layout.optional_columns[key[0]] in kept:
            wanted[key] = slice(at, at + part.nbytes)
            at += part.nbytes
    # Read replicated columns from the first object that has to be opened for its units anyway.
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
    """Yield the byte ranges in order, after merging those that touch."""
    run = slices[0]
    for each in slices[1:]:
        if each.start == run.stop:
            run = slice(run.start, each.stop)
        else:
            yield run
            run = each
    yield run

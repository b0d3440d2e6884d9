"""Page layouts: units, names, and the source objects of a rank in a group of another TP size."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product

import pytest

from lockstep.errors import ConfigError
from lockstep.page_format.object_shape import PARTS_MAX
from lockstep.page_format.page_layout import Column, PageLayout, ShardLayout, ShardPlace
from lockstep.page_format.shard_sources import sources_of
from tests.kit.ranks.reference_pages import (
    DRAFT,
    FLAGS,
    INDEX,
    LATENT,
    LAYOUTS,
    NARROW,
    SIZES,
    K,
    V,
    head_bytes,
    place_of,
    reference_page,
    unheld,
)

PAIRS = list(product(SIZES, SIZES))


def shard_of(layout: PageLayout, place: ShardPlace, absent: Collection[str] = ()) -> ShardLayout:
    rank = place.stage * place.tp_size + place.tp_rank
    world_size = place.tp_size * place.stages
    return layout.shard(rank, world_size, absent=absent, stages=place.stages)


def places(layout: PageLayout, tp_size: int, stages: int = 1) -> list[ShardPlace]:
    return [
        place_of(rank, tp_size, stage, stages) for stage in range(stages) for rank in range(tp_size)
    ]


def put_together(
    layout: PageLayout,
    mine: ShardPlace,
    tp_size: int,
    absent: Collection[str],
    theirs_absent: Collection[str],
) -> bytes | None:
    """Return the page of `mine`, assembled from the objects of a group of `tp_size` ranks.

    Return None if the objects lack a part, or if one of them is the page itself.
    """
    sources = sources_of(layout, mine, tp_size, absent=absent)
    if not sources:
        return None
    page = bytearray(b"?" * shard_of(layout, mine, absent).page_bytes)
    others = [place_of(rank, tp_size, mine.stage, mine.stages) for rank in range(tp_size)]
    written = {
        shard_of(layout, each, theirs_absent).name: reference_page(layout, each, theirs_absent)
        for each in others
    }
    present = shard_of(layout, others[0], theirs_absent).shape.present
    for source in sources:
        if source.shape.lacks(present):
            return None
        payload, plan = written[source.name], source.shape.plan(present)
        assert len(payload) == plan.payload_bytes
        content = b"".join(payload[run.offset : run.offset + run.nbytes] for run in plan.runs)
        for place in source.slices:
            length = place.stop - place.start
            assert page[place] == b"?" * length, "two objects fill the same bytes"
            page[place], content = content[:length], content[length:]
        assert not content
    return bytes(page)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tp_size", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_columns_lie_in_a_page_where_their_shards_say(name: str, tp_size: int, stages: int) -> None:
    layout = LAYOUTS[name]
    absent = unheld(layout, tp_size)

    for_places = places(layout, tp_size, stages)
    shards = [shard_of(layout, place, absent) for place in for_places]
    pages = [reference_page(layout, place, absent) for place in for_places]

    assert [laid_out(layout, shard) for shard in shards] == pages
    assert [shard.page_bytes for shard in shards] == [len(page) for page in pages]
    assert [shard.shape.nbytes for shard in shards] == [len(page) for page in pages]
    assert [shard for shard in shards if not shard.shape.is_whole] == []


def laid_out(layout: PageLayout, shard: ShardLayout) -> bytes:
    """Return a page assembled from the documented offsets: unit by unit, and layer by layer."""
    page = bytearray(shard.page_bytes)
    free = set(range(shard.page_bytes))
    for part in shard.columns:
        heads = part.heads // part.units
        for unit, at in product(range(part.units), range(part.layers)):
            start = part.offset_bytes + unit * part.stride_bytes + at * part.unit_layer_bytes
            first = part.head_first + unit * heads
            place = range(start, start + part.unit_layer_bytes)
            assert free >= {*place}, "two parts lie in the same bytes"
            free -= {*place}
            page[place.start : place.stop] = b"".join(
                head_bytes(layout, part.column, part.layer_first + at, head, 0)
                for head in range(first, first + heads)
            )
    assert not free
    return bytes(page)


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_finds_its_page_in_the_objects_of_groups_of_any_size(
    name: str, mine: int, theirs: int
) -> None:
    layout = LAYOUTS[name]
    absent = {*unheld(layout, mine), *unheld(layout, theirs)}
    mine_at = [place for stages in (1, 2) for place in places(layout, mine, stages)]
    names = {
        shard_of(layout, each, absent).name
        for stages in (1, 2)
        for each in places(layout, theirs, stages)
    }

    found = {place: put_together(layout, place, theirs, absent, absent) for place in mine_at}

    # None means that one of the other group's objects is the wanted page itself, so nothing is
    # assembled.
    assert found == {
        place: None
        if shard_of(layout, place, absent).name in names
        else reference_page(layout, place, absent)
        for place in mine_at
    }


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_a_rank_takes_the_columns_that_it_keeps_out_of_objects_that_have_more(
    mine: int, theirs: int
) -> None:
    layout = LAYOUTS["optional"]
    theirs_absent = unheld(layout, theirs)
    kept = [
        (place, absent)
        for absent in (("draft", "flags", "narrow"), ("draft", "narrow"), unheld(layout, mine))
        for place in places(layout, mine)
        if theirs != mine
    ]

    found = [put_together(layout, place, theirs, absent, theirs_absent) for place, absent in kept]

    assert found == [
        reference_page(layout, place, absent) if {*theirs_absent} <= {*absent} else None
        for place, absent in kept
    ]


def test_what_is_the_same_on_every_rank_is_read_once() -> None:
    layout = LAYOUTS["replicated between"]
    same = 2 * 2 * 5

    sources = sources_of(layout, place_of(0, 1), 4)

    assert [source.shape.held for source in sources] == [(0, 1, 2), (1, 2), (1, 2), (1, 2)]
    assert sources[0].slices[0].start == 0
    assert sum(source.shape.nbytes for source in sources) == len(
        reference_page(layout, place_of(0, 1))
    )
    assert sources[0].shape.parts[0].nbytes == same


def test_of_other_groups_objects_only_those_that_are_needed_are_named() -> None:
    layout = LAYOUTS["divided"]

    halves = sources_of(layout, place_of(1, 2), 8)
    whole = sources_of(layout, place_of(5, 8), 2)

    assert [source.name for source in halves] == [
        f"l0-4.h{head}-{head + 1}" for head in range(4, 8)
    ]
    assert [(source.name, source.shape.held) for source in whole] == [("l0-4.h4-8", (1,))]
    assert [source.slices for source in whole] == [(slice(0, whole[0].shape.nbytes),)]
    assert sources_of(layout, place_of(0, 2), 2) == ()


@pytest.mark.parametrize(
    ("name", "sizes"), [("replicated", SIZES), ("replicated with a draft", (4, 8))]
)
def test_replicated_content_has_one_object(name: str, sizes: Sequence[int]) -> None:
    layout = LAYOUTS[name]
    shards = [
        shard_of(layout, place, unheld(layout, size))
        for size in sizes
        for place in places(layout, size)
    ]

    assert {(shard.name, shard.replicated) for shard in shards} == {("l0-4.all", True)}
    assert len({shard.shape for shard in shards}) == 1
    assert {
        sources_of(layout, place_of(0, mine), theirs, absent=["narrow"])
        for mine, theirs in product(sizes, sizes)
    } == {()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_a_name_hold_the_same(name: str) -> None:
    layout = LAYOUTS[name]
    held: dict[str, set[bytes]] = {}
    for stages, size in product((1, 2), SIZES):
        for place in places(layout, size, stages):
            absent = unheld(layout, 8)
            shard = shard_of(layout, place, absent)
            held.setdefault(shard.name, set()).add(reference_page(layout, place, absent))

    assert all(len(contents) == 1 for contents in held.values())


def test_stages_hold_the_layers_of_their_own_and_share_no_names() -> None:
    layout = LAYOUTS["replicated between"]

    shards = [shard_of(layout, place) for place in places(layout, 2, stages=2)]

    assert [shard.name for shard in shards] == [
        "l0-2.l0-1.h0-4",
        "l0-2.l0-1.h4-8",
        "l2-4.l1-2.h0-4",
        "l2-4.l1-2.h4-8",
    ]
    assert [(part.layer_first, part.layers) for part in shards[2].columns] == [
        (2, 2),
        (1, 1),
        (2, 2),
    ]
    assert all(
        source.name.startswith("l2-4.") for source in sources_of(layout, place_of(0, 2, 1, 2), 4)
    )
    whole = sum(len(reference_page(layout, place)) for place in places(layout, 2, stages=2))
    assert sum(shard.page_bytes for shard in shards) == whole


def test_stages_that_divide_columns_differently_share_no_names() -> None:
    layout = PageLayout(
        page_tokens=1, columns=(replace(K, layers=7), replace(V, name="w", layers=6))
    )
    held: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for stages in range(1, 7):
        for place in places(layout, 1, stages):
            shard = shard_of(layout, place)
            layers = tuple((part.layer_first, part.layers) for part in shard.columns)
            held.setdefault(shard.name, set()).add(layers)

    assert all(len(layers) == 1 for layers in held.values())


@pytest.mark.parametrize(
    ("columns", "units"),
    [
        ((K, V), 8),
        ((K, replace(V, heads=4)), 4),
        ((replace(K, heads=6), replace(V, heads=4)), 2),
        ((K, INDEX, NARROW), 8),
        ((LATENT, INDEX), 1),
        ((LATENT, DRAFT, NARROW), 2),
        ((replace(K, heads=256),), 128),
        ((replace(K, heads=149),), 1),
        ((replace(K, heads=148),), 4),
        ((replace(K, heads=160),), 32),
        ((replace(K, heads=192),), 64),
        ((replace(K, heads=288),), 96),
        ((replace(K, heads=96), replace(DRAFT, heads=96)), 32),
    ],
    ids=str,
)
def test_a_unit_is_what_the_columns_numbers_of_heads_have_in_common(
    columns: tuple[Column, ...], units: int
) -> None:
    layout = PageLayout(page_tokens=2, columns=columns)

    assert layout.units == units
    assert layout.tp_sizes() == [size for size in range(1, units + 1) if units % size == 0]
    assert len(shard_of(layout, place_of(0, 1)).shape.parts) <= PARTS_MAX


def test_objects_of_many_columns_have_no_more_parts_than_a_header_has_room_for() -> None:
    drafts = tuple(replace(DRAFT, name=f"draft{n}", heads=64) for n in range(16))
    layout = PageLayout(
        page_tokens=1,
        columns=(replace(K, heads=64), INDEX, *drafts),
    )

    assert layout.units == 8
    assert len(shard_of(layout, place_of(0, 1)).shape.parts) == 1 + 8 + 16 * 8


def test_presence_bits_are_those_of_the_columns_that_are_kept() -> None:
    layout = LAYOUTS["optional"]
    absent: list[tuple[str, ...]] = [(), ("flags",), ("draft", "narrow")]

    shapes = [shard_of(layout, place_of(1, 2), each).shape for each in absent]

    assert layout.optional_columns == (DRAFT, FLAGS, NARROW)
    assert [shape.present for shape in shapes] == [0b111, 0b101, 0b010]
    assert [shape.is_whole for shape in shapes] == [True, True, True]


@pytest.mark.parametrize(
    ("ranks", "stages", "complaint"),
    [
        (3, 1, "'k' has 8 KV heads, which 3 ranks"),
        (16, 1, "'k' has 8 KV heads, which 16 ranks"),
        (4, 3, "4 ranks cannot be divided into 3 pipeline stages"),
        (3, 3, "'index' has 2 layers for 3 pipeline stages; use fewer stages"),
        (2, 0, "cannot be divided into 0 pipeline stages"),
    ],
)
def test_ranks_that_cannot_divide_a_page_are_told_why(
    ranks: int, stages: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LAYOUTS["replicated between"].shard(0, ranks, stages=stages)


@pytest.mark.parametrize(
    ("columns", "absent", "ranks", "complaint"),
    [
        (
            (replace(K, heads=148),),
            (),
            37,
            (
                "148 KV heads of column 'k' are kept in 4 units, because an object has at most 143"
                " parts, and 37 ranks cannot divide these evenly; choose a number of ranks that"
                " divides 4"
            ),
        ),
        (
            (LATENT, DRAFT, replace(NARROW, heads=6)),
            ("narrow",),
            4,
            (
                "column 'draft' is kept in 2 units, which it has in common with column 'narrow', whose"
                " 6 KV heads 4 ranks cannot divide evenly; choose a number of ranks that divides 2, or"
                " name 'draft' in absent_columns"
            ),
        ),
        (
            (LATENT, DRAFT, replace(NARROW, heads=6)),
            (),
            3,
            "column 'draft' has 4 KV heads, which 3 ranks cannot divide evenly",
        ),
    ],
)
def test_who_cannot_divide_units_is_told_what_makes_them_so_few(
    columns: tuple[Column, ...], absent: tuple[str, ...], ranks: int, complaint: str
) -> None:
    layout = PageLayout(page_tokens=1, columns=columns)

    with pytest.raises(ConfigError, match=complaint):
        layout.shard(0, ranks, absent=absent)


def test_stages_without_layers_of_a_column_that_is_absent_do_not_have_it() -> None:
    layout = PageLayout(page_tokens=2, columns=(K, INDEX, replace(NARROW, layers=1)))
    all_places = places(layout, 2, stages=2)
    pages = [reference_page(layout, place, ["narrow"]) for place in all_places]

    assert [put_together(layout, each, 4, ["narrow"], ["narrow"]) for each in all_places] == pages
    first, last = (shard_of(layout, place_of(0, 2, each, 2), ["narrow"]).shape for each in (0, 1))
    assert [part.bit for part in first.parts if part.bit >= 0] == []
    assert [part.bit for part in last.parts if part.bit >= 0] == [0]


@pytest.mark.parametrize("columns", [(K, INDEX), (LATENT,)], ids=["divided", "replicated"])
def test_objects_have_one_name_for_all_ranks_exactly_if_they_are_the_same(
    columns: tuple[Column, ...],
) -> None:
    # A replicated object is the same on all ranks, so all ranks use one name for it.
    layout = PageLayout(page_tokens=2, columns=(*columns, replace(NARROW, layers=1)))
    shards = [
        shard_of(layout, place, ["narrow"])
        for stages, size in product((1, 2), SIZES)
        for place in places(layout, size, stages)
    ]

    assert [each for each in shards if each.replicated != each.name.endswith(".all")] == []


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_is_told_of_a_column_with_fewer_layers_than_stages(rank: int) -> None:
    draft = replace(NARROW, layers=1)
    complaint = (
        "'narrow' has 1 layer for 2 pipeline stages; use fewer stages, or name it in absent_"
    )
    with pytest.raises(ConfigError, match=complaint):
        PageLayout(page_tokens=2, columns=(K, draft)).shard(rank, 4, stages=2)
    with pytest.raises(ConfigError, match="'narrow' has 1 layer for 2 pipeline stages; use fewer"):
        PageLayout(page_tokens=2, columns=(K, replace(draft, optional=False))).shard(
            rank, 4, stages=2
        )

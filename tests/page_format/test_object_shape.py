"""Parts of stored objects: offsets, the parts a caller wants, and the union of two writers' parts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InternalError
from lockstep.page_format.object_shape import (
    ALWAYS,
    PART_BYTES_MAX,
    PARTS_MAX,
    ObjectShape,
    Part,
    part_table,
    parts_of,
    pieces_of,
)

Contents = dict[int, bytes]


@st.composite
def drawn_parts(draw: st.DrawFn) -> tuple[Part, ...]:
    """Draw a few parts, the first of which is always present."""
    bits = st.integers(ALWAYS, 3)
    sizes = st.integers(0, 6)
    rest = draw(st.lists(st.tuples(sizes, bits), max_size=6))
    return (Part(draw(sizes)), *(Part(nbytes, bit) for nbytes, bit in rest))


def contents_of(parts: tuple[Part, ...], author: int) -> Contents:
    return {number: bytes([author + number]) * part.nbytes for number, part in enumerate(parts)}


def numbers_of(parts: tuple[Part, ...], present: int) -> list[int]:
    return [
        number
        for number, part in enumerate(parts)
        if part.bit == ALWAYS or f"{present:032b}"[31 - part.bit] == "1"
    ]


def joined(contents: Contents, numbers: list[int]) -> bytes:
    return b"".join(contents[number] for number in numbers)


def known_bits(parts: tuple[Part, ...]) -> set[int]:
    return {part.bit for part in parts if part.bit != ALWAYS}


def mask(bits: set[int]) -> int:
    return sum(1 << bit for bit in bits)


@st.composite
def drawn_shapes(draw: st.DrawFn) -> ObjectShape:
    """Draw the object shape of a caller that holds only some of an object's parts."""
    parts = draw(drawn_parts())
    held = draw(st.sets(st.sampled_from(range(len(parts))), min_size=1))
    return ObjectShape(parts, tuple(sorted(held)))


@given(drawn_shapes(), st.integers(0, 15))
def test_a_plan_cuts_what_is_held_out_of_an_object_with_any_columns(
    shape: ObjectShape, present: int
) -> None:
    contents = contents_of(shape.parts, 65)
    there = numbers_of(shape.parts, present)
    payload = joined(contents, there)

    plan = shape.plan(present)

    assert plan.payload_bytes == shape.payload_bytes(present) == len(payload)
    assert parts_of(plan.table) == [shape.parts[number] for number in there]
    cut = b"".join(payload[run.offset : run.offset + run.nbytes] for run in plan.runs)
    wanted = [number for number in shape.held if number in there]
    assert cut == joined(contents, wanted)
    found = [part for run in plan.runs for part in run.parts]
    assert found == [(there.index(number), shape.parts[number].nbytes) for number in wanted]
    assert all(run.nbytes == sum(nbytes for _, nbytes in run.parts) for run in plan.runs)
    assert shape.plan(present) is plan


@given(drawn_shapes(), st.integers(0, 15))
def test_runs_are_as_long_as_they_can_be(shape: ObjectShape, present: int) -> None:
    runs = [[number for number, _ in run.parts] for run in shape.plan(present).runs]

    assert runs == [list(range(run[0], run[0] + len(run))) for run in runs]
    assert [(one, two) for one, two in pairwise(runs) if two[0] <= one[-1] + 1] == []


@given(drawn_shapes(), st.integers(0, 15))
def test_a_shape_says_what_it_has_and_lacks(shape: ObjectShape, present: int) -> None:
    held_bits = {shape.parts[number].bit for number in shape.held} - {ALWAYS}
    others = {bit for bit in range(4) if present >> bit & 1}

    assert shape.present == mask(held_bits)
    assert shape.nbytes == sum(shape.parts[number].nbytes for number in shape.held)
    assert shape.lacks(present) == bool(held_bits - others)
    assert shape.knows(present) == (others <= known_bits(shape.parts))
    assert shape.is_whole == (list(shape.held) == numbers_of(shape.parts, shape.present))


@given(drawn_parts(), st.integers(0, 15), st.integers(0, 15), st.integers(1, 5))
def test_two_writers_parts_are_united_in_the_order_of_the_layout(
    parts: tuple[Part, ...], mine: int, theirs: int, step: int
) -> None:
    known = mask(known_bits(parts))
    mine, theirs = mine & known, theirs & known
    shape = ObjectShape(parts, tuple(numbers_of(parts, mine)))
    ours, others = contents_of(parts, 65), contents_of(parts, 97)
    written = joined(ours, list(shape.held))
    buffers = [memoryview(written[at : at + step]) for at in range(0, len(written), step)]

    payload = joined(others, numbers_of(parts, theirs))
    united = shape.unite(buffers, memoryview(payload), theirs)

    both = numbers_of(parts, mine | theirs)
    expected = {number: (ours if number in shape.held else others)[number] for number in both}
    assert bytes(united) == joined(expected, both)
    assert list(shape.with_columns(theirs).held) == both
    assert shape.with_columns(theirs).is_whole


@given(drawn_parts(), st.integers(0, 15))
def test_a_length_tells_an_object_only_if_no_other_columns_are_as_long(
    parts: tuple[Part, ...], present: int
) -> None:
    known = mask(known_bits(parts))
    shape = ObjectShape(parts, tuple(numbers_of(parts, present & known)))
    ours = shape.payload_bytes(present & known)
    others = {
        bits
        for bits in range(16)
        if not bits & ~known and shape.payload_bytes(bits) == ours and bits != present & known
    }

    assert shape.known_by_length == (not others)


def test_with_more_columns_than_can_be_compared_a_length_is_not_trusted() -> None:
    parts = (Part(10), *(Part(1 << bit, bit) for bit in range(5)))

    assert not ObjectShape(parts, (0, 1)).known_by_length
    assert ObjectShape(parts, (0,)).known_by_length
    assert ObjectShape(parts, tuple(range(6))).known_by_length


@given(st.lists(st.binary(max_size=5)), st.data())
def test_buffers_are_cut_into_pieces_wherever_their_ends_are(
    buffers: list[bytes], data: st.DataObject
) -> None:
    content = b"".join(buffers)
    places = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    ends = [0, *places, len(content)]
    sizes = [end - start for start, end in pairwise(ends)]

    pieces = list(pieces_of([memoryview(each) for each in buffers], sizes))

    assert [b"".join(piece) for piece in pieces] == [
        content[start : start + size] for start, size in zip(ends, sizes, strict=False)
    ]
    assert all(len(view) for piece in pieces for view in piece)


@given(st.lists(st.builds(Part, st.integers(0, PART_BYTES_MAX), st.integers(-1, 15))))
def test_a_table_says_again_what_it_was_told(parts: list[Part]) -> None:
    assert parts_of(part_table(parts)) == parts


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        ((Part(1),), ()),
        ((Part(1),), (1,)),
        ((Part(1),), (-1,)),
        ((Part(1), Part(1)), (1, 0)),
        ((Part(1), Part(1)), (0, 0)),
        ((Part(PART_BYTES_MAX + 1),), (0,)),
        ((Part(-1),), (0,)),
        ((Part(1),) * (PARTS_MAX + 1), (0,)),
    ],
    ids=["nothing", "beyond", "before", "descending", "twice", "too long", "negative", "too many"],
)
def test_parts_that_cannot_be_are_refused(parts: tuple[Part, ...], held: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match="part"):
        ObjectShape(parts, held)

"""Metadata slots: a request reads what it has written itself, as it wrote it, or an error by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, MessageError, StaleHandle, UsageError
from lockstep.ranks.group.metadata_slots import (
    PACKED_BYTES_MAX,
    MetadataSlots,
    SlotField,
    SlotHandle,
)

IDS = SlotField("output_ids", torch.int32, (4,))
LOGPROBS = SlotField("logprobs", torch.float32, (2, 3))
HIDDEN = SlotField("hidden", torch.bfloat16, (8,))
COUNT = SlotField("count", torch.int64, ())
FIELDS = (IDS, LOGPROBS, HIDDEN, COUNT)


def slots_of(count: int = 2) -> MetadataSlots:
    return MetadataSlots(FIELDS, count)


def taken(slots: MetadataSlots) -> SlotHandle:
    handle = slots.take()
    assert handle is not None
    return handle


def value(each: SlotField, number: int) -> torch.Tensor:
    """Return a tensor of a field that has one number in every place."""
    return torch.full(each.shape, number, dtype=each.dtype)


def write_all(slots: MetadataSlots, handle: SlotHandle, number: int) -> None:
    for each in FIELDS:
        slots.write(handle, each.name, value(each, number))


def numbers(slots: MetadataSlots, handle: SlotHandle) -> set[float]:
    """Return every number that is anywhere in a slot."""
    found: set[float] = set()
    for each in FIELDS:
        elements = slots.read(handle, each.name).double().reshape(-1).numpy()
        found |= {float(element) for element in elements}
    return found


def test_incident_e_no_request_reads_what_another_one_has_written_into_its_slot() -> None:
    """Section 9, incident E, and rule R7: after a retract the slot is another request's."""
    slots = slots_of(1)
    first = taken(slots)
    write_all(slots, first, 7)
    before = {each.name: slots.read(first, each.name) for each in FIELDS}
    slots.free(first)
    second = taken(slots)

    assert (second.slot, numbers(slots, second)) == (first.slot, {0.0})
    write_all(slots, second, 9)
    assert all(torch.equal(before[each.name], value(each, 7)) for each in FIELDS)
    with pytest.raises(
        StaleHandle, match="slot 0 of generation 1 was freed; it is taken by another"
    ):
        slots.read(first, "output_ids")


def test_incident_e_what_was_read_and_what_was_written_are_the_caller_s_own() -> None:
    """Rule R7: neither is a view of the slot, so neither changes with it."""
    slots = slots_of()
    handle = taken(slots)
    given_tensor = value(IDS, 7)
    slots.write(handle, "output_ids", given_tensor)
    read = slots.read(handle, "output_ids")
    given_tensor.fill_(8)
    read.fill_(9)

    assert torch.equal(slots.read(handle, "output_ids"), value(IDS, 7))


def test_incident_e_a_request_that_comes_back_has_its_metadata_as_it_was() -> None:
    """Section 9: retracted as bytes, resumed into another slot, in which something else was."""
    slots = slots_of(2)
    first, other = taken(slots), taken(slots)
    write_all(slots, first, 7)
    write_all(slots, other, 9)
    saved = slots.packed(first)
    for handle in (first, other):
        slots.free(handle)
    taken(slots)
    again = taken(slots)

    slots.unpack(again, saved)

    assert (again.slot, numbers(slots, again)) == (other.slot, {7.0})


@pytest.mark.parametrize("use", ["read", "write", "free", "packed", "unpack"])
def test_a_handle_of_a_slot_that_was_freed_is_good_for_nothing(use: str) -> None:
    slots = slots_of()
    handle = taken(slots)
    data = slots.packed(handle)
    slots.free(handle)
    uses: dict[str, Callable[[], object]] = {
        "read": lambda: slots.read(handle, "count"),
        "write": lambda: slots.write(handle, "count", value(COUNT, 1)),
        "free": lambda: slots.free(handle),
        "packed": lambda: slots.packed(handle),
        "unpack": lambda: slots.unpack(handle, data),
    }

    with pytest.raises(StaleHandle, match="slot 0 of generation 1 was freed; it is free"):
        uses[use]()
    assert slots.free_slots == 2


def test_when_all_slots_are_taken_there_is_none() -> None:
    slots = slots_of(2)
    first = taken(slots)
    taken(slots)
    assert (slots.take(), slots.free_slots) == (None, 0)

    slots.free(first)

    assert slots.take() == SlotHandle(first.slot, first.generation + 1)


@dataclass
class Walk:
    """Slots that are taken, written and freed at random, and a plain account of it."""

    slots: MetadataSlots = field(default_factory=lambda: slots_of(3))
    written: dict[SlotHandle, int] = field(default_factory=dict[SlotHandle, int])
    """What each request that has a slot has written last."""
    seen: list[tuple[set[float], set[float]]] = field(
        default_factory=list[tuple[set[float], set[float]]]
    )
    """What was read, and what should have been."""
    count: int = 0

    def step(self, action: int) -> None:
        """Do one thing, which the number chooses."""
        self.count += 1
        handles = list(self.written)
        if action < 3 or not handles:
            handle = self.slots.take()
            if handle is not None:
                self.written[handle] = 0
        else:
            handle = handles[action % len(handles)]
            if action % 2:
                self.slots.free(handle)
                del self.written[handle]
            else:
                write_all(self.slots, handle, self.count)
                self.written[handle] = self.count
        for handle, number in self.written.items():
            self.seen.append((numbers(self.slots, handle), {float(number)}))


def walked(actions: list[int]) -> Walk:
    walk = Walk()
    for action in actions:
        walk.step(action)
    return walk


@given(st.lists(st.integers(0, 9), max_size=30))
@settings(max_examples=100)
def test_whatever_is_taken_and_freed_each_request_reads_its_own(actions: list[int]) -> None:
    """Rule R7, for any interleaving."""
    walk = walked(actions)

    assert [read for read, _ in walk.seen] == [written for _, written in walk.seen]


def test_the_lowest_free_slot_is_taken_first() -> None:
    """Rule R3: which slot is next is replicated, so it needs no vote."""
    slots = slots_of(3)
    handles = [taken(slots) for _ in range(3)]
    for at in (2, 0, 1):
        slots.free(handles[at])

    assert [taken(slots).slot for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("output_ids", torch.zeros(3, dtype=torch.int32), r"int32 \[4\], and not int32 \[3\]"),
        ("output_ids", torch.zeros(1, dtype=torch.int32), r"int32 \[4\], and not int32 \[1\]"),
        ("output_ids", torch.zeros(4), r"int32 \[4\], and not float32 \[4\]"),
        ("logits", torch.zeros(4), "there is no field 'logits'; there are output_ids, logprobs"),
    ],
)
def test_a_tensor_that_the_field_does_not_have_is_refused(
    name: str, tensor: torch.Tensor, words: str
) -> None:
    """No broadcast and no cast: what is read is what was written."""
    slots = slots_of()

    with pytest.raises(UsageError, match=words):
        slots.write(taken(slots), name, tensor)


def test_a_slot_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no slot 5; there are 2"):
        slots_of().read(SlotHandle(5, 1), "count")


@pytest.mark.parametrize(
    ("fields", "count", "words"),
    [
        ((), 1, "slots need fields"),
        ((IDS, IDS), 1, "names that differ: output_ids, output_ids"),
        ((IDS,), 0, "there are 0 slots"),
        ((replace(IDS, shape=(0,)),), 1, r"has the shape \(0,\), without elements"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(
    fields: tuple[SlotField, ...], count: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MetadataSlots(fields, count)


@given(st.integers(0, (1 << 32) - 1))
@settings(max_examples=50)
def test_every_bit_of_a_slot_comes_back_from_its_bytes(seed: int) -> None:
    """Also a NaN and a negative zero, in every type."""
    generator = torch.Generator().manual_seed(seed)
    slots = slots_of(2)
    first, second = taken(slots), taken(slots)
    for each in FIELDS:
        raw = torch.randint(0, 256, (each.bytes,), dtype=torch.uint8, generator=generator)
        slots.write(first, each.name, raw.view(each.dtype).reshape(each.shape))

    slots.unpack(second, slots.packed(first))

    assert slots.packed(second) == slots.packed(first)


def refused(slots: MetadataSlots, data: bytes) -> str:
    """Return why bytes are refused; the slot is as it was."""
    handle = taken(slots)
    write_all(slots, handle, 3)
    with pytest.raises(MessageError) as raised:
        slots.unpack(handle, data)
    assert numbers(slots, handle) == {3.0}
    slots.free(handle)
    return str(raised.value)


LAYOUT, NO_SLOT, VERSION = (
    "the slot's fields are others than here",
    "bytes are no slot",
    "of version",
)


def test_bytes_of_another_layout_are_refused_and_nothing_is_written() -> None:
    others: list[tuple[SlotField, ...]] = [
        FIELDS[:-1],
        tuple(reversed(FIELDS)),
        (*FIELDS[:-1], replace(COUNT, dtype=torch.float64)),
        (*FIELDS[:-1], replace(COUNT, shape=(2,))),
        (*FIELDS[:-1], replace(COUNT, name="counts")),
    ]

    def packed(fields: tuple[SlotField, ...]) -> bytes:
        slots = MetadataSlots(fields, 1)
        return slots.packed(taken(slots))

    said = {refused(slots_of(), packed(fields)) for fields in others}
    assert [each[: len(LAYOUT)] for each in said] == [LAYOUT]


def test_bytes_that_are_cut_off_anywhere_are_refused() -> None:
    slots = slots_of()
    data = slots.packed(taken(slots))

    said = [refused(slots, data[:length]) for length in range(len(data))]

    assert [each for each in said if NO_SLOT not in each] == []


@given(st.binary(max_size=100))
def test_other_bytes_are_refused_by_name(data: bytes) -> None:
    assert re.search(f"{NO_SLOT}|{VERSION}", refused(slots_of(), data))


OTHER_FORMS: tuple[tuple[list[Any], str], ...] = (
    ([2, []], VERSION),
    ([1, []], LAYOUT),
    ([1, {}], NO_SLOT),
    ([1, [[1]]], NO_SLOT),
    ([1, [["output_ids", "int32", [4], 5]]], LAYOUT),
    (["1", []], VERSION),
)


@pytest.mark.parametrize(("parts", "why"), OTHER_FORMS, ids=str)
def test_bytes_of_another_form_are_refused(parts: list[Any], why: str) -> None:
    assert why in refused(slots_of(), msgpack.packb(parts))


def test_a_field_of_another_length_is_refused() -> None:
    slots = MetadataSlots((IDS,), 1)
    handle = taken(slots)
    data = msgpack.packb([1, [["output_ids", "int32", [4], bytes(15)]]])

    with pytest.raises(MessageError, match="field 'output_ids' is not 16 bytes"):
        slots.unpack(handle, data)


def test_a_slot_that_is_too_large_is_not_packed() -> None:
    """Rule R10."""
    slots = MetadataSlots((replace(IDS, shape=(PACKED_BYTES_MAX // 4,)),), 1)
    handle = taken(slots)

    with pytest.raises(UsageError, match="must be at most 262144"):
        slots.packed(handle)
    with pytest.raises(MessageError, match="must be at most 262144"):
        slots.unpack(handle, bytes(PACKED_BYTES_MAX + 1))

"""Metadata slots: small tensors of each request, in fixed places that are used again and again.

What an engine keeps for a request beside its KV (output ids, log probabilities, hidden states, the best
k of a step) has one layout for all requests, which is declared up front, and one buffer for each field.
A slot is one row of every buffer. Whoever takes one gets a handle with the slot's generation, and a
handle of an earlier generation is refused: no request reads what another has written (incident E).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any, cast

import msgpack
import torch

from ...errors import ConfigError, MessageError, StaleHandle, UsageError

VERSION = 1
SLOTS_MAX = 1 << 20
PACKED_BYTES_MAX = 256 << 10


@dataclass(frozen=True, slots=True)
class SlotField:
    """One tensor that every request has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Its shape; a length that varies is a field of its own."""

    @property
    def bytes(self) -> int:
        """How many bytes one request's tensor has."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotHandle:
    """The right to a slot, until it is freed."""

    slot: int
    generation: int
    """How often the slot was taken, this time included."""


class MetadataSlots:
    """The slots of one rank. Not thread-safe; owned by the engine's thread.

    The lowest slot that is free is taken first, so that ranks that take and free alike have the same
    slots. A slot is zero in every field when it is taken.
    """

    def __init__(
        self, fields: Sequence[SlotField], slots: int, *, device: torch.device | str = "cpu"
    ) -> None:
        """Raises `ConfigError` for a layout that makes no sense. All memory is taken here."""
        _check(fields, slots)
        self._fields = {each.name: each for each in fields}
        self._buffers = {
            each.name: torch.zeros((slots, *each.shape), dtype=each.dtype, device=device)
            for each in fields
        }
        self._generations = [0] * slots
        self._taken = [False] * slots
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    def take(self) -> SlotHandle | None:
        """Return a handle of a slot that nobody has, all of it zero; None if all are taken."""
        if not self._free:
            return None
        slot = heappop(self._free)
        self._taken[slot] = True
        self._generations[slot] += 1
        return SlotHandle(slot, self._generations[slot])

    def write(self, handle: SlotHandle, field: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of the field's shape and type into the slot.

        Raises `StaleHandle` where the handle's slot was freed, and `UsageError` for another tensor than
        the field has.
        """
        row, declared = self._row(handle, field), self._fields[field]
        if tensor.shape != row.shape or tensor.dtype != row.dtype:
            raise UsageError(
                f"field {field!r} is {_words(declared.dtype, declared.shape)}, and not"
                f" {_words(tensor.dtype, tuple(tensor.shape))}"
            )
        row.copy_(tensor)

    def read(self, handle: SlotHandle, field: str) -> torch.Tensor:
        """Return a copy of what the slot has, which is the caller's; zeros where nothing was written.

        Raises `StaleHandle` where the handle's slot was freed.
        """
        return self._row(handle, field).clone()

    def free(self, handle: SlotHandle) -> None:
        """Give the slot back; the handle is stale from now on. Raises `StaleHandle` the second time."""
        self._require_current(handle)
        for buffer in self._buffers.values():
            buffer[handle.slot].zero_()
        self._taken[handle.slot] = False
        heappush(self._free, handle.slot)

    def packed(self, handle: SlotHandle) -> bytes:
        """Return all fields of a slot as bytes, for a message to another group.

        Raises `UsageError` if they are more than `PACKED_BYTES_MAX`.
        """
        fields = [
            [each.name, _name(each.dtype), each.shape, _as_bytes(self._row(handle, each.name))]
            for each in self._fields.values()
        ]
        data: bytes = msgpack.packb([VERSION, fields])
        if len(data) > PACKED_BYTES_MAX:
            raise UsageError(f"a slot of {len(data)} bytes, must be at most {PACKED_BYTES_MAX}")
        return data

    def unpack(self, handle: SlotHandle, data: bytes) -> None:
        """Write all fields of a slot from what `packed` returned, by a rank of any group.

        Raises `MessageError`, and nothing is written, for other bytes or another layout.
        """
        self._require_current(handle)
        contents = self._contents(data)
        for name, tensor in contents.items():
            self.write(handle, name, tensor)

    def _contents(self, data: bytes) -> dict[str, torch.Tensor]:
        if len(data) > PACKED_BYTES_MAX:
            raise MessageError(f"a slot of {len(data)} bytes, must be at most {PACKED_BYTES_MAX}")
        try:
            version, fields = _pair(msgpack.unpackb(data))
        except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
            raise MessageError(f"{len(data)} bytes are no slot: {error}") from error
        if version != VERSION:
            raise MessageError(f"a slot of version {version!r}, must be {VERSION}")
        declared = [[each.name, _name(each.dtype), [*each.shape]] for each in self._fields.values()]
        if [each[:3] for each in fields] != declared:
            raise MessageError(f"the slot's fields are others than here, where they are {declared}")
        contents: dict[str, torch.Tensor] = {}
        for field, (*_, raw) in zip(self._fields.values(), fields, strict=True):
            if type(raw) is not bytes or len(raw) != field.bytes:
                raise MessageError(f"field {field.name!r} is not {field.bytes} bytes")
            whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            contents[field.name] = whole.view(field.dtype).reshape(field.shape)
        return contents

    def _row(self, handle: SlotHandle, field: str) -> torch.Tensor:
        """Return a view of a field in a slot, which never leaves this class."""
        self._require_current(handle)
        buffer = self._buffers.get(field)
        if buffer is None:
            raise UsageError(f"there is no field {field!r}; there are {', '.join(self._fields)}")
        return buffer[handle.slot]

    def _require_current(self, handle: SlotHandle) -> None:
        slot = handle.slot
        if not 0 <= slot < len(self._taken):
            raise UsageError(f"there is no slot {slot}; there are {len(self._taken)}")
        if not self._taken[slot] or self._generations[slot] != handle.generation:
            now = "taken by another" if self._taken[slot] else "free"
            raise StaleHandle(
                f"slot {slot} of generation {handle.generation} was freed; it is {now}"
            )


def _check(fields: Sequence[SlotField], slots: int) -> None:
    names = [each.name for each in fields]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"slots need fields with names that differ: {', '.join(names) or 'none'}")
    if not 0 < slots <= SLOTS_MAX:
        raise ConfigError(f"there are {slots} slots, must be 1 to {SLOTS_MAX}")
    for each in fields:
        if any(length < 1 for length in each.shape):
            raise ConfigError(f"field {each.name!r} has the shape {each.shape}, without elements")


def _pair(value: Any) -> tuple[Any, list[list[Any]]]:
    """Return a version and fields of four parts each; raises for anything else."""
    version, fields = value
    listed = cast("list[Any]", fields)
    if type(fields) is not list or any(type(each) is not list or len(each) != 4 for each in listed):
        raise TypeError("its fields are not four parts each")
    return version, listed


def _as_bytes(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{_name(dtype)} {[*shape]}"

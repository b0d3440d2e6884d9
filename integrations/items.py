"""Images, audio and other items of a prompt, as part of the keys of its pages.

The ids of an item's placeholders say nothing of its content. So in the page where an item begins, the
ids up to its last placeholder there, text before it included, are replaced by ids that no text has: 31
bits each of a digest of these ids, of the item's place and of its content. Pages before it keep their
keys, and requests with other items share them. Pages behind it differ, because a key covers everything
before it. A page in which fewer than `IDS_MIN` ids can be replaced has no room for 128 bits; then the
whole request is in a namespace of its items.

Only content counts. What an engine calls an item, as the hash that its caches go by, may be the word of
a client.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256, shake_256
from typing import Any, Generic, TypeAlias, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")

IDS_MIN = 5
"""Ids of 31 bits that hold 128."""

NAMES_MAX = 1 << 18
"""How many of an engine's names of items are remembered, with the digests of their contents."""

_NO_TEXT = 1 << 31
"""The sign of an int32: the ids of text have none."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item, or a part of one whose placeholders stand together."""

    name: Hashable
    """The name under which the engine keeps the item's embeddings and its own KV."""
    start: int
    end: int
    """Its placeholders are those from `start` to before `end`."""
    content: bytes
    """A digest of everything in it that the model reads."""


@dataclass(frozen=True, slots=True)
class ItemIds:
    """The ids of a prompt with items as they are in keys."""

    head: bytes
    """The first ids of the prompt, as int32, up to the last one that is replaced."""
    pages: tuple[int, ...]
    """The pages in which ids are replaced."""

    def of(self, tokens: bytes) -> bytes:
        """Return the ids in keys of the first `tokens` of the prompt, and of what follows it."""
        return self.head[: len(tokens)] + tokens[len(self.head) :]


def item_ids(tokens: bytes, items: Sequence[Item], page_tokens: int) -> ItemIds | None:
    """Return the ids in keys of a prompt of int32 `tokens`; None if a page has no room for an item."""
    ids = np.frombuffer(tokens, dtype="<i4").copy()
    beginning: dict[int, list[Item]] = {}
    for item in items:
        beginning.setdefault(item.start // page_tokens, []).append(item)
    end = 0
    for page, begun in sorted(beginning.items()):
        first = page * page_tokens
        end = min(first + page_tokens, max(item.end for item in begun))
        if end - first < IDS_MIN:
            return None
        digest = shake_256(struct.pack("<q", len(begun)) + ids[first:end].tobytes())
        for item in begun:
            digest.update(struct.pack("<qq", item.start - first, item.end - first) + item.content)
        fresh = np.frombuffer(digest.digest(4 * (end - first)), dtype="<u4")
        ids[first:end] = (fresh | _NO_TEXT).view("<i4")
    return ItemIds(ids[:end].tobytes(), tuple(sorted(beginning)))


def named_by_content(items: Iterable[Item]) -> list[list[object]]:
    """Return what keeps apart requests with other items, as part of a namespace."""
    return [[each.content.hex(), each.start, each.end] for each in items]


def content_digest(*parts: object) -> bytes | None:
    """Return a digest of nested tensors, arrays, numbers and texts; None if it is not all content.

    It is none if there is no tensor in it, as in the address of one that lies elsewhere, and if
    anything in it has no canonical bytes.
    """
    content = _Content()
    try:
        content.add(parts)
    except (_NoContent, RuntimeError, TypeError):
        return None
    return content.digest.digest() if content.tensors else None


class _NoContent(Exception):
    """There is something whose content is not known."""


class _Content:
    """Writes values so that different ones have different bytes: each has its kind and its length."""

    def __init__(self) -> None:
        self.digest = sha256()
        self.tensors = 0

    def add(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(str(value.dtype), tuple(value.shape), _bytes_of(value))
        elif isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(cast("npt.NDArray[Any]", value))
            if array.dtype.hasobject:
                raise _NoContent
            self._add_tensor(array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data)
        elif isinstance(value, bool | int | float | str | bytes):
            data = value if isinstance(value, bytes) else repr(value).encode()
            self._begin(type(value).__name__, len(data))
            self.digest.update(data)
        elif isinstance(value, Mapping):
            pairs = cast("Mapping[str, object]", value)
            self._begin("mapping", len(pairs))
            for name in sorted(pairs):
                self.add(name)
                self.add(pairs[name])
        elif isinstance(value, list | tuple):
            parts = cast("Sequence[object]", value)
            self._begin("list", len(parts))
            for part in parts:
                self.add(part)
        else:
            raise _NoContent

    def _begin(self, kind: str, length: int) -> None:
        self.digest.update(f"{kind} {length}:".encode())

    def _add_tensor(self, kind: str, shape: tuple[int, ...], data: memoryview) -> None:
        self.tensors += 1
        self._begin(f"tensor {kind} {shape}", data.nbytes)
        self.digest.update(data)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return cast("npt.NDArray[np.uint8]", flat.view(torch.uint8).numpy()).data


class OncePerObject(Generic[T]):
    """Remembers what was found of an object for as long as the object lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[object], T]] = {}

    def get(self, held: object, find: Callable[[], T]) -> T:
        """Return what was found of an object, and find it the first time."""
        at = id(held)
        known = self._known.get(at)
        if known is None or known[0]() is not held:
            known = ref(held, lambda _: self._known.pop(at, None)), find()
            self._known[at] = known
        return known[1]


class ItemNames:
    """Says whether an engine's name of an item stands for one content only.

    An engine takes embeddings, and KV on its device, of items that it knows by a name: a client may
    give that name to another content. So an item's content says what its KV is only if its name has
    stood for nothing else. Requests with items of another content under one name are not cached, while
    the last `NAMES_MAX` names are remembered.
    """

    def __init__(self, warn: Callable[[], object]) -> None:
        """`warn` is called once, when a name is found to stand for two contents."""
        self._warn = warn
        self._known: OrderedDict[Hashable, bytes | None] = OrderedDict()
        """The content, by name; None if it is not known, or if there were several."""
        self._warned = False

    def note(self, items: Iterable[Item]) -> None:
        """Note items that the engine is going to compute."""
        for item in items:
            known = self._known.setdefault(item.name, item.content)
            if known != item.content:
                self._known[item.name] = None
                if known is not None and not self._warned:
                    self._warned = True
                    self._warn()
            self._keep(item.name)

    def note_unknown(self, names: Iterable[Hashable]) -> None:
        """Note items of unknown content that the engine is going to compute."""
        for name in names:
            self._known[name] = None
            self._keep(name)

    def trusted(self, items: Iterable[Item]) -> bool:
        """Say whether KV that the engine computes for these items is that of their contents."""
        return all(self._known.get(item.name, item.content) == item.content for item in items)

    def _keep(self, name: Hashable) -> None:
        self._known.move_to_end(name)
        if len(self._known) > NAMES_MAX:
            self._known.popitem(last=False)


Items: TypeAlias = tuple[Item, ...]

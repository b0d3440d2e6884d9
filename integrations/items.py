"""Images, audio and other multimodal items of a prompt, as part of the keys of its KV pages.

An item's placeholder token ids do not depend on the item's content. In the page where an item begins,
all ids up to the item's last placeholder in that page are therefore replaced by ids that no text has.
Each new id has 31 bits of a digest of the old ids and of the item's position and content. Pages before
the item keep their keys, so they are shared. All pages after the item get other keys, because a key
covers all tokens before it. If a page has fewer than `IDS_MIN` replaceable ids, 128 bits do not fit,
and the request gets a namespace derived from its items instead.

The digest covers only content, because a client may choose the name by which the engine knows an item.
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
"""Number of token ids that must be replaced, at 31 bits each, to hold 128 bits of a digest."""

NAMES_MAX = 1 << 18
"""Maximum number of multimodal item names that are remembered with the digests of their contents."""

_NO_TEXT = 1 << 31
"""The sign bit of an int32. Ids that replace placeholders have this bit; ids of text tokens do not."""


@dataclass(frozen=True, slots=True)
class RequestItem:
    """A multimodal item of a prompt, or a part of it: one run of consecutive placeholder tokens."""

    name: Hashable
    """The name under which the engine caches the multimodal item's embeddings and KV."""
    start: int
    end: int
    """Position after the last placeholder token; `start` is the position of the first one."""
    content: bytes
    """Digest of all parts of the multimodal item that the model reads."""


@dataclass(frozen=True, slots=True)
class ItemIds:
    """Token ids for the page keys of a prompt with multimodal items."""

    head: bytes
    """Page-key ids (int32) of the prompt's first tokens, which end with the last token whose id is
    replaced."""
    pages: tuple[int, ...]
    """Indices of the prompt's pages in which placeholder ids are replaced."""

    def of(self, tokens: bytes) -> bytes:
        """Return the page-key ids of a request's first tokens.

        `tokens` has the request's own ids of the same tokens. Both are int32 ids as bytes.
        """
        return self.head[: len(tokens)] + tokens[len(self.head) :]


def item_ids(tokens: bytes, items: Sequence[RequestItem], page_tokens: int) -> ItemIds | None:
    """Return the page-key ids of a prompt; None if a page has fewer than `IDS_MIN` replaceable ids.

    `tokens` are the prompt's ids as int32.
    """
    ids = np.frombuffer(tokens, dtype="<i4").copy()
    beginning: dict[int, list[RequestItem]] = {}
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


def named_by_content(items: Iterable[RequestItem]) -> list[list[object]]:
    """Return the part of a namespace that identifies a request's multimodal items by content."""
    return [[each.content.hex(), each.start, each.end] for each in items]


def content_digest(*parts: object) -> bytes | None:
    """Return a digest of nested values; None if they contain no tensor or array.

    Values without a tensor or array might merely refer to remote data, and would then not identify an
    item's content.
    """
    content = _Content()
    try:
        content.add(parts)
    except (_NoContent, RuntimeError, TypeError):
        return None
    return content.digest.digest() if content.tensors else None


class _NoContent(Exception):
    """Raised for a value of a type that cannot be digested."""


class _Content:
    """Hashes kind, length and bytes of each value, so that different values hash differently."""

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
    """Caches the result of a function for each object until the object is garbage-collected."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[object], T]] = {}

    def get(self, held: object, find: Callable[[], T]) -> T:
        """Return the result cached for an object; if there is none, compute it by calling `find`."""
        at = id(held)
        known = self._known.get(at)
        if known is None or known[0]() is not held:
            known = ref(held, lambda _: self._known.pop(at, None)), find()
            self._known[at] = known
        return known[1]


class ItemNames:
    """Detects names that an engine uses for multimodal items of different content.

    An engine finds embeddings and device KV of items by name, and a client may send other content under
    a name that is already in use. Requests with such a name are not cached. Only the `NAMES_MAX` most
    recent names are remembered.
    """

    def __init__(self, warn: Callable[[], object]) -> None:
        """Store the function `warn`, to be called when a name is first found to have two contents."""
        self._warn = warn
        self._known: OrderedDict[Hashable, bytes | None] = OrderedDict()
        """Content digest by item name; None if the content is unknown or the name has had several
        contents."""
        self._warned = False

    def note(self, items: Iterable[RequestItem]) -> None:
        """Record the names and contents of multimodal items before the engine computes the items."""
        for item in items:
            known = self._known.setdefault(item.name, item.content)
            if known != item.content:
                self._known[item.name] = None
                if known is not None and not self._warned:
                    self._warned = True
                    self._warn()
            self._keep(item.name)

    def note_unknown(self, names: Iterable[Hashable]) -> None:
        """Record names of multimodal items of unknown content before the engine computes the items."""
        for name in names:
            self._known[name] = None
            self._keep(name)

    def trusted(self, items: Iterable[RequestItem]) -> bool:
        """Return whether the engine has used each of these items' names for only one content."""
        return all(self._known.get(item.name, item.content) == item.content for item in items)

    def _keep(self, name: Hashable) -> None:
        self._known.move_to_end(name)
        if len(self._known) > NAMES_MAX:
            self._known.popitem(last=False)


Items: TypeAlias = tuple[RequestItem, ...]

"""What a reader and a rank that serves pages tell each other, as bytes.

A connection begins with a handshake of fixed length (`handshake`). From then on each side sends frames:

    4 bytes   length of the control, little-endian, at most `CONTROL_BYTES_MAX`
    8 bytes   length of what is attached, little-endian
    control   one msgpack array: the number of its kind, then the kind's fields in order
    tag       16 bytes, of all that (`frame_tags`)
    attached  raw bytes; only `Pages` and `Located` have any
    tag       16 bytes, of what is attached, if anything is

Without a secret there are no tags. A wrong one ends the connection: its control is not obeyed, and
nothing that was attached counts as read.

    kind  who     message    fields
      1   server  Hello      which rank it is, namespace, ranks: [[address, [[pool, shard],
                         ...], engine], ...]
      2   reader  Ask        number, pool, shard, keys
      3   reader  Fetch      number, pool, shard, part table, numbers of the parts wanted, keys
      4   reader  Forget     number
      5   server  Told       number, one byte for each key: 1 if it seems to be there
      6   server  Pages      number, position of the first key, one `State` byte for each key
      7   reader  Locate     as Fetch
      8   server  Located    number, one `State` byte for each key, address of each page in memory
      9   reader  Done       number

A server says `Hello` first, and once. It answers each `Ask` with one `Told`, and each `Fetch` with
as many `Pages` as it likes, whose keys follow each other. To `Pages` is attached, key by key:
nothing where it is ABSENT; the object's header where it is BARE; the header and the wanted parts,
one after the other, where it is WHOLE. After `Forget` the rest of that fetch is ABSENT. A fetch's
part table (`object_shape.part_table`) lists all parts that the reader knows objects of this kind to
have; where the server's are others, or the page lacks a wanted part, objects are BARE, and the
reader sees by the header what is wrong.

A rank whose `engine` is not empty (`tcp://host:port` or `rdma://host:port`, as `transfer_engine` calls
it) answers each `Locate` with one `Located`, to which the headers are attached of all that are not
ABSENT. The reader reads the parts by an engine of its own: where they lie in a page follows from its
header. Pages stay as they are until it says `Done`, which it does once for each `Located`, or hangs up,
or is cut off. After `Forget` a `Locate` that was not answered is answered with ABSENT.

Kinds and the order of their fields never change their meaning; what is added raises `VERSION`,
which the handshake compares. Whatever does not fit raises `StorageError`, before anything is
allocated by what it claims, and ends its connection.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, cast

import msgpack

from ...errors import ConfigError, StorageError
from ...page_format.object_shape import PARTS_MAX
from ...ranks.protocol.engine_settings import require_engine_address
from ...ranks.protocol.host_port import split_address

VERSION: Final = 3
CONTROL_BYTES_MAX: Final = 256 << 10
NAMES_MAX: Final = 1024
"""The most keys of one request."""
RANKS_MAX: Final = 1024
POOLS_MAX: Final = 64
TEXT_MAX: Final = 128
"""The most characters of a part of an object's name (`object_name`)."""
ADDRESS_MAX: Final = 280
REQUESTS_MAX: Final = 64
"""The most requests of one connection that are not answered yet."""
FRAME_BYTES: Final = 4 << 20
"""A `Pages` frame has objects until it has so many bytes; what is withdrawn waits for its end."""

_PREFIX: Final = struct.Struct("<IQ")
PREFIX_BYTES: Final = _PREFIX.size
_NUMBER_MAX: Final = (1 << 63) - 1


class State(IntEnum):
    """What follows of one object."""

    ABSENT = 0
    BARE = 1
    """Its header."""
    WHOLE = 2
    """Its header, and the parts that were asked for."""


class PeerRank(NamedTuple):
    """One rank of a group that serves its pages."""

    address: str
    """Where it is reached, as host:port."""
    shards: tuple[tuple[str, str], ...]
    """Of each pool, the shard's part of its objects' names. The group's mark is one of them."""
    engine: str = ""
    """Where its memory is read by a transfer engine; empty if it is not."""


class Hello(NamedTuple):
    """All ranks of the group that answers."""

    rank: int
    """Which of `ranks` the server is."""
    namespace: str
    ranks: tuple[PeerRank, ...]


class Ask(NamedTuple):
    """Say which objects are there."""

    number: int
    pool: str
    shard: str
    keys: tuple[str, ...]


class Fetch(NamedTuple):
    """Send parts of objects."""

    number: int
    pool: str
    shard: str
    table: bytes
    held: bytes
    """The numbers of the wanted parts, ascending, one byte each."""
    keys: tuple[str, ...]


class Forget(NamedTuple):
    """Send no more of what was asked for under this number."""

    number: int


class Told(NamedTuple):
    """Which objects are there."""

    number: int
    there: bytes


class Pages(NamedTuple):
    """Objects follow, those of neighbouring keys of a fetch."""

    number: int
    first: int
    states: bytes


class Locate(NamedTuple):
    """Say where parts of objects lie, and keep them there."""

    number: int
    pool: str
    shard: str
    table: bytes
    held: bytes
    """As in `Fetch`."""
    keys: tuple[str, ...]


class Located(NamedTuple):
    """Where the pages lie of the objects of a `Locate`."""

    number: int
    states: bytes
    pages: tuple[int, ...]
    """Their addresses; of an object that is ABSENT it means nothing."""


class Done(NamedTuple):
    """What was located under this number is not read any more."""

    number: int


Message = Hello | Ask | Fetch | Forget | Told | Pages | Locate | Located | Done
_KINDS: Final[tuple[type[Message], ...]] = (
    Hello,
    Ask,
    Fetch,
    Forget,
    Told,
    Pages,
    Locate,
    Located,
    Done,
)


class Prefix(NamedTuple):
    """What stands before a control."""

    control_bytes: int
    attached_bytes: int


def encode(message: Message, attached_bytes: int = 0) -> bytes:
    """Return a frame but for what is attached. Raises `StorageError` for one that is too long."""
    control = msgpack.packb([_KINDS.index(type(message)) + 1, *message])
    if len(control) > CONTROL_BYTES_MAX:
        raise StorageError(f"a message of {len(control)} bytes; {CONTROL_BYTES_MAX} is the most")
    return _PREFIX.pack(len(control), attached_bytes) + control


def decode_prefix(raw: memoryview) -> Prefix:
    """Return the lengths that `PREFIX_BYTES` bytes speak of."""
    prefix = Prefix(*_PREFIX.unpack(raw))
    if not 0 < prefix.control_bytes <= CONTROL_BYTES_MAX:
        raise StorageError(
            f"a message of {prefix.control_bytes} bytes; 1 to {CONTROL_BYTES_MAX} can be"
        )
    return prefix


def decode(control: memoryview) -> Message:
    """Return the message that a control is; raises `StorageError` if it is none."""
    fields = _Fields(_unpacked(control))
    match fields.number():
        case 1:
            message: Message = _hello(fields)
        case 2:
            message = Ask(fields.number(), fields.text(), fields.text(), fields.keys())
        case 3:
            message = _fetch(fields)
        case 4:
            message = Forget(fields.number())
        case 5:
            message = Told(fields.number(), fields.raw(NAMES_MAX))
        case 6:
            message = Pages(fields.number(), fields.number(), fields.raw(NAMES_MAX))
        case 7:
            message = Locate(*_fetch(fields))
        case 8:
            message = Located(fields.number(), fields.raw(NAMES_MAX), fields.numbers())
        case 9:
            message = Done(fields.number())
        case kind:
            raise StorageError(f"a message of the unknown kind {kind}")
    fields.end()
    return message


def encode_rank(rank: PeerRank) -> bytes:
    """Return a rank as bytes, for the ranks of its group to tell each other."""
    return msgpack.packb(rank)


def decode_rank(raw: bytes) -> PeerRank:
    """Return the rank that `encode_rank` wrote."""
    return _rank(_unpacked(memoryview(raw)))


def _hello(fields: "_Fields") -> Hello:
    rank, namespace = fields.number(), fields.text()
    ranks = tuple(map(_rank, fields.items(RANKS_MAX)))
    if rank >= len(ranks):
        raise StorageError(f"rank {rank} of {len(ranks)} says hello")
    return Hello(rank, namespace, ranks)


def _fetch(fields: "_Fields") -> Fetch:
    return Fetch(
        fields.number(),
        fields.text(),
        fields.text(),
        fields.raw(5 * PARTS_MAX),
        fields.raw(PARTS_MAX),
        fields.keys(),
    )


def _rank(raw: object) -> PeerRank:
    fields = _Fields(raw)
    address = fields.text(ADDRESS_MAX)
    pairs = [_Fields(each) for each in fields.items(POOLS_MAX)]
    shards = tuple((pair.text(), pair.text()) for pair in pairs)
    engine = fields.text(ADDRESS_MAX)
    for each in (*pairs, fields):
        each.end()
    try:
        split_address(address)
        require_engine_address(engine)
    except ConfigError as error:
        raise StorageError(str(error)) from None
    return PeerRank(address, shards, engine)


def _unpacked(raw: memoryview) -> object:
    try:
        # Lists are made as long as they claim to be, so what they may claim is bounded.
        return msgpack.unpackb(
            raw,
            max_array_len=max(NAMES_MAX, RANKS_MAX),
            max_map_len=0,
            max_ext_len=0,
            strict_map_key=True,
        )
    except Exception as error:  # noqa: BLE001 - anything can come out of a parser of strangers' bytes.
        raise StorageError(f"a message that is no msgpack: {type(error).__name__}") from None


class _Fields:
    """Takes the fields of an array one by one, each of just the type that it must have."""

    def __init__(self, raw: object) -> None:
        if not isinstance(raw, list):
            raise StorageError("a message that is no array")
        self._left = iter(cast("Sequence[object]", raw))

    def number(self) -> int:
        value = self._next()
        if type(value) is not int or not 0 <= value <= _NUMBER_MAX:
            raise StorageError("a message with something else in place of a number")
        return value

    def text(self, most: int = TEXT_MAX) -> str:
        return _text(self._next(), most)

    def raw(self, most: int) -> bytes:
        value = self._next()
        if type(value) is not bytes or len(value) > most:
            raise StorageError(f"a message with something else in place of up to {most} bytes")
        return value

    def items(self, most: int) -> Sequence[object]:
        value = self._next()
        if not isinstance(value, list):
            raise StorageError("a message with something else in place of a list")
        items = cast("Sequence[object]", value)
        if len(items) > most:
            raise StorageError(f"a message with {len(items)} items; {most} is the most")
        return items

    def keys(self) -> tuple[str, ...]:
        keys = self.items(NAMES_MAX)
        if not keys:
            raise StorageError("a message that asks for nothing")
        return tuple([_text(each, TEXT_MAX) for each in keys])

    def numbers(self) -> tuple[int, ...]:
        values = self.items(NAMES_MAX)
        if not all(type(each) is int and 0 <= each <= _NUMBER_MAX for each in values):
            raise StorageError("a message with something else in place of numbers")
        return tuple(cast("Sequence[int]", values))

    def end(self) -> None:
        if next(self._left, self) is not self:
            raise StorageError("a message with more fields than its kind has")

    def _next(self) -> object:
        try:
            return next(self._left)
        except StopIteration:
            raise StorageError("a message with fewer fields than its kind has") from None


def _text(value: object, most: int) -> str:
    if type(value) is not str or len(value) > most:
        raise StorageError(f"a message with something else in place of up to {most} characters")
    return value

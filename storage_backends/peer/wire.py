"""The wire protocol between a reader and a page server.

A connection begins with a handshake of fixed length (`handshake`). Then each side sends frames:

    4 bytes   length of the control, little-endian, at most `CONTROL_BYTES_MAX`
    8 bytes   length of the attachment, little-endian
    control   the message, one msgpack array: the tag of its kind of `Message`, then its fields
    tag       16 bytes, authenticates all of the above (`frame_tags`)
    attached  raw bytes; only `ReadReply` and `LocateReply` have any
    tag       16 bytes, authenticates the attachment, if there is one

Without a secret the frames have no authentication tags. A wrong authentication tag closes the
connection: the message is not executed, and its attachment is not used.

The server sends `Hello` once, first. It answers each `LookupRequest` by one `LookupReply`, and each
`ReadRequest` by one or more `ReadReply` with consecutive keys. `ReadReply` attaches for each key:
nothing if the object is ABSENT; the object's header if it is BARE; the header and the wanted parts in
order if it is WHOLE. After a `Forget` the rest of that `ReadRequest` is answered with ABSENT. The part
table of a `ReadRequest` (`object_shape.part_table`) lists all parts that the reader expects such
objects to have. If the server's parts differ, or the page lacks a wanted part, the object is BARE, and
its header shows the reason.

A rank with a non-empty `engine` (`tcp://host:port` or `rdma://host:port`) answers each `LocateRequest`
by one `LocateReply`, which attaches the headers of all objects that are not ABSENT. The reader reads
the parts with its own transfer engine, at addresses that follow from the header. The pages stay
unchanged until the reader sends `Done`, once for each `LocateReply`, or its connection is closed. After
a `Forget` an unanswered `LocateRequest` is answered with ABSENT.

The meaning of message kinds and the order of their fields never change. An addition raises `VERSION`,
which the handshake compares. Invalid input raises `StorageError`, before any memory of a claimed size
is allocated, and closes the connection.
"""

import struct
from enum import IntEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ...coordinator.codec import Codec, Record
from ...errors import ConfigError, StorageError
from ...page_format.object_shape import PARTS_MAX
from ...ranks.protocol.host_port import split_address
from ...ranks.protocol.transfer_engine_settings import require_engine_address

VERSION: Final = 3
CONTROL_BYTES_MAX: Final = 256 << 10
NAMES_MAX: Final = 1024
"""Maximum number of keys per request."""
RANKS_MAX: Final = 1024
POOLS_MAX: Final = 64
TEXT_MAX: Final = 128
"""Maximum characters of each component of an object's name (namespace, pool, shard, key)."""
ADDRESS_MAX: Final = 280
REQUESTS_MAX: Final = 64
"""Maximum number of unanswered requests per connection."""
FRAME_BYTES: Final = 4 << 20
"""Number of attached bytes at which no further object is added to a `ReadReply` frame. The server
cannot free the pages of a frame before the frame is sent."""

_PREFIX: Final = struct.Struct("<IQ")
PREFIX_BYTES: Final = _PREFIX.size

Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=TEXT_MAX)]
Address: TypeAlias = Annotated[str, Meta(max_length=ADDRESS_MAX)]
Keys: TypeAlias = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=NAMES_MAX)]
States: TypeAlias = Annotated[bytes, Meta(max_length=NAMES_MAX)]
"""The `State` of each key in a request, one byte per key."""


class State(IntEnum):
    """How much of an object is attached to the answer; stated for each key of a request."""

    ABSENT = 0
    BARE = 1
    """The object exists, but only its header is attached."""
    WHOLE = 2
    """The object's header and the requested parts are attached."""


class PeerRank(Record, frozen=True, tag=False):
    """One rank of a serving group, as `Hello` describes it."""

    address: Address
    """Address of the rank's page server, as host:port."""
    shards: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=POOLS_MAX)]
    """(pool, shard) of all objects on this rank. The marker of the rank's group, by which groups of
    other TP sizes find pages, is one of these objects."""
    engine: Address = ""
    """Address of the rank's transfer engine; empty if the rank has none."""

    def __post_init__(self) -> None:
        split_address(self.address)
        require_engine_address(self.engine)


class Hello(Record, frozen=True, tag=1):
    """The server's first message: lists all ranks of the serving group."""

    rank: Number
    """The index in `ranks` of the rank whose server sends this message."""
    namespace: Name
    ranks: Annotated[tuple[PeerRank, ...], Meta(max_length=RANKS_MAX)]

    def __post_init__(self) -> None:
        if self.rank >= len(self.ranks):
            raise ConfigError(f"Hello is from rank {self.rank} of {len(self.ranks)} ranks")


class LookupRequest(Record, frozen=True, tag=2):
    """Asks a rank which objects of one pool and shard it has."""

    number: Number
    pool: Name
    shard: Name
    keys: Keys


class PartsRequest(Record, frozen=True):
    """The fields of a request for parts of objects."""

    number: Number
    pool: Name
    shard: Name
    table: Annotated[bytes, Meta(max_length=5 * PARTS_MAX)]
    held: Annotated[bytes, Meta(max_length=PARTS_MAX)]
    """The indices of the wanted parts in the part table, ascending, one byte each."""
    keys: Keys


class ReadRequest(PartsRequest, frozen=True, tag=3):
    """Requests parts of objects, which the server attaches to its answers."""


class Forget(Record, frozen=True, tag=4):
    """Asks the server to send no more objects for the request with this number."""

    number: Number


class LookupReply(Record, frozen=True, tag=5):
    """Answers a `LookupRequest`: for each key, whether the object exists."""

    number: Number
    there: States


class ReadReply(Record, frozen=True, tag=6):
    """Answers some consecutive keys of a `ReadRequest`; object headers and parts are attached."""

    number: Number
    first: Number
    states: States


class LocateRequest(PartsRequest, frozen=True, tag=7):
    """Asks a rank for the memory addresses of pages. The pages must not change until `Done`."""


class LocateReply(Record, frozen=True, tag=8):
    """Answers a `LocateRequest`: the memory address of each page; the object headers are attached."""

    number: Number
    states: States
    pages: Annotated[tuple[Number, ...], Meta(max_length=NAMES_MAX)]
    """The memory address of each page on the rank; undefined if the object is ABSENT."""


class Done(Record, frozen=True, tag=9):
    """Tells a rank that the reader has finished reading the pages located by one `LocateRequest`."""

    number: Number


Message = (
    Hello
    | LookupRequest
    | ReadRequest
    | Forget
    | LookupReply
    | ReadReply
    | LocateRequest
    | LocateReply
    | Done
)
MESSAGES: Final[Codec[Message]] = Codec(Message, bytes_max=CONTROL_BYTES_MAX, error=StorageError)
RANKS: Final[Codec[PeerRank]] = Codec(PeerRank, error=StorageError)
"""Encodes a `PeerRank`. The ranks of a group exchange their addresses in this encoding."""


def encode(message: Message, attached_bytes: int = 0) -> bytes:
    """Return the frame of a message, without authentication tags and attachment.

    Raises `StorageError` if the message is too long.
    """
    control = MESSAGES.encode(message)
    return _PREFIX.pack(len(control), attached_bytes) + control


def decode_prefix(raw: memoryview) -> tuple[int, int]:
    """Return (length of the control, length of the attachment) from `PREFIX_BYTES` bytes."""
    control_bytes, attached_bytes = _PREFIX.unpack(raw)
    if not 0 < control_bytes <= CONTROL_BYTES_MAX:
        raise StorageError(f"a message of {control_bytes} bytes, must be 1 to {CONTROL_BYTES_MAX}")
    return control_bytes, attached_bytes

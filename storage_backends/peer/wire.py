"""What a reader and a rank that serves pages tell each other, as bytes.

A connection begins with a handshake of fixed length (`handshake`). From then on each side sends frames:

    4 bytes   length of the control, little-endian, at most `CONTROL_BYTES_MAX`
    8 bytes   length of what is attached, little-endian
    control   one msgpack array: the number of its kind (the tag of a `Message`), then its fields
    tag       16 bytes, of all that (`frame_tags`)
    attached  raw bytes; only `Pages` and `Located` have any
    tag       16 bytes, of what is attached, if anything is

Without a secret there are no tags. A wrong one ends the connection: its control is not obeyed, and
nothing that was attached counts as read.

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
from enum import IntEnum
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ...coordinator.codec import Codec, Record
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

Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=TEXT_MAX)]
Address: TypeAlias = Annotated[str, Meta(max_length=ADDRESS_MAX)]
Keys: TypeAlias = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=NAMES_MAX)]
States: TypeAlias = Annotated[bytes, Meta(max_length=NAMES_MAX)]
"""One byte for each key."""


class State(IntEnum):
    """What follows of one object."""

    ABSENT = 0
    BARE = 1
    """Its header."""
    WHOLE = 2
    """Its header, and the parts that were asked for."""


class PeerRank(Record, frozen=True, tag=False):
    """One rank of a group that serves its pages."""

    address: Address
    """Where it is reached, as host:port."""
    shards: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=POOLS_MAX)]
    """Of each pool, the shard's part of its objects' names. The group's mark is one of them."""
    engine: Address = ""
    """Where its memory is read by a transfer engine; empty if it is not."""

    def __post_init__(self) -> None:
        split_address(self.address)
        require_engine_address(self.engine)


class Hello(Record, frozen=True, tag=1):
    """All ranks of the group that answers."""

    rank: Number
    """Which of `ranks` the server is."""
    namespace: Name
    ranks: Annotated[tuple[PeerRank, ...], Meta(max_length=RANKS_MAX)]

    def __post_init__(self) -> None:
        if self.rank >= len(self.ranks):
            raise ConfigError(f"rank {self.rank} of {len(self.ranks)} says hello")


class Ask(Record, frozen=True, tag=2):
    """Say which objects are there."""

    number: Number
    pool: Name
    shard: Name
    keys: Keys


class PartsRequest(Record, frozen=True):
    """Parts of objects that a reader wants."""

    number: Number
    pool: Name
    shard: Name
    table: Annotated[bytes, Meta(max_length=5 * PARTS_MAX)]
    held: Annotated[bytes, Meta(max_length=PARTS_MAX)]
    """The numbers of the wanted parts, ascending, one byte each."""
    keys: Keys


class Fetch(PartsRequest, frozen=True, tag=3):
    """Send parts of objects."""


class Forget(Record, frozen=True, tag=4):
    """Send no more of what was asked for under this number."""

    number: Number


class Told(Record, frozen=True, tag=5):
    """Which objects are there."""

    number: Number
    there: States


class Pages(Record, frozen=True, tag=6):
    """Objects follow, those of neighbouring keys of a fetch."""

    number: Number
    first: Number
    states: States


class Locate(PartsRequest, frozen=True, tag=7):
    """Say where parts of objects lie, and keep them there."""


class Located(Record, frozen=True, tag=8):
    """Where the pages lie of the objects of a `Locate`."""

    number: Number
    states: States
    pages: Annotated[tuple[Number, ...], Meta(max_length=NAMES_MAX)]
    """Their addresses; of an object that is ABSENT it means nothing."""


class Done(Record, frozen=True, tag=9):
    """What was located under this number is not read any more."""

    number: Number


Message = Hello | Ask | Fetch | Forget | Told | Pages | Locate | Located | Done
MESSAGES: Final[Codec[Message]] = Codec(Message, bytes_max=CONTROL_BYTES_MAX, error=StorageError)
RANKS: Final[Codec[PeerRank]] = Codec(PeerRank, error=StorageError)
"""A rank as bytes, for the ranks of its group to tell each other."""


def encode(message: Message, attached_bytes: int = 0) -> bytes:
    """Return a frame but for what is attached. Raises `StorageError` for one that is too long."""
    control = MESSAGES.encode(message)
    return _PREFIX.pack(len(control), attached_bytes) + control


def decode_prefix(raw: memoryview) -> tuple[int, int]:
    """Return how long the control is, and what is attached, as `PREFIX_BYTES` bytes say."""
    control_bytes, attached_bytes = _PREFIX.unpack(raw)
    if not 0 < control_bytes <= CONTROL_BYTES_MAX:
        raise StorageError(f"a message of {control_bytes} bytes; 1 to {CONTROL_BYTES_MAX} can be")
    return control_bytes, attached_bytes

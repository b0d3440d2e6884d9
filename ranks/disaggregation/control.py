"""Control messages between groups, and between them and routers: what they are, and their bytes.

    4 bytes    magic
    1 byte     version
    1 byte     kind
    32 bytes   SHA-256 of magic, version, kind and body
    body       a map of the kind's fields (`schema`)

Versions and kinds never change their meaning. Whatever cannot be read is refused by name and means no
more than that: the request that it was about is computed, or ends at its deadline.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from ...errors import UsageError
from ..arguments import require_source
from .manifest import (
    TOKENS_MAX,
    HandoffManifest,
    require_opaque,
    require_range,
    require_request,
    require_text,
)
from .refusal import Refusal, Refused
from .schema import pack, unpack
from .telling import (
    Counted,
    Drain,
    EventsTold,
    EventsWanted,
    Progress,
    RequestsTold,
    RequestsWanted,
    SnapshotTold,
)

VERSION: Final = 1
_MAGIC: Final = b"LKCM"
_HEADER_BYTES: Final = len(_MAGIC) + 2
_BODY_AT: Final = _HEADER_BYTES + 32

PROMPT_BYTES_MAX: Final = 4 << 20
"""The most bytes of a prompt, which are four for each token."""
CONTROL_BYTES_MAX: Final = PROMPT_BYTES_MAX + (1 << 20)
"""The most bytes of a control message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request for a group. The one that decodes hears of it too, and so knows it in any case."""

    request: str
    tokens: bytes
    """The prompt, as int32, little-endian."""
    namespace: str = ""
    """The namespace within the cache: a tenant's salt, an adapter."""
    sampling: bytes = b""
    """How the engine is to sample."""
    partner: str = ""
    """The inbox of the other group of a handoff; empty where there is none."""
    patience_ms: int = 0
    """How long to wait without a word of the other group before computing the prompt, if that is less
    than the receiver waits for all; 0 leaves it to the receiver."""

    def __post_init__(self) -> None:
        require_request(self.request)
        require_text(self.namespace, "namespace")
        require_text(self.partner, "partner")
        require_opaque(self.sampling, "sampling")
        require_range(self.patience_ms, "patience_ms", 1 << 40)
        if len(self.tokens) % 4 or len(self.tokens) > PROMPT_BYTES_MAX:
            raise UsageError(
                f"tokens has {len(self.tokens)} bytes, must be four for each token and at most"
                f" {PROMPT_BYTES_MAX}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """So many tokens of a request can be fetched by now; a level."""

    request: str
    tokens: int
    source: str = ""
    """Where, as in a manifest."""

    def __post_init__(self) -> None:
        require_request(self.request)
        require_range(self.tokens, "tokens", TOKENS_MAX)
        require_text(self.source, "source")
        require_source(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """What begins at a token of a request could not be fetched: offer it again."""

    request: str
    from_token: int

    def __post_init__(self) -> None:
        require_request(self.request)
        require_range(self.from_token, "from_token", TOKENS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Everything of a request has arrived: it need not be offered any more."""

    request: str

    def __post_init__(self) -> None:
        require_request(self.request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """A request ended, or what there was of it is offered no more: fetch nothing of it."""

    request: str

    def __post_init__(self) -> None:
        require_request(self.request)


Handover = HandoffManifest | Announce | Resend | Receipt | Withdrawn
"""What the two groups of a handoff say to each other about one request."""

Told = Progress | EventsTold | SnapshotTold | RequestsTold | Counted
"""What a group tells those who route requests."""

Control = Handover | Arrival | Drain | EventsWanted | RequestsWanted | Told

_KINDS: Final[dict[int, type[Control]]] = {
    1: HandoffManifest,
    2: Arrival,
    3: Announce,
    4: Resend,
    5: Receipt,
    6: Withdrawn,
    7: Drain,
    8: Progress,
    9: EventsWanted,
    10: EventsTold,
    11: SnapshotTold,
    12: Counted,
    13: RequestsWanted,
    14: RequestsTold,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def encode(message: Control) -> bytes:
    """Return a control message as bytes. Raises `UsageError` for more than it may have."""
    header = _MAGIC + bytes([VERSION, _NUMBERS[type(message)]])
    body = pack(message)
    size = _BODY_AT + len(body)
    if size > CONTROL_BYTES_MAX:
        raise UsageError(f"a control message of {size} bytes, must be at most {CONTROL_BYTES_MAX}")
    return header + sha256(header + body).digest() + body


def decode(data: bytes) -> Control:
    """Return the control message that `encode` wrote; raises `Refused` for anything else."""
    if len(data) > CONTROL_BYTES_MAX:
        raise Refused(
            Refusal.TOO_LARGE,
            f"a control message of {len(data)} bytes, must be at most {CONTROL_BYTES_MAX}",
        )
    if len(data) < _BODY_AT or data[: len(_MAGIC)] != _MAGIC:
        raise Refused(Refusal.MALFORMED, f"{len(data)} bytes are no control message")
    version, number = data[len(_MAGIC)], data[len(_MAGIC) + 1]
    if version != VERSION:
        raise Refused(
            Refusal.VERSION,
            f"a control message of version {version}, and this process reads {VERSION}; run the same"
            " version of Lockstep in all groups",
        )
    header, body = data[:_HEADER_BYTES], data[_BODY_AT:]
    if sha256(header + body).digest() != data[_HEADER_BYTES:_BODY_AT]:
        raise Refused(
            Refusal.CHECKSUM, f"a control message of {len(data)} bytes is not as it was written"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise Refused(Refusal.UNKNOWN_KIND, f"a control message of the unknown kind {number}")
    return unpack(kind, body)

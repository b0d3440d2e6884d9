"""The directory of groups: who is there, what for, and where.

A group registers for a time, its lease, and renews it while it lives; one that does not is gone when
the lease is over, without anybody's doing. Readers get a list with a version, which changes exactly
when the list does. A directory that cannot be reached raises `StorageError`: whoever has a list goes
on with that, and whoever has a lease tries again until it is over.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgpack

from ....errors import ConfigError
from .router import Role

LEASE_S_MIN, LEASE_S_MAX = 0.1, 86_400.0
RECORD_BYTES_MAX = 64 << 10
"""A registration that takes more is refused, and a longer record is nobody's."""

_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a group says of itself."""

    name: str
    """One name for one group, also after a restart."""
    role: Role
    addresses: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where it is reached, by what for: its requests, its messages, its pages, its KV events."""
    tp_size: int = 1
    fingerprint: str = ""
    """The digest of all that must agree before groups may share pages, and of the pages' layout."""
    start: str = field(default_factory=lambda: secrets.token_hex(8))
    """Drawn by each start of a group: one that was started anew has nothing of what it had, and one
    that is only listed anew has all of it."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a group needs a name to be registered under")
        if self.tp_size < 1:
            raise ConfigError(f"group {self.name!r}: TP size is {self.tp_size}, must be 1 or more")
        size = len(to_record(self))
        if size > RECORD_BYTES_MAX:
            raise ConfigError(
                f"group {self.name!r}: its registration takes {size} bytes, and may take"
                f" {RECORD_BYTES_MAX}"
            )


@dataclass(frozen=True, slots=True)
class Lease:
    """What a registered group renews."""

    name: str
    life: int
    """Larger than any that a directory has given before; the life of the group's KV events."""


@dataclass(frozen=True, slots=True)
class Member:
    """A group that is there."""

    registration: Registration
    life: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All groups that are there, in the order of their names."""

    version: int
    """Larger than that of any other list before; 0 as long as nobody has registered."""
    members: tuple[Member, ...]


class GroupDirectory(Protocol):
    """Where groups are listed. Any thread may call; a call waits for no other group."""

    def open(self) -> None:
        """Connect. Raises `ConfigError` if there is nothing to connect to."""
        ...

    def register(self, registration: Registration, lease_s: float) -> Lease:
        """List a group for so long. One of the same name gives way: its lease is over at once."""
        ...

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Let a lease last so long from now on; False if it is over, so that one registers anew."""
        ...

    def leave(self, lease: Lease) -> None:
        """Take a group off the list, unless its lease is over anyway."""
        ...

    def groups(self) -> Listing:
        """Return the groups whose leases are not over."""
        ...

    def close(self) -> None:
        """Disconnect; what is registered stays until its lease is over."""
        ...


def require_lease(lease_s: float) -> None:
    """Raise `ConfigError` for a lease that nobody could renew in time, or that never ends."""
    # Written so that it refuses what is not a number, too.
    if not LEASE_S_MIN <= lease_s <= LEASE_S_MAX:
        raise ConfigError(f"lease_s is {lease_s}, must be from {LEASE_S_MIN} to {LEASE_S_MAX:g}")


def to_record(registration: Registration) -> bytes:
    """Return a registration as msgpack."""
    addresses = dict(registration.addresses)
    row = [
        _FORMAT,
        registration.name,
        registration.role.value,
        addresses,
        registration.tp_size,
        registration.fingerprint,
        registration.start,
    ]
    return msgpack.packb(row)


def from_record(record: bytes) -> Registration | None:
    """Return the registration that a record holds; None if it makes no sense."""
    if len(record) > RECORD_BYTES_MAX:
        return None
    try:
        row: object = msgpack.unpackb(record)
    except (ValueError, msgpack.UnpackException, RecursionError):
        return None
    parts = cast("list[object]", row) if isinstance(row, list) else []
    if len(parts) != 7 or parts[0] != _FORMAT:
        return None
    name, role, rows, tp_size, fingerprint, start = parts[1:]
    if not isinstance(name, str) or not isinstance(fingerprint, str) or not name:
        return None
    if not isinstance(start, str):
        return None
    if not isinstance(role, str) or role not in set(Role):
        return None
    if not isinstance(tp_size, int) or tp_size < 1:
        return None
    addresses = cast("dict[object, object]", rows) if isinstance(rows, dict) else {None: None}
    texts = {what: where for what, where in addresses.items() if isinstance(what, str)}
    known = {what: where for what, where in texts.items() if isinstance(where, str)}
    if len(known) < len(addresses):
        return None
    return Registration(
        name=name,
        role=Role(role),
        addresses=known,
        tp_size=tp_size,
        fingerprint=fingerprint,
        start=start,
    )

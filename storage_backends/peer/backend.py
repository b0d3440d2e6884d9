"""`peer://host:port?secret=S`: reads pages from the host memory of another group's ranks.

`host:port` is the page server of one rank (`ranks/page_server/page_server`), which lists the other
ranks. The engine of the serving group decides which pages can be read, and until when. This store is
read-only and cannot list or remove. A corrupt page is CORRUPT at every read.

- `secret`: the secret of the serving group; required unless the rank is on this host
- `connect_s`: timeout of a connection attempt in seconds, default 5
- `inflight_bytes`: maximum bytes requested from one rank at a time, default 64 MiB
- `allow_sources`: comma-separated networks and host names that the rank must belong to
- `transfer`: `tcp` (default) reads pages over the connection. `mooncake` reads them with Mooncake's
  transfer engine if the serving group has one, too
- `protocol` (`tcp` or `rdma`), `device` (RDMA devices), `insists` (1: never read pages over the
  connection): options for `transfer=mooncake`

A call sends requests to all ranks concerned, over one connection each. Bytes go directly into the
caller's buffers and are verified there. If a read is abandoned early, its connection stays usable, and
late bytes are discarded. A broken connection fails its requests, and the next call reconnects. A rank
that does not answer makes each call wait until its deadline, which `breaker+` avoids. A transfer engine
reads into staging memory of this process (`one_sided`), so a call returns at its deadline even if the
engine still reads.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from msgspec import Meta

from ...errors import ConfigError, UsageError
from ...page_format.object_name import ObjectName
from ...ranks.protocol.allowed_sources import AllowedSources
from ...ranks.protocol.host_port import split_address
from ...ranks.protocol.transfer_engine_settings import TransferEngineSettings, TransferSettings
from ..base import Capabilities, Read, ReadOutcome, StoredObject, Write, WriteOutcome
from ..uri import StoreUri
from .calls import look_up, read_objects
from .group import PeerGroup


@dataclass(frozen=True, kw_only=True)
class PeerOptions(TransferSettings):
    """The options of a `peer://` URI."""

    secret: str = field(default="", repr=False)
    connect_s: Annotated[float, Meta(ge=0.01, le=600)] = 5.0
    inflight_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 64 << 20
    allow_sources: str = ""
    """Networks and host names that the rank must belong to, comma-separated, in the format of `Peers`.
    """


class PeerBackend:
    """A read-only `StorageBackend` for the pages in the host memory of another group's ranks."""

    def __init__(
        self,
        address: str,
        secret: str = "",
        *,
        text: str = "",
        connect_s: float = PeerOptions.connect_s,
        inflight_bytes: int = PeerOptions.inflight_bytes,
        engine: TransferEngineSettings | None = None,
        allowed: AllowedSources | None = None,
    ) -> None:
        """`address` is one rank's host:port; `text` is the store's name in error messages."""
        self._text = text or f"peer://{address}"
        self._make_group = partial(
            PeerGroup,
            address,
            secret,
            self._text,
            connect_s=connect_s,
            inflight_bytes=inflight_bytes,
            engine=engine,
            allowed=allowed or AllowedSources(),
        )
        self._group: PeerGroup | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(writes=False)

    async def open(self, memory: Sequence[memoryview] = ()) -> None:  # noqa: ARG002 - any memory will do.
        """Connect to the rank in the URI; raises `ConfigError` if that is impossible."""
        group = self._make_group()
        try:
            await group.enter()
        except BaseException:
            await group.close()
            raise
        self._group = group

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Return for each name whether the responsible rank would send the object now."""
        if self._group is None or not names or time.monotonic() >= deadline:
            return [False] * len(names)
        return await look_up(self._group, names, deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """Read the objects into their buffers."""
        if self._group is None or not reads:
            return [ReadOutcome.FAILED] * len(reads)
        return await read_objects(self._group, reads, deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """Return FAILED for each object, because the pages belong to another group."""
        late = self._group is not None and time.monotonic() >= deadline
        outcome = WriteOutcome.TIMED_OUT if late else WriteOutcome.FAILED
        return [outcome] * len(writes)

    async def remove(
        self,
        names: Sequence[ObjectName],
        *,
        deadline: float,  # noqa: ARG002 - see `StorageBackend`.
    ) -> list[bool]:
        """Return False for each name, because only the other group can free its pages."""
        return [False] * len(names)

    def objects(self) -> AsyncIterator[StoredObject]:
        """Raise `UsageError`, because ranks answer only requests for named objects."""
        raise UsageError(
            f"store {self._text!r} cannot be listed: ranks are asked for pages by their names only"
        )

    async def close(self) -> None:
        """Close the connections to all ranks. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            await group.close()


def from_uri(uri: StoreUri) -> PeerBackend:
    """Return the backend of a `peer://` URI."""
    try:
        split_address(uri.host)
    except ConfigError:
        raise ConfigError(
            f"store {uri.text!r} must name a rank as peer://host:port, and an IPv6 address as"
            " peer://[address]:port"
        ) from None
    if uri.path not in ("", "/"):
        raise ConfigError(f"store {uri.text!r} has a path; write peer://host:port")
    options = uri.read(PeerOptions)
    return PeerBackend(
        uri.host,
        options.secret,
        text=uri.text,
        connect_s=options.connect_s,
        inflight_bytes=options.inflight_bytes,
        engine=options.engine,
        allowed=AllowedSources([each for each in options.allow_sources.split(",") if each]),
    )

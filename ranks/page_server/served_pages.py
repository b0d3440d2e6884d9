"""One rank's host pages as objects: what readers are told and sent of those that are offered."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from ...errors import InternalError, StorageError
from ...page_format.object_header import HEADER_BYTES, encode_header, part_checksums
from ...page_format.object_name import MARK_POOL, ObjectName, name_digest
from ...page_format.object_shape import ObjectShape, Plan, part_table
from ...storage_backends.peer.wire import LocateRequest, LookupRequest, ReadRequest, State
from ..executor.storage_transfers import RankObjects
from .offers import HostPage, Offer, Offers

_FORMS_MAX: Final = 64
"""Choices of parts that readers ask for: those of their TP size and columns, so a few."""
_UNSOUND: Final = bytes(HEADER_BYTES)
"""A header that no reader accepts."""


class Begun(NamedTuple):
    """One object that is to be sent, and the operation that holds its page for so long."""

    state: State
    header: Callable[[], bytes]
    """Returns the object's header, which may take a while: whoever reads first pays for checksums."""
    page: memoryview
    wanted: Sequence[memoryview]
    """The parts of the page that are wanted, in order."""
    operation: Offer

    @property
    def nbytes(self) -> int:
        """How long the header and what is wanted are together."""
        return HEADER_BYTES + sum(map(len, self.wanted))


class Sent(NamedTuple):
    """How much was sent of a rank's pages, or begun to be."""

    objects: int = 0
    by_engine: int = 0
    """How many of the objects were left to readers' engines to read."""


class ServedPages:
    """The offered pages of one rank.

    An object is sent as any store would have it: the ordinary header, and the payload that the page
    is. The checksums of its parts are computed when it is first read, and kept, because hashing when it
    is offered would slow down the engine's step. They count only if the slot's generation is still that
    of the offer afterwards, so that they are never another page's. Readers find what changes later.
    """

    def __init__(self, objects: RankObjects, offers: Offers, *, by_engine: bool) -> None:
        self.by_engine = by_engine
        """Whether a transfer engine reads pages."""
        self._namespace = objects.namespace
        self._mark = objects.shardings.mark
        self._offers = offers
        layouts = {name: pool.layout for name, pool in objects.pools.items()}
        self._shards = {name: layout.name for name, layout in layouts.items()}
        self._shapes = {name: layout.shape for name, layout in layouts.items()}
        self._tables = {name: part_table(shape.parts) for name, shape in self._shapes.items()}
        self._plans: dict[tuple[str, bytes], Plan | None] = {}
        self.sent = Sent()

    @property
    def shards(self) -> tuple[tuple[str, str], ...]:
        """Of each pool, the shard's part of the objects' names; and the group's mark."""
        return (*self._shards.items(), (MARK_POOL, self._mark.shard))

    def lookup_reply(self, ask: LookupRequest) -> bytes:
        """Return one byte for each key: 1 if the object can be read now."""
        if (ask.pool, ask.shard) == (MARK_POOL, self._mark.shard):
            return bytes([key == self._mark.key for key in ask.keys])
        if self._shards.get(ask.pool) != ask.shard:
            return bytes(len(ask.keys))
        return bytes([self._offers.has((ask.pool, key)) for key in ask.keys])

    def begin(self, fetch: ReadRequest | LocateRequest, key: str) -> Begun | None:
        """Begin to send what a fetch wants of an object; None if that is not offered.

        `end` must follow for its operation. Raises `StorageError` for nonsense.
        """
        if self._shards.get(fetch.pool) != fetch.shard:
            return None
        plan = self._plan(fetch)
        found = self._offers.begin((fetch.pool, key))
        if found is None:
            return None
        page, operation = found
        runs = () if plan is None else plan.runs
        view = page.lease.view
        wanted = [view[run.offset : run.offset + run.nbytes] for run in runs]
        state = State.BARE if plan is None else State.WHOLE
        header = partial(self._header_of, fetch.pool, key, page)
        by_engine = self.sent.by_engine + isinstance(fetch, LocateRequest)
        self.sent = Sent(self.sent.objects + 1, by_engine)
        return Begun(state, header, view, wanted, operation)

    def end(self, operation: Offer) -> None:
        """Note that the send of an object has ended that this operation holds."""
        self._offers.end(operation)

    def _header_of(self, pool: str, key: str, page: HostPage) -> bytes:
        if page.header is None:
            header = self._header(pool, key, page)
            page.header = header if page.lease.is_current else _UNSOUND
        return page.header

    def _plan(self, fetch: ReadRequest | LocateRequest) -> Plan | None:
        """Return where in a page the wanted parts lie; None if it does not have them."""
        form = (fetch.pool, fetch.table + fetch.held)
        if form not in self._plans:
            if len(self._plans) >= _FORMS_MAX:
                self._plans.clear()
            self._plans[form] = self._make_plan(fetch)
        return self._plans[form]

    def _make_plan(self, fetch: ReadRequest | LocateRequest) -> Plan | None:
        ours = self._shapes[fetch.pool]
        if fetch.table != self._tables[fetch.pool]:
            return None
        try:
            wanted = ObjectShape(ours.parts, tuple(fetch.held))
        except InternalError as error:
            raise StorageError(f"it wants parts that cannot be: {error}") from None
        return None if wanted.lacks(ours.present) else wanted.plan(ours.present)

    def _header(self, pool: str, key: str, page: HostPage) -> bytes:
        shape = self._shapes[pool]
        name = ObjectName(self._namespace, key, pool, self._shards[pool])
        digest = name_digest(name)
        assert digest is not None
        plan = shape.plan(shape.present)
        checksums = part_checksums(plan.sizes, [page.lease.view])
        return encode_header(name, digest, shape.present, plan, checksums)

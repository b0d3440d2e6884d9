"""A group that serves a trace's prompts one after the other: a real replica whose I/O is instant.

Every order completes at once on every rank, so its verdict can be derived from the order itself. No
ballots, executors or page contents are needed. The results depend only on the prompts and the settings.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from ...coordinator.expectations import Expectation, Forgotten, Queued, SlotAssigned
from ...coordinator.operation import Phase, Queue
from ...coordinator.verdict import PrefetchArrived, PrefetchFound, SlotVerdict, Verdict, Watermark
from ...ranks.executor.restorable import restorable
from ...ranks.protocol.answers import Admission
from ...ranks.protocol.effects import Effects
from ...ranks.protocol.orders import (
    CopyToDevice,
    CopyToHost,
    Fetch,
    LookUp,
    ObjectTransfer,
    Order,
    Put,
)
from ...ranks.protocol.replica_config import ReplicaConfig
from ...ranks.replica.operations.requests import LoadState
from ...ranks.replica.replica import Replica
from .key_store import KeyStore
from .prompts import ID_BYTES, PagedPrompt

_NAMESPACE = ""
_by_operation = attrgetter("operation")
_TRIES_MAX = 4
"""Maximum number of attempts to admit a request. A refused attempt may start backups of evicted pages,
after which the next attempt may succeed."""


class Served(NamedTuple):
    """How many pages of a prompt came from each tier."""

    device: int
    host: int
    storage: int


class InstantGroup:
    """A group as one replica with instant I/O; a page has one token, the page's id (`PagedPrompt`)."""

    def __init__(
        self, config: ReplicaConfig, *, chunk_pages: int, store: KeyStore | None = None
    ) -> None:
        """Create the group; prompts are computed in chunks of `chunk_pages`."""
        self.replica = Replica(config)
        self.moved: Counter[tuple[str, str]] = Counter()
        """Number of pages that each rank moved, by direction (`l1_to_l2` and so on) and pool."""
        self._chunk_pages = chunk_pages
        self._device_pages = config.device_pages
        self._store = store
        self._rounds = 0
        self._names = 0
        self._lengths: dict[int, Sequence[int]] = {}
        """For each prefetch in flight: the prefix lengths, in pages, that the store can restore."""

    def serve(self, prompt: PagedPrompt) -> Served | None:
        """Compute a prompt; return how much of it was cached, or None if the device is too small."""
        if prompt.reserved > self._device_pages:
            return None
        replica, name = self.replica, str(self._names)
        self._names += 1
        usable = prompt.ids[: prompt.usable * ID_BYTES]
        if self._store is not None:
            self._follow(replica.prefetch(name, _NAMESPACE, usable)[1])
        admission = self._admit(name, usable, prompt.reserved)
        served = None
        if admission is not None and self._compute(name, prompt, admission):
            served = Served(
                admission.device_tokens, admission.host_tokens, admission.storage_tokens
            )
        if replica.knows(name):
            self._follow(replica.release(name)[1])
        return served

    def _admit(self, name: str, usable: bytes, pages: int) -> Admission | None:
        """Admit a request with pages for its cached prefix and first chunk; None if refused."""
        for _ in range(_TRIES_MAX):
            reserved = pages
            if pages > self._chunk_pages:
                cached = self.replica.match(_NAMESPACE, usable).host_tokens
                reserved = min(pages, cached + self._chunk_pages)
            answer, effects = self.replica.load_back(name, _NAMESPACE, usable, reserved)
            self._follow(effects)
            if isinstance(answer, Admission):
                return answer
        return None

    def _compute(self, name: str, prompt: PagedPrompt, admission: Admission) -> bool:
        """Compute a request's uncached pages in chunks; return False if too few pages are free."""
        replica, pages = self.replica, prompt.pages
        if replica.load_state(name) is not LoadState.READY:
            return False
        chunks = range(admission.cached_tokens + self._chunk_pages, pages, self._chunk_pages)
        ends = sorted({*chunks, *admission.checkpoints, pages})
        for end in ends:
            final = end == pages
            # If the prompt is a single chunk, all its pages were reserved at admission.
            if prompt.reserved > self._chunk_pages:
                fits, effects = replica.extend(name, prompt.reserved if final else end)
                self._follow(effects)
                if not fits:
                    return False
            inserted = replica.insert(name, prompt.ids[: end * ID_BYTES], final=final)
            self._follow(inserted[1])
        return True

    def _follow(self, effects: Effects) -> None:
        """Complete all orders of `effects` and apply their verdicts, until nothing is in flight."""
        while effects.expectations or effects.orders:
            prefetch_slots = self._prefetch_slots(effects.expectations, effects.orders)
            watermarks = _watermarks(effects.expectations)
            self._carry_out(effects.orders)
            if not (watermarks or prefetch_slots):
                return
            self._rounds += 1
            effects = self.replica.apply(
                Verdict(
                    round=self._rounds,
                    time_ms=self._rounds,
                    watermarks=watermarks,
                    prefetch_slots=prefetch_slots,
                )
            )

    def _prefetch_slots(
        self, expectations: Iterable[Expectation], orders: Iterable[Order]
    ) -> tuple[SlotVerdict, ...]:
        """Return what a verdict has for each prefetch slot: the result of its lookup or of its read."""
        fetches: dict[int, Fetch] = {}
        for order in orders:
            if isinstance(order, LookUp):
                self._lengths[order.operation] = self._restorable(order)
            elif isinstance(order, Fetch):
                fetches[order.operation] = order
        prefetch_slots: list[SlotVerdict] = []
        for each in expectations:
            if isinstance(each, Forgotten):
                self._lengths.pop(each.operation, None)
            elif not isinstance(each, SlotAssigned):
                continue
            elif each.phase is Phase.TRANSFER:
                prefetch_slots.append(self._read(fetches[each.operation]))
            else:
                lengths = self._lengths[each.operation]
                pages = max((one for one in lengths if one <= each.bound), default=0)
                prefetch_slots.append(
                    PrefetchFound(each.operation, each.bound, pages, 0, pages, None)
                )
        return tuple(sorted(prefetch_slots, key=_by_operation))

    def _restorable(self, order: LookUp) -> Sequence[int]:
        """Return the prefix lengths, in pages, that the store can restore for a lookup."""
        assert self._store is not None
        has = self._store.has
        present = [[has(need.pool, key) for key in need.keys] for need in order.needs]
        longest, lengths = restorable(order, present)
        return lengths or range(longest + 1)

    def _read(self, order: Fetch) -> PrefetchArrived:
        assert self._store is not None
        landed = 0
        for transfer in order.transfers:
            there = self._store.read(transfer.pool, transfer.keys)
            landed += there
            if there < len(transfer.keys):
                return PrefetchArrived(order.operation, landed, landed, 0, None)
        return PrefetchArrived(order.operation, landed, None, None, None)

    def _carry_out(self, orders: Iterable[Order]) -> None:
        """Count the pages that orders move, and write persisted pages to the store."""
        for order in orders:
            if isinstance(order, CopyToHost | CopyToDevice):
                way = "l1_to_l2" if isinstance(order, CopyToHost) else "l2_to_l1"
                for copy in order.transfers:
                    self.moved[way, copy.pool] += len(copy.sources)
            elif isinstance(order, Fetch):
                self._count_objects("l3_to_l2", order.transfers)
            elif isinstance(order, Put):
                assert self._store is not None
                self._count_objects(
                    "l2_to_l3", [each for each in order.transfers if not each.stored]
                )
                for each in order.transfers:
                    self._store.write(each.pool, each.keys)

    def _count_objects(self, way: str, transfers: Iterable[ObjectTransfer]) -> None:
        for each in transfers:
            self.moved[way, each.pool] += len(each.pages)


def _watermarks(expectations: Iterable[Expectation]) -> tuple[Watermark, ...]:
    """Return watermarks that report all queued operations as completed on every rank."""
    through: dict[Queue, int] = {}
    for each in expectations:
        if isinstance(each, Queued):
            through[each.queue] = max(each.queue_index, through.get(each.queue, 0))
    return tuple(
        Watermark(queue=queue, ended_through=through[queue], first_failed=None, failed_rank=None)
        for queue in sorted(through)
    )

"""Predicts which tokens a match must find on the device, without using the replica.

If all pages that were ever written to a device pool fit in the pool, nothing can have been evicted. As
long as a request is admitted, the prefix that it shares with the tree cannot be evicted either.
Recurrent states are an exception: each request works on a copy, so the state in the tree may be
evicted.
"""

from collections.abc import Collection

from ...ranks.group.member.inspection import Inspection
from ...ranks.protocol.answers import Admission
from ...ranks.replica.tree.matching import Match
from ...ranks.replica.tree.node import DEVICE
from ..world.contents import ExpectedContents
from ..world.faults import FAULT_PROFILES
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest
from ..world.violated import not_kept
from ..world.world import World


class Published:
    """Records the prefixes that requests published, or restored to the device, in one epoch."""

    def __init__(self, world: World, contents: ExpectedContents) -> None:
        self._world = world
        self._page = world.page_tokens
        self._contents = contents
        self._pages: set[int] = set()
        """Contents of all published full-attention pages."""
        self._ends: set[int] = set()
        """Contents of the last page of each published prefix. Their number is the maximum number of
        recurrent states in the tree."""
        self._loaded = 0
        """Number of full-attention pages that load backs started to fill; failed load backs count, too.
        """
        self._loads = 0
        """Number of load backs; each may have filled one state slot."""
        self._requests = world.requests_max
        """Highest number of requests in flight so far, without finished requests that only serve their
        pages."""
        controlled = FAULT_PROFILES[world.fault_profile].controlled
        self._overflowed = bool(world.config.limits or controlled)
        """Whether the device may have evicted pages, because it was full, because a namespace has
        limits, or because an operator dropped pages."""

    def add(self, request: EngineRequest, length: int) -> None:
        """Record that a request now shares its first `length` tokens with the prefix tree."""
        tokens = request.head(length)
        pages = [
            self._content(request.namespace, tokens, count)
            for count in range(1, length // self._page + 1)
        ]
        self._pages.update(pages)
        self._ends.update(pages[-1:])

    def loading(self, answer: Admission) -> None:
        """Record how many device pages an admission's load back is going to fill."""
        self._loaded += (answer.host_tokens + answer.storage_tokens) // self._page
        self._loads += answer.operation is not None

    def note_room(self, requests: Collection[EngineRequest], seen: Inspection) -> None:
        """Record that the device may have evicted pages, unless all pages written so far fit on it.

        The pages of operations in flight are counted, too, because a retraction owns its request's
        partial page until it ends.
        """
        self._requests = max(self._requests, len(requests))
        held = sum(-(-request.room // self._page) for request in requests)
        held += sum(len(each.owned_pages(DEVICE, 0)) for each in seen.in_flight.values())
        if len(self._pages) + self._loaded + held > self._world.device_pages:
            self._overflowed = True

    def check_match(self, found: Match, namespace: str, tokens: bytes) -> None:
        """Raise if a match does not find published pages although nothing can have evicted them.

        Checks models with full attention only. In other models a match may be shorter: pages behind a
        window are freed, and a state is published at some positions only.
        """
        if self._world.config.components or self._overflowed:
            return
        whole = len(tokens) // TOKEN_BYTES // self._page
        count = 0
        while count < whole and self._content(namespace, tokens, count + 1) in self._pages:
            count += 1
        if found.device_tokens < count * self._page:
            why = "were published and never had to leave the device"
            raise not_kept(count * self._page, why, found.device_tokens)

    def check_shared(self, found: Match, request: EngineRequest, seen: Inspection) -> None:
        """Raise if a match misses the prefix that an admitted request has just published or restored.

        In a model with recurrent state, nothing is checked unless the prefix ends at a checkpoint and
        the state pool has enough slots. A hit on any tier then suffices, because a state in host memory
        need not be published again. The slots of operations in flight do not count as free, because a
        failed retraction keeps its slot while a copy accesses the slot.
        """
        shared, there = request.shared, found.device_tokens
        if self._world.checkpoint_tokens is not None:
            if not self._keeps_state(request, seen):
                return
            there = found.host_tokens
        if there < shared:
            raise not_kept(shared, f"are shared by request {request.name}", there)

    def _keeps_state(self, request: EngineRequest, seen: Inspection) -> bool:
        """Return whether the tree must hold the recurrent state after the request's last token."""
        every, shared = self._world.checkpoint_tokens, request.shared
        assert every is not None
        used = len(self._ends) + self._loads + self._requests
        slots = min(
            seen.prefixes.allocator.pools[DEVICE][each.index].capacity
            - sum(len(o.owned_pages(DEVICE, each.index)) for o in seen.in_flight.values())
            for each in seen.prefixes.components
            if not each.per_page
        )
        is_checkpoint = not shared % every or shared in request.checkpoints
        return request.computed == shared and is_checkpoint and used <= slots

    def _content(self, namespace: str, tokens: bytes, pages: int) -> int:
        return self._contents.of(namespace, tokens[: pages * self._page * TOKEN_BYTES])

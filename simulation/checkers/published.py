"""What a match must find on the device, as far as that is known outside of the replica.

Nothing has to leave a pool that has always had room for everything that was put into it. The shared
prefix of an admitted request stays for as long as the request does. A recurrent state is the exception:
a request works on a copy of its own, so the state in the tree may leave.
"""

from collections.abc import Collection

from ...ranks.group.member.inspection import Inspection
from ...ranks.protocol.answers import Admission
from ...ranks.replica.tree.matching import Match
from ...ranks.replica.tree.node import DEVICE
from ..world.contents import Contents
from ..world.faults import FAULT_PROFILES
from ..world.prompts import TOKEN_BYTES
from ..world.request import EngineRequest
from ..world.violated import not_kept
from ..world.world import World


class Published:
    """The prefixes that were published, or restored to the device, in one epoch."""

    def __init__(self, world: World, contents: Contents) -> None:
        self._world = world
        self._page = world.page_tokens
        self._contents = contents
        self._pages: set[int] = set()
        """Contents of full attention's pages."""
        self._ends: set[int] = set()
        """Contents of the last of them, of each time: at most so many states there are."""
        self._loaded = 0
        """Pages of full attention that load backs were to fill, whatever became of them."""
        self._loads = 0
        """Load backs; each may have filled one slot with a state."""
        self._requests = world.requests_max
        """The most requests at a time; those that are only served come on top."""
        controlled = FAULT_PROFILES[world.fault_profile].controlled
        self._overflowed = bool(world.config.limits or controlled)
        """The device may have been full, or limits or an operator have let published pages leave."""

    def add(self, request: EngineRequest, length: int) -> None:
        """Note that the request shares its first `length` tokens with the tree."""
        tokens = request.head(length)
        pages = [
            self._content(request.namespace, tokens, count)
            for count in range(1, length // self._page + 1)
        ]
        self._pages.update(pages)
        self._ends.update(pages[-1:])

    def loading(self, answer: Admission) -> None:
        """Note how much a load back is to fill."""
        self._loaded += (answer.host_tokens + answer.storage_tokens) // self._page
        self._loads += answer.operation is not None

    def note_room(self, requests: Collection[EngineRequest], seen: Inspection) -> None:
        """Note whether the device may have been full by now.

        A retract in flight still has the begun page of its request.
        """
        self._requests = max(self._requests, len(requests))
        held = sum(-(-request.room // self._page) for request in requests)
        held += sum(len(each.owned_pages(DEVICE, 0)) for each in seen.in_flight.values())
        if len(self._pages) + self._loaded + held > self._world.device_pages:
            self._overflowed = True

    def check_match(self, found: Match, namespace: str, tokens: bytes) -> None:
        """With full attention alone, a match finds what was published and never had to leave.

        In other models a match can be shorter: a window leaves the pages behind that it no longer
        reaches, and a state is published at some positions only.
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
        """A match finds what an admitted request shares, right after that was published or restored.

        In a model with a recurrent state this holds only at a checkpoint for which the pool has room,
        and there on any tier: a state that host memory has need not be published again. Operations in
        flight take room too: a retract that failed keeps its slot as long as a copy touches it.
        """
        shared, there = request.shared, found.device_tokens
        if self._world.checkpoint_tokens is not None:
            if not self._keeps_state(request, seen):
                return
            there = found.host_tokens
        if there < shared:
            raise not_kept(shared, f"are shared by request {request.name}", there)

    def _keeps_state(self, request: EngineRequest, seen: Inspection) -> bool:
        """Say whether the tree must have the state that the request has computed last."""
        every, shared = self._world.checkpoint_tokens, request.shared
        assert every is not None
        # Each request works on a slot of its own.
        used = len(self._ends) + self._loads + self._requests
        slots = min(
            seen.prefixes.residence.pools[DEVICE][each.index].capacity
            - sum(len(o.owned_pages(DEVICE, each.index)) for o in seen.in_flight.values())
            for each in seen.prefixes.components
            if not each.per_page
        )
        is_checkpoint = not shared % every or shared in request.checkpoints
        return request.computed == shared and is_checkpoint and used <= slots

    def _content(self, namespace: str, tokens: bytes, pages: int) -> int:
        return self._contents.of(namespace, tokens[: pages * self._page * TOKEN_BYTES])

"""The host tier of several SGLang ranks: real caches, executors with scripted I/O, no radix tree."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lockstep.integrations.sglang.identity.kv_identity import Update
from lockstep.integrations.sglang.namespaces import Namespaces
from lockstep.integrations.sglang.pending_tree_backups import PendingTreeBackups
from lockstep.integrations.sglang.pools.slots import AttentionSlots
from lockstep.integrations.sglang.running import RunningRequests, token_bytes
from lockstep.integrations.sglang.waiting import Load, Waiting, WaitingRequests
from lockstep.integrations.sglang.weights import WeightsVersions
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.config import WritePolicy
from lockstep.ranks.protocol.orders import CopyToHost, Direction, Fence
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.sglang.sent import Sent, SentItems
from tests.kit.sglang.slot_allocators import SlotAllocator

T = TypeVar("T")

SLOTS = 40 * PAGE_TOKENS
INITIAL = "files 0"
"""Name of the weights that an engine serves first."""


@dataclass
class KnownAdapters:
    """Maps the adapter ids that SGLang assigns to the identities of the adapters' weights."""

    names: dict[str, str | None] = field(default_factory=dict[str, str | None])

    def identify(self, lora_id: str) -> str | None:
        """Return the identity of an adapter's weights, or None if it is unknown."""
        return self.names.get(lora_id)

    def look(self) -> Collection[str | None]:
        """Return the identities of all adapters, as the test has set them."""
        return self.names.values()


class RankBelow:
    """The host tier of one SGLang rank, with slot numbers that no other rank uses."""

    def __init__(self, host: HostCache, policy: WritePolicy, threshold_tokens: int) -> None:
        self.host, pages = host, SLOTS // PAGE_TOKENS
        allocator = SlotAllocator(pages, PAGE_TOKENS, first=host.rank * pages)
        self.slots = AttentionSlots(allocator, PAGE_TOKENS)
        self.unlocked: list[Any] = []
        """The lock handles that were released, in order."""
        self.waiting = WaitingRequests(host, threshold_tokens)
        self.backups = PendingTreeBackups(host, self.unlocked.append, SLOTS)
        self.adapters = KnownAdapters()
        self.namespaces = Namespaces(host, self.adapters, page_tokens=PAGE_TOKENS)
        self.running = RunningRequests(self.backups, self.slots, policy, self.namespaces.names)
        self.weights = WeightsVersions(host, self.namespaces, INITIAL, named_by_version)

    def rows(self, tokens: int, first: int = 0) -> torch.Tensor:
        start = self.host.rank * SLOTS + first
        return torch.arange(start, start + tokens)

    def arrive(
        self,
        handle: str,
        tokens: Sequence[int],
        device_tokens: int = 0,
        *,
        items: SentItems | None = None,
        held_by: str | None = None,
    ) -> None:
        """Add a waiting request that uses the current weights; `tokens` fill full pages."""
        request = Sent(handle, tokens, multimodal_inputs=items)
        namespace, prompt = self.namespaces.of(request), self.namespaces.items_of(request)
        assert namespace is not None
        assert prompt is not None
        data = token_bytes(request.origin_input_ids, len(tokens), prompt)
        waiting = Waiting(data, namespace, prompt=prompt, held_by=held_by)
        self.waiting.arrive(handle, waiting, device_tokens)

    def forget(self, handle: str) -> bool:
        """Remove a waiting request; return whether there was one."""
        return self.waiting.forget(handle) is not None

    def known(self, handle: str) -> Waiting:
        waiting = self.waiting.get(handle)
        assert waiting is not None
        return waiting

    def waits(self, handle: str) -> bool:
        """Return True if a request must wait for loads of other requests."""
        return self.waiting.waits_for_others(self.known(handle))

    def after(self, handle: str, queue: Sequence[str]) -> list[str]:
        """Return the names of the waiting requests that SGLang visits after the request `handle`.

        SGLang visits requests in the order of `queue`.
        """
        return [each.name for each in self.waiting.after(self.known(handle), queue)]

    def hit(self, handle: str, device_tokens: int = 0) -> int:
        """Return how many tokens can be loaded from the host for a waiting request."""
        return self.waiting.hit(self.known(handle), device_tokens)

    def load(self, handle: str, device_tokens: int = 0, tokens: int | None = None) -> None:
        """Start to load a waiting request's matched tokens, or the first `tokens` of them."""
        waiting = self.known(handle)
        count = waiting.prefix - device_tokens if tokens is None else tokens
        reserved = self.slots.reserve(count, 0, lambda full, window, states: None)
        assert reserved is not None
        anchor = f"anchor of {handle}"
        load = Load(device_tokens, device_tokens + count, reserved, anchor)
        self.waiting.begin_load(waiting, load)
        self.host.begin_loads()

    def ended(self) -> list[tuple[str, bool]]:
        """Return the finished loads: each request's name, and whether its load succeeded."""
        return [(waiting.name, good) for waiting, _, good in self.waiting.ended()]

    def compute(
        self,
        handle: str,
        tokens: Sequence[int],
        *,
        items: SentItems | None = None,
        shared: int = 0,
        backed_up: int | None = None,
    ) -> None:
        """Admit a request, compute its tokens, and back up the first `backed_up` of them.

        By default all tokens are backed up.
        """
        if handle not in self.running:
            self.arrive(handle, tokens, items=items)
            waiting = self.waiting.forget(handle)
            assert waiting is not None
            waiting.prefix = shared
            self.running.admitted(handle, waiting)
        count = len(tokens) if backed_up is None else backed_up
        self.running.computed(
            Sent(handle, tokens),
            count,
            lambda kept: (f"lock of {handle} at {kept}", self.rows(kept), None),
        )
        self.host.begin_backups()


def named_by_version(update: Update) -> str | None:
    """Return the name of the new weights: the version that the user gave, or None."""
    return update.version


class RanksBelow:
    """The host tiers of all ranks, which get the same commands."""

    def __init__(
        self,
        ranks: int = 2,
        *,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        threshold_tokens: int = 0,
        **settings: Any,
    ) -> None:
        self.ranks = HostRanksInTurn(ranks, **settings)
        self.below = [RankBelow(host, policy, threshold_tokens) for host in self.ranks.caches]

    def every(self, command: Callable[[RankBelow], T]) -> T:
        """Run a command on every rank; return the answer, which must be equal on all."""
        answers = [command(each) for each in self.below]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def publish(self, handle: str, tokens: Sequence[int], items: SentItems | None = None) -> None:
        """Compute a request under the current weights, and back up the request's pages to the host."""
        self.every(lambda rank: rank.compute(handle, tokens, items=items))
        self.ranks.settle()
        self.every(lambda rank: rank.backups.collect())
        self.every(lambda rank: rank.running.ended(handle))

    def check_copied_before_it_went_on(self) -> None:
        """Check that each rank started one copy to the host, and then waited for it in a fence."""
        for executor in self.ranks.executors:
            [copy], [fence] = executor.given(CopyToHost), executor.given(Fence)
            assert executor.begun == [Direction.TO_HOST]
            assert executor.orders == [copy, fence]
            assert fence.operations == (copy.operation,)

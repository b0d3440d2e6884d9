"""Requests that wait for admission, with their prefetches and loads.

A request is registered at its first match and forgotten when it is admitted or aborted. Meanwhile
SGLang asks about it repeatedly, on every rank in the same step:

    match       which tokens can be loaded beyond those on the device
    load        starts once the request fits with these tokens; SGLang asks again in a later step
    landed      the loaded tokens are in SGLang's tree, where the next match finds them

Every answer follows from verdicts, so it is the same on every rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.requests import LoadState
from ...ranks.replica.tree.tokens import TOKEN_BYTES
from .engine.contract import Handle, Lock
from .items import TEXT_ALONE, PromptItems
from .pools.slots import Reserved

TOGETHER_STEPS = 3
"""Maximum number of steps that a loaded request waits for loads that started together with its load.

Loads that start together end within a step or two of each other. A rank reports a completed copy in the
next step; at pipeline depth 1 the verdict is applied one step later.
"""

LANDED_FIRST_STEPS = 8
"""Maximum number of steps that other requests wait until a request with a completed load is admitted.
"""

NEVER = -LANDED_FIRST_STEPS


@dataclass(slots=True, eq=False)
class Load:
    """One load of a request's tokens `start` to `end` from host memory to the device."""

    start: int
    end: int
    reserved: Reserved
    anchor: Lock
    """The lock on the tokens before `start`, which are in SGLang's tree."""
    step: int = 0
    """The step in which the load started."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for admission."""

    tokens: bytes
    """Token ids of the prompt's whole pages, as int32."""
    namespace: str
    extra_key: str | None = None
    cache_salt: str | None = None
    name: str = ""
    """The request's name in the replica: unique, equal on every rank (SGLang reuses its request ids).
    """
    prompt: PromptItems = TEXT_ALONE
    room: int = 0
    """Number of device tokens that the request needs in total, including tokens still to be decoded."""
    held_by: str | None = None
    """Name of the backup that must complete before a retracted request is prefetched; None if there is
    none."""
    prefix: int = 0
    """How many of the request's tokens are on the device or loadable, as of the last match."""
    on_device: int = 0
    """How many of the request's tokens are on the device, as of the last match."""
    load: Load | None = None
    """The request's load in flight."""
    landed: tuple[int, int] = (0, 0)
    """Token range (start, end) that this request's loads have brought to the device."""
    landed_at: int = NEVER
    """The step in which the request's last successful load completed."""
    dropped: bool = False
    """Whether the request was admitted or aborted while its load was in flight."""
    unwanted: bool = False
    """Whether to discard the load in flight, because the weights have changed."""

    def __len__(self) -> int:
        """Return the request's number of tokens in whole pages."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class WaitingRequests:
    """Requests that wait for admission, by SGLang's request ids."""

    host: HostCache
    prefetch_threshold_tokens: int
    loaded: int = 0
    """Number of loads that succeeded and were not discarded."""
    loaded_tokens: int = 0
    _known: dict[Handle, Waiting] = field(default_factory=dict[Handle, Waiting])
    _loading: dict[Waiting, Load] = field(default_factory=dict[Waiting, Load])
    """Loads in flight, in the order of their starts, including those of aborted requests."""
    _landed: list[Waiting] = field(default_factory=list[Waiting])
    """Waiting requests whose loads completed within the last `LANDED_FIRST_STEPS` steps."""
    _arrivals: int = 0
    _steps: int = 0

    def get(self, handle: Handle) -> Waiting | None:
        """Return a waiting request, or None if no such request is waiting."""
        return self._known.get(handle)

    def after(self, first: Waiting, handles: Iterable[Handle]) -> list[Waiting]:
        """Return the waiting requests that SGLang visits after `first`.

        These follow the order of `handles`; requests that are not in `handles` come last.
        """
        known = self._known
        visited = {handle: known[handle] for handle in handles if handle in known}
        in_order = list((visited | known).values())
        return in_order[in_order.index(first) + 1 :]

    def arrive(self, handle: Handle, waiting: Waiting, device_tokens: int) -> None:
        """Register a request, and prefetch its tokens from storage unless it must wait for a backup."""
        self._arrivals += 1
        waiting.name = f"r{self._arrivals}"
        self._known[handle] = waiting
        if waiting.held_by is None:
            self._prefetch(waiting, device_tokens)

    def go_on(self, waiting: Waiting, device_tokens: int) -> None:
        """Start the prefetch of a retracted request, because its backup has completed."""
        waiting.held_by = None
        self._prefetch(waiting, device_tokens)

    def is_busy(self, waiting: Waiting) -> bool:
        """Return whether a request cannot be admitted yet because of a prefetch, load or backup."""
        return (
            waiting.load is not None
            or waiting.held_by is not None
            or not self.host.prefetch_done(waiting.name)
        )

    def waits_for_others(self, waiting: Waiting) -> bool:
        """Return whether SGLang should skip a request in this step because of other requests' loads.

        While loads are in flight, other requests would find no room, and SGLang would then stop
        admitting until a request finishes. Loaded tokens should also be used before they are evicted to
        make room for more. A loaded request waits up to `TOGETHER_STEPS` for loads that started
        together with its load, so that one batch computes all of them. Other requests wait up to
        `LANDED_FIRST_STEPS` for its admission.
        """
        if self._has_just_landed(waiting):
            return self._steps - waiting.landed_at < TOGETHER_STEPS and any(
                load.step <= waiting.landed_at and not each.dropped
                for each, load in self._loading.items()
            )
        return bool(self._landed) or any(not each.dropped for each in self._loading)

    def hit(self, waiting: Waiting, device_tokens: int) -> int:
        """Return how many tokens after those on the device can be loaded from host memory."""
        found = self.host.match_host(
            waiting.name, waiting.tokens, waiting.namespace, device_tokens=device_tokens
        )
        waiting.prefix = device_tokens + found
        return found

    def begin_load(self, waiting: Waiting, load: Load) -> None:
        """Start to load the tokens that `hit` reported, into the device slots of `load`."""
        self.host.load(
            waiting.name,
            waiting.tokens[: load.end * TOKEN_BYTES],
            load.reserved.pages,
            device_tokens=load.start,
        )
        load.step = self._steps
        waiting.load = self._loading[waiting] = load

    def ended(self) -> Iterator[tuple[Waiting, Load, bool]]:
        """Yield each load that ended on every rank, and whether its tokens may be used.

        No copy accesses the load's slots any more, so the caller owns them from then on.
        """
        self._steps += 1
        self._landed = [each for each in self._landed if self._has_just_landed(each)]
        for waiting, load in list(self._loading.items()):
            state = self.host.load_state(waiting.name)
            if state is LoadState.LOADING:
                continue
            del self._loading[waiting]
            waiting.load = None
            good = state is LoadState.READY and not waiting.unwanted
            if good:
                self.loaded += 1
                self.loaded_tokens += load.end - load.start
                start = waiting.landed[0] if waiting.landed[1] == load.start else load.start
                waiting.landed, waiting.landed_at = (start, load.end), self._steps
            if waiting.dropped:
                self.host.release(waiting.name)
            elif good and waiting not in self._landed:
                self._landed.append(waiting)
            yield waiting, load, good

    def admitted(self, handle: Handle) -> Waiting | None:
        """Count an admitted request's hit in the statistics, and forget the request."""
        waiting = self._known.get(handle)
        if waiting is not None and len(waiting):
            count = waiting.on_device
            self.host.admit(waiting.name, waiting.tokens, waiting.namespace, device_tokens=count)
        return self.forget(handle)

    def forget(self, handle: Handle) -> Waiting | None:
        """Forget an admitted or aborted request; if a load is in flight, `ended` still yields it."""
        waiting = self._known.pop(handle, None)
        if waiting is None:
            return None
        if waiting in self._landed:
            self._landed.remove(waiting)
        if waiting.load is None:
            self.host.release(waiting.name)
        else:
            waiting.dropped = True
        return waiting

    def forget_all(self) -> None:
        """Forget all waiting requests, and discard the results of their prefetches and loads."""
        for handle in list(self._known):
            self.forget(handle)
        for waiting in self._loading:
            waiting.unwanted = True

    @property
    def loads(self) -> int:
        """Number of loads in flight."""
        return len(self._loading)

    def _has_just_landed(self, waiting: Waiting) -> bool:
        return self._steps - waiting.landed_at < LANDED_FIRST_STEPS

    def _prefetch(self, waiting: Waiting, device_tokens: int) -> None:
        if len(waiting) - device_tokens >= max(1, self.prefetch_threshold_tokens):
            self.host.prefetch(waiting.name, waiting.tokens, waiting.namespace)

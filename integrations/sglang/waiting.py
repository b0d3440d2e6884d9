"""Requests that wait for admission under SGLang, with their prefetches and loads.

A request is registered at its first match and forgotten when it is admitted or aborted. Meanwhile
SGLang asks about it repeatedly, on every rank in the same step:

    match       Lockstep reports which tokens beyond those on the device can be loaded
    load        Lockstep starts to load them when they fit; SGLang asks again in a later step
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
"""Maximum number of steps that a request whose load has completed waits for loads still in flight.

A few steps suffice, because loads that start in the same step end within a step or two of each other. A
rank reports a completed copy in the next step; at pipeline depth 1 the verdict is applied one step
later.
"""

LANDED_FIRST_STEPS = 8
"""Maximum number of steps that other requests wait for the admission of a request whose load has
completed."""

NEVER = -LANDED_FIRST_STEPS


@dataclass(slots=True, eq=False)
class Load:
    """A load of a request's tokens `start` to `end` (exclusive) from host memory to the device."""

    start: int
    end: int
    reserved: Reserved
    anchor: Lock
    """The lock on the request's tokens before `start`; these tokens are in SGLang's tree."""
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
    """The request's name in the replica. It is unique, although SGLang reuses request ids, and equal on
    every rank."""
    prompt: PromptItems = TEXT_ALONE
    room: int = 0
    """Number of device slots that the request needs in total, including those for tokens still to
    be decoded."""
    held_by: str | None = None
    """Name of the backup that must complete before the prefetch of a retracted request starts; None
    without such a backup."""
    prefix: int = 0
    """Number of the request's first tokens that the last match found on the device or in host memory.
    """
    on_device: int = 0
    """Number of the request's first tokens that were on the device at the last match."""
    load: Load | None = None
    """The request's load in flight; None without one."""
    landed: tuple[int, int] = (0, 0)
    """(start, end) of the request's tokens that its completed loads have brought to the device."""
    landed_at: int = NEVER
    """Number of the step in which the request's last successful load completed."""
    dropped: bool = False
    """Whether the request was admitted or aborted while its load was in flight."""
    unwanted: bool = False
    """Whether the result of the load in flight must be discarded, because the weights have changed."""

    def __len__(self) -> int:
        """Return the number of tokens in the request's whole pages."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class WaitingRequests:
    """The requests that wait for admission, by SGLang's request id."""

    host: HostCache
    prefetch_threshold_tokens: int
    loaded: int = 0
    """Number of loads that succeeded and whose result was used."""
    loaded_tokens: int = 0
    _known: dict[Handle, Waiting] = field(default_factory=dict[Handle, Waiting])
    _loading: dict[Waiting, Load] = field(default_factory=dict[Waiting, Load])
    """Loads in flight, in the order in which they started, including loads of aborted requests."""
    _landed: list[Waiting] = field(default_factory=list[Waiting])
    """Waiting requests whose load completed within the last `LANDED_FIRST_STEPS` steps."""
    _arrivals: int = 0
    _steps: int = 0

    def get(self, handle: Handle) -> Waiting | None:
        """Return a waiting request, or None if no such request is waiting."""
        return self._known.get(handle)

    def after(self, first: Waiting, handles: Iterable[Handle]) -> list[Waiting]:
        """Return the waiting requests that SGLang visits after `first`, in the order of visits.

        `handles` gives this order; requests that are not in `handles` are last.
        """
        known = self._known
        visited = {handle: known[handle] for handle in handles if handle in known}
        in_order = list((visited | known).values())
        return in_order[in_order.index(first) + 1 :]

    def arrive(self, handle: Handle, waiting: Waiting, device_tokens: int) -> None:
        """Register a request, and start its prefetch from storage unless it must wait for a backup."""
        self._arrivals += 1
        waiting.name = f"r{self._arrivals}"
        self._known[handle] = waiting
        if waiting.held_by is None:
            self._prefetch(waiting, device_tokens)

    def go_on(self, waiting: Waiting, device_tokens: int) -> None:
        """Start the prefetch of a retracted request after its backup has completed."""
        waiting.held_by = None
        self._prefetch(waiting, device_tokens)

    def is_busy(self, waiting: Waiting) -> bool:
        """Return whether a request cannot be admitted yet, because of its prefetch, load or backup."""
        return (
            waiting.load is not None
            or waiting.held_by is not None
            or not self.host.prefetch_done(waiting.name)
        )

    def waits_for_others(self, waiting: Waiting) -> bool:
        """Return whether other requests' loads should keep a request from admission in this step.

        - A request whose load has completed waits up to `TOGETHER_STEPS` steps for loads that were
          still in flight when it completed, so that one batch computes all of these requests.
        - Other requests wait while loads are in flight, because they would find no free slots, and
          SGLang would then stop admitting until a request finishes.
        - After a load, other requests wait until the loaded request is admitted, but at most
          `LANDED_FIRST_STEPS` steps, so that its tokens are used before they are evicted.
        """
        if self._has_just_landed(waiting):
            return self._steps - waiting.landed_at < TOGETHER_STEPS and any(
                load.step <= waiting.landed_at and not each.dropped
                for each, load in self._loading.items()
            )
        return bool(self._landed) or any(not each.dropped for each in self._loading)

    def hit(self, waiting: Waiting, device_tokens: int) -> int:
        """Return how many tokens after the first `device_tokens` can be loaded from host memory."""
        found = self.host.match_host(
            waiting.name, waiting.tokens, waiting.namespace, device_tokens=device_tokens
        )
        waiting.prefix = device_tokens + found
        return found

    def begin_load(self, waiting: Waiting, load: Load) -> None:
        """Start `load`: copy the tokens that `hit` has found to the device slots reserved in it."""
        self.host.load(
            waiting.name,
            waiting.tokens[: load.end * TOKEN_BYTES],
            load.reserved.pages,
            device_tokens=load.start,
        )
        load.step = self._steps
        waiting.load = self._loading[waiting] = load

    def ended(self) -> Iterator[tuple[Waiting, Load, bool]]:
        """Yield (request, load, good) for each load that ended on every rank.

        `good` is True if the loaded tokens may be used. The caller owns the load's slots from then
        on, because no copy accesses them any more.
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
        """Record an admitted request and its hit in the statistics, and forget the request."""
        waiting = self._known.get(handle)
        if waiting is not None and len(waiting):
            count = waiting.on_device
            self.host.admit(waiting.name, waiting.tokens, waiting.namespace, device_tokens=count)
        return self.forget(handle)

    def forget(self, handle: Handle) -> Waiting | None:
        """Forget an admitted or aborted request; `ended` still yields its load if one is in flight."""
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
        """Forget all waiting requests, and do not use the results of their prefetches and loads."""
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

"""Requests that wait to be admitted: what is prefetched and loaded for each of them.

A request is known from its first match until it is admitted or aborted. In between SGLang asks for it
again and again, on every rank in the same step:

    match       what of it can be loaded beyond what is on the device
    load        once it fits with that; SGLang comes back for it in a later step
    landed      what was loaded is in SGLang's tree, and the next match finds it there

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
"""How many steps a request that has landed waits for those that were to land with it.

Loads that began together end a step or two apart: a rank reports a copy in the step after its end, and
at a pipeline depth of 1 the verdict is applied in the next one.
"""

LANDED_FIRST_STEPS = 8
"""How many steps others wait for a request that has landed to be admitted."""

NEVER = -LANDED_FIRST_STEPS


@dataclass(slots=True, eq=False)
class Load:
    """One load of a request, from token `start` to token `end`."""

    start: int
    end: int
    reserved: Reserved
    anchor: Lock
    """Keeps on the device what the load continues."""
    step: int = 0
    """The step in which it began."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One request that waits."""

    tokens: bytes
    """The whole pages of its prompt, as int32."""
    namespace: str
    extra_key: str | None = None
    cache_salt: str | None = None
    name: str = ""
    """Its name on every rank, once it has arrived; SGLang uses a handle again after a retraction."""
    prompt: PromptItems = TEXT_ALONE
    room: int = 0
    """How many tokens it needs on the device in all, with what it is to decode."""
    held_by: str | None = None
    """A backup that has to end first: what it was retracted with."""
    prefix: int = 0
    """How many of its tokens are on the device or can be brought there, as of the last match."""
    on_device: int = 0
    """How many of its tokens are on the device, as of the last match."""
    load: Load | None = None
    """The load that is under way."""
    landed: tuple[int, int] = (0, 0)
    """From which token to which one loads have brought it to the device."""
    landed_at: int = NEVER
    """The step in which it has landed."""
    dropped: bool = False
    """It was aborted while it was loaded."""
    unwanted: bool = False
    """What is being loaded must not be used any more, since the weights have changed."""

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class WaitingRequests:
    """The requests that wait, by SGLang's handles."""

    host: HostCache
    prefetch_threshold_tokens: int
    loaded: int = 0
    """How many loads have brought what is used."""
    loaded_tokens: int = 0
    _known: dict[Handle, Waiting] = field(default_factory=dict[Handle, Waiting])
    _loading: dict[Waiting, Load] = field(default_factory=dict[Waiting, Load])
    """The loads that are under way, also of requests that were aborted, in the order of their begin."""
    _landed: list[Waiting] = field(default_factory=list[Waiting])
    """Those that wait and have just landed."""
    _arrivals: int = 0
    _steps: int = 0

    def get(self, handle: Handle) -> Waiting | None:
        """Return a request that waits, if it is known."""
        return self._known.get(handle)

    def after(self, first: Waiting, handles: Iterable[Handle]) -> list[Waiting]:
        """Return those that are visited after one: `handles` come first, in their order."""
        known = self._known
        visited = {handle: known[handle] for handle in handles if handle in known}
        in_order = list((visited | known).values())
        return in_order[in_order.index(first) + 1 :]

    def arrive(self, handle: Handle, waiting: Waiting, device_tokens: int) -> None:
        """Note a request, and begin to bring what storage has of it."""
        self._arrivals += 1
        waiting.name = f"r{self._arrivals}"
        self._known[handle] = waiting
        if waiting.held_by is None:
            self._prefetch(waiting, device_tokens)

    def go_on(self, waiting: Waiting, device_tokens: int) -> None:
        """Let a retracted request look for what was saved of it."""
        waiting.held_by = None
        self._prefetch(waiting, device_tokens)

    def is_busy(self, waiting: Waiting) -> bool:
        """Say whether a request cannot be admitted yet: it is read, loaded, or saved."""
        return (
            waiting.load is not None
            or waiting.held_by is not None
            or not self.host.prefetch_done(waiting.name)
        )

    def waits_for_others(self, waiting: Waiting) -> bool:
        """Say whether a request had better not be visited in this step, for loads of other ones.

        While some are loaded, others would find no room, and SGLang would look for none until a request
        ends. What has landed is to be used before room is made for more, in whatever order SGLang
        visits; but nobody waits for long for a request that SGLang does not admit. One that has landed
        waits a little for those whose loads began with its own, so that one batch computes them all.
        One that SGLang has not admitted for a while is as any other: what it had may be evicted by now.
        """
        if self._has_just_landed(waiting):
            return self._steps - waiting.landed_at < TOGETHER_STEPS and any(
                load.step <= waiting.landed_at and not each.dropped
                for each, load in self._loading.items()
            )
        return bool(self._landed) or any(not each.dropped for each in self._loading)

    def hit(self, waiting: Waiting, device_tokens: int) -> int:
        """Return how many tokens can be loaded beyond those that are on the device; whole pages."""
        found = self.host.hit(
            waiting.name, waiting.tokens, waiting.namespace, device_tokens=device_tokens
        )
        waiting.prefix = device_tokens + found
        return found

    def begin_load(self, waiting: Waiting, load: Load) -> None:
        """Begin to bring what `hit` has promised to slots that were reserved for it."""
        self.host.load(
            waiting.name,
            waiting.tokens[: load.end * TOKEN_BYTES],
            load.reserved.pages,
            device_tokens=load.start,
        )
        load.step = self._steps
        waiting.load = self._loading[waiting] = load

    def ended(self) -> Iterator[tuple[Waiting, Load, bool]]:
        """Yield the loads that have ended on every rank, and whether what they brought is to be used.

        Nothing touches their slots any more, which are the caller's from here on.
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
        """Count a request that is in the batch, and forget it."""
        waiting = self._known.get(handle)
        if waiting is not None and len(waiting):
            count = waiting.on_device
            self.host.admit(waiting.name, waiting.tokens, waiting.namespace, device_tokens=count)
        return self.forget(handle)

    def forget(self, handle: Handle) -> Waiting | None:
        """Forget a request, which was admitted or aborted; what is loaded for it is still awaited."""
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

    def begin_anew(self) -> None:
        """Forget all requests: what was found for them is not to be used any more."""
        for handle in list(self._known):
            self.forget(handle)
        for waiting in self._loading:
            waiting.unwanted = True

    @property
    def loads(self) -> int:
        """How many loads are under way."""
        return len(self._loading)

    def _has_just_landed(self, waiting: Waiting) -> bool:
        return self._steps - waiting.landed_at < LANDED_FIRST_STEPS

    def _prefetch(self, waiting: Waiting, device_tokens: int) -> None:
        if len(waiting) - device_tokens >= max(1, self.prefetch_threshold_tokens):
            self.host.prefetch(waiting.name, waiting.tokens, waiting.namespace)

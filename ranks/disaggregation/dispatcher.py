"""The dispatcher: who gets which request, and who had it when a group is lost.

It keeps what the router decides by: the groups that the directory lists, what it has sent them, what
they have told of it since, and the index of what they have cached. It sends nothing itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..replica.tree.page_keys import namespace_seed, page_keys
from ..replica.tree.tokens import as_token_bytes
from .groups.directory import Member
from .groups.prefix_index import PrefixIndex
from .groups.router import Choice, Group, Prompt, Refusal, Role, route
from .telling import Milestone, Progress

TOKENS_PER_S_GUESS = 100_000.0
"""How fast a group computes prompts, as long as it has not shown it."""
_HASHED_PAGES = 16
_WEIGHT = 0.2
"""How much the last prompt says of how fast a group computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the groups that are chosen from have in common."""

    model_digest: bytes
    """The digest of the namespace of their caches (`Namespace.digest`)."""
    page_tokens: int
    tokens_max: int
    """Tokens of requests that a group has room for while it decodes them."""
    weights_version: str | None = None
    """Set where groups have been given weights since they began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """A request that groups have, or are about to get."""

    request: str
    tokens: int
    outputs: int
    prefill: str
    """The group that computes its prompt; empty where the one that decodes does all."""
    decode: str
    missing: int
    """Tokens that the group that computes was thought to lack."""
    hit_tokens: int
    sent_us: int


@dataclass(slots=True)
class _Load:
    """What is known of one group."""

    member: Member
    tokens_per_s: float = TOKENS_PER_S_GUESS
    free_us: int = 0
    """When it was last heard to have computed a prompt."""


class Dispatcher:
    """Chooses groups for requests and follows how they go. Owned by one thread."""

    def __init__(self, terms: Terms, index: PrefixIndex) -> None:
        self._terms = terms
        self._index = index
        self._loads: dict[str, _Load] = {}
        self._under_way: dict[str, Dispatched] = {}
        self._computing: dict[str, str] = {}
        """Requests whose prompts are not computed yet, with the group that does it."""
        self._ready: set[str] = set()
        """Requests of which the group that decodes has all."""

    def __len__(self) -> int:
        """Return how many requests are under way."""
        return len(self._under_way)

    def __contains__(self, request: str) -> bool:
        """Say whether a request is under way."""
        return request in self._under_way

    def member(self, group: str) -> Member | None:
        """Return what the directory says of a group that is there."""
        known = self._loads.get(group)
        return None if known is None else known.member

    def join(self, member: Member) -> None:
        """Send requests to a group from now on."""
        self._loads[member.registration.name] = _Load(member)

    def lose(self, group: str) -> list[Dispatched]:
        """Send a group nothing more; return what it had to go on with.

        That is also what it had computed, as long as the group that decodes has not got it all.
        """
        self._loads.pop(group, None)
        return [
            each
            for each in self._under_way.values()
            if each.decode == group or (each.prefill == group and each.request not in self._ready)
        ]

    def choose(
        self, tokens: npt.NDArray[np.int32], outputs: int, namespace: str = ""
    ) -> Choice | Refusal:
        """Choose the groups for a request; where none computes prompts, one for all of it."""
        hits = self._index.hits(self._keys(tokens, namespace))
        prompt = Prompt(
            tokens=len(tokens),
            output_tokens=outputs,
            page_tokens=self._terms.page_tokens,
            hits=hits,
        )
        groups = self._groups()
        chosen = route(groups, prompt)
        if chosen is not Refusal.NO_PREFILL_GROUP:
            return chosen
        alone = [replace(each, role=Role.BOTH) for each in groups]
        return route(alone, prompt) if alone else Refusal.NO_DECODE_GROUP

    def begin(
        self, request: str, tokens: int, outputs: int, choice: Choice, now_us: int
    ) -> Dispatched:
        """Note that a request is sent to the groups that were chosen."""
        alone = choice.prefill == choice.decode
        begun = Dispatched(
            request=request,
            tokens=tokens,
            outputs=outputs,
            prefill="" if alone else choice.prefill,
            decode=choice.decode,
            missing=tokens - choice.hit_tokens,
            hit_tokens=choice.hit_tokens,
            sent_us=now_us,
        )
        self._under_way[request] = begun
        self._computing[request] = choice.prefill
        return begun

    def hear(self, message: Progress) -> Dispatched | None:
        """Follow how a request goes; return it if that is what it was sent for and is known."""
        known = self._under_way.get(message.request)
        if known is None or message.group not in (known.prefill, known.decode):
            return None
        if (
            message.stage == Milestone.COMPUTED
            and self._computing.get(message.request) == message.group
        ):
            del self._computing[message.request]
            self._learn(message, known)
        if message.stage in (Milestone.READY, Milestone.COMPUTED) and message.group == known.decode:
            self._ready.add(message.request)
            self._computing.pop(message.request, None)
        if message.stage in (Milestone.DONE, Milestone.REFUSED) and message.group == known.decode:
            self.end(message.request)
        return known

    def end(self, request: str) -> Dispatched | None:
        """Follow a request no more; return it if it was under way."""
        self._computing.pop(request, None)
        self._ready.discard(request)
        return self._under_way.pop(request, None)

    def computes_here(self, request: str, group: str) -> None:
        """Note that the prompt of a request is computed by another group than was chosen."""
        self._computing[request] = group

    def _keys(self, tokens: npt.NDArray[np.int32], namespace: str) -> Iterator[bytes]:
        """Yield the page keys of a prompt, hashed some at a time: few are asked for beyond a hit."""
        terms, some = self._terms, _HASHED_PAGES * self._terms.page_tokens
        last = namespace_seed(terms.model_digest, namespace, weights_version=terms.weights_version)
        for at in range(0, len(tokens), some):
            keys = page_keys(last, as_token_bytes(tokens[at : at + some]), terms.page_tokens)
            yield from keys
            last = keys[-1] if keys else last

    def _learn(self, message: Progress, known: Dispatched) -> None:
        """Take a computed prompt into how fast its group is."""
        load = self._loads.get(message.group)
        if load is None:
            return
        took_us = message.at_us - max(load.free_us, known.sent_us)
        load.free_us = max(load.free_us, message.at_us)
        if took_us > 0 and message.computed_tokens > 0:
            measured = message.computed_tokens * 1e6 / took_us
            load.tokens_per_s += _WEIGHT * (measured - load.tokens_per_s)

    def _groups(self) -> list[Group]:
        queued: dict[str, list[int]] = {name: [] for name in self._loads}
        for request, group in self._computing.items():
            queued.get(group, []).append(self._under_way[request].missing)
        running = dict.fromkeys(self._loads, 0)
        for each in self._under_way.values():
            if each.decode in running:
                running[each.decode] += each.tokens + each.outputs
        return [
            Group(
                name=name,
                role=load.member.registration.role,
                queued_requests=len(queued[name]),
                queued_tokens=sum(queued[name]),
                prefill_tokens_per_s=load.tokens_per_s,
                running_tokens=running[name],
                tokens_max=self._terms.tokens_max,
            )
            for name, load in self._loads.items()
        ]

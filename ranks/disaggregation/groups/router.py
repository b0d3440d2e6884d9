"""The router: which group computes a request's prompt, and which one decodes it.

A pure policy over what groups have told. It compares times and not hits: a group with a long prefix
and a long queue is worse than one that has to compute more and can begin at once.

    a group's cost = its queue's time + the prompt's compute there * (1 + others) + the transfer

`others` says who else pays for a second of compute. One are those who will find pages displaced by
what is computed here though another group has it. The rest are those who wait behind it: by Little's
law about as many as there are in a group now. The mean over the groups is taken, since work that one
group has more is shared by all as soon as the next requests go elsewhere. So with little to do a hit
must only pay for itself, and the more there is to do the more of a queue it outweighs; but never more
seconds of queueing than it saves, times that number. Whoever looks at a request's own time alone
(`others` = 0) computes in several groups what one has, and has longer queues for it.

A group of which the index is not exact counts as one without a hit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .prefix_index import Hit

DISPLACED = 1.0
"""How many seconds others compute later for each second that is computed now, since a page is displaced
by each that comes; as if each displaced page were wanted once more, which is the most that pays."""


class Role(StrEnum):
    """What a group is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a group has told of itself, and what the router has sent it since."""

    name: str
    role: Role
    healthy: bool = True
    queued_requests: int = 0
    """Requests whose prompts wait or are being computed."""
    queued_tokens: int = 0
    """Tokens of those that are still to be computed."""
    prefill_tokens_per_s: float = 1.0
    """How many tokens of prompts it computes."""
    transfer_tokens_per_s: float = float("inf")
    """How many tokens' pages it hands to another group."""
    running_tokens: int = 0
    """Tokens of the requests that it decodes, or is going to."""
    tokens_max: int = 0
    """How many tokens of requests that decode it has room for; 0 if it does not decode."""
    full_step_s: float = 0.0
    """How long one token takes when it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request to be routed."""

    tokens: int
    output_tokens: int = 0
    """How many it is expected to generate, for which there has to be room."""
    page_tokens: int
    hits: Mapping[str, Hit]
    """What groups have of it, as `PrefixIndex.hits` says."""

    def missing(self, group: str) -> int:
        """Return how many tokens a group would have to compute, or be sent; one at least."""
        hit = self.hits.get(group)
        return self.tokens if hit is None else max(1, self.tokens - hit.pages * self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request goes, and why."""

    prefill: str
    decode: str
    wait_s: float
    compute_s: float
    transfer_s: float
    hit_tokens: int
    reason: str
    """The numbers that decided, in one line for people."""

    @property
    def first_token_s(self) -> float:
        """The estimated time to the first token."""
        return self.wait_s + self.compute_s + self.transfer_s


class Refusal(StrEnum):
    """Why a request goes nowhere."""

    NO_PREFILL_GROUP = "no healthy group computes prompts"
    NO_DECODE_GROUP = "no healthy group decodes"
    NO_ROOM = "no group that decodes has room for the request now"
    TOO_LONG = "no group that decodes could ever hold the request"


@dataclass(frozen=True, slots=True)
class _Estimate:
    group: Group
    wait_s: float
    compute_s: float


def route(groups: Iterable[Group], prompt: Prompt, *, selfish: bool = False) -> Choice | Refusal:
    """Choose a group to compute the prompt and one to decode; or say by name why there is none.

    The prompt's group is chosen first, as its queue is the longer one. Ties go to the group with less
    queued, then to the name that comes first, so equal reports give equal choices. `selfish` looks at
    the request's own time alone; it is there to be compared with.
    """
    able = [each for each in groups if each.healthy]
    computing = [each for each in able if each.role is not Role.DECODE]
    decoding = [each for each in able if each.role is not Role.PREFILL]
    if not computing:
        return Refusal.NO_PREFILL_GROUP
    if not decoding:
        return Refusal.NO_DECODE_GROUP
    wanted = prompt.tokens + prompt.output_tokens
    if all(wanted > each.tokens_max for each in decoding):
        return Refusal.TOO_LONG
    with_room = [each for each in decoding if each.running_tokens + wanted <= each.tokens_max]
    if not with_room:
        return Refusal.NO_ROOM
    queued = sum(each.queued_requests for each in computing) / len(computing)
    others = 0.0 if selfish else DISPLACED + queued
    best = _choose_prefill(computing, prompt, others)
    decode, transfer_s = _choose_decode(best.group, with_room, prompt, wanted)
    hit_tokens = prompt.tokens - prompt.missing(best.group.name)
    return Choice(
        prefill=best.group.name,
        decode=decode.name,
        wait_s=best.wait_s,
        compute_s=best.compute_s,
        transfer_s=transfer_s,
        hit_tokens=hit_tokens,
        reason=(
            f"{best.group.name} has {hit_tokens} of {prompt.tokens} tokens, and computes the others in"
            f" {best.compute_s:.3f} s after {best.wait_s:.3f} s of queueing; a second of compute counts"
            f" {1 + others:.1f} times; {decode.name} decodes {decode.running_tokens} of"
            f" {decode.tokens_max} tokens"
        ),
    )


def _choose_prefill(groups: Sequence[Group], prompt: Prompt, others: float) -> _Estimate:
    def order(estimate: _Estimate) -> tuple[float, int, str]:
        group = estimate.group
        cost_s = estimate.wait_s + estimate.compute_s * (1 + others)
        return cost_s, group.queued_requests, group.name

    estimates = [
        _Estimate(
            each,
            wait_s=each.queued_tokens / each.prefill_tokens_per_s,
            compute_s=prompt.missing(each.name) / each.prefill_tokens_per_s,
        )
        for each in groups
    ]
    return min(estimates, key=order)


def _choose_decode(
    prefill: Group, groups: Sequence[Group], prompt: Prompt, wanted: int
) -> tuple[Group, float]:
    """Return the group that goes on soonest, and how long the transfer to it takes."""

    def transfer_s(group: Group) -> float:
        if group.name == prefill.name:
            return 0.0
        return prompt.missing(group.name) / prefill.transfer_tokens_per_s

    def cost(group: Group) -> tuple[float, float, str]:
        filled = (group.running_tokens + wanted) / group.tokens_max
        return transfer_s(group) + filled * group.full_step_s, filled, group.name

    best = min(groups, key=cost)
    return best, transfer_s(best)

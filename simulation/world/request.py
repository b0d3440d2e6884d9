"""A simulated request as its engine sees it: tokens and progress."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ...ranks.protocol.orders import KV_POOL
from .prompts import TOKEN_BYTES


class EngineStage(Enum):
    """Stage of a request, as its engine sees it."""

    ARRIVED = auto()
    """Stage: the request has arrived, and the engine has not called the cache for it yet."""
    PREFETCHING = auto()
    """Stage: the request's prefetch has begun; the engine may wait for it."""
    WAITING = auto()
    """Stage: the request waits for admission."""
    LOADING = auto()
    """Stage: the request's cached prefix or saved data is being loaded from the host to the device."""
    COMPUTING = auto()
    """Stage: the request's cached prefix is on the device, and the rest of its prompt is being
    computed."""
    ANSWERING = auto()
    """Stage: the request's prompt is computed, and its answer is being decoded."""
    PUBLISHED = auto()
    """Stage: all of the request's tokens are computed and cached for others; it is about to be
    released."""
    RETRACTED = auto()
    """Stage: the request was retracted: its KV is in host memory, or being copied to it."""
    GONE = auto()
    """Stage: the request was released or aborted."""


@dataclass(slots=True)
class EngineRequest:
    """A simulated request as its engine sees it. Lengths are in tokens."""

    name: str
    namespace: str
    tokens: bytes
    prompt: int
    """Number of tokens of the prompt; the tokens after them are the answer."""
    stage: EngineStage = EngineStage.ARRIVED
    source: str = ""
    """Address of another group that serves pages of this request; empty if none does."""
    is_served: bool = False
    """Whether the request has finished and is kept only to serve its pages to another group."""
    is_handed_over: bool = False
    """Whether the request was handed over to another group."""
    computed: int = 0
    """Number of computed tokens.

    Their KV is in the request's pages on every rank, and its recurrent state covers exactly these
    tokens.
    """
    room: int = 0
    """Number of tokens for which the request has pages."""
    shared: int = 0
    """Number of tokens, from the first, whose pages the request shares with the prefix tree."""
    priority: int = 0
    """The request's priority; pages last used by requests of lower priority are evicted first."""
    answer: int = 0
    """Number of tokens that the complete answer will have."""
    refused: int = 0
    """Number of times in a row that the request was refused for lack of free pages."""
    prefetched: bool = False
    """Whether the cache accepted a prefetch for the request."""
    cached_before: int = 0
    """Number of tokens that a match found on the host just before the prefetch began."""
    came_from: EngineStage = EngineStage.COMPUTING
    """The stage that the request had when it was retracted, and has again after it resumes."""
    resumes: bool = False
    """Whether the load in flight resumes the request after a retraction."""
    checkpoints: tuple[int, ...] = ()
    """Token counts at which the request should publish, because a recurrent state can be kept there."""
    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The request's device page tables by pool, as the engine last read or changed them."""

    generation: int = 0
    """Number of cache resets before the request began to compute: the generation of the request's
    contents."""
    admitted: bool = False
    """Whether the cache knows that the request is computing, because a load or backup call has named
    it."""
    unknown: bool = False
    """Whether the cache was reset after the request began to compute, but before any call named the
    request."""
    failed: bool = False
    """Whether a copy for the request has failed, after which the cache loads nothing for it."""
    bringing: int = 0
    """During a load: number of tokens that the request has when the load ends. After a retraction:
    number of tokens that it had computed before."""
    keeps_windows: bool = False
    """Whether the request keeps the device pages that its sliding windows have passed. A load may leave
    such pages unfilled."""
    unfilled: dict[str, range] = field(default_factory=dict[str, range])
    """By pool: page-table positions whose pages the last load left unfilled."""
    state_comes: bool = False
    """Whether a load in flight brings the request's state; until it ends, the state is unknown."""
    kept: list[int] = field(default_factory=list[int])
    """State slots with copies of the request's state, which a backup may still be reading."""
    lends_state: bool = False
    """Whether a backup may still be reading the slot in which the model updates the request's state."""
    copies_state: bool = False
    """Whether to copy the state, after this step's forward pass, to the slot reserved for it at the end
    of `kept`."""
    planned: int = 0
    """Number of tokens that will be computed after this step's forward pass; 0 if the pass leaves the
    request out."""
    fence_due: bool = False
    """Whether the request was preempted in this step, and the cache has not fenced its copies yet."""

    @property
    def table(self) -> list[int]:
        """The request's page table of full attention."""
        return self.tables.get(KV_POOL, [])

    @table.setter
    def table(self, pages: list[int]) -> None:
        self.tables[KV_POOL] = pages

    def head(self, length: int) -> bytes:
        return self.tokens[: length * TOKEN_BYTES]

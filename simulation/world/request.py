"""A request from the engine's view: its tokens and its progress."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ...ranks.protocol.orders import KV_POOL
from .prompts import TOKEN_BYTES


class EngineStage(Enum):
    """Stage of a request from the engine's view."""

    ARRIVED = auto()
    """The engine has not yet called the cache for this request."""
    PREFETCHING = auto()
    """The request's prefetch has begun, and the engine may have to wait for it."""
    WAITING = auto()
    """The request waits for admission."""
    LOADING = auto()
    """The request's load back is in flight."""
    COMPUTING = auto()
    """The request's prefix is available, and the rest of its prompt is being computed."""
    ANSWERING = auto()
    """The request is decoding tokens."""
    PUBLISHED = auto()
    """All computed tokens are in the tree."""
    RETRACTED = auto()
    """The request was retracted: its KV is in host memory, or being copied there or back."""
    GONE = auto()
    """The cache holds nothing for the request any more."""


@dataclass(slots=True)
class EngineRequest:
    """One request from the engine's view. Lengths are in tokens."""

    name: str
    namespace: str
    tokens: bytes
    prompt: int
    """The length of the prompt; the tokens after it are the answer."""
    stage: EngineStage = EngineStage.ARRIVED
    source: str = ""
    """The address of another group that serves the request's pages; empty if none does."""
    is_served: bool = False
    """Whether the request finished and stays only to serve its pages to another group."""
    is_handed_over: bool = False
    """Whether the other group was notified of the request."""
    computed: int = 0
    """Number of computed tokens.

    Their KV is in the request's pages on every rank, and its state covers them.
    """
    room: int = 0
    """The token capacity of the request's pages."""
    shared: int = 0
    """Tokens that the request shares with the tree, as a hit or by publishing."""
    priority: int = 0
    """Pages last used by lower-priority requests are evicted first."""
    answer: int = 0
    """The length of the request's answer when it finishes."""
    refused: int = 0
    """Number of consecutive refusals for lack of room."""
    prefetched: bool = False
    """Whether a prefetch was started for the request."""
    cached_before: int = 0
    """Tokens matched right before the prefetch."""
    came_from: EngineStage = EngineStage.COMPUTING
    """The request's stage when it was retracted."""
    resumes: bool = False
    """Whether the request resumes after a retraction, so that its load restores everything."""
    checkpoints: tuple[int, ...] = ()
    """Lengths at which the request should publish, so that a recurrent state is kept there."""
    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The request's device pages by pool, as last read by the engine."""

    generation: int = 0
    """The number of cache resets before the request began to compute."""
    admitted: bool = False
    """Whether the cache knows that the request computes, because it has loaded or backed up."""
    unknown: bool = False
    """Whether the request computed before a reset, unknown to the cache."""
    failed: bool = False
    """Whether a copy of the request has failed; nothing is loaded for it afterwards."""
    bringing: int = 0
    """The number of the request's tokens after its load, or at its retraction."""
    keeps_windows: bool = False
    """Whether the request provides pages for a whole window, even those that the window has passed."""
    unfilled: dict[str, range] = field(default_factory=dict[str, range])
    """By pool: page-table entries provided for the request's last load and not filled by it."""
    state_comes: bool = False
    """Whether the request's load includes its state, whose slot has unknown content until then."""
    kept: list[int] = field(default_factory=list[int])
    """Slots with copies of the request's state, which a backup may still read."""
    lends_state: bool = False
    """Whether a backup may still read the slot in which the request's state is computed."""
    copies_state: bool = False
    """Whether the last slot of `kept` gets a copy of the state after this step's forward pass."""
    planned: int = 0
    """The request's computed tokens after this step's forward pass; 0 if it computes none."""
    fence_due: bool = False
    """Whether the request was preempted in this step and still needs its fence."""

    @property
    def table(self) -> list[int]:
        """The request's full-attention device pages."""
        return self.tables.get(KV_POOL, [])

    @table.setter
    def table(self, pages: list[int]) -> None:
        self.tables[KV_POOL] = pages

    def head(self, length: int) -> bytes:
        return self.tokens[: length * TOKEN_BYTES]

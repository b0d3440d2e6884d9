"""A request as the engine knows it: its tokens, and how far it has come."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ...ranks.protocol.orders import KV_POOL
from .prompts import TOKEN_BYTES


class EngineStage(Enum):
    """Where a request stands, in the eyes of the engine."""

    ARRIVED = auto()
    """The engine has asked the cache for nothing yet."""
    PREFETCHING = auto()
    """Its prefetch has begun, and the engine may have to wait for it."""
    WAITING = auto()
    """It waits for admission."""
    LOADING = auto()
    """Its load back is in flight."""
    COMPUTING = auto()
    """It has its prefix, and computes the rest of the prompt."""
    ANSWERING = auto()
    """It puts out tokens."""
    PUBLISHED = auto()
    """All that it computed is in the tree."""
    RETRACTED = auto()
    """It is in host memory, or on its way there or back."""
    GONE = auto()
    """The cache holds nothing for it any more."""


@dataclass(slots=True)
class EngineRequest:
    """One request as the engine knows it. Lengths are in tokens."""

    name: str
    namespace: str
    tokens: bytes
    prompt: int
    """The length of the prompt; the tokens behind it are the answer."""
    stage: EngineStage = EngineStage.ARRIVED
    source: str = ""
    """Where another group serves what it has computed of it; empty if none has."""
    is_served: bool = False
    """Whether it has ended, and stays so that another group can read what it has."""
    is_handed_over: bool = False
    """Whether that group was told of it."""
    computed: int = 0
    """How many tokens it has computed: their KV is in its pages on every rank, and its state stands for
    them."""
    room: int = 0
    """How many tokens its pages have room for."""
    shared: int = 0
    """How many tokens it shares with the tree, as a hit or because it has published them."""
    priority: int = 0
    """What requests of lower priority have used is to be evicted before what this one has."""
    answer: int = 0
    """The length of its answer when it ends."""
    refused: int = 0
    """How often in a row it was told that there is no room."""
    prefetched: bool = False
    """Whether a prefetch was begun for it."""
    cached_before: int = 0
    """How many tokens a match found right before that prefetch."""
    came_from: EngineStage = EngineStage.COMPUTING
    """The stage in which it was retracted."""
    resumes: bool = False
    """Whether it comes back from a retract, so that its load brings all that it had."""
    checkpoints: tuple[int, ...] = ()
    """Lengths at which it should publish, so that a recurrent state is kept there."""
    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Its device pages by pool, as the engine has read them last."""

    # Where the engine owns the device pages.
    generation: int = 0
    """How often the cache had been reset when it began to compute."""
    admitted: bool = False
    """Whether the cache knows that it computes, since it has loaded or backed up."""
    unknown: bool = False
    """Whether it computed before a reset without the cache knowing that it had pages."""
    failed: bool = False
    """Whether one of its copies has failed; nothing is loaded for it after that."""
    bringing: int = 0
    """How many tokens it has once its load is over, or had when it was retracted."""
    keeps_windows: bool = False
    """Whether it lends pages for all of a window, also those that the window has left behind."""
    unfilled: dict[str, range] = field(default_factory=dict[str, range])
    """By pool: the entries of its tables that its last load was lent and did not fill."""
    state_comes: bool = False
    """Whether its load brings the state too; until then the content of its slot is not known."""
    kept: list[int] = field(default_factory=list[int])
    """Slots with copies of its state, which a backup may still read."""
    lends_state: bool = False
    """Whether a backup may still read the slot in which its state is computed."""
    copies_state: bool = False
    """Whether the last slot of `kept` gets its state after this step's forward pass."""
    planned: int = 0
    """How many tokens it will have computed after this step's forward pass; 0 if it computes none."""
    fence_due: bool = False
    """Whether it was preempted in this step and its fence is still to come."""

    @property
    def table(self) -> list[int]:
        """Its device pages of full attention."""
        return self.tables.get(KV_POOL, [])

    @table.setter
    def table(self, pages: list[int]) -> None:
        self.tables[KV_POOL] = pages

    def head(self, length: int) -> bytes:
        return self.tokens[: length * TOKEN_BYTES]

"""A request as the engine knows it: its tokens, and how far it has come."""

from dataclasses import dataclass, field
from enum import Enum, auto

from ...ranks.orders import KV_POOL
from .prompts import TOKEN_BYTES


class EngineStage(Enum):
    """Where a request stands in the engine's eyes."""

    ARRIVED = auto()
    """Nothing was asked of the cache."""
    PREFETCHING = auto()
    """Its prefetch was begun, and the engine may have to wait for it."""
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
    """One request as the engine knows it. Lengths in tokens."""

    name: str
    namespace: str
    tokens: bytes
    prompt: int
    """The length of the prompt; what follows is its answer."""
    stage: EngineStage = EngineStage.ARRIVED
    computed: int = 0
    """Tokens whose KV is in its pages, and after which its state is, on every rank."""
    room: int = 0
    """Tokens that its pages have room for."""
    shared: int = 0
    """Tokens that it has seen as a hit or published."""
    priority: int = 0
    """What only requests of a lower one used is to leave first."""
    answer: int = 0
    """The length of its answer when it ends."""
    refused: int = 0
    """How often in a row it was told that there is no room."""
    prefetched: bool = False
    """Whether a prefetch was begun for it."""
    cached_before: int = 0
    """Tokens that a match found right before that prefetch."""
    came_from: EngineStage = EngineStage.COMPUTING
    """What it did when it was retracted."""
    resumes: bool = False
    """It comes back from a retract: its load is that of all it had."""
    checkpoints: tuple[int, ...] = ()
    """Lengths at which it should publish, so that a recurrent state is kept there."""
    tables: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """By pool: its device pages, as the engine has read them last."""

    # Where the engine owns the device pages.
    generation: int = 0
    """How often the cache had been reset when it began to compute."""
    admitted: bool = False
    """The cache knows that it computes: it has loaded or backed up."""
    unknown: bool = False
    """It computed before a reset of which the cache could not know that it concerns its pages."""
    failed: bool = False
    """A copy of its failed, after which nothing is loaded for it any more."""
    bringing: int = 0
    """Tokens that it has once its load is over, or that it had when it was retracted."""
    state_comes: bool = False
    """Its load is to bring the state, too; until then its slot holds anything."""
    kept: list[int] = field(default_factory=list[int])
    """Slots with copies of its state, which a backup may still read."""
    lends_state: bool = False
    """A backup may still read the slot in which its state is computed."""
    copies_state: bool = False
    """The last slot of `kept` gets its state after this step's forward pass."""
    planned: int = 0
    """Tokens that it will have computed after this step's forward pass, or 0."""
    fence_due: bool = False
    """It was preempted in this step, and its fence is still to come."""

    @property
    def table(self) -> list[int]:
        """Its device pages of full attention."""
        return self.tables.get(KV_POOL, [])

    @table.setter
    def table(self, pages: list[int]) -> None:
        self.tables[KV_POOL] = pages

    def head(self, length: int) -> bytes:
        """Return its first `length` tokens."""
        return self.tokens[: length * TOKEN_BYTES]

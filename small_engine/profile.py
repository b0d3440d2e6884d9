"""What a model profile is: the pools of a real model, scaled down so that a replay fits any machine.

A profile keeps what decides how the cache behaves (pools and their columns, heads that ranks divide
between them, what is replicated, element types, window and checkpoint distances in tokens) and
scales what only costs memory (layers, elements).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..page_format.page_layout import Column, PageLayout
from ..ranks.protocol.config import ComponentConfig, Recurrent, SlidingWindow
from ..ranks.protocol.model_description import FULL_ATTENTION, KeptState, ModelDescription
from ..ranks.protocol.orders import KV_POOL

KV_PAGES_PER_WINDOW_PAGE = 2
"""By default a window pool has one page for so many of full attention's.

Of a cached prefix only the last window is ever read, but a chunk in progress needs pages for all of
its tokens: at the default sizes half of 8192 pages of 64 tokens are eight requests of a window of
1024 tokens and a chunk of 8192 each, and as much again and more for cached prefixes.
"""
STATES_PER_CHECKPOINT = 2
"""By default a state pool has so many slots for each checkpoint that full attention's pages cover.

One for the checkpoint, and one for all that lies between them: the states that requests work on, the
ends of prompts, and the points where prompts branch.
"""
STATES_LEAST = 16
"""And never fewer than this, since every admitted request works on a state of its own."""
CHUNK_PAGES_LEAST = 2
"""Window pages that a request needs beside its window: it computes a page, and may begin inside of
the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGeometry:
    """The columns of one pool of a real model, and how many layers and elements a replay keeps."""

    columns: tuple[Column, ...]
    """The columns that the real model has."""
    layers: int
    """Layers in a replay."""
    elements: tuple[int, ...]
    """Elements in a replay, by column."""

    @property
    def scaled(self) -> tuple[Column, ...]:
        """The columns as a replay has them."""
        return tuple(
            replace(column, layers=self.layers, elements=elements)
            for column, elements in zip(self.columns, self.elements, strict=True)
        )

    def layout(self, page_tokens: int) -> PageLayout:
        return PageLayout(page_tokens=page_tokens, columns=self.scaled)

    def kept(self, kind: str) -> KeptState:
        """Return what the real model keeps here."""
        names = tuple(column.name for column in self.columns)
        return KeptState(kind=kind, layers=self.columns[0].layers, columns=names)

    def scale(self, unit: str) -> str:
        """Return in words what was scaled; `unit` is what the bytes are counted by."""
        real, scaled = _bytes(self.columns), _bytes(self.scaled)
        return (
            f"{_in_words(self.columns)} scaled to {_in_words(self.scaled)}:"
            f" {scaled} bytes a {unit} instead of {real}, 1/{real // scaled}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGeometry(PoolGeometry):
    """The pool of the layers with a sliding window."""

    window_tokens: int
    """The window of the real model, which is not scaled."""

    def pages(self, page_tokens: int) -> int:
        """Return the pages of a whole window."""
        return -(-self.window_tokens // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry(PoolGeometry):
    """The pool of the layers with a recurrent state."""

    checkpoint_tokens: int
    """A choice of whoever serves the model, and no property of the model."""

    def every(self, page_tokens: int) -> int:
        """Return the distance of checkpoints in tokens: whole pages, at least `checkpoint_tokens`."""
        return -(-self.checkpoint_tokens // page_tokens) * page_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model as a replay sees it."""

    name: str
    model: str
    """The real model."""
    full: PoolGeometry
    """The pool of the layers with full attention."""
    window: WindowGeometry | None = None
    state: StateGeometry | None = None

    def layout(self, page_tokens: int) -> PageLayout:
        return self.full.layout(page_tokens)

    def components(
        self,
        page_tokens: int,
        device_pages: int,
        host_pages: int,
        given: Mapping[str, int] | None = None,
    ) -> tuple[ComponentConfig, ...]:
        """Return the components beside full attention, whose pools have these pages.

        `given` has pool sizes that are not to be derived, by the names that `sizes` gives them.
        """
        sizes = {**self.sizes(page_tokens, device_pages, host_pages), **(given or {})}
        components: list[ComponentConfig] = []
        if self.window is not None:
            components.append(
                SlidingWindow(
                    window_tokens=self.window.window_tokens,
                    layout=self.window.layout(page_tokens),
                    device_pages=sizes["window_device_pages"],
                    host_pages=sizes["window_host_pages"],
                )
            )
        if self.state is not None:
            components.append(
                Recurrent(
                    checkpoint_tokens=self.state.every(page_tokens),
                    layout=self.state.layout(1),
                    device_pages=sizes["state_device_pages"],
                    host_pages=sizes["state_host_pages"],
                )
            )
        return tuple(components)

    def description(self) -> ModelDescription:
        """Return everything that the real model keeps for a prefix."""
        keeps = [self.full.kept(FULL_ATTENTION)]
        if self.window is not None:
            keeps.append(self.window.kept(SlidingWindow.kind))
        if self.state is not None:
            keeps.append(self.state.kept(Recurrent.kind))
        return ModelDescription(model=self.model, keeps=tuple(keeps))

    def sizes(self, page_tokens: int, device_pages: int, host_pages: int) -> dict[str, int]:
        """Return the derived sizes of the pools beside full attention's, by setting."""
        sizes: dict[str, int] = {}
        least = self.least_sizes(page_tokens)
        for tier, pages in (("device", device_pages), ("host", host_pages)):
            if self.window is not None:
                name = f"window_{tier}_pages"
                sizes[name] = max(pages // KV_PAGES_PER_WINDOW_PAGE, least[name])
            if self.state is not None:
                checkpoints = pages * page_tokens // self.state.every(page_tokens)
                sizes[f"state_{tier}_pages"] = max(
                    STATES_PER_CHECKPOINT * checkpoints, STATES_LEAST
                )
        return sizes

    def least_sizes(self, page_tokens: int) -> dict[str, int]:
        """Return the sizes of these pools with which one request can just be served, by setting."""
        least: dict[str, int] = {}
        if self.window is not None:
            window = self.window.pages(page_tokens)
            least |= {
                "window_device_pages": window + CHUNK_PAGES_LEAST,
                "window_host_pages": window,
            }
        if self.state is not None:
            # The state that the request works on, and the checkpoint that it begins with.
            least |= {"state_device_pages": 2, "state_host_pages": 1}
        return least

    @property
    def scale(self) -> str:
        """One line that says what was scaled in each pool, and by how much."""
        pools = [f"{KV_POOL}: {self.full.scale('token')}"]
        if self.window is not None:
            pools.append(
                f"window of {self.window.window_tokens} tokens: {self.window.scale('token')}"
            )
        if self.state is not None:
            pools.append(
                f"state every {self.state.checkpoint_tokens} tokens: {self.state.scale('state')}"
            )
        return f"{self.name} ({self.model}), {'; '.join(pools)}"


def _bytes(columns: tuple[Column, ...]) -> int:
    return PageLayout(page_tokens=1, columns=columns).shard(0, 1).page_bytes


def _in_words(columns: tuple[Column, ...]) -> str:
    layers = columns[0].layers
    shapes = ", ".join(f"{each.name} {each.heads}x{each.elements}" for each in columns)
    return f"{layers} layer{'s' if layers > 1 else ''} of {shapes}"

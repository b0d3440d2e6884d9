"""Model profiles: the pools of a real model, scaled down so that a replay fits any machine.

The numbers of layers and elements are scaled, because they change only the memory needed. Everything
that determines the cache's behaviour is kept: pools, columns, heads, replication, element types, window
and checkpoint distances.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..page_format.page_layout import Column, PageLayout
from ..ranks.protocol.config import ComponentConfig, Recurrent, SlidingWindow
from ..ranks.protocol.model_description import FULL_ATTENTION, KeptState, ModelDescription
from ..ranks.protocol.orders import KV_POOL

KV_PAGES_PER_WINDOW_PAGE = 2
"""Number of full-attention pages for each page of a window pool, by default.

A chunk in progress needs window pages for all its tokens. By default a device has 8192 full-attention
pages of 64 tokens, so a window pool has 4096 pages. Eight requests, each with a window of 1024 tokens
and a chunk of 8192, take 1152 window pages. The other window pages remain for cached prefixes.
"""
STATES_PER_CHECKPOINT = 2
"""Default number of state slots per checkpoint. The number of checkpoints follows from the number of
tokens that the full-attention pool can hold.

One slot holds the checkpoint. The other slot is for states at other positions: working states of
requests, ends of prompts, and points where prompts branch.
"""
STATES_LEAST = 16
"""Minimum number of state slots, however small the pool, because every admitted request needs a slot
for its working state."""
CHUNK_PAGES_LEAST = 2
"""Window pages that a request needs in addition to its window. One page is for the tokens being
computed. Another page is needed because a chunk may begin within a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGeometry:
    """One pool of a real model: its columns, and the numbers of layers and elements to simulate."""

    columns: tuple[Column, ...]
    layers: int
    elements: tuple[int, ...]
    """Number of elements per token in a replay, for each of the columns in order."""

    @property
    def scaled(self) -> tuple[Column, ...]:
        """The pool's columns with the layers and elements of a replay."""
        return tuple(
            replace(column, layers=self.layers, elements=elements)
            for column, elements in zip(self.columns, self.elements, strict=True)
        )

    def layout(self, page_tokens: int) -> PageLayout:
        return PageLayout(page_tokens=page_tokens, columns=self.scaled)

    def kept(self, kind: str) -> KeptState:
        """Return the description of the state that the real model keeps in this pool."""
        names = tuple(column.name for column in self.columns)
        return KeptState(kind=kind, layers=self.columns[0].layers, columns=names)

    def scale(self, unit: str) -> str:
        """Describe the scaling of the pool, with the bytes per `unit` before and after.

        A `unit` is a token or a state.
        """
        real, scaled = _bytes(self.columns), _bytes(self.scaled)
        return (
            f"{_in_words(self.columns)} scaled to {_in_words(self.scaled)}:"
            f" {scaled} bytes a {unit} instead of {real}, 1/{real // scaled}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGeometry(PoolGeometry):
    """The pool of a model's sliding-window layers."""

    window_tokens: int
    """The length of the real model's window in tokens, not scaled."""

    def pages(self, page_tokens: int) -> int:
        """Return the length of the window in pages, rounded up."""
        return -(-self.window_tokens // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGeometry(PoolGeometry):
    """The pool of a model's layers with a recurrent state."""

    checkpoint_tokens: int
    """Number of tokens between two checkpoints. Operators choose it; the real model does not prescribe
    it."""

    def every(self, page_tokens: int) -> int:
        """Return the checkpoint distance in tokens, rounded up to whole pages."""
        return -(-self.checkpoint_tokens // page_tokens) * page_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A scaled-down model for a replay."""

    name: str
    model: str
    full: PoolGeometry
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
        """Return the settings of the components besides full attention.

        By default, their pool sizes derive from the sizes of the full-attention pool. `given` overrides
        pool sizes; its keys are setting names, as returned by `sizes`.
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
        """Return the description of all state that the real model keeps for a prefix."""
        keeps = [self.full.kept(FULL_ATTENTION)]
        if self.window is not None:
            keeps.append(self.window.kept(SlidingWindow.kind))
        if self.state is not None:
            keeps.append(self.state.kept(Recurrent.kind))
        return ModelDescription(model=self.model, keeps=tuple(keeps))

    def sizes(self, page_tokens: int, device_pages: int, host_pages: int) -> dict[str, int]:
        """Return pool sizes by setting name, derived from the sizes of the full-attention pool.

        Covers all pools except the full-attention pool.
        """
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
        """Return, by setting name, the smallest pool sizes with which one request can run.

        Covers all pools except full attention's.
        """
        least: dict[str, int] = {}
        if self.window is not None:
            window = self.window.pages(page_tokens)
            least |= {
                "window_device_pages": window + CHUNK_PAGES_LEAST,
                "window_host_pages": window,
            }
        if self.state is not None:
            # A request needs two device slots: for its working state, and for the checkpoint that it
            # starts from.
            least |= {"state_device_pages": 2, "state_host_pages": 1}
        return least

    @property
    def scale(self) -> str:
        """A line of text that describes the scaling of each pool."""
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

"""A cache whose prefix tree has a given number of nodes, and prompts cached in that tree.

The tree is filled by the calls that an engine makes. No host memory is used and no page is copied, so
timed calls measure the replicated state alone.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..coordinator.collectives.in_process import InProcessGroup
from ..errors import ConfigError
from ..page_format.page_layout import Column, PageLayout
from ..ranks.group.cache import Cache
from ..ranks.protocol.answers import Admission
from ..ranks.protocol.config import PAGES_MAX, CacheConfig, ComponentConfig, SlidingWindow
from ..ranks.protocol.replica_config import ReplicaConfig
from .silent_executor import SilentExecutor

TokenArray: TypeAlias = npt.NDArray[np.int32]

LEAF_TOKENS = 64
"""The number of tokens in each filler node, to be rounded up to whole pages. Filler nodes only enlarge
the tree."""
GROUP_NODES = 32
"""The number of filler nodes (which only enlarge the tree) in a group: one shared node and its
children."""
WINDOW_TOKENS = 1024
WITH_WINDOW = "full+window"
COMPONENTS = ("full", WITH_WINDOW)
"""The sets of components that the benchmarked model can have."""
NOTHING: TokenArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The properties of a prefix tree that all measurements in the tree share."""

    nodes: int
    """The number of filler nodes, which only enlarge the tree; rounded to a multiple of `GROUP_NODES`.
    """
    page_tokens: int
    components: str

    @property
    def leaf_tokens(self) -> int:
        """The number of tokens in each filler node (which only enlarges the tree), in whole pages."""
        return -(-LEAF_TOKENS // self.page_tokens) * self.page_tokens

    @property
    def groups(self) -> int:
        """The number of groups of filler nodes, which only enlarge the tree."""
        return max(1, round(self.nodes / GROUP_NODES))


class CachedPrompts:
    """One rank's cache. The prefix tree fills its device pool, except for a number of spare pages."""

    def __init__(self, shape: TreeShape, *, spare_tokens: int, seed: int = 1) -> None:
        """Build the tree; `spare_tokens` is the number of tokens that can be added to it later.

        The pages for these tokens stay allocated until `open_spare_room` is called. Until then, a
        request is admitted only by evicting other pages.
        """
        self.shape = shape
        self._random = np.random.default_rng(seed)
        self._added = 0
        filled = shape.groups * GROUP_NODES * shape.leaf_tokens
        self.cache = _open(shape, filled + spare_tokens)
        self._admit("spare", NOTHING, spare_tokens)
        for _ in range(shape.groups):
            self.add_group()

    def open_spare_room(self) -> None:
        """Free the pages kept for later additions to the tree, so that the additions evict nothing."""
        self.cache.release("spare")

    def close(self) -> None:
        self.cache.close(flush=False)

    def random_tokens(self, count: int) -> TokenArray:
        """Return random tokens that share no prefix with the tree."""
        return self._random.integers(0, 1 << 31, count, dtype=np.int32)

    def add_group(self) -> None:
        """Add a group of `GROUP_NODES` filler nodes to the tree: one shared node, and its children."""
        shared = self.random_tokens(self.shape.leaf_tokens)
        for _ in range(GROUP_NODES - 1):
            self.add(np.concatenate([shared, self.random_tokens(self.shape.leaf_tokens)]))

    def add(self, tokens: TokenArray) -> None:
        """Serve a request with these tokens, and so leave its pages in the tree."""
        name = self.next_request()
        self._admit(name, tokens, len(tokens))
        self.cache.insert(name, tokens)
        self.cache.release(name)

    def add_prompt(self, tokens: TokenArray, path_nodes: int) -> None:
        """Add a prompt that spans `path_nodes` nodes of equal length, each a number of whole pages.

        At the end of each node but the last, another prompt branches off, so that the tree splits
        there.
        """
        page = self.shape.page_tokens
        ends = [len(tokens) // page * n // path_nodes * page for n in range(1, path_nodes + 1)]
        self.add(tokens)
        for end in ends[:-1]:
            self.add(np.concatenate([tokens[:end], self.random_tokens(page)]))

    def next_request(self) -> str:
        self._added += 1
        return f"request {self._added}"

    def _admit(self, name: str, tokens: TokenArray, reserve_tokens: int) -> None:
        admission = self.cache.load_back(name, tokens, reserve_tokens=reserve_tokens)
        admitted = isinstance(admission, Admission)
        if not admitted:
            raise RuntimeError(f"{name} was not admitted: {admission}")


def _open(shape: TreeShape, device_tokens: int) -> Cache:
    device_pages = -(-device_tokens // shape.page_tokens)
    if device_pages > PAGES_MAX:
        raise ConfigError(
            f"--nodes is {shape.nodes}, which with these --tokens needs {device_pages} pages, must be"
            f" at most {PAGES_MAX}; lower one of them"
        )
    # Give each token only one element, because no page content is read or written.
    columns = (Column(name="kv", layers=1, heads=1, elements=1),)
    layout = PageLayout(page_tokens=shape.page_tokens, columns=columns)
    config = CacheConfig(
        model="bench",
        layout=layout,
        components=_components(shape, layout, device_pages),
        device_pages=device_pages,
        host_pages=0,
    )
    replica_config = ReplicaConfig.of(config, pools=config.pool_sizes(), model_digest=b"bench")
    return Cache(config, InProcessGroup(1).member(0), SilentExecutor(), replica_config)


def _components(
    shape: TreeShape, layout: PageLayout, device_pages: int
) -> tuple[ComponentConfig, ...]:
    """Return the components besides full attention, with enough pages for the whole tree."""
    if shape.components != WITH_WINDOW:
        return ()
    window = SlidingWindow(
        window_tokens=WINDOW_TOKENS, layout=layout, device_pages=device_pages, host_pages=0
    )
    return (window,)

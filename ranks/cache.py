"""The engine's side: one cache for an engine that runs the same scheduler on every rank.

Every rank makes the same calls in the same order with the same arguments, and gets the same answers.
Once per engine step, whatever is in flight, it calls `step`, which is the only place where ranks
communicate. Local facts (how fast a disk is, what a store has lost) never show in an answer before
all ranks have agreed on them.

    admission:  match -> prefetch -> step ... until prefetch_done -> load_back -> step ... until READY
    compute:    write KV into page_table's pages, insert(final=False) after each chunk
    finish:     insert(final=True), release

The last token of a prompt has to be computed in any case, so an engine gives `tokens[:-1]` to match,
prefetch and load_back.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..coordinator.collectives.base import Collective
from ..errors import ConfigError, UsageError
from .config import CacheConfig
from .rank_cache import RankCache, as_count, require_text
from .replica.serving import Admission, LoadState, Wait
from .replica.tokens import Tokens, as_token_bytes

if TYPE_CHECKING:
    import torch

    from .executor.pools import DevicePool


class Cache(RankCache):
    """One rank's cache, with device pages of its own."""

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        collective: Collective | None = None,
        *,
        device: "torch.device | str" = "cpu",
    ) -> "Cache":
        """Make this rank's cache: compare settings over the ranks, get memory, open the store.

        Collective: every rank calls it at the same point. `collective` is the transport for rounds,
        the cache's from now on; by default a new gloo group of all ranks of `torch.distributed`,
        which must be initialised. Raises the same `ConfigError` on every rank if settings differ or
        one rank cannot start.
        """
        # Simulation and the replica's tests need no torch, which takes seconds to import.
        import torch  # noqa: PLC0415

        from .opening import new_group, open_cache  # noqa: PLC0415

        if not config.device_pages:
            raise ConfigError(
                "device_pages is 0, must be 1 or more; where the engine owns the device pages, open"
                " a HostCache"
            )
        return open_cache(config, collective or new_group(config), torch.device(device))

    @property
    def device_pool(self) -> "DevicePool":
        """The device pages; `.column(name)` is a tensor [layers, pages, heads, tokens, elements]."""
        # Only the simulated executor has none, and whoever imports this class need not have torch.
        pool: DevicePool | None = getattr(self.executor, "device_pool", None)
        if pool is None:
            raise UsageError("this cache has no device pages of its own")
        return pool

    def load_back(
        self, request: str, tokens: Tokens, namespace: str = "", *, reserve_tokens: int = 0
    ) -> Admission | Wait:
        """Admit a request: lock its device prefix, load back what the host has, reserve the rest.

        `tokens` are those that may be taken from the cache; `reserve_tokens` is the number of tokens
        in total that the request needs device pages for. All of it happens, or nothing does and a
        `Wait` says why. A prefetch of the request ends with what has landed by the last verdict.
        The pages may be used once `load_state` is READY.
        """
        self._require_group()
        require_text(namespace)
        data, reserve = as_token_bytes(tokens), as_count(reserve_tokens)
        admission = self.replica.load_back(request, namespace, data, reserve)
        self._dispatch()
        return admission

    def load_state(self, request: str) -> LoadState:
        """Say whether an admitted request's prefix is on the device on every rank."""
        return self.replica.load_state(request)

    def page_table(self, request: str) -> npt.NDArray[np.int32]:
        """Return the device pages of a READY request in token order: shared prefix, then its own.

        A copy. `insert` may change the table, since a page that the tree has already replaces the
        request's own.
        """
        return np.array(self.replica.page_table(request), dtype=np.int32)

    def extend(self, request: str, total_tokens: int) -> bool:
        """Reserve device pages for `total_tokens` tokens in total; False if there is no room."""
        self._require_group()
        done = self.replica.extend(request, as_count(total_tokens))
        self._dispatch()
        return done

    def insert(self, request: str, tokens: Tokens, *, final: bool = True) -> int:
        """Publish the whole pages of `tokens`, whose KV is in the request's pages.

        Call it only when the KV has been written, or is ordered before every later use on the
        engine's stream. `final=False` says that the prompt goes on (chunked prefill). The published
        pages are shared, backed up under the write policy, and stay locked for the request. Returns
        the number of tokens that the tree now shares with it.
        """
        self._require_group()
        shared = self.replica.insert(request, as_token_bytes(tokens), final=final)
        self._dispatch()
        return shared

    def release(self, request: str) -> None:
        """Forget a request: unlock what it shares and give back what is its own."""
        self.replica.release(request)
        self._dispatch()

    def abort(self, request: str) -> None:
        """Forget a request wherever it stands, also one that is not known.

        What its prefetch has landed stays cached; what is still moving settles by itself.
        """
        if request in self.replica.state.requests:
            self.release(request)

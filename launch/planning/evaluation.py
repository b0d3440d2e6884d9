"""Evaluates a cache size on a trace: the hits of the replica, and those of ideal reference caches."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isinf

from ...errors import ConfigError
from ...ranks.protocol.orders import KV_POOL
from ...simulation.planning.group import InstantGroup, Served
from ...simulation.planning.key_store import KeyStore
from ...simulation.planning.oracles import Path, belady, fifo, ideal, paths
from ...simulation.planning.prompts import PagedPrompt, paged, require_page_tokens
from ...small_engine.profile import KV_PAGES_PER_WINDOW_PAGE
from ...small_engine.request import WorkloadRequest
from ...small_engine.workload import requests_of
from ..replay.report import HitTokens
from .plan_settings import FIFO, MovedGib, PlanPoint, PlanSettings, Size
from .pools import GIB, ModelPools
from .published import find_model


class Evaluation:
    """A trace and a model with which cache sizes are evaluated. For use by one thread."""

    def __init__(self, settings: PlanSettings) -> None:
        """Read the trace and the model. Raises `ConfigError` if either is wrong."""
        self.model = find_model(settings.model, settings.dtype)
        self.requests: Sequence[WorkloadRequest] = list(
            requests_of(settings.trace, 0, settings.requests)
        )
        self.tokens = sum(each.prompt_length for each in self.requests)
        self._tp = settings.tp
        self._operations = sum(
            self.model.work.operations(each.prompt_length) for each in self.requests
        )
        # Keep the divided prompts for a few page sizes, because many evaluated cache sizes have the
        # same page size.
        self.prompts = lru_cache(maxsize=4)(self._prompts)

    def pools(self, page_tokens: int) -> ModelPools:
        """Return the model's pools for a page size."""
        return ModelPools(self.model.profile, self._tp, page_tokens)

    def require(self, size: Size) -> tuple[int, int]:
        """Return (device pages, host pages) of a cache size; raise `ConfigError` if it is too small."""
        require_page_tokens(size.page_tokens)
        pools = self.pools(size.page_tokens)
        device = pools.pages(size.device_gib * GIB, "device")
        host = pools.pages(size.host_gib * GIB, "host")
        for tier, pages, gib in (
            ("device", device, size.device_gib),
            ("host", host, size.host_gib),
        ):
            if not pages and (gib or tier == "device"):
                least = pools.nbytes(1, tier) / GIB
                raise ConfigError(
                    f"--{tier}-gib {gib:g} does not fit one page of {size.page_tokens} tokens, which"
                    f" takes {least:.4f} GiB on each rank with its window and state pages; give more"
                )
        if size.storage_gib and not host:
            raise ConfigError("--storage-gib needs host memory: set --host-gib")
        return device, host

    def evaluate(self, size: Size) -> PlanPoint:
        """Replay the whole trace on a cache of this size; return its hit ratios, memory and traffic."""
        prompts, chains, most, _ = self.prompts(size.page_tokens)
        device, host = self.require(size)
        pools = self.pools(size.page_tokens)
        memory = device + host
        stored = size.storage_gib * GIB
        best = most
        if not isinf(stored):
            memory += int(stored) // pools.stored_bytes[KV_POOL]
            best = belady(chains, memory)
        moved: Mapping[tuple[str, str], int] = {}
        if size.policy == FIFO:
            oldest = most if isinf(stored) else fifo(chains, memory)
            served: list[Served | None] = [Served(each, 0, 0) for each in oldest]
        else:
            store = None
            if stored:
                store = KeyStore(pools.stored_bytes, None if isinf(stored) else int(stored))
            enough = self._pages_enough(size.page_tokens)
            sizes = min(device, enough), min(host, enough)
            group = InstantGroup(
                pools.replica(*sizes, has_store=store is not None, policy=size.policy),
                chunk_pages=pools.chunk_pages(device),
                store=store,
            )
            served = [group.serve(each) for each in prompts]
            moved = group.moved
        unit = size.page_tokens
        hits = [sum(each) * unit if each is not None else 0 for each in served]
        by_tier = [sum(each[tier] for each in served if each is not None) for tier in range(3)]
        return PlanPoint(
            device_gib=size.device_gib,
            host_gib=size.host_gib,
            storage_gib=None if isinf(stored) else size.storage_gib,
            page_tokens=unit,
            policy=size.policy,
            hit_ratio=sum(hits) / self.tokens,
            ideal_ratio=sum(most) * unit / self.tokens,
            belady_ratio=sum(best) * unit / self.tokens,
            compute_saved=sum(map(self.model.work.operations, hits)) / self._operations,
            hit_tokens=HitTokens(
                device=by_tier[0] * unit, host=by_tier[1] * unit, storage=by_tier[2] * unit
            ),
            moved_gib=self._moved(moved, pools),
            device_pages=device,
            host_pages=host,
            too_long=sum(each is None for each in served),
        )

    def ideal_tokens(self, page_tokens: int) -> int:
        """Return the number of prompt tokens that hit in a cache of unlimited size."""
        return sum(self.prompts(page_tokens)[2]) * page_tokens

    def whole_gib(self, page_tokens: int) -> float:
        """Return the GiB of host memory per rank that can hold all pages of the trace."""
        return self.pools(page_tokens).nbytes(self.prompts(page_tokens)[3], "host") / GIB

    def _pages_enough(self, page_tokens: int) -> int:
        """Return a number of pages per tier with which no page is ever evicted."""
        state = self.model.profile.state
        # The sizes of the window and state pools are fractions of the KV pool's size. Make the KV pool
        # so large that these smaller pools can also hold all pages of every request.
        beside = 1 if state is None else state.every(page_tokens) // page_tokens
        prompts = self.prompts(page_tokens)[0]
        return KV_PAGES_PER_WINDOW_PAGE * sum(each.reserved + beside for each in prompts)

    def _prompts(self, page_tokens: int) -> tuple[list[PagedPrompt], list[Path], list[int], int]:
        prompts = paged(self.requests, page_tokens)
        chains, pages = paths(prompts)
        return prompts, chains, ideal(chains), pages

    def _moved(self, moved: Mapping[tuple[str, str], int], pools: ModelPools) -> MovedGib:
        def gib(way: str, page_bytes: Mapping[str, int], times: int) -> float:
            of_way = ((pool, pages) for (each, pool), pages in moved.items() if each == way)
            return sum(pages * page_bytes[pool] for pool, pages in of_way) * times / GIB

        # Count reads of replicated content on every rank, but writes only once, because only one rank
        # writes this content.
        return MovedGib(
            l1_to_l2=gib("l1_to_l2", pools.page_bytes, self._tp),
            l2_to_l1=gib("l2_to_l1", pools.page_bytes, self._tp),
            l2_to_l3=gib("l2_to_l3", pools.stored_bytes, 1),
            l3_to_l2=gib("l3_to_l2", pools.page_bytes, self._tp),
        )

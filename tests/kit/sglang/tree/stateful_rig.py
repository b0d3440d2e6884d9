"""One rank's radix cache over SGLang's pools, for a model with recurrent states.

Instead of a forward pass, known numbers are written to the request's state slot. If SGLang tracks
states at page ends, the numbers are also written to the slots of the tracked states.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lockstep.coordinator.collective import Collective
from lockstep.ranks.protocol.config import ComponentConfig, Recurrent
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_bytes import numbers_of
from tests.kit.sglang.tree.known_states import LAYERS, STATES, held_by, write
from tests.kit.sglang.tree.rig import BASE, LONGEST, MEM_CACHE, OURS, Rig
from tests.kit.sglang.tree.rigs import Rigs

POOLS = f"{MEM_CACHE}.memory_pool"


class StatefulRig(Rig):
    """One rank with `slots` state slots for recurrent states of the kind `states`.

    If `tracked` is True, SGLang keeps a copy of a request's state at each page end. Otherwise a page
    has one token.
    """

    def __init__(
        self,
        collective: Collective,
        *,
        states: str = "delta net",
        slots: int = 12,
        host_states: int = 64,
        tracked: bool = False,
        **settings: Any,
    ) -> None:
        self.state_kind, self.slots, self.tracked = STATES[states], slots, tracked
        self._host_states = host_states
        kind = "attention" if tracked else "a token to a page"
        sizes: dict[str, Any] = {"kind": kind, "pages": 128, "host_pages": 256}
        super().__init__(collective, **sizes | settings)

    def _rows(self) -> Any:
        return here.of(POOLS, "HybridReqToTokenPool")(
            size=4,
            mamba_size=self.slots,
            mamba_spec_state_size=4,
            max_context_len=LONGEST,
            device="cpu",
            enable_memory_saver=False,
            cache_params=self.state_kind.params(self.ranks),
            mamba_layer_ids=list(LAYERS),
            enable_mamba_extra_buffer=self.tracked,
        )

    def _kv_cache(self) -> Any:
        return here.of(POOLS, "HybridLinearKVPool")(
            size=self.size,
            dtype=self.pool.dtype,
            page_size=self.page_tokens,
            head_num=self.pool.head_num,
            head_dim=self.pool.head_dim,
            full_attention_layer_ids=[0, 2, 5],
            device="cpu",
            mamba_pool=self.rows.mamba_pool,
            full_kv_pool=self.pool,
        )

    def _components(self, pools: dict[str, Any]) -> tuple[ComponentConfig, ...]:
        layout = pools["state"].layout
        return (
            Recurrent(
                checkpoint_tokens=self.page_tokens,
                layout=layout,
                device_pages=0,
                host_pages=self._host_states,
            ),
        )

    def _lent(self) -> Any:
        slots = here.of(f"{OURS}.pools.state_slots", "StateSlots")
        return slots(self.allocator, self.rows, self.page_tokens)

    def _kept(self) -> dict[str, Any]:
        kinds = here.of(f"{MEM_CACHE}.unified_cache.component_type", "ComponentType")
        return {
            "tree_components": (kinds.FULL, kinds.MAMBA),
            "enable_mamba_extra_buffer": self.tracked,
        }

    # Methods that allocate and free state slots in the order of SGLang's scheduler.

    def admit(self, request: Any, *, promised: int = 0) -> bool:
        if not super().admit(request, promised=promised):
            if request.kv.holds_mamba:
                self.rows.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))
                request.kv.mamba_pool_idx = None
            request.kv.mamba_cow_src_index = None
            return False
        source = request.kv.mamba_cow_src_index
        if source is not None:
            self.rows.copy_mamba_state(source, request.kv.mamba_pool_idx.unsqueeze(0))
            request.kv.mamba_cow_src_index = None
        return True

    def _compute(self, request: Any, end: int) -> None:
        start = request.kv.kv_allocated_len
        super()._compute(request, end)
        known = [*request.origin_input_ids, *request.output_ids][:end]
        numbers = [int(number) for number in numbers_of(known)]
        self._write_state(request.kv.mamba_pool_idx, numbers[-1])
        for tracked in range(start // self.page_tokens + 1, end // self.page_tokens + 1):
            if self.tracked:
                self._track(request.kv, tracked * self.page_tokens, numbers)

    def _track(self, kv: Any, tokens: int, numbers: Sequence[int]) -> None:
        at = kv.mamba_next_track_idx
        self._write_state(kv.mamba_ping_pong_track_buffer[at], numbers[tokens - 1])
        kv.mamba_last_track_idx, kv.mamba_next_track_idx = at, 1 - at
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = tokens

    def insert(self, tokens: Sequence[int]) -> None:
        """Insert full pages of tokens and the state after them into the tree, in new slots."""
        numbers = numbers_of(tokens)
        slots = self._slots(None, 0, len(tokens))
        self.write(slots, numbers)
        state = self.rows.mamba_allocator.alloc(1)
        self._write_state(state, int(numbers[-1]))
        params = here.of(BASE, "InsertParams")(key=self.key(tokens), value=slots, mamba_value=state)
        if self.cache.insert(params).mamba_exist:
            self.rows.mamba_allocator.free(state)

    def evict_states(self, count: int) -> None:
        self.cache.evict(here.of(BASE, "EvictParams")(mamba_num=count))

    # Methods that query matches and the content of slots.

    def pages(self, first: int, count: int) -> list[int]:
        """Return consecutive tokens that fill `count` pages; the first token is `first`."""
        return list(range(first, first + count * self.page_tokens))

    def found(self, *sequences: Sequence[int]) -> list[bool]:
        """Return, for each sequence of tokens, whether the whole sequence matches on the device."""
        return [self.matched(each) == len(each) for each in sequences]

    def state_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the state slot of the tree node at which the match of these tokens ends."""
        kinds = here.of(f"{MEM_CACHE}.unified_cache.component_type", "ComponentType")
        node = self.match(tokens).last_device_node
        state: torch.Tensor = self.cache.tree_core.get_component_device_value(node, kinds.MAMBA)
        return state

    def wrong(self, tokens: Sequence[int]) -> list[str]:
        return super().wrong(tokens) + self._wrong_state(self.state_of(tokens), tokens)

    def wrong_of(self, request: Any) -> list[str]:
        found = super().wrong_of(request)
        known = [*request.origin_input_ids, *request.output_ids][: request.kv.kv_committed_len]
        return found + (self._wrong_state(request.kv.mamba_pool_idx, known) if known else [])

    def _wrong_state(self, slot: torch.Tensor, tokens: Sequence[int]) -> list[str]:
        number = int(numbers_of(tokens)[-1])
        expected = self.state_kind.expected(number, self.rank, self.ranks)
        held = held_by(self.rows.mamba_pool, int(slot))
        assert held.keys() == expected.keys()
        return [name for name in held if not torch.equal(held[name], expected[name])]

    def _write_state(self, slot: torch.Tensor, number: int) -> None:
        held = self.state_kind.expected(number, self.rank, self.ranks)
        write(self.rows.mamba_pool, int(slot), held)

    def spoil(self) -> None:
        super().spoil()
        for slot in self.rows.mamba_allocator.free_slots:
            self._write_state(slot, 4711)

    def all_lost(self) -> tuple[int, ...]:
        free, cache = self.rows.mamba_allocator.available_size(), self.cache
        in_tree = cache.mamba_evictable_size() + cache.mamba_protected_size()
        return self.lost(), self.slots - free - in_tree


@contextmanager
def one_stateful(*, states_per_path: int = -1, **settings: Any) -> Generator[StatefulRig]:
    """Run one rank, and check at the end that no slot is lost or locked.

    SGLang keeps at most `states_per_path` states on one path of its tree; -1 means no limit.
    """
    here.begin()
    mamba = here.of("sglang.srt.runtime_context", "get_exec")().mamba
    with (
        mamba.override(mamba_max_states_per_path=states_per_path),
        Rigs(rig=StatefulRig, **settings) as rigs,
    ):
        [rig] = rigs.ranks
        assert isinstance(rig, StatefulRig)
        yield rig
        rig.settled()
        assert rig.all_lost() == (0, 0)
        assert (rig.cache.protected_size(), rig.cache.mamba_protected_size()) == (0, 0)
        rig.cache.sanity_check()


@pytest.fixture(params=[False, True], ids=["pages of one token", "tracked beside it"])
def rig(request: pytest.FixtureRequest) -> Generator[StatefulRig]:
    """One rank, once without and once with tracked states. Test modules import this fixture."""
    with one_stateful(tracked=request.param) as rig:
        yield rig

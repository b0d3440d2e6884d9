"""Host memory and storage below SGLang's radix tree on one rank; `sglang_opening.py` creates them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.config import WritePolicy
from .namespaces import Namespaces
from .pools.slots import AttentionSlots
from .pools.state_slots import StateSlots
from .weights import WeightsVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """The host tier below SGLang's radix tree on one rank, with the settings that the tree uses."""

    host: HostCache
    slots: AttentionSlots
    namespaces: Namespaces
    weights: WeightsVersions
    write_policy: WritePolicy
    prefetch_threshold_tokens: int
    idle_wait_s: float
    compare_batches: bool
    stream: torch.cuda.Stream | None
    """The CUDA stream of the forward pass, on which the KV is written; None on a CPU."""

    def behind_forward(self) -> AbstractContextManager[Any]:
        """Return a context in which copies from the device start after the forward pass in flight.

        For a model with recurrent state, the copies also wait for the current stream, because SGLang
        copies states into the tree on that stream and not on the forward stream.
        """
        if self.stream is None:
            return nullcontext()
        if isinstance(self.slots, StateSlots):
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

"""What lies below SGLang's tree on one rank, as `opening.py` has made it."""

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
class Below:
    """The parts that the tree is built over, and how it is to use them."""

    host: HostCache
    slots: AttentionSlots
    namespaces: Namespaces
    weights: WeightsVersions
    write_policy: WritePolicy
    prefetch_threshold_tokens: int
    idle_wait_s: float
    witness: bool
    stream: torch.cuda.Stream | None
    """The stream that writes the KV; None on a CPU."""

    def behind_forward(self) -> AbstractContextManager[Any]:
        """Order the copies within it behind the pass that may still write, or read, their slots.

        The tree is given copies of states, which SGLang makes where it does not compute.
        """
        if self.stream is None:
            return nullcontext()
        if isinstance(self.slots, StateSlots):
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

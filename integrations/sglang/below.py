"""What lies below SGLang's tree on one rank, as `opening.py` has made it."""

from dataclasses import dataclass

import torch

from ...ranks.config import WritePolicy
from ...ranks.host_cache import HostCache
from .namespaces import Namespaces
from .slots import Slots
from .weights import WeightsVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """The parts that the tree is built over, and how it is to use them."""

    host: HostCache
    slots: Slots
    namespaces: Namespaces
    weights: WeightsVersions
    write_policy: WritePolicy
    prefetch_threshold_tokens: int
    idle_wait_s: float
    witness: bool
    stream: torch.cuda.Stream | None
    """The stream that writes the KV; None on a CPU."""

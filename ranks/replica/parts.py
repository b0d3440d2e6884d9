"""The classes that make up a replica's parts. Tests replace some with faulty classes."""

from collections.abc import Callable
from dataclasses import dataclass

from ...coordinator.ballot import Ballot
from ...coordinator.lanes import BallotShape
from .attaching import Attaching
from .device.lent_device import LentDevice
from .device.owned import OwnedDevice
from .operations.backing_up import BackingUp
from .operations.loading_back import LoadingBack
from .operations.operation_table import OperationTable
from .operations.persisting import Persisting
from .operations.requests import Requests
from .operations.retraction import Retraction
from .operations.retrying import Retrying
from .operations.serving_peers import ServingPeers
from .operations.store import Store
from .pinning import Pinning
from .prefetch.prefetching import Prefetching
from .tree.page_allocator import PageAllocator
from .tree.prefixes import Prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One class for each part of a replica that tests can replace."""

    allocator: type[PageAllocator] = PageAllocator
    prefixes: type[Prefixes] = Prefixes
    requests: type[Requests] = Requests
    store: type[Store] = Store
    operation_table: type[OperationTable] = OperationTable
    prefetching: type[Prefetching] = Prefetching
    backing_up: type[BackingUp] = BackingUp
    persisting: type[Persisting] = Persisting
    retrying: type[Retrying] = Retrying
    loading_back: type[LoadingBack] = LoadingBack
    saving: type[Retraction] = Retraction
    serving: type[ServingPeers] = ServingPeers
    owned: type[OwnedDevice] = OwnedDevice
    lent: type[LentDevice] = LentDevice
    pinning: type[Pinning] = Pinning
    attaching: type[Attaching] = Attaching
    ballot: Callable[[BallotShape, int], Ballot] = Ballot


SOUND = Parts()

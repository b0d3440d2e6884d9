"""The classes that make up a replica's parts; tests substitute faulty ones to check detection."""

from collections.abc import Callable
from dataclasses import dataclass

from ...coordinator.ballot import Ballot
from ...coordinator.lanes import BallotShape
from .attaching import Attaching
from .device.lent_device import LentDevice
from .device.owned import OwnedDevice
from .operations.agenda import Agenda
from .operations.backing_up import BackingUp
from .operations.loading_back import LoadingBack
from .operations.persisting import Persisting
from .operations.requests import Requests
from .operations.retrying import Retrying
from .operations.saving import Saving
from .operations.serving_peers import ServingPeers
from .operations.store import Store
from .pinning import Pinning
from .prefetch.prefetching import Prefetching
from .tree.prefixes import Prefixes
from .tree.residence import Residence


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One class for each replaceable part of a rank."""

    residence: type[Residence] = Residence
    prefixes: type[Prefixes] = Prefixes
    requests: type[Requests] = Requests
    store: type[Store] = Store
    agenda: type[Agenda] = Agenda
    prefetching: type[Prefetching] = Prefetching
    backing_up: type[BackingUp] = BackingUp
    persisting: type[Persisting] = Persisting
    retrying: type[Retrying] = Retrying
    loading_back: type[LoadingBack] = LoadingBack
    saving: type[Saving] = Saving
    serving: type[ServingPeers] = ServingPeers
    owned: type[OwnedDevice] = OwnedDevice
    lent: type[LentDevice] = LentDevice
    pinning: type[Pinning] = Pinning
    attaching: type[Attaching] = Attaching
    ballot: Callable[[BallotShape, int], Ballot] = Ballot


SOUND = Parts()

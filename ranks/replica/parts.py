"""The classes that a replica is put together from. A test hands in others, to see what notices."""

from dataclasses import dataclass

from .agenda import Agenda
from .attaching import Attaching
from .backing_up import BackingUp
from .lent_device import LentDevice
from .loading_back import LoadingBack
from .owned import OwnedDevice
from .persisting import Persisting
from .pinning import Pinning
from .prefetching import Prefetching
from .prefixes import Prefixes
from .requests import Requests
from .residence import Residence
from .room import Room
from .saving import Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One class for each part that decides something."""

    residence: type[Residence] = Residence
    room: type[Room] = Room
    prefixes: type[Prefixes] = Prefixes
    requests: type[Requests] = Requests
    agenda: type[Agenda] = Agenda
    prefetching: type[Prefetching] = Prefetching
    backing_up: type[BackingUp] = BackingUp
    persisting: type[Persisting] = Persisting
    loading_back: type[LoadingBack] = LoadingBack
    saving: type[Saving] = Saving
    owned: type[OwnedDevice] = OwnedDevice
    lent: type[LentDevice] = LentDevice
    pinning: type[Pinning] = Pinning
    attaching: type[Attaching] = Attaching


SOUND = Parts()

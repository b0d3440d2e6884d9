"""One line for an error that many ranks meet, printed by one of them.

Every rank that fails asks the store in which the ranks met whether it is the first; only the first
one speaks. A lost peer is mostly the consequence of another rank's error, so a rank that only lost
its peers waits a moment for the one that knows more.
"""

import time

from torch.distributed.distributed_c10d import Store

from ...errors import GroupError, LockstepError, PeerLost
from .environment import RankEnvironment
from .exits import say
from .meeting import meet

_CLAIM = "first-error"
_CONNECT_TIMEOUT_S = 5.0
_CONSEQUENCE_DELAY_S = 0.5
_LINGER_S = 2.0
_LINGER_POLL_S = 0.01


def claim(store: Store) -> bool:
    """Take it upon this process to say why the ranks end; say whether nobody had done so before."""
    return store.add(_CLAIM, 1) == 1


def was_claimed(store: Store) -> bool:
    """Say whether the ranks end because of an error that somebody tells of."""
    try:
        return store.add(_CLAIM, 0) > 0
    except RuntimeError:
        return False


def say_once(error: LockstepError, environment: RankEnvironment, store: Store | None) -> None:
    """Print the error's line unless another rank of this attempt has printed one.

    `store` is where the ranks have met, None if they have not yet. Where it cannot be reached in
    time the line is printed: twice is better than never.
    """
    if isinstance(error, GroupError):
        time.sleep(_CONSEQUENCE_DELAY_S)
    try:
        if store is None:
            store = meet(environment, timeout_s=_CONNECT_TIMEOUT_S)
        if claim(store):
            say(str(error))
        if environment.rank == 0 and not environment.store_is_hosted:
            _linger(store, environment.world_size)
    except (RuntimeError, PeerLost):
        say(str(error))


def _linger(store: Store, world_size: int) -> None:
    """Serve the store until the other ranks have asked too, or do not seem to want to."""
    deadline = time.monotonic() + _LINGER_S
    while store.add(_CLAIM, 0) < world_size and time.monotonic() < deadline:
        time.sleep(_LINGER_POLL_S)

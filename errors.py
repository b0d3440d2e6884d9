"""The errors of Lockstep, split by what the caller can do about them.

    LockstepError
      ConfigError (ValueError)            fix the configuration and start again
      UsageError                          fix the calling code: the engine called out of order
      InternalError                       report it: a promise of Lockstep's own was broken
      GroupError                          rebuild the group: this epoch is over on every rank
        CollectiveTimeout (TimeoutError)    a round did not come back within its deadline
        PeerLost                            another rank of the group is gone
        DivergenceError                     the replicas are not equal any more
        RankUnhealthy                       a rank cannot go on, as it said or as all have seen
        WireError                           what one process of the group told another makes no sense
      StorageError                        treat it as a miss: storage never stops the group

A missing page is an outcome and not an error. Messages name the thing, what was expected, what was
found, and the remedy where there is one.
"""


class LockstepError(Exception):
    """The root of all errors that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting is wrong. Fix it and start again; nothing was lost."""


class UsageError(LockstepError):
    """The engine called out of order or with impossible arguments. Nothing was changed.

    The group goes on, if every rank has made the same call and catches it.
    """


class InternalError(LockstepError):
    """A promise of Lockstep's own was broken. Please report it with the message."""


class GroupError(LockstepError):
    """The group cannot agree any more. Its epoch is over on every rank; rebuild the group.

    Every later command and step raises it again. What was written to the store is there for the next.
    """


class CollectiveTimeout(GroupError, TimeoutError):
    """A round did not come back within its deadline."""


class PeerLost(GroupError):
    """Another rank of the group is gone."""


class DivergenceError(GroupError):
    """The replicas are not equal any more; the message names the first operation that differs."""


class RankUnhealthy(GroupError):
    """A rank cannot go on: it said so in its ballot, or all have seen that its copies do not end."""


class WireError(GroupError):
    """A message between the processes of a group cannot be written, or makes no sense."""


class StorageError(LockstepError):
    """A store failed as a whole. The caller treats what it asked for as missing."""

"""Lockstep's errors, grouped by how the caller can react.

    LockstepError
      ConfigError (ValueError)            fix the configuration and start again
      UsageError                          fix the calling code: the engine called out of order
      InternalError                       report it: a bug in Lockstep
      GroupError                          rebuild the group: this epoch is over on every rank
        CollectiveTimeout (TimeoutError)    a round did not complete before its deadline
        PeerLost                            another rank of the group has left or was lost
        DivergenceError                     the replicas are no longer equal
        RankUnhealthy                       a rank cannot continue
        WireError                           a message between processes of the group is malformed
      StorageError                        treat it as a miss: storage never stops the group

A missing page is an outcome, not an error. Messages name the thing, the value found, what was expected,
and the remedy, if there is one.
"""


class LockstepError(Exception):
    """The base of all errors that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting is wrong. Fix the setting and start again; nothing was lost."""


class UsageError(LockstepError):
    """The engine called out of order or with invalid arguments. Nothing was changed.

    The group continues if every rank made the same call and catches the error.
    """


class InternalError(LockstepError):
    """An internal guarantee was violated, which is a bug. Please report it with the message."""


class GroupError(LockstepError):
    """The ranks can no longer agree. The epoch is over on every rank; rebuild the group.

    Every later command and step raises the error again. Data already in the store is available to the
    next group.
    """


class CollectiveTimeout(GroupError, TimeoutError):
    """A round did not complete before its deadline."""


class PeerLost(GroupError):
    """Another rank of the group has left or was lost."""


class DivergenceError(GroupError):
    """The replicas are no longer equal; the message names the first recorded change that differs."""


class RankUnhealthy(GroupError):
    """A rank cannot continue: it voted that it is unhealthy, or its copies do not finish."""


class WireError(GroupError):
    """A message between the processes of a group cannot be encoded or is malformed."""


class StorageError(LockstepError):
    """A store failed as a whole. The caller treats the requested data as missing."""

"""Sleeping on a word of shared memory until another process changes it (futex(2), Linux).

No lock and no handle: the kernel compares the word and puts the caller to sleep in one step, so that
a change just before the sleep is not missed, and a process that dies leaves nothing behind.
"""

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import partial

from ...errors import ConfigError

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
"""The number of the system call by machine, as `uname` names it."""

_WAIT, _WAKE = 0, 1

_EVERYBODY = (1 << 31) - 1


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The two calls. Addresses are those of aligned 32-bit words in memory that processes share."""

    def __init__(self) -> None:
        """Raises `ConfigError` where the system has no futex that this module knows."""
        number = _SYSCALLS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise ConfigError(
                f"ranks cannot share memory on {sys.platform} on {platform.machine()};"
                " use the transport torch"
            )
        self._number = ctypes.c_long(number)
        # A sleep must let other threads of the process run. A wake is over in a microsecond, and
        # would take longer if it had to get the interpreter back.
        self._sleep = ctypes.CDLL(None).syscall
        self._wake = ctypes.PyDLL(None).syscall

    def sleep(self, address: int, expected: int, timeout_s: float) -> None:
        """Sleep while the word at `address` is `expected` (32 bits, unsigned), for `timeout_s` at most.

        May return early for no reason; the caller looks again.
        """
        nanoseconds = max(0, int(timeout_s * 1e9))
        duration = _Duration(*divmod(nanoseconds, 1_000_000_000))
        self._sleep(
            self._number,
            ctypes.c_void_p(address),
            ctypes.c_int(_WAIT),
            ctypes.c_uint32(expected),
            ctypes.byref(duration),
        )

    def waker(self, address: int) -> Callable[[], object]:
        """Return a call that wakes everybody who sleeps on the word at `address`."""
        return partial(
            self._wake,
            self._number,
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_EVERYBODY),
        )

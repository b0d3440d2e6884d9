"""Sleep on a word of shared memory until another process changes it (futex(2), Linux).

The kernel compares the word and puts the caller to sleep atomically, so a change just before the sleep
is not missed. A process that dies leaves no lock or handle behind.
"""

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import partial

from ...errors import ConfigError

_SYSCALLS = {"x86_64": 202, "aarch64": 98}
"""The number of the futex system call, keyed by the machine name that `uname` prints."""

_WAIT, _WAKE = 0, 1

_EVERYBODY = (1 << 31) - 1


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Futex sleep and wake. Addresses are those of aligned 32-bit words in shared memory."""

    def __init__(self) -> None:
        """Prepare the futex system call. Raise `ConfigError` if this system is not supported."""
        number = _SYSCALLS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise ConfigError(
                f"ranks cannot share memory on {sys.platform} on {platform.machine()};"
                " use the transport torch"
            )
        self._number = ctypes.c_long(number)
        # CDLL releases the GIL while the process sleeps. PyDLL keeps the GIL during a wake, because a
        # wake takes about a microsecond and reacquiring the GIL would take longer.
        self._sleep = ctypes.CDLL(None).syscall
        self._wake = ctypes.PyDLL(None).syscall

    def sleep(self, address: int, expected: int, timeout_s: float) -> None:
        """Sleep while the word at `address` equals `expected` (32 bits, unsigned), at most `timeout_s`.

        May return early; the caller must check the word again.
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
        """Return a callable that wakes every process sleeping on the word at `address`."""
        return partial(
            self._wake,
            self._number,
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_EVERYBODY),
        )

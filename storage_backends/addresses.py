"""Where the bytes of a buffer lie in memory, for what Python hands to the kernel or a library."""

import mmap

import numpy as np


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return the address of the first byte."""
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address

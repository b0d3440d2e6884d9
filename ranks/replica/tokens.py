"""Token ids as bytes: int32, little-endian, so that matching a run is one comparison."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import UsageError

TOKEN_BYTES = 4

Tokens: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.int32] | Sequence[int]"
"""Token ids: a buffer of int32, an integer array, or a sequence of Python integers."""


def as_token_bytes(tokens: Tokens) -> bytes:
    """Return the tokens as bytes; cheap for buffers and int32 arrays, slower for Python lists.

    Raises `UsageError` for a buffer that is not whole tokens and for ids that int32 cannot hold.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise UsageError(
                f"tokens must be a one-dimensional integer array, not {tokens.dtype}"
                f" with {tokens.ndim} dimensions"
            )
        return tokens.astype("<i4", copy=False).tobytes()
    if isinstance(tokens, bytes | bytearray | memoryview):
        data = bytes(tokens)
        if len(data) % TOKEN_BYTES:
            raise UsageError(f"a token buffer of {len(data)} bytes is not whole int32 tokens")
        return data
    try:
        numbers = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise UsageError(f"tokens must be int32 token ids: {error}") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()

"""Token ids as bytes, and page keys.

The bytes are little-endian int32, so matching a run is one comparison. A page key is a cryptographic
hash chain: key[i] = sha256(key[i - 1] + tokens of page i), where key[-1] is the seed of the namespace.
Two pages have the same key only if their namespaces, their tokens and all tokens before them are equal.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ....errors import UsageError

TOKEN_BYTES = 4
_LITTLE = sys.byteorder == "little"

_SMALLEST, _LARGEST = -(1 << 31), (1 << 31) - 1
_INT32_ARRAY = np.dtype("<i4")
"""numpy's shared dtype object for little-endian int32. Most token arrays have exactly this object as
their dtype, so an identity comparison recognises them."""
_INT32 = ("i", "<i", "=i", "@i", "<l", "=l")
"""The format strings of int32 in the buffer protocol."""

Tokens: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.integer[Any]] | Sequence[int]"
"""Token ids: a buffer of int32, an integer array, or a sequence of Python integers."""


def token_hash(tokens: bytes) -> int:
    """Return a 64-bit hash of the tokens; not protected against forgery."""
    return xxhash.xxh3_64_intdigest(tokens)


def as_token_view(tokens: Tokens) -> bytes | memoryview:
    """Return the tokens as bytes, without a copy if they are an int32 buffer.

    Without a copy the result is a view of the caller's memory and must not outlive the call. Accepts
    and refuses the same values as `as_token_bytes`.
    """
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
        if view.format == "i" and view.ndim == 1 and _LITTLE:
            return view.cast("B")
    except (TypeError, ValueError):
        # Copy tokens that are not a buffer, are empty, or are not contiguous.
        pass
    return as_token_bytes(tokens)


def as_token_bytes(tokens: Tokens) -> bytes:
    """Return the tokens as bytes; fast for buffers and int32 arrays, slower for Python lists.

    Raises `UsageError` for a buffer that is not whole tokens and for ids that int32 cannot hold.
    """
    if isinstance(tokens, np.ndarray):
        kind = tokens.dtype
        if kind is _INT32_ARRAY and tokens.ndim == 1:
            return tokens.tobytes()
        if tokens.ndim != 1 or kind.kind not in "iu":
            raise UsageError(
                f"tokens must be a one-dimensional integer array, not {kind}"
                f" with {tokens.ndim} dimensions"
            )
        if kind != np.int32 and tokens.size:
            # Refuse larger ids: a cast to int32 would wrap them, and the tokens could match the pages
            # of another prompt.
            low, high = int(tokens.min()), int(tokens.max())
            if low < _SMALLEST or high > _LARGEST:
                raise UsageError(f"tokens must be int32 token ids: from {low} to {high}")
        return tokens.astype("<i4", copy=False).tobytes()
    if isinstance(tokens, memoryview) and tokens.itemsize != 1 and tokens.format not in _INT32:
        raise UsageError(f"a token buffer must hold int32, not items of format {tokens.format!r}")
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


def namespace_seed(
    model_digest: bytes,
    namespace: str,
    generation: int = 0,
    life: bytes = b"",
    weights_version: str | None = None,
) -> bytes:
    """Return the seed of the key chain for one namespace (tenant salt, adapter) of one model.

    Each cache reset begins another generation. If the reset names a weights version, the keys depend on
    that version only. Otherwise they are unique to the generation and to `life`, which identifies one
    run of the cache.
    """
    seed = sha256(model_digest + namespace.encode()).digest()
    if weights_version is not None:
        return sha256(seed + b"weights" + weights_version.encode()).digest()
    if not generation:
        return seed
    return sha256(seed + generation.to_bytes(8, "little") + life).digest()


def page_keys(seed: bytes, tokens: bytes | bytearray, page_tokens: int) -> list[bytes]:
    """Return the keys of the whole pages of `tokens`; the page before them has the key `seed`."""
    step = page_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key = seed
    for at in range(0, len(tokens) - step + 1, step):
        key = sha256(key + tokens[at : at + step]).digest()
        keys.append(key)
    return keys

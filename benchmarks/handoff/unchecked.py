"""Moving pages without their checksums, for a measurement of what those cost."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import xxhash

from ...page_format import object_header
from ...ranks.executor import seals

_NOTHING: Final = bytes(16)


class _Free:
    """What the checksums of pages come from, in place of xxhash: all are the same, and cost nothing."""

    xxh3_64_intdigest = staticmethod(xxhash.xxh3_64_intdigest)
    """Headers are still checked; they have 128 bytes."""

    @staticmethod
    def xxh3_128_digest(_data: Any) -> bytes:
        return _NOTHING

    class xxh3_128:  # noqa: N801 - the name that xxhash has.
        def update(self, _data: Any) -> None:
            """Look at nothing."""

        def digest(self) -> bytes:
            return _NOTHING


class _FreeSeals:
    @staticmethod
    def xxh3_64_intdigest(_data: Any) -> int:
        return 0


@contextmanager
def checksums(*, kept: bool) -> Generator[None]:
    """Let pages move with their checksums, as ever, or without. Both sides must do the same."""
    if kept:
        yield
        return
    with ExitStack() as changed:
        changed.enter_context(patch.object(object_header, "xxhash", _Free))
        changed.enter_context(patch.object(seals, "xxhash", _FreeSeals))
        yield

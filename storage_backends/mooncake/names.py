"""The objects requested from a Mooncake Store, and their keys there.

An object lies under the key of its *generation*. Generation 0 is that of the first writer; `reads` and
`writes` describe how later ones are created.
"""

from dataclasses import dataclass
from typing import Final

from ...page_format.object_header import FORMAT_VERSION
from ...page_format.object_shape import ALWAYS, ObjectShape

GENERATIONS: Final = 8
"""Each generation adds a column, so this limits the optional columns of a page."""


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object to read or write; its buffers are non-empty byte views."""

    digest: bytes
    buffers: list[memoryview]
    shape: ObjectShape

    @property
    def last_generation(self) -> int:
        """Return the highest possible generation, because each adds an optional column."""
        columns = {part.bit for part in self.shape.parts if part.bit != ALWAYS}
        return min(len(columns), GENERATIONS - 1)


def key_of(digest: bytes, generation: int = 0) -> str:
    """Return the key of an object in the store."""
    later = f".{generation}" if generation else ""
    return f"lockstep/v{FORMAT_VERSION}/{digest.hex()}{later}"

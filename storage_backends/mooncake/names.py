"""The objects requested from a Mooncake Store, and their keys there.

The key of an object contains its *generation*. The first writer stores generation 0, and a writer that
adds columns stores the next one, which replaces it (`reads`, `writes`).
"""

from dataclasses import dataclass
from typing import Final

from ...page_format.object_header import FORMAT_VERSION
from ...page_format.object_shape import ALWAYS, ObjectShape

GENERATIONS: Final = 8
"""Maximum number of generations of an object. Each generation after the first adds an optional column,
so a stored object can gain at most `GENERATIONS` - 1 columns."""


@dataclass(frozen=True, slots=True)
class WantedObject:
    """An object to read or write. Its buffers are byte views that are not empty."""

    digest: bytes
    buffers: list[memoryview]
    shape: ObjectShape

    @property
    def last_generation(self) -> int:
        """Return the object's highest possible generation.

        Each optional column adds one generation, up to `GENERATIONS` - 1.
        """
        columns = {part.bit for part in self.shape.parts if part.bit != ALWAYS}
        return min(len(columns), GENERATIONS - 1)


def key_of(digest: bytes, generation: int = 0) -> str:
    """Return the key under which one generation of an object is stored."""
    later = f".{generation}" if generation else ""
    return f"lockstep/v{FORMAT_VERSION}/{digest.hex()}{later}"

"""What is asked of a Mooncake Store, and the keys that objects have there.

An object lies under the key of its *generation*. Generation 0 is what the first writer stored; how
the others come to be is told in `reads` and `writes`.
"""

from dataclasses import dataclass
from typing import Final

from ...page_format.object_header import FORMAT_VERSION
from ...page_format.object_shape import ALWAYS, ObjectShape

GENERATIONS: Final = 8
"""Each has a column more than the one before, so this bounds the optional columns of a page."""


@dataclass(frozen=True, slots=True)
class WantedObject:
    """What somebody reads or writes: the buffers are views of bytes, none of them empty."""

    digest: bytes
    buffers: list[memoryview]
    shape: ObjectShape

    @property
    def last_generation(self) -> int:
        """The last that there can be, since each has an optional column more than the one before."""
        columns = {part.bit for part in self.shape.parts if part.bit != ALWAYS}
        return min(len(columns), GENERATIONS - 1)


def key_of(digest: bytes, generation: int = 0) -> str:
    """Return the key of an object in the store."""
    later = f".{generation}" if generation else ""
    return f"lockstep/v{FORMAT_VERSION}/{digest.hex()}{later}"

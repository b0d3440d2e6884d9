"""Takes away the directories that a measurement has made in a store of files, and nothing else.

Pages that are removed leave the directories in which they were, and to open a store makes its own.
Only what is empty is taken, so whatever somebody else has written stays.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..page_format.object_name import NAME_DIGEST_BYTES, object_path


@contextmanager
def no_directories_left(root: Path, namespace: str) -> Generator[None]:
    """Let the block make a store in `root` and write pages of `namespace`, which nobody else has.

    However the block ends, the directories of the namespace are removed. Where there was no `root`
    before, it goes too, and what it had to be made in, unless there is any file in it by then: others
    use the store.
    """
    made = [each for each in (root, *root.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        # Any object of the namespace lies two levels below its directory.
        _remove_if_empty((root / object_path(namespace, bytes(NAME_DIGEST_BYTES))).parents[1])
        if made:
            _remove_if_empty(root)
        for directory in made[1:]:
            with suppress(OSError):
                directory.rmdir()


def _remove_if_empty(top: Path) -> None:
    """Remove a directory and those in it, if none of them has anything else in it."""
    found = list(os.walk(top, topdown=False))
    if any(files for _, _, files in found):
        return
    for directory, _, _ in found:
        with suppress(OSError):
            Path(directory).rmdir()

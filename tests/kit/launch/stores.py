"""File stores with content as engines write it, for tests of `lockstep store`.

python -m tests.kit.launch.stores <directory>: writes pages of the model `gemma` until it is killed.
"""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.page_format.namespace import Namespace
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.storage_backends.base import StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.records.manifest import Manifest, claim_model
from tests.kit.programs import program
from tests.kit.storage.files import FileStore

LAYOUT = PageLayout(
    page_tokens=4,
    columns=(
        Column(name="k", layers=2, heads=4, elements=8),
        Column(name="v", layers=2, heads=4, elements=8),
        Column(name="draft", layers=1, heads=4, elements=8, optional=True),
    ),
)
OTHER_LAYOUT = PageLayout(page_tokens=8, columns=LAYOUT.columns)
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 2
"""Size in bytes of one rank's shard of a page in a group of two ranks, without the optional draft
column.

A shard has 4 tokens, keys and values, 2 layers, 2 heads and 8 elements of bfloat16.
"""
OBJECT_BYTES = HEADER_BYTES + PAGE_BYTES
"""Size in bytes of the stored object of one shard: the header and the shard."""
MANIFEST_BYTES = HEADER_BYTES + (16 << 10)
MARK_BYTES = HEADER_BYTES + 1


def namespace_of(
    model: str = "llama", weights_version: str = "1", layout: PageLayout = LAYOUT
) -> str:
    return Namespace(model=model, weights_version=weights_version, layouts={"kv": layout}).digest()


def manifest_of(model: str = "llama", weights_version: str = "1") -> ObjectName:
    return Manifest(model=model, weights_version=weights_version, layouts={"kv": LAYOUT}).name


def page_name(number: int, rank: int = 0, *, tp_size: int = 2, model: str = "llama") -> ObjectName:
    shard = LAYOUT.shard(rank, tp_size).name
    return ObjectName(namespace_of(model), f"{number:064x}", "kv", shard)


def page_write(name: ObjectName, rank: int, tp_size: int, *, layout: PageLayout = LAYOUT) -> Write:
    """Return a `Write` of a page as an engine makes it, with bytes derived from the object name."""
    shape = layout.shard(rank, tp_size, absent=("draft",)).shape
    content = random.Random(f"{name.key}{rank}").randbytes(shape.nbytes)
    return Write(name, (memoryview(content),), shape)


async def write_model(
    backend: StorageBackend,
    *,
    model: str = "llama",
    weights_version: str = "1",
    layout: PageLayout = LAYOUT,
    tp_size: int = 2,
    pages: Sequence[int] = range(3),
) -> None:
    """Write a model's objects: its manifest, the record of the group's TP size, all ranks' pages."""
    deadline = time.monotonic() + 60
    await claim_model(backend, model, weights_version, {"kv": layout}, deadline)
    namespace = namespace_of(model, weights_version, layout)
    mark = ObjectName(namespace, namespace, "sharding", f"stage0of1.tp{tp_size}")
    writes = [Write(mark, (memoryview(b"\1"),), ObjectShape.whole(1))]
    for number in pages:
        for rank in range(tp_size):
            shard = layout.shard(rank, tp_size).name
            name = ObjectName(namespace, f"{number:064x}", "kv", shard)
            writes.append(page_write(name, rank, tp_size, layout=layout))
    outcomes = await backend.write(writes, deadline=deadline)
    assert not {WriteOutcome.FAILED, WriteOutcome.TIMED_OUT}.intersection(outcomes)


class Kept(FileStore):
    """A file store in a directory, with methods that fill and inspect it."""

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    def fill(self, **model: object) -> "Kept":
        """Write a model's objects with `write_model`. Return this store so that calls can chain."""

        async def scenario() -> None:
            backend = FileBackend(self.root)
            await backend.open()
            await write_model(backend, **model)  # type: ignore[arg-type] # Callers pass valid types.
            await backend.close()

        asyncio.run(scenario())
        return self

    def age(self, name: ObjectName, age_s: float) -> None:
        """Set the mtime of an object's file to `age_s` seconds ago."""
        then = time.time() - age_s
        os.utime(self.path(name), (then, then))

    def has(self, name: ObjectName) -> bool:
        return self.path(name).exists()

    def contents(self) -> dict[str, bytes]:
        return {str(each.relative_to(self.root)): each.read_bytes() for each in self.objects()}


@contextmanager
def another_process_writes(root: Path) -> Generator[None]:
    """Run a process that writes pages to the store during the block.

    Fails if the process exits before the block ends.
    """
    with subprocess.Popen(
        program("tests.kit.launch.stores", root), stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            yield
            assert writer.poll() is None
        finally:
            writer.kill()


async def write_for_ever(root: Path) -> None:
    """Write pages of the model `gemma` until this process is killed.

    Prints a line after the first pages are written.
    """
    backend = FileBackend(root)
    await backend.open()
    for number in itertools.count():
        start = 8 * (number % 64)
        await write_model(backend, model="gemma", pages=range(start, start + 8))
        if number == 2:
            sys.stdout.write("writing\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1])))

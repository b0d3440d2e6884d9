"""Kills writers of a file store at chosen system calls, and checks the files that they leave behind.

python -m tests.kit.storage.crashes <directory> <durability> named|unnamed <seed> <deaths>

A writer makes each kind of change to a store, and reports every change that the store has confirmed. It
dies before a system call, after a system call, or in a write, when half of the write's last buffer is
written. With `named` the store cannot use O_TMPFILE. <deaths> is the number of deaths at random system
calls, or `all` for a death of each of the three kinds at every system call.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from typing import Any, Final

from lockstep.page_format.object_name import ObjectName, object_path
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.objects import Durability, ObjectFiles
from lockstep.storage_backends.file.quarantine import PLACES
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import columns, digest_of, full_page, object_name, page, soon_off_loop
from tests.kit.storage.files import open_without_unnamed_files

SMALL, LARGE = 5000, (300 << 10) + 7
SPOILT: Final = 77
"""Length in bytes to which the writer truncates a file in order to corrupt it."""
CALLS: Final = (
    "open",
    "close",
    "stat",
    "fstat",
    "mkdir",
    "pwritev",
    "preadv",
    "link",
    "replace",
    "unlink",
    "fsync",
    "fdatasync",
)
MANNERS: Final = ("before", "after", "torn")
CALLS_MAX: Final = 400
"""Upper bound for the number of system calls that one writer makes."""
NAMES: Final = 10
"""Number of different objects that a writer uses. An object's number selects the kind of change."""
WHOLE_SMALL, WHOLE_LARGE, UNITED, REPAIRED, REMOVED = range(5)


class Death:
    """Counts the writer's system calls, and kills the writer at call number `at`."""

    def __init__(self, at: int, manner: str) -> None:
        self._left = at
        self._manner = manner
        for name in CALLS:
            setattr(os, name, self._around(name, getattr(os, name)))

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left:
                return call(*arguments, **named)
            match self._manner:
                case "after":
                    call(*arguments, **named)
                case "torn" if name == "pwritev":
                    fd, pieces, at = arguments
                    call(fd, [memoryview(pieces[-1])[: len(pieces[-1]) // 2]], at)
                case _:
                    pass
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a writer survived its death")

        return instead


def content_of(number: int) -> tuple[ObjectShape, bytes]:
    match number % NAMES:
        case what if what == WHOLE_LARGE:
            return ObjectShape.whole(LARGE), bytes(page(number % 7, LARGE))
        case what if what == UNITED:
            return columns(3, SMALL), bytes(full_page(3, 1, SMALL))
        case _:
            return ObjectShape.whole(SMALL), bytes(page(number % 7, SMALL))


def write(files: ObjectFiles, number: int, shape: ObjectShape, content: bytes) -> bool:
    view = memoryview(content)
    outcome = files.write(object_name(number), [view], shape, Stop(soon_off_loop()))
    return outcome is WriteOutcome.OK


def be_a_writer(root: Path, durability: Durability, first: int, write_end: int) -> None:
    """Make each kind of change to the store, and report every change that the store has confirmed."""
    files = ObjectFiles(root, durability, direct=False)
    files.open()
    for what in (WHOLE_SMALL, WHOLE_LARGE, REPAIRED, REMOVED):
        number = first + what
        assert write(files, number, *content_of(number))
        if what == REPAIRED:
            os.truncate(root / path_of(object_name(number)), SPOILT)
            assert write(files, number, *content_of(number))
        if what == REMOVED:
            assert files.remove(object_name(number))
        os.write(write_end, f"{number}\n".encode())
    number = first + UNITED
    for present in (1, 2):
        content = bytes(full_page(present, 1, SMALL))
        assert write(files, number, columns(present, SMALL), content)
    os.write(write_end, f"{number}\n".encode())
    files.close()


def let_one_die(
    root: Path, durability: Durability, first: int, at: int, manner: str
) -> tuple[bool, list[int]]:
    """Run a writer that dies at call number `at`; return whether it died, and its confirmed changes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        Death(at, manner)
        be_a_writer(root, durability, first, write_end)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, encoding="ascii") as lines:
        done = [int(line) for line in lines]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, "the writer failed"
    return os.WIFSIGNALED(status), done


def path_of(name: ObjectName) -> str:
    return object_path(name.namespace, digest_of(name))


def look_at_everything(root: Path, done: set[int]) -> None:
    """Check that the store has all confirmed changes and no temporary or invalid file."""
    files = ObjectFiles(root, Durability.NONE, direct=False)
    files.open()
    assert not any((root / "temporary").iterdir()), "a temporary file survived the next opening"
    names = {each.name: each.shape for each in files.names()}
    paths = {str(path.relative_to(root)) for path in root.glob("objects/*/*/*")}
    # Allow corrupt files, because a writer may die after it truncates a file and before it repairs the
    # file.
    spoilt = {path for path in paths if (root / path).stat().st_size == SPOILT}
    assert paths - spoilt == {path_of(name) for name in names}, "a file is no sound object"
    for name, shape in names.items():
        number = int(name.key, 16)
        whole, content = content_of(number)
        if number % NAMES == UNITED and shape.nbytes != whole.nbytes:
            # Allow an object without its second column, because the writer may have died before that
            # write.
            assert number not in done, f"object {number} lacks a column"
            whole, content = columns(1, SMALL), bytes(full_page(1, 1, SMALL))
        buffer = bytearray(whole.nbytes)
        outcome = files.read(Read(name, (memoryview(buffer),), whole), Stop(soon_off_loop()))
        assert outcome is ReadOutcome.OK, f"object {number} is {outcome.name}"
        assert bytes(buffer) == content, f"object {number} has other bytes"
    there = {int(name.key, 16) for name in names}
    lost = {number for number in done - there if number % NAMES != REMOVED}
    assert not lost, f"objects {sorted(lost)} were stored and are gone"
    back = {number for number in done & there if number % NAMES == REMOVED}
    assert not back, f"objects {sorted(back)} were removed and are back"
    assert len(list((root / "quarantine").iterdir())) <= PLACES
    there_is = {path.name for path in root.iterdir()}
    assert there_is == {"objects", "quarantine", "temporary"}, "something else is in the store"
    files.close()


def drawn(seed: int, deaths: str) -> Iterator[tuple[int, str]]:
    if deaths == "all":
        yield from product(range(1, CALLS_MAX), MANNERS)
        return
    draw = random.Random(seed)
    for _ in range(int(deaths)):
        yield draw.randint(1, 130), draw.choice(MANNERS)


def main() -> None:
    root, durability, named, seed, deaths = sys.argv[1:]
    if named == "named":
        os.open = open_without_unnamed_files
    done: set[int] = set()
    died = lived = 0
    for one, (at, manner) in zip(count(), drawn(int(seed), deaths)):
        dead, confirmed = let_one_die(Path(root), Durability(durability), one * NAMES, at, manner)
        done |= set(confirmed)
        if deaths == "all" and manner == "before" and not dead:
            # Stop here: the writer made fewer system calls than `at`, so a larger `at` kills no writer.
            break
        died, lived = died + dead, lived + (not dead)
        if one % 20 == 19:
            look_at_everything(Path(root), done)
    look_at_everything(Path(root), done)
    sys.stdout.write(f"died {died}, lived {lived}, told {len(done)}\n")


if __name__ == "__main__":
    main()

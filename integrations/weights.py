"""Digests of the files that hold a model's or an adapter's weights.

A name or path does not identify weights, because files may be overwritten in place. Reading the files
of a large model takes minutes, so digests are remembered in a record file by path, size and timestamps.
The ranks of one host read the files one after the other, so that later ranks use the first rank's
digests. Ranks on different hosts compare their digests when the caches open.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from .canonical import DIGEST_CHARACTERS

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""File name endings of weights."""

SAYING = frozenset({".json", ".py"})
"""File name endings of configuration and code that determine how weights are read and used."""

NEUTRAL = frozenset(
    {
        # Ignore these files, which only convert between text and token ids: page keys have the token
        # ids.
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "chat_template.json", "generation_config.json"),
        # Ignore training state such as that of the optimizer, because no inference engine reads it.
        *("training_args.bin", "trainer_state.json", "optimizer.bin", "optimizer.pt"),
        *("scheduler.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"),
    }
)
"""Names of files in a model's folder that never change KV."""

READERS = 8
"""Number of threads that read weight files; several, because one does not saturate a fast disk."""

LOCK_S_MAX = 1800.0
"""Maximum seconds that a rank waits for another rank of the host to read the files. After this time,
the rank reads the files itself."""

LOCK_POLL_S = 0.05

SETTLED_NS = 2_000_000_000
"""Minimum age, in nanoseconds, of a file whose digest is remembered.

The content of a younger file may change again without a change of mtime, because the clock of a file
system is coarse.
"""

FILES_MAX = 16_384
"""Maximum number of files in the record file; the oldest entries are dropped first."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

_log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Size, times and inode of a file. They reveal any change, because programs cannot set ctime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """Return the metadata of a file; raise `OSError` if the file cannot be read."""
        seen = path.stat()
        return cls(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


_Known = tuple[FileStamp, str]
"""A file's metadata, and the digest of the content that the file had with this metadata."""

_Record = tuple[int, int, int, int, str]
"""Size, mtime, ctime, inode and digest of one file, as stored in the record file."""


class FileDigests:
    """Digests of file contents, remembered across starts in the record file `record`.

    If the record file cannot be written, a warning is logged and every start reads all files.
    """

    def __init__(
        self,
        record: Path,
        *,
        log: logging.Logger = _log,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the path of the record file; slow reads and errors are logged to `log`."""
        self.record = record
        self._log = log
        self._clock_ns = clock_ns
        self._kept: dict[str, _Known] = {}
        self.bytes_read = 0
        """Number of bytes read from files whose digest was not in the record file."""

    def of(self, files: Sequence[Path]) -> list[str]:
        """Return the digest of each file; raises `OSError` if a file cannot be read."""
        paths = [str(path.resolve()) for path in files]
        wanted = {path: FileStamp.of(Path(path)) for path in paths}
        found = self._remembered(wanted)
        if len(found) < len(wanted):
            with self._alone() as may_write:
                found = self._remembered(wanted)
                read = self._read({path: wanted[path] for path in wanted if path not in found})
                if read:
                    known = {path: (wanted[path], each) for path, each in read.items()}
                    self._remember(known, may_write=may_write)
            found |= read
        return [found[path] for path in paths]

    def _read(self, wanted: Mapping[str, FileStamp]) -> dict[str, str]:
        size = sum(stamp.size for stamp in wanted.values())
        if wanted:
            self._log.info("reading %d weight files, %.2f GiB", len(wanted), size / 2**30)
        with ThreadPoolExecutor(READERS) as readers:
            digests = dict(zip(wanted, readers.map(_digest_of, wanted), strict=True))
        for path, stamp in wanted.items():
            if FileStamp.of(Path(path)) != stamp:
                raise OSError(
                    f"{path} changed while it was being read; start when the file is complete"
                )
        self.bytes_read += size
        return digests

    def _remembered(self, wanted: Mapping[str, FileStamp]) -> dict[str, str]:
        if not all(self._keeps(path, stamp) for path, stamp in wanted.items()):
            records = self._records()
            for path, stamp in wanted.items():
                if path in records and records[path][:-1] == stamp:
                    self._keep(path, (stamp, records[path][-1]))
        return {path: self._kept[path][1] for path in wanted if self._keeps(path, wanted[path])}

    def _keeps(self, path: str, stamp: FileStamp) -> bool:
        return path in self._kept and self._kept[path][0] == stamp

    def _keep(self, path: str, known: _Known) -> None:
        self._kept.pop(path, None)
        self._kept[path] = known
        if len(self._kept) > FILES_MAX:
            del self._kept[next(iter(self._kept))]

    def _records(self) -> dict[str, _Record]:
        """Return the entries of the record file; empty if the file is missing or damaged."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=dict[str, _Record])
        except (OSError, ValueError):
            return {}

    def _remember(self, read: Mapping[str, _Known], *, may_write: bool) -> None:
        """Add digests of files older than `SETTLED_NS` to memory and to the record file.

        Entries of deleted files are dropped from the record file.
        """
        settled_ns = self._clock_ns() - SETTLED_NS
        settled = {
            path: known
            for path, known in read.items()
            if max(known[0].mtime_ns, known[0].ctime_ns) < settled_ns
        }
        for path, known in settled.items():
            self._keep(path, known)
        if not may_write:
            return
        records = {
            path: record
            for path, record in self._records().items()
            if path not in read and not _is_gone(path)
        }
        records |= {path: (*stamp, each) for path, (stamp, each) in settled.items()}
        newest = dict(list(records.items())[-FILES_MAX:])
        partial = self.record.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(newest))
            partial.replace(self.record)
        except OSError as error:
            self._warn(error)

    @contextmanager
    def _alone(self) -> Generator[bool]:
        """Wait at most `LOCK_S_MAX` seconds for the host's read lock; yield whether it was acquired.

        Only the process that holds the lock may write the record file.
        """
        try:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            lock = self.record.with_suffix(".lock").open("ab")
        except OSError as error:
            self._warn(error)
            yield False
            return
        with lock:
            until = time.monotonic() + LOCK_S_MAX
            while not (locked := _try_lock(lock.fileno())) and time.monotonic() < until:
                time.sleep(LOCK_POLL_S)
            yield locked

    def _warn(self, error: OSError) -> None:
        self._log.warning(
            "weight digests cannot be stored in %s, so every start reads all weights: %s",
            self.record,
            error,
        )


def weights_digest(path: Path, digests: FileDigests) -> str:
    """Return a digest of the names and contents of the weight files in a folder, or of a single file.

    Raises `OSError` if a file cannot be read, and `FileNotFoundError` if there are no weights.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if _counts(each))
    if not any(each.suffix in WEIGHTS for each in files):
        raise FileNotFoundError(
            f"{path} has no weight files, which end in {', '.join(sorted(WEIGHTS))}"
        )
    named = [[each.name, found] for each, found in zip(files, digests.of(files), strict=True)]
    return sha256(json.dumps(named).encode()).hexdigest()[:DIGEST_CHARACTERS]


def commit_of(path: Path) -> str | None:
    """Return the commit of a snapshot folder of the Hugging Face cache; None for any other folder."""
    is_snapshot = path.parent.name == "snapshots" and is_commit(path.name)
    return path.name if is_snapshot else None


def is_commit(revision: object) -> bool:
    """Return whether a revision is a commit, which never changes, unlike a branch or a tag."""
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def _counts(path: Path) -> bool:
    return path.suffix in WEIGHTS | SAYING and path.name not in NEUTRAL and path.is_file()


def _is_gone(path: str) -> bool:
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        # Do not count the file as deleted: an error other than a missing file may be temporary.
        return False
    return False


def _digest_of(path: str) -> str:
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _try_lock(descriptor: int) -> bool:
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True

"""What a model's or an adapter's weights are: a digest of the files that hold them.

A name and a path say nothing of weights that are trained again in place, so KV that the former ones
gave would be found under them. Any engine can use this: it knows of files, and of nothing else.

Reading them takes minutes for a large model. So what is read once is remembered in a small file, by
path, size and times, and the ranks of one host read one after the other: the first one reads, and the
others find what it has remembered. A process keeps what it has found or read, and looks into the small
file for other files only. Ranks on other hosts have files of their own, and read these; whether all
ranks have come to the same is compared when their caches open.
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
"""What files of weights are called."""

SAYING = frozenset({".json", ".py"})
"""What files are called that say how weights are read, and what is computed with them."""

NEUTRAL = frozenset(
    {
        # They make token ids of text, which are in every page's key, or text of token ids.
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "chat_template.json", "generation_config.json"),
        # They are for training on, and no engine reads them.
        *("training_args.bin", "trainer_state.json", "optimizer.bin", "optimizer.pt"),
        *("scheduler.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"),
    }
)
"""Files beside weights that change no byte of KV."""

READERS = 8
"""Threads that read files: one alone does not keep a fast disk busy."""

LOCK_S_MAX = 1800.0
"""How long a rank waits while another one reads; after that it reads for itself."""

LOCK_POLL_S = 0.05

SETTLED_NS = 2_000_000_000
"""A file that was changed a moment ago may change again within the same tick of its file system's
clock. So it is not remembered."""

FILES_MAX = 16_384
"""How many files are remembered; the longest remembered go first."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

_log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Holds what of a file changes whenever its bytes do. The change time cannot be set back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """Look at a file; raises `OSError` if that cannot be done."""
        seen = path.stat()
        return cls(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


_Known = tuple[FileStamp, str]
"""What a file looked like, and the digest of what it held then."""

_Record = tuple[int, int, int, int, str]
"""The same, as it is written down."""


class FileDigests:
    """Digests of the contents of files, remembered from one start to the next in the file `record`.

    Where that cannot be written, every start reads anew, and a warning says so. One object reads a file
    anew only once it has changed.
    """

    def __init__(
        self,
        record: Path,
        *,
        log: logging.Logger = _log,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Tell of what takes long, and of what goes wrong, in the engine's `log`."""
        self.record = record
        self._log = log
        self._clock_ns = clock_ns
        self._kept: dict[str, _Known] = {}
        self.bytes_read = 0
        """How much was read of files whose digest was not remembered."""

    def of(self, files: Sequence[Path]) -> list[str]:
        """Return the digest of each file; raises `OSError` if one cannot be read."""
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
            self._log.info("reading %d files of weights, %.2f GiB", len(wanted), size / 2**30)
        with ThreadPoolExecutor(READERS) as readers:
            digests = dict(zip(wanted, readers.map(_digest_of, wanted), strict=True))
        for path, stamp in wanted.items():
            if FileStamp.of(Path(path)) != stamp:
                raise OSError(f"{path} was changed while it was read; start when it is complete")
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
        """Return what was remembered; nothing of a record that is not there or is damaged."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=dict[str, _Record])
        except (OSError, ValueError):
            return {}

    def _remember(self, read: Mapping[str, _Known], *, may_write: bool) -> None:
        """Keep what was read of settled files, and write it down; drop files that are gone."""
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
        """Wait until no other process of this host reads; say whether the record may be written."""
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
            "digests of weights cannot be remembered in %s, so each start reads all weights: %s",
            self.record,
            error,
        )


def weights_digest(path: Path, digests: FileDigests) -> str:
    """Return a digest of the weights in a folder, or in one file.

    It covers the contents of all files that an engine reads there, and their names. Raises `OSError`
    if one cannot be read, and `FileNotFoundError` if there are no weights.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if _counts(each))
    if not any(each.suffix in WEIGHTS for each in files):
        raise FileNotFoundError(
            f"{path} holds no weights, which are files that end in {', '.join(sorted(WEIGHTS))}"
        )
    named = [[each.name, found] for each, found in zip(files, digests.of(files), strict=True)]
    return sha256(json.dumps(named).encode()).hexdigest()[:DIGEST_CHARACTERS]


def commit_of(path: Path) -> str | None:
    """Return the commit whose files a folder of the Hugging Face cache holds; None for another one."""
    is_snapshot = path.parent.name == "snapshots" and is_commit(path.name)
    return path.name if is_snapshot else None


def is_commit(revision: object) -> bool:
    """Say whether a revision names one state of a repository for ever, as no branch and no tag does."""
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def _counts(path: Path) -> bool:
    return path.suffix in WEIGHTS | SAYING and path.name not in NEUTRAL and path.is_file()


def _is_gone(path: str) -> bool:
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        # It may be there again in a moment.
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

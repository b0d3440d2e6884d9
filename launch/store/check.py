"""The run behind `lockstep store verify`: what it does, prints and exits with."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from ...errors import ConfigError, StorageError
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import StoredObject
from ...storage_backends.file.unsound import unsound_files
from ...storage_backends.records.manifest import MANIFEST_BYTES
from ...storage_backends.uri import parse_uri
from ..amounts import LINE_MAX, bytes_in_words, count, printable, shown_store
from ..interruption import Interrupted
from .batches import only, these
from .damage import (
    REASONS_IN_WORDS,
    CorruptObject,
    Examiner,
    Strays,
    quiet_quarantine,
    reason_of,
)
from .opening import (
    can_only_look,
    listed,
    opened_store,
    run_until_interrupted,
    store_directory,
)
from .progress import store_progress
from .runs import EXIT_CORRUPT, EXIT_INCOMPLETE, check_jobs
from .survey import SAMPLE_MAX, StoreSample, Surveyed, find_namespace, survey
from .tables import Record, console, found_record, full_name, print_found, print_json
from .verify import Verification, verify_objects

_FIX: Final = "--fix puts such in quarantine"


def run_verify(
    uri: str, *, namespace: str | None, sample: int | None, jobs: int, fix: bool, as_json: bool
) -> int:
    """Read every object of a store, or some, and say how many are what their names say.

    With `fix` what is not goes to the quarantine of a store of files, which changes nothing otherwise.
    """
    check_jobs(jobs)
    if sample is not None and not 1 <= sample <= SAMPLE_MAX:
        raise ConfigError(f"--sample is {sample}, must be from 1 to {SAMPLE_MAX:,}")
    directory = store_directory(parse_uri(uri))
    verified, strays = Verification(), Strays()
    telling = _Telling(
        shown_store(uri),
        directory,
        verified,
        strays,
        fixed=fix,
        taken=fix or not can_only_look(parse_uri(uri)),
    )
    try:
        with quiet_quarantine():
            full = run_until_interrupted(_verify(uri, namespace, sample, jobs, verified, fix=fix))
            if directory is not None and sample is None:
                for found in unsound_files(directory, namespace=full, put_away=fix):
                    strays.add(found)
    except OSError as error:
        raise StorageError(f"store {shown_store(uri)!r} failed: {error}") from error
    except (Interrupted, StorageError):
        if verified.objects:
            telling.tell(as_json=as_json, so_far=True)
        raise
    return telling.tell(as_json=as_json, so_far=False)


async def _verify(
    uri: str,
    namespace: str | None,
    sample_size: int | None,
    jobs: int,
    verified: Verification,
    *,
    fix: bool,
) -> str | None:
    """Read the objects that are asked for; return the namespace that was meant, in full."""
    parsed = parse_uri(uri)
    async with AsyncExitStack() as stores:
        fixing = None
        if fix and can_only_look(parsed):
            # What is damaged is looked at first, and put away by another read.
            fixing = await stores.enter_async_context(opened_store(uri))
        backend = await stores.enter_async_context(opened_store(uri, looking=True))
        examiner = Examiner(store_directory(parsed), fixing, verified.corrupt)
        with store_progress() as progress:
            wanted = _InNamespace(namespace or "")
            sample = StoreSample(sample_size, wanted) if sample_size is not None else None
            surveyed = await survey(backend, uri, progress, sample)
            manifest = ObjectShape.whole(MANIFEST_BYTES)
            await examiner.note([(name, manifest) for name in surveyed.corrupt])
            # They were read already, and may have been left where they are.
            wanted.but = frozenset(surveyed.corrupt)
            if namespace is not None:
                # Given in full or not: it must be there, and be the only one that is meant.
                namespace = find_namespace(surveyed.catalogue, namespace, shown_store(uri))
            objects, nbytes = _size_of(surveyed, namespace, sample)
            progress.begin("reading", objects, nbytes, moves=True)
            found = these(sample.objects) if sample else listed(backend, uri)
            await verify_objects(
                backend,
                only(found, wanted),
                surveyed.catalogue,
                jobs=jobs,
                progress=progress,
                verified=verified,
                examiner=examiner,
            )
    return namespace


class _InNamespace:
    """Wants the objects of namespaces that begin with a text, but for some."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.but: frozenset[ObjectName] = frozenset()

    def __call__(self, stored: StoredObject) -> bool:
        name = stored.name
        return name.namespace.startswith(self._prefix) and name not in self.but


def _size_of(
    surveyed: Surveyed, namespace: str | None, sample: StoreSample | None
) -> tuple[int, int | None]:
    if sample is not None:
        return len(sample.objects), None
    if namespace is None:
        return surveyed.catalogue.total.objects, surveyed.catalogue.total.nbytes
    extents = [
        each.extent
        for model in surveyed.catalogue.models()
        for each in model.namespaces
        if each.namespace.startswith(namespace)
    ]
    return sum(each.objects for each in extents), sum(each.nbytes for each in extents)


@dataclass(frozen=True, slots=True)
class _Telling:
    """Says what a verification has found."""

    shown: str
    directory: Path | None
    """Of a store of files."""
    verified: Verification
    strays: Strays
    fixed: bool
    taken: bool
    """Whether what is corrupt was taken out of the way."""

    def tell(self, *, as_json: bool, so_far: bool) -> int:
        """Print what was found, and return the status to exit with."""
        verified = self.verified
        if as_json:
            print_json(self._record(so_far=so_far))
        else:
            self._print(so_far=so_far)
        if verified.corrupt.objects or self.strays.files:
            return EXIT_CORRUPT
        return EXIT_INCOMPLETE if verified.unread.objects else 0

    def _record(self, *, so_far: bool) -> Record:
        verified, strays = self.verified, self.strays
        return {
            "store": self.shown,
            "complete": not so_far,
            "objects": verified.objects,
            "sound": verified.sound,
            "sound_bytes": verified.sound_bytes,
            "corrupt": {
                "objects": verified.corrupt.objects,
                "first": [
                    {
                        "name": full_name(each.name),
                        "path": None if each.path is None else str(each.path),
                        "reason": each.reason,
                        "put_away": each.put_away,
                    }
                    for each in verified.corrupt.first
                ],
            },
            "changed_meanwhile": verified.changed,
            "unread": found_record(verified.unread),
            "unsound_files": {
                "files": strays.files,
                "bytes": strays.nbytes,
                "put_away": strays.put_away,
                "first": [
                    {
                        "path": str(self._place(each.path)),
                        "reason": reason_of(each),
                        "bytes": each.nbytes,
                        "put_away": each.put_away,
                    }
                    for each in strays.first
                ],
            },
        }

    def _print(self, *, so_far: bool) -> None:
        out, verified = console(), self.verified
        read = f"{count(verified.objects, 'object')} read{' so far' if so_far else ''}"
        size = bytes_in_words(verified.sound_bytes)
        out.print(
            f"{self.shown}: {read}, {verified.sound:,} of them sound ({size})", soft_wrap=True
        )
        if verified.changed:
            said = (
                f"{count(verified.changed, 'object')} removed or written anew meanwhile: no fault"
            )
            out.print(said, soft_wrap=True)
        if verified.corrupt.objects:
            self._print_corrupt(out)
        if self.strays.files:
            self._print_strays(out)
        if verified.unread.objects:
            out.print(
                f"{count(verified.unread.objects, 'object')} could not be read", soft_wrap=True
            )
            print_found(out, "not read", verified.unread)

    def _print_corrupt(self, out: Console) -> None:
        corrupt = self.verified.corrupt
        said = f"{count(corrupt.objects, 'object')} corrupt"
        if self.taken:
            said += (
                ", and taken out of the way by the store: each is a miss from now on, and written"
            )
            out.print(f"{said} anew", soft_wrap=True)
        else:
            fix = _FIX if self.directory is not None else "--fix takes such out of the way"
            out.print(f"{said}: each is a miss; {fix}", soft_wrap=True)
        if corrupt.objects != len(corrupt.first):
            out.print(f"the first {len(corrupt.first)}:", style="bold", soft_wrap=True)
        for each in corrupt.first:
            self._print_line(out, *_corrupt_line(each), put_away=each.put_away)

    def _print_strays(self, out: Console) -> None:
        strays = self.strays
        said = (
            f"{count(strays.files, 'file')}, {bytes_in_words(strays.nbytes)}, among the objects that"
            " no name leads to: never served"
        )
        done = f", {strays.put_away:,} of them in quarantine now" if self.fixed else f"; {_FIX}"
        out.print(f"{said}{done}", soft_wrap=True)
        for each in strays.first:
            path, reason = self._place(each.path), reason_of(each)
            self._print_line(out, str(path), REASONS_IN_WORDS[reason], put_away=each.put_away)

    def _print_line(self, out: Console, *said: str, put_away: bool) -> None:
        """Print one thing that is damaged: what and where it is, and why."""
        line = ": ".join(printable(each, LINE_MAX) for each in said)
        stays = self.directory is not None and self.fixed and not put_away
        out.print(f"  {line}{', and could not be put away' if stays else ''}", soft_wrap=True)

    def _place(self, path: str) -> Path:
        assert self.directory is not None
        return self.directory / path


def _corrupt_line(found: CorruptObject) -> tuple[str, ...]:
    path = () if found.path is None else (str(found.path),)
    why = () if found.reason is None else (REASONS_IN_WORDS[found.reason],)
    return (full_name(found.name), *path, *why)

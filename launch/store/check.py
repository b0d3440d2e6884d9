"""The run behind `lockstep store verify`: what it does, prints and exits with."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import StoredObject
from ...storage_backends.file.unsound import unsound_files
from ...storage_backends.records.catalogue import Catalogue
from ...storage_backends.records.manifest import MANIFEST_BYTES
from ...storage_backends.uri import parse_uri
from ..amounts import LINE_MAX, bytes_in_words, count, printable, shown_store
from .batches import check_jobs, only, these
from .damage import (
    REASONS_IN_WORDS,
    CorruptObject,
    Examiner,
    Strays,
    quiet_quarantine,
    reason_of,
)
from .opened_store import OpenedStore, exit_status, run_on_store, telling_so_far
from .opening import can_only_look, failures_named, opened_store, store_directory
from .survey import SAMPLE_MAX, StoreSample, extent_of, find_namespace, survey
from .tables import Record, found_record, full_name, print_found, print_json, say
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
    parsed = parse_uri(uri)
    directory = store_directory(parsed)
    verified, strays = Verification(), Strays()
    telling = _Telling(
        shown_store(uri),
        directory,
        verified,
        strays,
        fixed=fix,
        taken=fix or not can_only_look(parsed),
        as_json=as_json,
    )

    async def verify(store: OpenedStore) -> str | None:
        # What is damaged is looked at first, and put away by another read.
        put_away = opened_store(uri) if fix and can_only_look(parsed) else nullcontext()
        async with put_away as fixing:
            examiner = Examiner(directory, fixing, verified.corrupt)
            return await _verify(
                store, verified, examiner, namespace=namespace, sample_size=sample, jobs=jobs
            )

    with failures_named(uri), telling_so_far(telling.tell_so_far), quiet_quarantine():
        full = run_on_store(uri, verify, looking=True)
        if directory is not None and sample is None:
            for found in unsound_files(directory, namespace=full, put_away=fix):
                strays.add(found)
    return telling.tell()


async def _verify(
    store: OpenedStore,
    verified: Verification,
    examiner: Examiner,
    *,
    namespace: str | None,
    sample_size: int | None,
    jobs: int,
) -> str | None:
    """Read the objects that are asked for; return the namespace that was meant, in full."""
    wanted = _InNamespace(namespace or "")
    sample = StoreSample(sample_size, wanted) if sample_size is not None else None
    surveyed = await survey(store, sample)
    manifest = ObjectShape.whole(MANIFEST_BYTES)
    await examiner.note([(name, manifest) for name in surveyed.corrupt])
    # They were read already, and may have been left where they are.
    wanted.but = frozenset(surveyed.corrupt)
    if namespace is not None:
        # Given in full or not: it must be there, and be the only one that is meant.
        namespace = find_namespace(surveyed.catalogue, namespace, store.shown)
    objects, nbytes = _size_of(surveyed.catalogue, namespace, sample)
    store.progress.begin("reading", objects, nbytes, moves=True)
    found = these(sample.objects) if sample else store.listed()
    await verify_objects(
        store,
        only(found, wanted),
        surveyed.catalogue,
        jobs=jobs,
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
    catalogue: Catalogue, namespace: str | None, sample: StoreSample | None
) -> tuple[int, int | None]:
    if sample is not None:
        return len(sample.objects), None
    if namespace is None:
        return catalogue.total.objects, catalogue.total.nbytes
    return extent_of(catalogue, namespace.__eq__)


@dataclass(frozen=True, slots=True)
class _Telling:
    """Says what a verification has found."""

    shown: str
    directory: Path | None
    """The directory of a store of files; None for a store of another kind."""
    verified: Verification
    strays: Strays
    fixed: bool
    taken: bool
    """Whether what is corrupt was taken out of the way."""
    as_json: bool

    def tell_so_far(self) -> None:
        """Print what was found before the verification ended early, if it had begun."""
        if self.verified.objects:
            self.tell(so_far=True)

    def tell(self, *, so_far: bool = False) -> int:
        """Print what was found, and return the status to exit with."""
        verified = self.verified
        if self.as_json:
            print_json(self._record(so_far=so_far))
        else:
            self._print(so_far=so_far)
        return exit_status(
            corrupt=verified.corrupt.objects + self.strays.files, incomplete=verified.unread.objects
        )

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
        verified = self.verified
        read = f"{count(verified.objects, 'object')} read{' so far' if so_far else ''}"
        size = bytes_in_words(verified.sound_bytes)
        say(f"{self.shown}: {read}, {verified.sound:,} of them sound ({size})")
        if verified.changed:
            say(f"{count(verified.changed, 'object')} removed or written anew meanwhile: no fault")
        if verified.corrupt.objects:
            self._print_corrupt()
        if self.strays.files:
            self._print_strays()
        if verified.unread.objects:
            say(f"{count(verified.unread.objects, 'object')} could not be read")
            print_found("not read", verified.unread)

    def _print_corrupt(self) -> None:
        corrupt = self.verified.corrupt
        said = f"{count(corrupt.objects, 'object')} corrupt"
        if self.taken:
            away = "taken out of the way by the store: each is a miss from now on"
            say(f"{said}, and {away}, and written anew")
        else:
            fix = _FIX if self.directory is not None else "--fix takes such out of the way"
            say(f"{said}: each is a miss; {fix}")
        if corrupt.objects != len(corrupt.first):
            say(f"the first {len(corrupt.first)}:", style="bold")
        for each in corrupt.first:
            self._print_line(*_corrupt_line(each), put_away=each.put_away)

    def _print_strays(self) -> None:
        strays = self.strays
        said = (
            f"{count(strays.files, 'file')}, {bytes_in_words(strays.nbytes)}, among the objects that"
            " no name leads to: never served"
        )
        done = f", {strays.put_away:,} of them in quarantine now" if self.fixed else f"; {_FIX}"
        say(f"{said}{done}")
        for each in strays.first:
            path, reason = self._place(each.path), reason_of(each)
            self._print_line(str(path), REASONS_IN_WORDS[reason], put_away=each.put_away)

    def _print_line(self, *said: str, put_away: bool) -> None:
        """Print one thing that is damaged: what and where it is, and why."""
        line = ": ".join(printable(each, LINE_MAX) for each in said)
        stays = self.directory is not None and self.fixed and not put_away
        say(f"  {line}{', and could not be put away' if stays else ''}")

    def _place(self, path: str) -> Path:
        assert self.directory is not None
        return self.directory / path


def _corrupt_line(found: CorruptObject) -> tuple[str, ...]:
    path = () if found.path is None else (str(found.path),)
    why = () if found.reason is None else (REASONS_IN_WORDS[found.reason],)
    return (full_name(found.name), *path, *why)

"""The runs behind `lockstep store ls` and `stat`: what they do, print and exit with."""

from dataclasses import asdict

from ...errors import ConfigError, LockstepError
from ...storage_backends.base import Capabilities
from ...storage_backends.records.catalogue import Catalogue
from ...storage_backends.uri import StoreUri, parse_uri, without_secrets
from ..amounts import age_in_words, bytes_in_words, count, shown_store
from .batches import JOBS_MAX
from .opening import (
    listed,
    opened_store,
    quarantine_extent,
    run_until_interrupted,
    store_directory,
    unsound_extent,
)
from .progress import store_progress
from .survey import survey
from .tables import (
    Record,
    console,
    contents_record,
    object_line,
    object_record,
    print_contents,
    print_facts,
    print_json,
)

EXIT_CORRUPT = 1
"""Something in the store was not what its name says."""
EXIT_INCOMPLETE = 3
"""Something could not be read, written or removed."""


def check_jobs(jobs: int) -> None:
    """Raise `ConfigError` for a number of jobs that nobody can want."""
    if not 1 <= jobs <= JOBS_MAX:
        raise ConfigError(f"--jobs is {jobs}, must be from 1 to {JOBS_MAX}")


def take_stock(uri: str) -> Catalogue:
    """Return what is in a store."""

    async def look() -> Catalogue:
        async with opened_store(uri, looking=True) as backend:
            with store_progress() as progress:
                return (await survey(backend, uri, progress)).catalogue

    return run_until_interrupted(look())


def run_ls(uri: str, *, objects: bool, as_json: bool) -> int:
    """Print what is in a store, by model or object by object."""
    shown = shown_store(uri)
    if objects:
        run_until_interrupted(_print_objects(uri, as_json=as_json))
        return 0
    catalogue = take_stock(uri)
    unsound = unsound_extent(uri)
    if as_json:
        print_json(contents_record(shown, catalogue) | {"unsound_files": _files_record(unsound)})
        return 0
    print_contents(console(), shown, catalogue)
    if unsound is not None and unsound[0]:
        said = f"\n{_files(unsound)}, that no name leads to; `lockstep store verify` names them"
        console().print(said, soft_wrap=True)
    return 0


async def _print_objects(uri: str, *, as_json: bool) -> None:
    async with opened_store(uri, looking=True) as backend:
        async for stored in listed(backend, uri):
            try:
                if as_json:
                    print_json(object_record(stored), lines=True)
                else:
                    print(object_line(stored))
            except BrokenPipeError:
                raise
            except OSError as error:
                # It must not be taken for one of the store's.
                raise LockstepError(f"the output could not be written: {error.strerror}") from error


def run_stat(uri: str, *, as_json: bool) -> int:
    """Print how much is in a store, and what the store can do."""

    async def look() -> tuple[Catalogue, Capabilities]:
        async with opened_store(uri, looking=True) as backend:
            with store_progress() as progress:
                surveyed = await survey(backend, uri, progress)
                return surveyed.catalogue, backend.capabilities

    catalogue, capabilities = run_until_interrupted(look())
    record = _stat_record(uri, catalogue, capabilities)
    if as_json:
        print_json(record)
    else:
        print_facts(console(), _stat_facts(record))
    return 0


def _stat_record(uri: str, catalogue: Catalogue, capabilities: Capabilities) -> Record:
    parsed = parse_uri(uri)
    directory = store_directory(parsed)
    quarantine = None if directory is None else quarantine_extent(directory)
    total = catalogue.total
    quota_bytes = _quota_bytes(parsed)
    return {
        "store": shown_store(uri),
        "scheme": parsed.scheme,
        "wrappers": list(parsed.wrappers),
        "options": dict(parse_uri(without_secrets(uri)).options),
        "capabilities": asdict(capabilities),
        "models": sum(each is not None for each in catalogue.manifests.values()),
        "namespaces": len(catalogue.namespaces()),
        "objects": total.objects,
        "bytes": total.nbytes,
        "largest_bytes": catalogue.largest_bytes,
        "newest_s": total.newest_s,
        "oldest_s": total.oldest_s,
        "quarantine": _files_record(quarantine),
        "unsound_files": _files_record(unsound_extent(uri)),
        "quota_bytes": quota_bytes,
        "filled": total.nbytes / quota_bytes if quota_bytes else None,
    }


def _quota_bytes(uri: StoreUri) -> int | None:
    """Return the quota that the URI of a store of files sets, if it sets one."""
    if "quota_bytes" in uri.options:
        return int(uri.options["quota_bytes"])
    if "quota_gib" in uri.options:
        return int(float(uri.options["quota_gib"]) * (1 << 30))
    return None


def _stat_facts(record: Record) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in record["options"].items())
    can = [name.replace("_", " ") for name, has in record["capabilities"].items() if has]
    facts = [
        ("store", record["store"]),
        ("backend", "+".join([*record["wrappers"], record["scheme"]])),
        ("options", f"{options}; the rest at defaults" if options else "all at defaults"),
        ("capabilities", ", ".join(can)),
        ("models", f"{record['models']:,}"),
        ("namespaces", f"{record['namespaces']:,}"),
        ("objects", f"{record['objects']:,}"),
        ("size", f"{bytes_in_words(record['bytes'])} ({record['bytes']:,} bytes)"),
        ("largest object", bytes_in_words(record["largest_bytes"])),
        ("newest, oldest", ", ".join(age_in_words(record[k]) for k in ("newest_s", "oldest_s"))),
    ]
    for title, files in (
        ("quarantine", record["quarantine"]),
        ("not objects", record["unsound_files"]),
    ):
        if files is not None:
            facts.append((title, _files((files["files"], files["bytes"]))))
    if record["quota_bytes"] is not None:
        share, quota = 100 * record["filled"], bytes_in_words(record["quota_bytes"])
        facts.append(("quota", f"{share:.1f} % of {quota} in use"))
    else:
        facts.append(("quota", "none in the URI"))
    return facts


def _files_record(extent: tuple[int, int] | None) -> Record | None:
    return None if extent is None else {"files": extent[0], "bytes": extent[1]}


def _files(extent: tuple[int, int]) -> str:
    return f"{count(extent[0], 'file')}, {bytes_in_words(extent[1])}"

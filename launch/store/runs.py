"""`lockstep store ls` and `stat`: list a store's objects, and show its capabilities."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...errors import LockstepError
from ...storage_backends.file.backend import FileOptions
from ...storage_backends.file.quarantine import QUARANTINE
from ...storage_backends.records.catalogue import Catalogue
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import parse_uri, without_secrets
from ..cli.amounts import age_in_words, bytes_in_words, count, shown_store
from ..cli.options import Json
from .opened_store import OpenedStore, run_on_store
from .options import Rank, Uri, of_rank
from .survey import survey
from .tables import (
    Record,
    contents_record,
    object_line,
    object_record,
    print_contents,
    print_facts,
    print_json,
)


def ls(
    uri: Uri,
    /,
    *,
    objects: Annotated[
        bool, Parameter(help="One line for each object; with --json, one record.")
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Show the objects of a store, by model and shard.

    Models are listed with their weights version; below each are its namespaces, pools and shards.
    """
    uri = of_rank(uri, rank)
    if objects:
        run_on_store(uri, partial(_print_objects, as_json=as_json), looking=True)
        return
    catalogue = run_on_store(uri, survey, looking=True).catalogue
    shown = shown_store(uri)
    if as_json:
        print_json(contents_record(shown, catalogue))
    else:
        print_contents(shown, catalogue)


async def _print_objects(store: OpenedStore, *, as_json: bool) -> None:
    async for stored in store.listed():
        try:
            if as_json:
                print_json(object_record(stored), lines=True)
            else:
                print(object_line(stored))
        except BrokenPipeError:
            raise
        except OSError as error:
            # stdout could not be written. Raise another type of error, because the caller reports an
            # `OSError` as an error of the store.
            raise LockstepError(f"the output could not be written: {error.strerror}") from error


def stat(uri: Uri, /, *, rank: Rank = None, as_json: Json = False) -> None:
    """Show a store's size and capabilities."""
    uri = of_rank(uri, rank)

    async def look(store: OpenedStore) -> Catalogue:
        return (await survey(store)).catalogue

    record = _stat_record(uri, run_on_store(uri, look, looking=True))
    if as_json:
        print_json(record)
    else:
        print_facts(_stat_facts(record))


def _stat_record(uri: str, catalogue: Catalogue) -> Record:
    parsed, total = parse_uri(uri), catalogue.total
    quarantine = quota_bytes = None
    if parsed.scheme == "file":
        directory = Path(os.path.normpath(parsed.path))
        quarantine = _quarantine_record(directory)
        quota_bytes = parsed.read(FileOptions).limits.quota(directory, total.nbytes)
    return {
        "store": shown_store(uri),
        "scheme": parsed.scheme,
        "wrappers": list(parsed.wrappers),
        "options": dict(parse_uri(without_secrets(uri)).options),
        "capabilities": asdict(make_backend(uri).capabilities),
        "models": sum(each is not None for each in catalogue.manifests.values()),
        "namespaces": len(catalogue.namespaces()),
        "objects": total.objects,
        "bytes": total.nbytes,
        "largest_bytes": catalogue.largest_bytes,
        "newest_s": total.newest_s,
        "oldest_s": total.oldest_s,
        "quarantine": quarantine,
        "quota_bytes": quota_bytes,
        "filled": total.nbytes / quota_bytes if quota_bytes else None,
    }


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
    if record["quarantine"] is not None:
        files, nbytes = record["quarantine"]["files"], record["quarantine"]["bytes"]
        facts.append(("quarantine", f"{count(files, 'file')}, {bytes_in_words(nbytes)}"))
    if record["filled"] is not None:
        share, quota = 100 * record["filled"], bytes_in_words(record["quota_bytes"])
        facts.append(("quota", f"{share:.1f} % of {quota} in use"))
    else:
        facts.append(("quota", "none"))
    return facts


def _quarantine_record(directory: Path) -> Record:
    """Return (number, bytes) of the quarantined files in a store's directory."""
    files = nbytes = 0
    try:
        with os.scandir(directory / QUARANTINE) as entries:
            for entry in entries:
                files += 1
                nbytes += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass
    return {"files": files, "bytes": nbytes}

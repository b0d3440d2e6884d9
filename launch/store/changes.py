"""The runs behind `lockstep store gc`, `rm` and `copy`: what they do, print and exit with."""

import os
import sys

import typer

from ...errors import ConfigError, StorageError
from ...storage_backends.records.catalogue import stored_bytes
from ...storage_backends.uri import parse_uri
from ..amounts import bytes_in_words, count, parse_age, parse_bytes, shown_store
from ..interruption import Interrupted
from .batches import only
from .copy import Copied, StoreCopy, failures
from .opening import listed, opened_store, opened_target, run_until_interrupted
from .progress import store_progress
from .removal import (
    Ages,
    OlderThan,
    Removal,
    Selection,
    check_ages,
    everything,
    extent_of,
    of_models,
    of_namespaces,
    pages_of,
    remove_objects,
    remove_selected,
)
from .runs import EXIT_CORRUPT, EXIT_INCOMPLETE, check_jobs, take_stock
from .survey import find_models, find_namespace, survey, told
from .tables import console, print_found


def run_gc(
    uri: str, *, older_than: str | None, to_bytes: str | None, model: str | None, dry_run: bool
) -> int:
    """Remove the pages that are older than some age, or the oldest ones down to some size."""
    if older_than is not None and to_bytes is not None:
        raise ConfigError("give only one of --older-than and --to-bytes")
    if older_than is None and to_bytes is None:
        raise ConfigError(
            "give either --older-than AGE or --to-bytes SIZE, for example 7d or 100GiB"
        )
    age_s = parse_age(older_than, "--older-than") if older_than is not None else None
    size = parse_bytes(to_bytes, "--to-bytes") if to_bytes is not None else 0
    removed = Removal()
    try:
        stayed = run_until_interrupted(_collect(uri, age_s, size, model, removed, dry_run=dry_run))
    except (Interrupted, StorageError):
        if removed.objects:
            _tell_removed(uri, removed, "would free" if dry_run else "freed", ", so far")
        raise
    return _tell_removed(uri, removed, "would free" if dry_run else "freed", f"; {stayed}")


async def _collect(
    uri: str, age_s: float | None, size: int, model: str | None, removed: Removal, *, dry_run: bool
) -> str:
    """Remove what is too old or too much; return what stays, in words."""
    async with opened_store(uri, looking=dry_run) as backend:
        with store_progress() as progress:
            namespaces = None
            if model is not None:
                catalogue = (await survey(backend, uri, progress)).catalogue
                namespaces = set(find_models(catalogue, model, None, shown_store(uri)).values())
            progress.begin("looking")
            ages, objects, nbytes = Ages(), 0, 0
            async for stored in told(only(listed(backend, uri), pages_of(namespaces)), progress):
                ages.add(stored)
                objects += 1
                nbytes += stored_bytes(stored)
            check_ages(ages, shown_store(uri))
            wanted = OlderThan(ages, age_s) if age_s is not None else ages.oldest(nbytes - size)
            progress.begin("removing")
            pages = only(only(listed(backend, uri), pages_of(namespaces)), wanted)
            await remove_objects(backend, pages, progress, removed, dry_run=dry_run)
    left = f"{count(max(0, objects - removed.objects), 'page')}, "
    left += (
        f"{bytes_in_words(max(0, nbytes - removed.nbytes))} {'would stay' if dry_run else 'stay'}"
    )
    unknown = f", {ages.unknown:,} of them of unknown age" if ages.unknown else ""
    return f"{left}{unknown}"


def run_rm(
    uri: str,
    *,
    model: str | None,
    weights_version: str | None,
    namespace: str | None,
    everything_there: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Remove a model, a namespace or everything, after asking; with `dry_run` only say how much."""
    given = (model is not None) + (namespace is not None) + everything_there
    if given > 1:
        raise ConfigError("give only one of --model, --namespace and --all")
    if not given:
        raise ConfigError(
            "give one of --model NAME, --namespace DIGEST and --all, to say what goes"
        )
    if weights_version is not None and model is None:
        raise ConfigError("--weights-version needs --model, since it is one of a model's")
    catalogue = take_stock(uri)
    shown = shown_store(uri)
    if model is not None:
        selection = of_models(find_models(catalogue, model, weights_version, shown))
    elif namespace is not None:
        selection = of_namespaces([find_namespace(catalogue, namespace, shown)])
    else:
        selection = everything(catalogue)
    objects, nbytes = extent_of(catalogue, selection)
    if not objects:
        typer.echo(f"{shown}: there is nothing to remove")
        return 0
    what = f"remove {count(objects, 'object')}, {bytes_in_words(nbytes)}"
    if dry_run:
        typer.echo(f"{shown}: would {what}")
        return 0
    if not yes and not _agreed(what, shown):
        typer.echo("nothing was removed")
        return 0
    removed = Removal()
    try:
        run_until_interrupted(_remove(uri, selection, (objects, nbytes), removed))
    except (Interrupted, StorageError):
        _tell_removed(uri, removed, "removed", ", so far")
        raise
    return _tell_removed(uri, removed, "removed", "")


async def _remove(
    uri: str, selection: Selection, extent: tuple[int, int], removed: Removal
) -> None:
    async with opened_store(uri) as backend:
        with store_progress() as progress:
            progress.begin("removing", *extent)
            await remove_selected(backend, uri, selection, progress, removed)


def _agreed(what: str, shown: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"store {shown!r}: there is nobody to ask whether to {what}; say --yes to do it"
        )
    try:
        return typer.confirm(f"{shown}: {what}?", default=False, err=True)
    except typer.Abort:
        return False


def _tell_removed(uri: str, removed: Removal, done: str, rest: str) -> int:
    out = console()
    said = f"{done} {count(removed.objects, 'object')}, {bytes_in_words(removed.nbytes)}"
    out.print(f"{shown_store(uri)}: {said}{rest}", soft_wrap=True)
    print_found(out, f"{count(removed.stayed.objects, 'object')} not removed", removed.stayed)
    return EXIT_INCOMPLETE if removed.stayed.objects else 0


def run_copy(source: str, target: str, *, jobs: int) -> int:
    """Copy what a store has and another lacks."""
    check_jobs(jobs)
    if _place(source) == _place(target):
        raise ConfigError(f"FROM and TO are the same store, {shown_store(target)}; give two stores")
    copied = Copied()
    try:
        run_until_interrupted(_copy(source, target, jobs, copied))
    except (Interrupted, StorageError):
        _tell_copied(source, target, copied, ", so far; the same command goes on from here")
        raise
    return _tell_copied(source, target, copied, "")


def _place(uri: str) -> tuple[str, ...]:
    """Return what two URIs of one store have in common, and those of two stores have not."""
    parsed = parse_uri(uri)
    if parsed.scheme == "s3":
        # The same bucket's name stands for another bucket on another server, and each index is a
        # store of its own.
        server = parsed.options.get("endpoint", "").rstrip("/")
        index = parsed.options.get("index", "")
        return parsed.scheme, parsed.host, parsed.path.strip("/"), server, index
    return parsed.scheme, parsed.host, os.path.realpath(parsed.path) if parsed.path else ""


async def _copy(source_uri: str, target_uri: str, jobs: int, copied: Copied) -> None:
    async with (
        opened_store(source_uri, looking=True) as source,
        opened_target(target_uri) as target,
    ):
        with store_progress() as progress:
            catalogue = (await survey(source, source_uri, progress)).catalogue
            copy = StoreCopy(source, target, source_uri, target_uri, catalogue, copied)
            await copy.agree()
            total = catalogue.total
            progress.begin("copying", total.objects, total.nbytes, moves=True)
            await copy.copy_manifests()
            await copy.copy_objects(jobs, progress)


def _tell_copied(source: str, target: str, copied: Copied, rest: str) -> int:
    out = console()
    route = f"{shown_store(source)} -> {shown_store(target)}"
    size = bytes_in_words(copied.nbytes)
    there = f"{copied.present:,} were there already"
    out.print(
        f"{route}: copied {count(copied.objects, 'object')}, {size}; {there}{rest}", soft_wrap=True
    )
    if copied.changed:
        out.print(
            f"{count(copied.changed, 'object')} went away from FROM meanwhile", soft_wrap=True
        )
    if copied.corrupt.objects:
        out.print("what is corrupt was not copied; see `lockstep store verify`", soft_wrap=True)
    for what, found in failures(copied):
        print_found(out, f"{count(found.objects, 'object')} {what}", found)
    if copied.corrupt.objects:
        return EXIT_CORRUPT
    incomplete = copied.unread.objects or copied.unwritten.objects or copied.gone.objects
    return EXIT_INCOMPLETE if incomplete else 0

"""The runs behind `lockstep store gc`, `rm` and `copy`: what they do, print and exit with."""

import os
import sys
from dataclasses import replace
from functools import partial

import typer

from ...errors import ConfigError
from ...storage_backends.records.catalogue import stored_bytes
from ...storage_backends.uri import parse_uri
from ..amounts import bytes_in_words, count, parse_age, parse_bytes, shown_store
from .batches import check_jobs, only, these
from .copy import Copied, StoreCopy, failures
from .opened_store import OpenedStore, exit_status, run_on_store, telling_so_far
from .opening import opened_target
from .removal import (
    Ages,
    OlderThan,
    Oldest,
    Removal,
    Selection,
    check_ages,
    pages_of,
    remove_objects,
    remove_selected,
    selected_extent,
)
from .survey import find_models, find_namespace, survey, told
from .tables import print_found, say


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
    tell = partial(_tell_removed, uri, removed, "would free" if dry_run else "freed")
    collect = partial(
        _collect, age_s=age_s, size=size, model=model, removed=removed, dry_run=dry_run
    )

    def tell_so_far() -> None:
        if removed.objects:
            tell(", so far")

    with telling_so_far(tell_so_far):
        stayed = run_on_store(uri, collect, looking=dry_run)
    return tell(f"; {stayed}")


async def _collect(
    store: OpenedStore,
    *,
    age_s: float | None,
    size: int,
    model: str | None,
    removed: Removal,
    dry_run: bool,
) -> str:
    """Remove what is too old or too much; return what stays, in words."""
    namespaces = None
    if model is not None:
        catalogue = (await survey(store)).catalogue
        namespaces = set(find_models(catalogue, model, None, store.shown).values())
    pages = pages_of(namespaces)
    store.progress.begin("looking")
    ages, objects, nbytes = Ages(), 0, 0
    async for stored in told(only(store.listed(), pages), store.progress):
        ages.add(stored)
        objects += 1
        nbytes += stored_bytes(stored)
    check_ages(ages, store.shown)
    wanted = OlderThan(ages, age_s) if age_s is not None else ages.oldest(nbytes - size)
    store.progress.begin("removing")
    ages.list_again()
    await remove_objects(store, only(only(store.listed(), pages), wanted), removed, dry_run=dry_run)
    if isinstance(wanted, Oldest):
        await remove_objects(store, these([*wanted.last()]), removed, dry_run=dry_run)
    left = count(max(0, objects - removed.objects), "page")
    left_bytes = bytes_in_words(max(0, nbytes - removed.nbytes))
    unknown = f", {ages.unknown:,} of them of unknown age" if ages.unknown else ""
    return f"{left}, {left_bytes} {'would stay' if dry_run else 'stay'}{unknown}"


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
    catalogue = run_on_store(uri, survey, looking=True).catalogue
    shown = shown_store(uri)
    if model is not None:
        namespaces = find_models(catalogue, model, weights_version, shown)
        selection = Selection(frozenset(namespaces.values()), manifests=frozenset(namespaces))
    elif namespace is not None:
        selection = Selection(frozenset([find_namespace(catalogue, namespace, shown)]))
    else:
        selection = Selection(None, manifests=frozenset(catalogue.manifests))
    objects, nbytes = selected_extent(catalogue, selection)
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
    tell = partial(_tell_removed, uri, removed, "removed")

    async def remove(store: OpenedStore) -> None:
        store.progress.begin("removing", objects, nbytes)
        await remove_selected(store, selection, removed)

    with telling_so_far(lambda: tell(", so far")):
        run_on_store(uri, remove)
    return tell("")


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
    gone = f"{done} {count(removed.objects, 'object')}, {bytes_in_words(removed.nbytes)}"
    say(f"{shown_store(uri)}: {gone}{rest}")
    print_found(f"{count(removed.stayed.objects, 'object')} not removed", removed.stayed)
    return exit_status(incomplete=removed.stayed.objects)


def run_copy(source: str, target: str, *, jobs: int) -> int:
    """Copy what a store has and another lacks."""
    check_jobs(jobs)
    if _place(source) == _place(target):
        raise ConfigError(f"FROM and TO are the same store, {shown_store(target)}; give two stores")
    copied = Copied()
    tell = partial(_tell_copied, f"{shown_store(source)} -> {shown_store(target)}", copied)

    async def copy(store: OpenedStore) -> None:
        async with opened_target(target) as backend:
            await _copy(store, replace(store, backend=backend, uri=target), jobs, copied)

    with telling_so_far(lambda: tell(", so far; the same command goes on from here")):
        run_on_store(source, copy, looking=True)
    return tell("")


async def _copy(source: OpenedStore, target: OpenedStore, jobs: int, copied: Copied) -> None:
    catalogue = (await survey(source)).catalogue
    copy = StoreCopy(source, target, catalogue, copied)
    await copy.agree()
    total = catalogue.total
    source.progress.begin("copying", total.objects, total.nbytes, moves=True)
    await copy.copy_manifests()
    await copy.copy_objects(jobs)


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


def _tell_copied(route: str, copied: Copied, rest: str) -> int:
    size = bytes_in_words(copied.nbytes)
    there = f"{copied.present:,} were there already"
    say(f"{route}: copied {count(copied.objects, 'object')}, {size}; {there}{rest}")
    if copied.changed:
        say(f"{count(copied.changed, 'object')} went away from FROM meanwhile")
    if copied.corrupt.objects:
        say("what is corrupt was not copied; see `lockstep store verify`")
    for what, found in failures(copied):
        print_found(f"{count(found.objects, 'object')} {what}", found)
    incomplete = copied.unread.objects + copied.unwritten.objects + copied.gone.objects
    return exit_status(corrupt=copied.corrupt.objects, incomplete=incomplete)

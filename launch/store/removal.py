"""`lockstep store gc` and `lockstep store rm`: select objects, remove them, and report the result."""

import heapq
import sys
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count as numbers
from typing import Annotated, Final

from cyclopts import Parameter

from ...benchmarks.byte_sizes import BYTES
from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ...storage_backends.base import StoredObject
from ...storage_backends.records.catalogue import (
    Catalogue,
    Totals,
    is_manifest,
    is_record,
    manifest_bytes,
    stored_bytes,
)
from ..cli.amounts import bytes_in_words, count, parse_age, shown_store
from ..cli.options import AT_LEAST_0
from .batches import ANY_BYTES, Batch, Defects, Scratch, for_each_batch, only, these
from .opened_store import OpenedStore, exit_status, reporting_partial, run_on_store
from .options import Digest, DryRun, Rank, Uri, of_rank
from .store_opening import call_deadline
from .survey import extent_of, find_models, find_namespace, survey, with_progress
from .tables import print_found, say

_JOBS: Final = 2

Wanted = Callable[[StoredObject], bool]


@dataclass(slots=True)
class Removal:
    """Objects and bytes that were removed, or that a dry run would remove."""

    objects: int = 0
    nbytes: int = 0
    stayed: Defects = field(default_factory=Defects)
    """Objects that the store could not remove."""

    def add(self, name: ObjectName, nbytes: int, *, gone: bool) -> None:
        """Count one object: as removed if `gone` is true, otherwise as not removable."""
        if gone:
            self.objects += 1
            self.nbytes += nbytes
        else:
            self.stayed.add(name)


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects that `lockstep store rm` removes."""

    namespaces: frozenset[str] | None
    """Namespaces whose objects are removed; None for all."""
    manifests: frozenset[ObjectName] = frozenset()
    """Manifests to remove. They describe the other objects, so they are removed last."""

    def wants(self, stored: StoredObject) -> bool:
        """Return whether an object must be removed; manifests are removed separately."""
        if is_manifest(stored):
            return False
        return self.namespaces is None or stored.name.namespace in self.namespaces


class _Oldest:
    """Collects the oldest objects of a store: only as many as must be removed to free `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._numbers = numbers()
        self._heap: list[tuple[float, int, StoredObject]] = []

    def add(self, stored: StoredObject) -> None:
        """Add an object; an object of unknown age is ignored.

        The youngest objects are dropped as long as the others free enough bytes.
        """
        if stored.age_s is None:
            return
        heapq.heappush(self._heap, (stored.age_s, next(self._numbers), stored))
        self._left -= stored_bytes(stored)
        while self._heap and self._left + stored_bytes(self._heap[0][2]) <= 0:
            self._left += stored_bytes(heapq.heappop(self._heap)[2])

    def oldest_first(self) -> list[StoredObject]:
        """Return the collected objects, oldest first, so that a prefix loses its last pages first."""
        return [stored for _, _, stored in sorted(self._heap, reverse=True)]


def gc(
    uri: Uri,
    /,
    *,
    older_than: Annotated[
        float | None,
        Parameter(
            help="Remove pages not written or used for this long: 90s, 15m, 12h, 7d, 2w.",
            converter=parse_age,
            metavar="AGE",
            show_default="none",
        ),
    ] = None,
    to_bytes: Annotated[
        int | None,
        BYTES,
        AT_LEAST_0,
        Parameter(
            help="Remove the least recently used pages until this size remains: 100GiB.",
            show_default="none",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Parameter(help="Only pages of this model, with any weights.", show_default="all"),
    ] = None,
    rank: Rank = None,
    dry_run: DryRun = False,
) -> int:
    """Remove pages that have not been used for a long time.

    An engine that needs a removed page has a miss. Manifests and marks are kept.
    """
    uri = of_rank(uri, rank)
    if older_than is not None and to_bytes is not None:
        raise ConfigError("give only one of --older-than and --to-bytes")
    if older_than is None and to_bytes is None:
        raise ConfigError(
            "give either --older-than AGE or --to-bytes SIZE, for example 7d or 100GiB"
        )
    removed = Removal()
    tell = partial(_print_removed, uri, removed, "would free" if dry_run else "freed")
    collect = partial(
        _collect,
        age_s=older_than,
        size=to_bytes or 0,
        model=model,
        removed=removed,
        dry_run=dry_run,
    )

    def report_partial() -> None:
        if removed.objects:
            tell(", so far")

    with reporting_partial(report_partial):
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
    """Remove pages older than `age_s`, or the oldest pages until at most `size` bytes are left.

    Returns text about the remaining pages.
    """
    namespaces = None
    if model is not None:
        catalogue = (await survey(store)).catalogue
        namespaces = set(find_models(catalogue, model, None, store.shown).values())
    wanted = pages_of(namespaces)
    store.progress.begin("looking")
    pages, unknown_age = Totals(), 0
    async for stored in with_progress(only(store.listed(), wanted), store.progress):
        pages.add(stored)
        unknown_age += stored.age_s is None
    if unknown_age and unknown_age == pages.objects:
        raise ConfigError(
            f"store {store.shown!r} does not know the ages of its objects; use `lockstep store rm` with"
            " --model or --namespace instead"
        )
    store.progress.begin("removing")
    if age_s is not None:
        going = only(only(store.listed(), wanted), partial(_is_older, age_s))
    else:
        oldest = _Oldest(pages.nbytes - size)
        if pages.nbytes > size:
            async for stored in only(store.listed(), wanted):
                oldest.add(stored)
        going = these(oldest.oldest_first())
    await remove_objects(store, going, removed, dry_run=dry_run)
    left = count(max(0, pages.objects - removed.objects), "page")
    left_bytes = bytes_in_words(max(0, pages.nbytes - removed.nbytes))
    unknown = f", {unknown_age:,} of them of unknown age" if unknown_age else ""
    return f"{left}, {left_bytes} {'would remain' if dry_run else 'remain'}{unknown}"


def _is_older(age_s: float, stored: StoredObject) -> bool:
    return stored.age_s is not None and stored.age_s >= age_s


def rm(
    uri: Uri,
    /,
    *,
    model: Annotated[str | None, Parameter(help="Remove this model.", show_default="none")] = None,
    weights_version: Annotated[
        str | None,
        Parameter(help="Only the model with these weights.", show_default="all weights"),
    ] = None,
    namespace: Annotated[
        Digest,
        Parameter(
            help="Remove this namespace: its digest, or a prefix of it.", show_default="none"
        ),
    ] = None,
    everything: Annotated[
        bool, Parameter("--all", help="Remove all of Lockstep's objects in the store.")
    ] = False,
    rank: Rank = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, Parameter(help="Remove without asking.")] = False,
) -> int:
    """Remove a model, a namespace or everything.

    Asks for confirmation, and removes only objects of Lockstep. Manifests are removed last.
    """
    uri = of_rank(uri, rank)
    selection, catalogue = _selected(uri, model, weights_version, namespace, everything=everything)
    shown = shown_store(uri)
    objects, nbytes = selected_extent(catalogue, selection)
    if not objects:
        print(f"{shown}: nothing to remove")
        return 0
    what = f"remove {count(objects, 'object')}, {bytes_in_words(nbytes)}"
    if dry_run:
        print(f"{shown}: would {what}")
        return 0
    if not yes and not _agreed(what, shown):
        print("nothing was removed")
        return 0
    removed = Removal()
    tell = partial(_print_removed, uri, removed, "removed")

    async def remove(store: OpenedStore) -> None:
        store.progress.begin("removing", objects, nbytes)
        await remove_selected(store, selection, removed)

    with reporting_partial(lambda: tell(", so far")):
        run_on_store(uri, remove)
    return tell("")


def _selected(
    uri: str,
    model: str | None,
    weights_version: str | None,
    namespace: str | None,
    *,
    everything: bool,
) -> tuple[Selection, Catalogue]:
    """Return (objects that the options of `rm` select, the store's catalogue)."""
    given = (model is not None) + (namespace is not None) + everything
    if given > 1:
        raise ConfigError("give only one of --model, --namespace and --all")
    if not given:
        raise ConfigError("give one of --model NAME, --namespace DIGEST and --all")
    if weights_version is not None and model is None:
        raise ConfigError("--weights-version needs --model")
    catalogue = run_on_store(uri, survey, looking=True).catalogue
    shown = shown_store(uri)
    if model is not None:
        namespaces = find_models(catalogue, model, weights_version, shown)
        selection = Selection(frozenset(namespaces.values()), manifests=frozenset(namespaces))
    elif namespace is not None:
        selection = Selection(frozenset([find_namespace(catalogue, namespace, shown)]))
    else:
        selection = Selection(None, manifests=frozenset(catalogue.manifests))
    return selection, catalogue


def _agreed(what: str, shown: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"store {shown!r}: stdin is no terminal, so there is no confirmation to {what}; use --yes"
        )
    print(f"{shown}: {what}? [y/N]: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_removed(uri: str, removed: Removal, done: str, rest: str) -> int:
    gone = f"{done} {count(removed.objects, 'object')}, {bytes_in_words(removed.nbytes)}"
    say(f"{shown_store(uri)}: {gone}{rest}")
    print_found(f"{count(removed.stayed.objects, 'object')} not removed", removed.stayed)
    return exit_status(incomplete=removed.stayed.objects)


def pages_of(namespaces: Collection[str] | None) -> Wanted:
    """Return a filter that accepts the pages of these namespaces (None: of all).

    Manifests, and marks (which record the groups that wrote pages), are not accepted, because they are
    small and describe the pages that remain.
    """
    return lambda stored: (
        not is_record(stored) and (namespaces is None or stored.name.namespace in namespaces)
    )


async def remove_objects(
    store: OpenedStore,
    objects: AsyncIterator[StoredObject],
    removed: Removal,
    *,
    dry_run: bool = False,
) -> None:
    """Remove the objects and count them in `removed`; with `dry_run`, count without removing."""

    async def remove(batch: Batch, _: Scratch) -> None:
        names = [stored.name for stored in batch]
        gone = [True] * len(names)
        if not dry_run:
            gone = await store.backend.remove(names, deadline=call_deadline())
        for stored, each in zip(batch, gone, strict=True):
            removed.add(stored.name, stored_bytes(stored), gone=each)
        store.progress.advance(len(batch), sum(map(stored_bytes, batch)))

    await for_each_batch(objects, _JOBS, remove, nbytes_max=ANY_BYTES)


async def remove_selected(store: OpenedStore, selection: Selection, removed: Removal) -> None:
    """Remove the selected objects; keep the manifests if any other object could not be removed."""
    await remove_objects(store, only(store.listed(), selection.wants), removed)
    if selection.manifests and not removed.stayed.objects:
        names = sorted(selection.manifests, key=lambda name: name.namespace)
        gone = await store.backend.remove(names, deadline=call_deadline())
        for name, each in zip(names, gone, strict=True):
            removed.add(name, manifest_bytes(), gone=each)


def selected_extent(catalogue: Catalogue, selection: Selection) -> tuple[int, int]:
    """Return (number, bytes) of the selected objects, including manifests."""
    if selection.namespaces is None:
        return catalogue.total.objects, catalogue.total.nbytes
    objects, nbytes = extent_of(catalogue, selection.namespaces.__contains__)
    manifests = len(selection.manifests)
    return objects + manifests, nbytes + manifests * manifest_bytes()

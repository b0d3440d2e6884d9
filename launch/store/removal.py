"""`lockstep store gc` and `lockstep store rm`: which objects go, and their removal."""

import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ...storage_backends.base import StoredObject
from ...storage_backends.records.catalogue import (
    Catalogue,
    is_manifest,
    is_record,
    manifest_bytes,
    stored_bytes,
)
from .batches import ANY_BYTES, Batch, Scratch, for_each_batch, only
from .opened_store import OpenedStore
from .opening import call_deadline
from .survey import extent_of
from .verify import Defects

_BUCKETS_PER_OCTAVE: Final = 64
_BUCKET_AGE_S: Final = 300.0
"""Ages in one bucket differ by a hundredth, and by some seconds where objects are younger than this:
more than the time between the listing of an object and its removal is likely to be."""
_JOBS: Final = 2

Wanted = Callable[[StoredObject], bool]


@dataclass(slots=True)
class Removal:
    """Counts what a removal has done so far, or would do."""

    objects: int = 0
    nbytes: int = 0
    stayed: Defects = field(default_factory=Defects)
    """Objects that the store did not remove."""

    def add(self, name: ObjectName, nbytes: int, *, gone: bool) -> None:
        """Count one object."""
        if gone:
            self.objects += 1
            self.nbytes += nbytes
        else:
            self.stayed.add(name)


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects that `rm` is to remove."""

    namespaces: frozenset[str] | None
    """The namespaces whose objects go; None for all."""
    manifests: frozenset[ObjectName] = frozenset()
    """The manifests that go, after everything else: until then they say what the other objects are."""

    def wants(self, stored: StoredObject) -> bool:
        """Say whether an object other than a manifest is to be removed."""
        if is_manifest(stored):
            return False
        return self.namespaces is None or stored.name.namespace in self.namespaces


@dataclass(slots=True)
class Ages:
    """Counts the bytes of a store by age, to say how old an object must be to go, without sorting.

    Memory is bounded, because ages are counted in buckets that grow with them.
    """

    begun: float = field(default_factory=time.monotonic)
    listed: float = field(default_factory=time.monotonic)
    """When the present listing began: stores say how old objects were then."""
    nbytes: dict[int, int] = field(default_factory=dict[int, int])
    unknown: int = 0
    """Objects of which the store does not say how old they are."""

    def add(self, stored: StoredObject) -> None:
        """Count one object."""
        age_s = self.age_s(stored)
        if age_s is None:
            self.unknown += 1
            return
        bucket = _bucket(age_s)
        self.nbytes[bucket] = self.nbytes.get(bucket, 0) + stored_bytes(stored)

    def age_s(self, stored: StoredObject) -> float | None:
        """Return how old an object was when this count began: the same in each listing."""
        if stored.age_s is None:
            return None
        return max(0.0, stored.age_s - (self.listed - self.begun))

    def list_again(self) -> None:
        """Take note that another listing begins."""
        self.listed = time.monotonic()

    def oldest(self, nbytes: int) -> "Oldest":
        """Return what to remove to be rid of so many bytes, the oldest first."""
        if nbytes >= sum(self.nbytes.values()):
            return Oldest(self, -2, 0)
        older = 0
        for bucket in sorted(self.nbytes, reverse=True):
            older += self.nbytes[bucket]
            if older >= nbytes > 0:
                surely = sum(size for each, size in self.nbytes.items() if each > bucket + 1)
                return Oldest(self, bucket, nbytes - surely)
        return Oldest(self, max(self.nbytes, default=0) + 2, 0)


@dataclass(slots=True)
class Oldest:
    """Wants the oldest objects: all that are older than about `bucket`, and some bytes of that age.

    An object may be found one bucket off when it is listed again, since time passes meanwhile; so
    the ages next to the limit count as that of the limit. Objects of those ages are for `last`.
    """

    ages: Ages
    bucket: int
    left: int
    _near: list[tuple[float, StoredObject]] = field(
        default_factory=list[tuple[float, StoredObject]]
    )

    def __call__(self, stored: StoredObject) -> bool:
        """Say whether the object is surely to go; to be asked once for each."""
        age_s = self.ages.age_s(stored)
        if age_s is None:
            return False
        older_by = _bucket(age_s) - self.bucket
        if -1 <= older_by <= 1:
            self._near.append((age_s, stored))
        return older_by > 1

    def last(self) -> Iterator[StoredObject]:
        """Yield which of the others are to go: the oldest, which are the ends of prefixes, first."""
        for _, stored in sorted(self._near, key=lambda each: each[0], reverse=True):
            if self.left <= 0:
                return
            self.left -= stored_bytes(stored)
            yield stored


@dataclass(frozen=True, slots=True)
class OlderThan:
    """Wants objects of at least this age."""

    ages: Ages
    age_s: float

    def __call__(self, stored: StoredObject) -> bool:
        """Say whether the object is to go."""
        age_s = self.ages.age_s(stored)
        return age_s is not None and age_s >= self.age_s


def pages_of(namespaces: Collection[str] | None) -> Wanted:
    """Return what wants the pages of these namespaces, or of all: not manifests and marks.

    Those are small, and say what the pages that stay are.
    """
    return lambda stored: (
        not is_record(stored) and (namespaces is None or stored.name.namespace in namespaces)
    )


def check_ages(ages: Ages, uri: str) -> None:
    """Raise `ConfigError` if the store says of no object how old it is."""
    if ages.unknown and not ages.nbytes:
        raise ConfigError(
            f"store {uri!r} does not say how old its objects are; remove some with `lockstep store "
            "rm --model` or `--namespace`"
        )


async def remove_objects(
    store: OpenedStore,
    objects: AsyncIterator[StoredObject],
    removed: Removal,
    *,
    dry_run: bool = False,
) -> None:
    """Remove the objects and count them in `removed`, or only count them."""

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
    """Remove what is selected. Manifests stay where anything of theirs could not be removed."""
    await remove_objects(store, only(store.listed(), selection.wants), removed)
    if selection.manifests and not removed.stayed.objects:
        names = sorted(selection.manifests, key=lambda name: name.namespace)
        gone = await store.backend.remove(names, deadline=call_deadline())
        for name, each in zip(names, gone, strict=True):
            removed.add(name, manifest_bytes(), gone=each)


def selected_extent(catalogue: Catalogue, selection: Selection) -> tuple[int, int]:
    """Return how many objects are selected, manifests too, and their bytes."""
    if selection.namespaces is None:
        return catalogue.total.objects, catalogue.total.nbytes
    objects, nbytes = extent_of(catalogue, selection.namespaces.__contains__)
    manifests = len(selection.manifests)
    return objects + manifests, nbytes + manifests * manifest_bytes()


def _bucket(age_s: float) -> int:
    return int(math.log2(1.0 + age_s / _BUCKET_AGE_S) * _BUCKETS_PER_OCTAVE)

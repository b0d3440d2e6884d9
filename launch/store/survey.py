"""Lists a store: counts its objects by model, and optionally draws a random sample."""

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...storage_backends.base import Read, ReadOutcome, StorageBackend, StoredObject
from ...storage_backends.records.catalogue import Catalogue, default_namespace, stored_bytes
from ...storage_backends.records.manifest import MANIFEST_BYTES, decode_manifest
from .opened_store import OpenedStore
from .progress import StoreProgress
from .store_opening import call_deadline

_TOLD_AT_A_TIME: Final = 128
_PREFIX_MIN: Final = 6
SAMPLE_MAX: Final = 1_000_000


@dataclass(slots=True)
class StoreSample:
    """A uniform random sample, of at most `size` objects, of the objects that `wanted` accepts."""

    size: int
    wanted: Callable[[StoredObject], bool]
    objects: list[StoredObject] = field(default_factory=list[StoredObject])
    met: int = 0

    def add(self, stored: StoredObject) -> None:
        """Offer one more object to the sample; ignore it unless `wanted` accepts it."""
        if not self.wanted(stored):
            return
        self.met += 1
        if len(self.objects) < self.size:
            self.objects.append(stored)
            return
        place = random.randrange(self.met)  # noqa: S311 - a sample is no secret.
        if place < self.size:
            self.objects[place] = stored


class Surveyed(NamedTuple):
    """Catalogue of a store, and its corrupt manifests."""

    catalogue: Catalogue
    corrupt: list[ObjectName]
    """Manifests that were corrupt when they were read. A writable store has moved them to quarantine.
    """


async def survey(store: OpenedStore, sample: StoreSample | None = None) -> Surveyed:
    """List a store and read its manifests; every listed object is offered to `sample`."""
    store.progress.begin("looking")
    catalogue = Catalogue()
    async for stored in with_progress(store.listed(), store.progress):
        catalogue.add(stored)
        if sample is not None:
            sample.add(stored)
    corrupt: list[ObjectName] = []
    for name in list(catalogue.manifests):
        outcome, content = await read_manifest(store.backend, name)
        catalogue.learn(name, decode_manifest(content) if outcome is ReadOutcome.OK else None)
        if outcome is ReadOutcome.CORRUPT:
            corrupt.append(name)
    return Surveyed(catalogue, corrupt)


async def read_manifest(backend: StorageBackend, name: ObjectName) -> tuple[ReadOutcome, bytes]:
    """Read a manifest; return (outcome of the read, the manifest's bytes)."""
    content = bytearray(MANIFEST_BYTES)
    read = Read(name, (memoryview(content),), ObjectShape.whole(MANIFEST_BYTES))
    (outcome,) = await backend.read([read], deadline=call_deadline())
    return outcome, bytes(content)


async def with_progress(
    objects: AsyncIterator[StoredObject], progress: StoreProgress
) -> AsyncIterator[StoredObject]:
    """Yield all `objects`, and advance the progress bar by many objects at a time."""
    number = nbytes = 0
    async for stored in objects:
        yield stored
        number, nbytes = number + 1, nbytes + stored_bytes(stored)
        if number == _TOLD_AT_A_TIME:
            progress.advance(number, nbytes)
            number = nbytes = 0
    progress.advance(number, nbytes)


def extent_of(catalogue: Catalogue, wanted: Callable[[str], bool]) -> tuple[int, int]:
    """Return (number, bytes) of the objects in the wanted namespaces."""
    extents = [
        each.extent
        for model in catalogue.models()
        for each in model.namespaces
        if wanted(each.namespace)
    ]
    return sum(each.objects for each in extents), sum(each.nbytes for each in extents)


def find_namespace(catalogue: Catalogue, prefix: str, uri: str) -> str:
    """Return the one namespace that begins with `prefix`; raise `ConfigError` if none or several do."""
    known = catalogue.namespaces()
    if prefix in known:
        return prefix
    found = [each for each in known if each.startswith(prefix)]
    if len(prefix) < _PREFIX_MIN:
        raise ConfigError(
            f"--namespace is {prefix!r}; give {_PREFIX_MIN} digits or more, as `lockstep store ls "
            f"{uri}` shows them"
        )
    if len(found) > 1:
        raise ConfigError(
            f"--namespace {prefix!r} matches {len(found)} namespaces; give more digits"
        )
    if not found:
        raise ConfigError(
            f"--namespace {prefix!r}: the store has no such namespace; `lockstep store ls {uri}` "
            "lists its namespaces"
        )
    return found[0]


def find_models(
    catalogue: Catalogue, model: str, weights_version: str | None, uri: str
) -> dict[ObjectName, str]:
    """Return {manifest's object name: namespace} for all manifests of a model.

    If `weights_version` is not None, only manifests with these weights count. Raises `ConfigError` if
    there is no such manifest.
    """
    manifests = [each for each in catalogue.manifests.values() if each is not None]
    same = [each for each in manifests if each.model == model]
    if not same:
        known = sorted({each.model for each in manifests})
        there = f"it has {', '.join(map(repr, known[:5]))}" if known else "it has none"
        more = f" and {len(known) - 5} others" if len(known) > 5 else ""
        raise ConfigError(f"--model {model!r}: the store {uri} has no such model; {there}{more}")
    found = [each for each in same if weights_version in (None, each.weights_version)]
    if not found:
        known = sorted(each.weights_version for each in same)
        raise ConfigError(
            f"--weights-version {weights_version!r}: the store {uri} has model {model!r} with "
            f"{', '.join(map(repr, known[:5]))}"
        )
    return {each.name: default_namespace(each) for each in found}

"""Totals of a store's objects, grouped by model and weights version, namespace, pool and shard.

The name of an object contains its namespace, pool and shard. The manifests in the store (see
`manifest`) map namespaces to models. The caller first adds each listed object to a catalogue. Then it
reads the manifests that were listed, and passes each to `learn`.

This module does no I/O. Its memory is bounded, and grows with the number of namespaces, pools and
shards, not of objects.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from ...errors import ConfigError, StorageError
from ...page_format.namespace import Namespace
from ...page_format.object_header import HEADER_BYTES
from ...page_format.object_name import MANIFEST_POOL, MARK_POOL, ObjectName
from ...page_format.object_shape import ObjectShape
from ...page_format.page_layout import PageLayout, ShardPlace
from ..base import StoredObject
from .manifest import MANIFEST_BYTES, Manifest

GROUPS_MAX: Final = 1 << 16
_MARK: Final = ObjectShape.whole(1)
RECORD_BYTES: Final = (HEADER_BYTES + _MARK.nbytes, HEADER_BYTES + MANIFEST_BYTES)
"""Lengths in bytes of a marker's object and of a manifest's object, headers included."""
_SHARD: Final = re.compile(r"l([0-9]{1,6})-([0-9]{1,6})\..+")
_DIMENSION_MAX: Final = 4096
"""Maximum number of layers and of heads in a manifest. A larger manifest is ignored, because computing
the shards of such a model would take too long."""


class GroupKey(NamedTuple):
    """Namespace, pool and shard of an object's name. All objects that share them are one group."""

    namespace: str
    pool: str
    shard: str


@dataclass(slots=True)
class Totals:
    """Number and total bytes (with headers) of some objects, and the least and greatest age."""

    objects: int = 0
    nbytes: int = 0
    newest_s: float | None = None
    oldest_s: float | None = None

    def add(self, stored: StoredObject) -> None:
        """Add one object to the totals."""
        self.merge(Totals(1, stored_bytes(stored), stored.age_s, stored.age_s))

    def merge(self, other: "Totals") -> None:
        """Add the totals `other`."""
        self.objects += other.objects
        self.nbytes += other.nbytes
        ages = (self.newest_s, self.oldest_s, other.newest_s, other.oldest_s)
        known = [age_s for age_s in ages if age_s is not None]
        self.newest_s, self.oldest_s = min(known, default=None), max(known, default=None)

    @staticmethod
    def of(parts: "Iterable[Totals]") -> "Totals":
        """Return the sum of several totals."""
        total = Totals()
        for each in parts:
            total.merge(each)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContents:
    """Totals of the objects of one shard of one pool."""

    pool: str
    shard: str
    tp_size: int | None
    """The TP size of the groups that write objects of this shard. None if the TP size is unknown, or if
    groups of every TP size write such objects."""
    extent: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceContents:
    """Totals of the objects of one namespace, by pool and shard."""

    namespace: str
    shards: tuple[ShardContents, ...]
    writers: tuple[str, ...]
    """The markers that groups of ranks have written in the namespace, such as `stage0of1.tp2`."""
    extent: Totals
    """The totals of all objects in the namespace, markers included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """Totals of the objects of one model and weights version, or of all objects of unknown models."""

    manifest: Manifest | None
    namespaces: tuple[NamespaceContents, ...]

    @property
    def extent(self) -> Totals:
        """Return the totals of the model's objects, except its manifest."""
        return Totals.of(each.extent for each in self.namespaces)


@dataclass(slots=True)
class Catalogue:
    """Counts the objects of one store, and adds up their bytes, while they are listed."""

    total: Totals = field(default_factory=Totals)
    largest_bytes: int = 0
    manifests: dict[ObjectName, Manifest | None] = field(
        default_factory=dict[ObjectName, Manifest | None]
    )
    """The content of each listed manifest, by the name of its object. The value is None until `learn`
    is called for the manifest. It stays None if this version cannot decode the manifest."""
    _groups: dict[GroupKey, Totals] = field(default_factory=dict[GroupKey, Totals])
    _models: dict[str, Manifest] = field(default_factory=dict[str, Manifest])

    def add(self, stored: StoredObject) -> None:
        """Add one object to the totals.

        Raises `StorageError` if the store has more than `GROUPS_MAX` groups, that is, combinations of
        namespace, pool and shard.
        """
        self.total.add(stored)
        self.largest_bytes = max(self.largest_bytes, stored_bytes(stored))
        if is_manifest(stored):
            self.manifests.setdefault(stored.name, None)
        else:
            name = stored.name
            key = GroupKey(name.namespace, name.pool, name.shard)
            self._groups.setdefault(key, Totals()).add(stored)
        if len(self._groups) + len(self.manifests) > GROUPS_MAX:
            raise StorageError(
                f"the store has more than {GROUPS_MAX:,} models, namespaces and shards, more than "
                "any real store; check who writes to it"
            )

    def learn(self, name: ObjectName, manifest: Manifest | None) -> None:
        """Record the manifest stored under `name`; None stands for an unreadable manifest."""
        # Ignore a manifest with too many layers or heads, or with another model than the one in the
        # object's name.
        accepted = manifest
        if accepted is not None and (accepted.name != name or not _is_sensible(accepted)):
            accepted = None
        self.manifests[name] = accepted
        if accepted is not None:
            self._models[default_namespace(accepted)] = accepted

    def model_of(self, namespace: str) -> Manifest | None:
        """Return the manifest of the model whose objects are in `namespace`, or None."""
        return self._models.get(namespace)

    def namespaces(self) -> list[str]:
        """Return all namespaces with objects other than manifests, sorted."""
        return sorted({key.namespace for key in self._groups})

    def models(self) -> list[ModelContents]:
        """Return the totals by model and weights version; those of unknown models come last."""
        by_namespace: dict[str, list[tuple[GroupKey, Totals]]] = {}
        for key, extent in self._groups.items():
            by_namespace.setdefault(key.namespace, []).append((key, extent))
        known = sorted(
            (each for each in self.manifests.values() if each is not None),
            key=lambda each: (each.model, each.weights_version),
        )
        entries: list[ModelContents] = []
        for manifest in known:
            groups = by_namespace.pop(default_namespace(manifest), None)
            found = () if groups is None else (_namespace_contents(manifest, groups),)
            entries.append(ModelContents(manifest=manifest, namespaces=found))
        rest = [_namespace_contents(None, groups) for _, groups in sorted(by_namespace.items())]
        if rest:
            entries.append(ModelContents(manifest=None, namespaces=tuple(rest)))
        return entries


def manifest_bytes() -> int:
    """Return the length in bytes of a manifest, including its object's header."""
    return HEADER_BYTES + MANIFEST_BYTES


def stored_bytes(stored: StoredObject) -> int:
    """Return the length in bytes of an object, including its header."""
    return HEADER_BYTES + stored.shape.nbytes


def is_manifest(stored: StoredObject) -> bool:
    """Return whether an object has the name and length of a model's manifest."""
    name = stored.name
    named = (name.pool, name.shard, name.key) == (MANIFEST_POOL, "all", name.namespace)
    return named and stored.shape == ObjectShape.whole(MANIFEST_BYTES)


def is_record(stored: StoredObject) -> bool:
    """Return whether an object is a record, that is, a manifest or a group's marker."""
    mark = stored.name.pool == MARK_POOL and stored.shape == _MARK
    return mark or is_manifest(stored)


def default_namespace(manifest: Manifest) -> str:
    """Return the digest of the namespace that contains a model's objects."""
    return Namespace(
        model=manifest.model, weights_version=manifest.weights_version, layouts=manifest.layouts
    ).digest()


def tp_size_of(layout: PageLayout, shard: str) -> int | None:
    """Return the TP size at which ranks write objects with the head range of this shard.

    The layers in the shard's name are ignored. Returns None if the layout has no such shard, or if
    ranks of every TP size write the shard.
    """
    return _tp_sizes(layout).get(shard.rpartition(".")[2])


@lru_cache(maxsize=64)
def _tp_sizes(layout: PageLayout) -> dict[str, int]:
    """Return a mapping from head range (last component of a shard's name) to TP size."""
    sizes = {
        layout.shard(rank, size, absent=layout.optional_names).name.rpartition(".")[2]: size
        for size in layout.tp_sizes()
        for rank in range(size)
    }
    sizes.pop("all", None)
    return sizes


def full_shape(layout: PageLayout, stored: StoredObject) -> ObjectShape | None:
    """Return a listed object's shape, extended by all parts that an object of this name may have.

    The listing states only the parts that the object has, and the result marks these as present. A
    reader needs the other parts too, because another engine may add a column after the listing. The
    object then looks corrupt to a reader that does not know the column. Returns None if the layout
    has no such object.
    """
    if not layout.optional_columns:
        return stored.shape
    for place in _places(layout, stored.name.shard):
        world_size, rank = place.tp_size * place.stages, place.stage * place.tp_size + place.tp_rank
        try:
            # Compute the shard without optional columns, because a rank does not store an optional
            # column that its TP size cannot divide.
            lean = layout.optional_names
            shard = layout.shard(rank, world_size, absent=lean, stages=place.stages)
        except ConfigError:
            continue
        if shard.name == stored.name.shard:
            found = _with_parts(shard.shape, stored.shape)
            if found is not None:
                return found
    return None


def _places(layout: PageLayout, shard: str) -> Iterator[ShardPlace]:
    """Yield the ranks, with TP size and pipeline stage, that may write objects of this shard."""
    match = _SHARD.fullmatch(shard)
    if match is None:
        return
    size = tp_size_of(layout, shard)
    layers = max(column.layers for column in layout.columns)
    first, last = int(match[1]), int(match[2])
    for stages in range(1, layers + 1):
        for stage in range(stages):
            if (layers * stage // stages, layers * (stage + 1) // stages) == (first, last):
                for each in [size] if size is not None else layout.tp_sizes():
                    yield from (ShardPlace(rank, each, stage, stages) for rank in range(each))
                if size is None:
                    # At all TP sizes above `layout.units`, every rank writes the same objects. So
                    # yield only one rank of one of these TP sizes.
                    yield ShardPlace(0, layout.units + 1, stage, stages)


class FullShapes:
    """Computes `full_shape` for the objects of one store; caches the results.

    The cache key is namespace, pool, shard and present columns.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._known: dict[tuple[GroupKey, int], tuple[ObjectShape, ObjectShape | None]] = {}

    def of(self, stored: StoredObject) -> ObjectShape | None:
        """Return the object's shape with all parts that it may have; None if its layout is unknown."""
        if is_record(stored):
            return stored.shape
        name = stored.name
        key = (GroupKey(name.namespace, name.pool, name.shard), stored.shape.present)
        found = self._known.get(key)
        if found is None or found[0] != stored.shape:
            manifest = self._catalogue.model_of(name.namespace)
            layout = manifest.layouts.get(name.pool) if manifest is not None else None
            shape = full_shape(layout, stored) if layout is not None else None
            found = (stored.shape, shape)
            if len(self._known) < GROUPS_MAX:
                self._known[key] = found
        return found[1]


def _is_sensible(manifest: Manifest) -> bool:
    columns = [column for layout in manifest.layouts.values() for column in layout.columns]
    return all(max(each.layers, each.heads) <= _DIMENSION_MAX for each in columns)


def _with_parts(full: ObjectShape, stated: ObjectShape) -> ObjectShape | None:
    """Return `full` with the parts of `stated` marked as present; None if `full` lacks one of them."""
    present = stated.present
    held = full.numbers(present)
    same = full.knows(present) and tuple(full.parts[number] for number in held) == stated.parts
    return ObjectShape(full.parts, tuple(held)) if same else None


def _namespace_contents(
    manifest: Manifest | None, groups: list[tuple[GroupKey, Totals]]
) -> NamespaceContents:
    shards: list[ShardContents] = []
    writers: list[str] = []
    for key, extent in groups:
        if key.pool == MARK_POOL:
            writers.append(key.shard)
            continue
        layout = manifest.layouts.get(key.pool) if manifest is not None else None
        shards.append(
            ShardContents(
                pool=key.pool,
                shard=key.shard,
                tp_size=tp_size_of(layout, key.shard) if layout is not None else None,
                extent=extent,
            )
        )
    shards.sort(key=lambda each: (each.pool, each.tp_size or 0, _numbers_first(each.shard)))
    return NamespaceContents(
        namespace=groups[0][0].namespace,
        shards=tuple(shards),
        writers=tuple(sorted(writers, key=_numbers_first)),
        extent=Totals.of(extent for _, extent in groups),
    )


def _numbers_first(text: str) -> tuple[list[int], str]:
    """Return a sort key that orders names by the numbers in them: `h8-16` before `h16-24`."""
    digits = "".join(character if character.isdigit() else " " for character in text)
    return [int(number) for number in digits.split()], text

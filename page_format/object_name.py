"""The name of a stored object, the name's digest, and the object's path in a store."""

import re
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

NAME_DIGEST_BYTES: Final = 32
OBJECTS: Final = "objects"
"""The directory, or path prefix, under which a store keeps its objects."""
MANIFEST_POOL: Final = "manifest"
MARK_POOL: Final = "sharding"
"""The pool of objects that record the TP sizes of the groups that have written to a store (see
`records/shardings`). They contain no pages, like those of `MANIFEST_POOL`, a model's manifest (see
`records/manifest`)."""

_PART: Final = re.compile("[a-z0-9.-]{1,128}")
_OF_PARTS: Final = b"abcdefghijklmnopqrstuvwxyz0123456789.-"
_KEY_MAX: Final = 128


class ObjectName(NamedTuple):
    """The name of one stored object. All fields are safe in paths: hex digits, or [a-z0-9.-].

    `namespace` is the hex digest of everything that must match before bytes may be shared (model,
    weights, dtype, layout, tenant, adapter). `key` is the hex digest of the token prefix. `pool` names
    the component's pool. `shard` is the range of layers and heads that the object covers.
    """

    namespace: str
    key: str
    pool: str
    shard: str


def name_digest(name: ObjectName) -> bytes | None:
    """Return the 32-byte digest of the full name, or None if a field contains an invalid character."""
    around = _around_key(name.namespace, name.pool, name.shard)
    key = name.key
    # This code runs for every page, and the names of many pages differ only in their keys. The text
    # before and after the key therefore comes from a cache.
    if around is None or not (key.isascii() and 0 < len(key) <= _KEY_MAX):
        return None
    text = key.encode()
    if text.translate(None, _OF_PARTS):
        return None
    before, after = around
    return blake2b(before + text + after, digest_size=NAME_DIGEST_BYTES).digest()


def located(name: ObjectName) -> tuple[bytes, str] | None:
    """Return (digest of the name, path of the object), or None if the name is invalid."""
    digest = name_digest(name)
    return None if digest is None else (digest, object_path(name.namespace, digest))


def full_name(name: ObjectName) -> str:
    """Return the object's full name as one string, its fields separated by slashes."""
    return f"{name.namespace}/{name.key}/{name.pool}/{name.shard}"


def object_path(namespace: str, digest: bytes) -> str:
    """Return the path, relative to the store's root, of the object with this `name_digest`."""
    digits = digest.hex()
    return f"{_namespace_directory(namespace)}/{digits[:2]}/{digits}"


@lru_cache(maxsize=1024)
def _namespace_directory(namespace: str) -> str:
    return f"{OBJECTS}/{blake2b(namespace.encode('ascii'), digest_size=16).hexdigest()}"


@lru_cache(maxsize=256)
def _around_key(namespace: str, pool: str, shard: str) -> tuple[bytes, bytes] | None:
    """Return the parts of a full name before and after the key, or None if a field is invalid."""
    if not all(_PART.fullmatch(part) for part in (namespace, pool, shard)):
        return None
    return f"{namespace}/".encode(), f"/{pool}/{shard}".encode()

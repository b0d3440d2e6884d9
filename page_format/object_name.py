"""The name of a stored object, the digest of the name, and the path where stores keep it."""

import re
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

NAME_DIGEST_BYTES: Final = 32
OBJECTS: Final = "objects"
"""The directory, or the prefix of paths, below which a store has its objects."""
MANIFEST_POOL: Final = "manifest"
MARK_POOL: Final = "sharding"
"""Names of objects that describe others, in place of a component's pool: a model's manifest
(`records/manifest`) and the marks of TP sizes (`records/shardings`)."""

_PART: Final = re.compile("[a-z0-9.-]{1,128}")
_OF_PARTS: Final = b"abcdefghijklmnopqrstuvwxyz0123456789.-"
_KEY_MAX: Final = 128


class ObjectName(NamedTuple):
    """The name of one stored object. All parts are safe in paths: hex digits, or [a-z0-9.-].

    `namespace` is the hex digest of everything that must agree before bytes may be shared (model,
    weights, dtype, layout, tenant, adapter); `key` the hex digest of the token prefix; `pool` and
    `shard` say which part of the page it is.
    """

    namespace: str
    key: str
    pool: str
    shard: str


def name_digest(name: ObjectName) -> bytes | None:
    """Return the 32-byte digest of the full name, or None if a part has a character it must not."""
    around = _around_key(name.namespace, name.pool, name.shard)
    key = name.key
    # One call's names share all parts but the key, and this is on the path of every page.
    if around is None or not (key.isascii() and 0 < len(key) <= _KEY_MAX):
        return None
    text = key.encode()
    if text.translate(None, _OF_PARTS):
        return None
    before, after = around
    return blake2b(before + text + after, digest_size=NAME_DIGEST_BYTES).digest()


def located(name: ObjectName) -> tuple[bytes, str] | None:
    """Return the digest of a name and the path of its object; None as `name_digest`."""
    digest = name_digest(name)
    return None if digest is None else (digest, object_path(name.namespace, digest))


def full_name(name: ObjectName) -> str:
    """Return the name as one text."""
    return f"{name.namespace}/{name.key}/{name.pool}/{name.shard}"


def object_path(namespace: str, digest: bytes) -> str:
    """Return where, below the root, the object with this `name_digest` lies."""
    digits = digest.hex()
    return f"{_namespace_directory(namespace)}/{digits[:2]}/{digits}"


@lru_cache(maxsize=1024)
def _namespace_directory(namespace: str) -> str:
    return f"{OBJECTS}/{blake2b(namespace.encode('ascii'), digest_size=16).hexdigest()}"


@lru_cache(maxsize=256)
def _around_key(namespace: str, pool: str, shard: str) -> tuple[bytes, bytes] | None:
    """Return what comes before and after the key in a full name; None if a part is impossible."""
    if not all(_PART.fullmatch(part) for part in (namespace, pool, shard)):
        return None
    return f"{namespace}/".encode(), f"/{pool}/{shard}".encode()

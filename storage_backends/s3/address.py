"""The address of an `s3://` store: parses its URI, and rejects ambiguous URIs with an exact error.

Credentials are never part of the URI, because it appears in logs and on command lines. The operator
passes them to the S3 client in the usual ways (environment, instance or container metadata). For the
same reason an error does not repeat a part of the URI that may be secret.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Final
from urllib.parse import urlsplit

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError
from ..uri import StoreUri, without_secrets

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION: Final = re.compile(r"[a-z0-9-]{1,64}")
_SECRET: Final = re.compile(r"secret|token|access|password|credential|(^|_)key", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class S3Address(Settings):
    """A prefix of a bucket, with the settings to access it."""

    bucket: str
    prefix: str = ""
    """The prefix of all paths in the bucket, without a slash at either end; empty for the whole bucket.
    """
    endpoint: str | None = None
    """The URL of an S3 server other than Amazon's, which is accessed with path-style URLs."""
    region: str | None = None
    anonymous: bool = False
    """Whether requests are sent unsigned, without credentials."""
    concurrency: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Maximum requests in flight. Many are needed to fill a network link, because a request mostly
    waits."""
    read_only: bool = False
    """Whether the store is read-only: nothing in the bucket is created, replaced or removed."""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def address_of(uri: StoreUri) -> S3Address:
    """Return the address in an `s3://` URI. Raises `ConfigError`."""
    _refuse_secrets(uri)
    if not uri.host:
        raise ConfigError(f"store {uri.text!r} names no bucket; write s3://bucket/prefix")
    if _BUCKET.fullmatch(uri.host) is None:
        raise ConfigError(
            f"store {uri.text!r}: {uri.host!r} is not a bucket name; it must have 3 to 63 of a-z, 0-9, "
            "'.' and '-' (the server is named by endpoint=http://host:port)"
        )
    uri.refuse_half_characters()
    prefix = uri.path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigError(f"store {uri.text!r}: the prefix has an empty part, '.' or '..'")
    address = uri.read(S3Address, bucket=uri.host, prefix=prefix)
    if address.region is not None and _REGION.fullmatch(address.region) is None:
        raise ConfigError(
            f"store {uri.text!r}: region is {address.region!r}, write it as us-east-1"
        )
    return replace(address, endpoint=_endpoint(uri))


def _refuse_secrets(uri: StoreUri) -> None:
    remedy = (
        "leave them out and give them to the process as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, by an instance role, or write anonymous=1 for none"
    )
    if "@" in uri.host:
        bucket = uri.host.rpartition("@")[2]
        raise ConfigError(f"store s3://{bucket}/...: the URI has credentials before '@'; {remedy}")
    known = {each.name for each in fields(S3Address)}
    for name in uri.options:
        if name not in known and _SECRET.search(name):
            raise ConfigError(
                f"store s3://{uri.host}/...: option {name!r} is a credential; {remedy}"
            )
    if "@" in uri.options.get("endpoint", ""):
        raise ConfigError(
            f"store s3://{uri.host}/...: the endpoint has credentials before '@'; {remedy}"
        )


def _endpoint(uri: StoreUri) -> str | None:
    endpoint = uri.options.get("endpoint")
    if endpoint is None:
        return None
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or "?" in endpoint or "#" in endpoint:
        raise ConfigError(
            f"store {uri.text!r}: endpoint is {without_secrets(endpoint)!r}, must be a URL such as "
            "http://host:9000"
        )
    return endpoint.rstrip("/")

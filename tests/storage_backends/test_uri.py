"""Store URIs: which backend each opens, and how each mistake is named in the error."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, LockstepError, StorageError
from lockstep.storage_backends import registry
from lockstep.storage_backends.base import ReadOutcome
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.registry import known_schemes, make_backend
from lockstep.storage_backends.uri import hiding_secrets, parse_uri, without_secrets
from tests.kit.storage.calls import get, object_name, opened_at, page, put


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("/var/kv", "is not a URI; write it as scheme://"),
        ("://x", "'' is not a scheme"),
        ("File:///var/kv", "'File' is not a scheme; schemes are in lower case"),
        ("tape:///var/kv", "unknown scheme 'tape'; known: "),
        (
            "+file:///var/kv",
            "is not a scheme; schemes are in lower case, and wrappers precede",
        ),
        ("file:///var/k v", "percent-encode it"),
        ("file:///var/kv#part", "fragment"),
        ("file:///var/%00", "NUL"),
        ("file:///var/kv?direct", "name=value"),
        ("file:///var/kv?direct=1&direct=1", "'direct' is given twice"),
        ("file:///var/kv?dircet=1", "there is no option 'dircet'; known: direct, durability"),
        ("file:///var/kv?direct=yes", "direct is 'yes', must be true or false"),
        ("file:///var/kv?threads=0", "threads is '0', must be at least 1"),
        ("file://var/kv", "names a host; an absolute path needs three slashes"),
        ("file://", "has no path; write file:///absolute/path"),
        ("memory://a/b", "has a path"),
        ("memory://A_b", "may have only"),
        ("memory://[::1", "Invalid IPv6 URL"),
    ],
)
def test_a_wrong_uri_is_refused_by_name(uri: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_backend(uri)
    assert complaint in str(raised.value)


def test_the_parts_of_a_uri_are_told_apart() -> None:
    uri = parse_uri("fault+breaker+s3://bucket/a%20b?endpoint=http%3A%2F%2Fx&n=1")
    assert uri.wrappers == ("fault", "breaker")
    assert (uri.scheme, uri.host, uri.path) == ("s3", "bucket", "/a b")
    assert dict(uri.options) == {"endpoint": "http://x", "n": "1"}


async def test_a_file_uri_opens_its_directory(tmp_path: Path) -> None:
    async with opened_at(f"file://{tmp_path}/a%20b?durability=full&direct=0&threads=2") as backend:
        await put(backend, object_name(1), page(1))
    assert (tmp_path / "a b" / "objects").is_dir()


async def test_memory_with_a_name_is_shared_and_without_is_private() -> None:
    shared, private = "memory://shared-by-two", "memory://"
    async with opened_at(shared) as first, opened_at(shared) as second:
        await put(first, object_name(1), page(1))
        assert (await get(second, object_name(1)))[0] is ReadOutcome.OK
    async with opened_at(private) as third, opened_at(private) as fourth:
        await put(third, object_name(1), page(1))
        assert (await get(fourth, object_name(1)))[0] is ReadOutcome.MISSING


async def test_memory_with_a_name_lives_as_long_as_somebody_has_it() -> None:
    backend = make_backend("memory://short-lived")
    await backend.open()
    await put(backend, object_name(1), page(1))
    del backend
    async with opened_at("memory://short-lived") as another:
        assert (await get(another, object_name(1)))[0] is ReadOutcome.MISSING


def test_another_package_adds_a_scheme_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = EntryPoints(
        EntryPoint(name, value, registry.ENTRY_POINT_GROUP)
        for name, value in (
            ("tape", "lockstep.storage_backends.memory:from_uri"),
            ("broken", "no_such_package_at_all:make"),
            ("file", "no_such_package_at_all:make"),
        )
    )

    def entries_of(*, group: str) -> EntryPoints:
        return entries.select(group=group)

    monkeypatch.setattr("importlib.metadata.entry_points", entries_of)
    assert isinstance(make_backend("tape://x"), MemoryBackend)
    assert known_schemes() == sorted({*known_schemes(), "broken", "file", "memory", "tape"})
    with pytest.raises(ConfigError, match="the package that provides broken://"):
        make_backend("broken://x")
    with pytest.raises(ConfigError, match="has no path"):
        make_backend("file://")


SECRET = "s3kr1t"  # noqa: S105 - nobody's.


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("file:///var/kv?threads=2", "file:///var/kv?threads=2"),
        ("file:///var/kv@2/x:y@z", "file:///var/kv@2/x:y@z"),
        ("3fs:///m?index=redis://host:6379/0", "3fs:///m?index=redis://host:6379/0"),
        (
            "s3://b/p?endpoint=http%3A%2F%2Fhost%3A9000",
            "s3://b/p?endpoint=http%3A%2F%2Fhost%3A9000",
        ),
        ("s3://bucket/a@b?region=us-east-1", "s3://bucket/a@b?region=us-east-1"),
        (
            f"3fs:///m?index=redis://user:{SECRET}@host:6379/0&files=4",
            "3fs:///m?index=redis://***@host:6379/0&files=4",
        ),
        (f"3fs:///m?index=redis://:a/b{SECRET}?@host", "3fs:///m?index=redis://***@host"),
        (f"3fs:///m?index=redis://:a@b{SECRET}@host", "3fs:///m?index=redis://***@host"),
        (f"3fs:///m?index=redis%3A%2F%2Fu%3A{SECRET}%40host", "3fs:///m?index=redis://***@host"),
        (
            f"3fs:///m?index=redis://host/0%3Fpassword={SECRET}%26db=1",
            "3fs:///m?index=redis://host/0?password=***%26db=1",
        ),
        (
            f"3fs:///m?index=redis://host?password={SECRET}",
            "3fs:///m?index=redis://host?password=***",
        ),
        (f"s3://AKIA{SECRET}:{SECRET}@bucket/p", "s3://***@bucket/p"),
        (f"s3://b?endpoint=http://k:{SECRET}@host", "s3://b?endpoint=http://***@host"),
        (f"s3://b?access_key_id={SECRET}&region=r", "s3://b?access_key_id=***&region=r"),
        (f"s3://b?session%5Ftoken={SECRET}", "s3://b?session%5Ftoken=***"),
        (f"fault+tape://x?fault.password={SECRET}", "fault+tape://x?fault.password=***"),
        (f"tape://x?APIKEY={SECRET}&a=1", "tape://x?APIKEY=***&a=1"),
        (f"tape://x?pw={SECRET}", "tape://x?pw=***"),
        (f"redis:user:{SECRET}@host", "***@host"),
        ("", ""),
    ],
)
def test_what_is_shown_of_a_uri_has_no_secret(uri: str, shown: str) -> None:
    assert without_secrets(uri) == shown
    assert without_secrets(shown) == shown
    assert SECRET not in shown


def test_half_a_character_is_shown_too() -> None:
    shown = without_secrets(f"file://a?b=%40@\ud800:{SECRET}@=\ud800")

    assert SECRET not in shown
    assert shown.encode()


def test_uris_in_uris_without_end_are_shown_without_end_of_patience() -> None:
    deep = "a://x?n=" * 5000 + f"redis://u:{SECRET}@h"
    assert SECRET not in without_secrets(deep)


@pytest.mark.parametrize(
    "uri",
    [
        f"memory://u:{SECRET}@host",
        f"file:///x?token={SECRET}",
        f"3fs:///x?index=postgres://u:{SECRET}@host",
        f"s3://bucket?endpoint=ftp://h?token={SECRET}",
        f"tape://u:{SECRET}@host",
        f"file:///x?password={SECRET}&password={SECRET}",
        f"redis:u:{SECRET}@host",
        f"file:///x y?password={SECRET}",
        f"redis://u:{SECRET}@[::1",
        f"redis://u:{SECRET}\u2100@host",
        f"file:///x?quota_bytes=u:{SECRET}@host",
    ],
)
def test_no_refusal_of_a_uri_repeats_a_secret(uri: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_backend(uri)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StorageError("no r/ead from u"), "StorageError: no *** from u"),
        (OSError("cannot use 'r/ead'"), "ConfigError: OSError: cannot use '***'"),
        (ValueError("no port 'ead'"), "ConfigError: ValueError: no port '***'"),
        (ValueError("no port"), "ValueError: no port"),
    ],
)
def test_what_a_client_says_of_a_store_is_told_without_the_secrets_of_its_uri(
    error: Exception, expected: str
) -> None:
    with (
        pytest.raises((LockstepError, ValueError)) as raised,
        hiding_secrets("3fs:///x?index=redis://u:r%2Fead@h"),
    ):
        raise error
    assert f"{raised.typename}: {raised.value}" == expected
    assert raised.value.__cause__ is None

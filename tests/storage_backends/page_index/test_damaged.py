"""Page indexes with addresses that make no sense, with content nobody wrote, and in a crowd."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.storage_backends.page_index.contract import (
    NOTHING,
    Commit,
    CommitOutcome,
    Settings,
)
from lockstep.storage_backends.page_index.opening import make_index
from lockstep.storage_backends.three_fs.backend import RINGS_MAX
from tests.kit.servers.redis_server import RedisServer
from tests.kit.storage.index_entries import LONG_S, alter, entry, key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sqlite://[x", "write sqlite:///absolute/path"),
        ("sqlite:///%00", "a NUL character"),
        ("redis://[x", "Invalid IPv6"),
        ("redis://127.0.0.1:port", "port"),
        ("redis://127.0.0.1:1?nosuch=1", "unknown option 'nosuch'"),
        ("redis://127.0.0.1:1?ssl_cert_reqs=none", "ssl_cert_reqs"),
    ],
)
def test_an_address_of_an_index_that_makes_no_sense_is_refused_in_one_line(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_index(text, "x").open()
    assert "\n" not in str(caught.value)


def test_a_sqlite_index_that_was_damaged_costs_errors_of_the_store(tmp_path: Path) -> None:
    index = make_index(f"sqlite://{tmp_path}/pages.db", "")
    index.open()
    index.provide(4)
    (lent,) = index.reserve(1, LONG_S)
    old = entry(1, lent)
    assert index.commit([Commit(old, lent.slot, NOTHING)]) == [CommitOutcome.DONE]
    for harm, call in (
        ("UPDATE settings SET value = 'y' WHERE name = 'generation'", lambda: index.reserve(1, 9)),
        ("UPDATE settings SET value = x'00' WHERE name = 'slots'", lambda: index.provide(1)),
        ("UPDATE settings SET value = 9223372036854775807", lambda: index.reserve(3, 9)),
        ("UPDATE entries SET used = 'zz'", lambda: list(index.entries())),
        ("UPDATE settings SET value = 'y'", lambda: index.agree(Settings(1, 1))),
        (
            "DELETE FROM settings",
            lambda: index.commit([Commit(old._replace(offset=1 << 70), 0, 0)]),
        ),
    ):
        alter(tmp_path / "pages.db", "INSERT OR REPLACE INTO settings VALUES ('fresh', 3)", harm)
        with suppress(StorageError):
            call()
    index.close()
    alter(tmp_path / "pages.db", "INSERT OR REPLACE INTO settings VALUES ('format', 'z')")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_index(f"sqlite://{tmp_path}/pages.db", "").open()


def test_a_redis_index_that_was_damaged_costs_errors_of_the_store(
    redis_server: RedisServer,
) -> None:
    redis = pytest.importorskip("redis")
    index = make_index(redis_server.url(), "damaged")
    index.open()
    client = redis.Redis.from_url(redis_server.url())
    settings, slots = "{lockstep:damaged}:settings", "{lockstep:damaged}:slots"
    client.hset(settings, "slot_bytes", "x")
    with pytest.raises(StorageError, match="damaged"):
        index.agree(Settings(8192, 4))
    index.provide(2)
    client.zadd(slots, {"no number": 0})
    with pytest.raises(StorageError, match="damaged"):
        index.reserve(1, LONG_S)
    client.close()
    index.close()


def forgetting_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server forget everything right before each command of this name."""
    redis = pytest.importorskip("redis")
    ask = redis.Redis.execute_command

    def forget_and_ask(client: Any, *command: Any, **options: Any) -> Any:
        if command[0] == name:
            ask(client, "FLUSHALL")
        return ask(client, *command, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", forget_and_ask)


def test_a_redis_that_forgets_everything_in_between_has_what_it_is_told_next(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(redis_server.url(), "forgotten")
    index.open()
    forgetting_before("HGET", monkeypatch)
    assert index.identity("ours") == "ours"
    assert index.agree(Settings(8192, 4)) == Settings(8192, 4)
    index.close()


def test_as_many_threads_as_a_store_may_have_can_ask_a_redis_at_once(
    redis_server: RedisServer,
) -> None:
    redis = pytest.importorskip("redis")
    index = make_index(redis_server.url(), "crowded")
    index.open()
    index.provide(1)
    client = redis.Redis.from_url(redis_server.url())
    # All ask while the server answers nobody, and so all at once.
    client.client_pause(500)
    with ThreadPoolExecutor(RINGS_MAX) as threads:
        answers = list(threads.map(index.look_up, [[key(1)]] * RINGS_MAX))
    assert answers == [[None]] * RINGS_MAX
    client.close()
    index.close()

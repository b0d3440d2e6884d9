"""A page index in Redis or Valkey: for any number of nodes.

Each step is one script, so it happens at once for everybody, and by one clock, the server's. What
an index has lies under five keys with the prefix `{lockstep:<name>}`. A server that forgets them
(without persistence, after a restart) leaves an empty index: all is missing, nothing is wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

from ...errors import ConfigError, StorageError
from ..redis_scripts import RedisScripts
from ..uri import without_secrets
from .contract import (
    SLOTS_MAX,
    Commit,
    CommitOutcome,
    Entry,
    Reservation,
    Settings,
    Used,
    is_sane,
)

_OPTIONS: Final = frozenset({"db", "username", "password", "client_name"})
_OPTIONS_TLS: Final = "ssl_"
"""What these begin with are the options of a `rediss://` address, and redis-py's to check."""
_KEYS_AT_A_TIME: Final = 500
_FORMAT: Final = "1"

_PRELUDE: Final = """
local settings, entries, used, slots, claims = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
-- Numbers that Lua writes itself lose digits.
local function exact(number) return string.format('%.0f', number) end
local function forget(key, row)
    redis.call('HDEL', entries, key)
    redis.call('ZREM', used, key)
    local slot = string.match(row, '^%d+ (%d+) ')
    if slot then redis.call('ZADD', slots, 0, slot) end
end
"""
"""`entries` is a hash from keys to rows, and `used` a sorted set of keys by their last use, without
those of entries that are kept; `slots` is a sorted set of those that are free (score 0) or lent out
(until then), and `claims` a hash from those lent out to their generations. Times are in microseconds
since 1970. A row is generation, slot, offset, length, presence bits and place, with spaces between."""

_SCRIPTS: Final = {
    "set_default": """
redis.call('HSETNX', settings, ARGV[1], ARGV[2])
return redis.call('HGET', settings, ARGV[1])
""",
    "provide": """
local there = tonumber(redis.call('HGET', settings, 'slots') or '0')
there = math.max(there, tonumber(ARGV[1]))
redis.call('HSET', settings, 'slots', exact(there))
-- Generations never seen before, also if all was lost and begun again.
redis.call('HSETNX', settings, 'generation', exact(now))
return exact(there)
""",
    "confirm": """
local rows = redis.call('HMGET', entries, unpack(ARGV))
for at, row in ipairs(rows) do
    -- What is kept is not among the used.
    if row then redis.call('ZADD', used, 'XX', exact(now + at), ARGV[at]) end
end
return rows
""",
    "reserve": """
local count = tonumber(ARGV[1])
local lent = redis.call('ZRANGEBYSCORE', slots, '-inf', exact(now), 'LIMIT', 0, count)
local fresh = tonumber(redis.call('HGET', settings, 'fresh') or '0')
local there = tonumber(redis.call('HGET', settings, 'slots') or '0')
while #lent < count and fresh < there do
    lent[#lent + 1] = exact(fresh)
    fresh = fresh + 1
end
redis.call('HSET', settings, 'fresh', exact(fresh))
while #lent < count do
    local oldest = redis.call('ZPOPMIN', used)[1]
    if not oldest then break end
    local row = redis.call('HGET', entries, oldest)
    redis.call('HDEL', entries, oldest)
    lent[#lent + 1] = row and string.match(row, '^%d+ (%d+) ') or nil
end
local answer = {}
for _, slot in ipairs(lent) do
    local generation = exact(redis.call('HINCRBY', settings, 'generation', 1))
    redis.call('ZADD', slots, exact(now + tonumber(ARGV[2])), slot)
    redis.call('HSET', claims, slot, generation)
    answer[#answer + 1] = slot
    answer[#answer + 1] = generation
end
return answer
""",
    "commit": """
local outcomes = {}
for at = 1, #ARGV, 6 do
    local key, generation, slot, replaces, kept, row = unpack(ARGV, at, at + 5)
    local standing = redis.call('HGET', entries, key)
    local theirs = standing and string.match(standing, '^(%d+) ') or '0'
    local outcome = 0
    if theirs == generation then
        outcome = 0
    elseif redis.call('HGET', claims, slot) ~= generation then
        outcome = 2
    else
        redis.call('HDEL', claims, slot)
        if theirs == replaces then
            if standing then forget(key, standing) end
            redis.call('ZREM', slots, slot)
            redis.call('HSET', entries, key, row)
            if kept == '0' then redis.call('ZADD', used, exact(now + at), key) end
        else
            redis.call('ZADD', slots, 0, slot)
            outcome = 1
        end
    end
    outcomes[#outcomes + 1] = outcome
end
return outcomes
""",
    "release": """
for at = 1, #ARGV, 2 do
    if redis.call('HGET', claims, ARGV[at]) == ARGV[at + 1] then
        redis.call('HDEL', claims, ARGV[at])
        redis.call('ZADD', slots, 0, ARGV[at])
    end
end
""",
    "drop": """
for at = 1, #ARGV, 2 do
    local row = redis.call('HGET', entries, ARGV[at])
    if row and string.match(row, '^(%d+) ') == ARGV[at + 1] then forget(ARGV[at], row) end
end
""",
    "remove": """
for _, key in ipairs(ARGV) do
    local row = redis.call('HGET', entries, key)
    if row then forget(key, row) end
end
""",
}


class RedisPageIndex:
    """Keeps the contract of `PageIndex` with redis-py, from the extra `redis`."""

    def __init__(self, url: str, name: str) -> None:
        self.text = f"{without_secrets(url)} (index {name!r})"
        _check_options(url)
        prefix = f"{{lockstep:{name}}}"
        self._entries = f"{prefix}:entries"
        self._used = f"{prefix}:used"
        self._keys = [
            f"{prefix}:settings",
            self._entries,
            self._used,
            f"{prefix}:slots",
            f"{prefix}:claims",
        ]
        scripts = {script: _PRELUDE + body for script, body in _SCRIPTS.items()}
        # Every script may run twice.
        self._server = RedisScripts(f"index {self.text}", url, scripts, self._keys, repeats=True)

    def open(self) -> None:
        """Connect."""
        version = self._server.open(lambda: self._set_default("format", _FORMAT))
        if version != _FORMAT:
            self.close()
            raise ConfigError(
                f"index {self.text} has format {version}, and this version of Lockstep reads "
                f"{_FORMAT}; give another index_name"
            )

    def identity(self, proposal: str) -> str:
        """Return the index's own name."""
        return self._set_default("identity", proposal)

    def agree(self, settings: Settings) -> Settings:
        """Return the settings that the index was begun with."""
        return Settings(
            slot_bytes=self._number(self._set_default("slot_bytes", str(settings.slot_bytes))),
            file_slots=self._number(self._set_default("file_slots", str(settings.file_slots))),
        )

    def provide(self, slots: int) -> int:
        """Let there be at least so many slots."""
        return self._number(self._server.run("provide", [min(slots, SLOTS_MAX)]))

    def look_up(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key."""
        rows: list[bytes | None] = []
        for some in _cut(keys, _KEYS_AT_A_TIME):
            rows += self._server.ask("HMGET", self._entries, *some)
        return [_entry(key, row) for key, row in zip(keys, rows, strict=True)]

    def confirm(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entry of each key, and count that as its use."""
        rows: list[bytes | None] = []
        for some in _cut(keys, _KEYS_AT_A_TIME):
            rows += self._server.run("confirm", some)
        return [_entry(key, row) for key, row in zip(keys, rows, strict=True)]

    def use(self, keys: Sequence[bytes], after: bytes | None, distance: int) -> None:
        """Let entries count as used: `after`, and before that the first of them, last of all."""
        del distance
        self.confirm([*reversed(keys), *([] if after is None else [after])])

    def reserve(self, count: int, lease_s: float) -> list[Reservation]:
        """Lend out slots: free ones, fresh ones, then those of what was used least recently."""
        lent: list[int] = []
        while len(lent) < 2 * count:
            wanted = min(count - len(lent) // 2, _KEYS_AT_A_TIME)
            answer = self._server.run("reserve", [wanted, int(lease_s * 1e6)])
            lent += map(self._number, answer)
            if len(answer) < 2 * wanted:
                break
        return [Reservation(*pair) for pair in zip(lent[::2], lent[1::2], strict=True)]

    def commit(self, commits: Sequence[Commit]) -> list[CommitOutcome]:
        """Give keys their places."""
        outcomes: list[CommitOutcome] = []
        for some in _cut(commits, _KEYS_AT_A_TIME):
            arguments: list[Any] = []
            for wish in some:
                entry = wish.entry
                numbers = (entry.generation, wish.slot, entry.offset, entry.length, entry.present)
                row = " ".join([*map(str, numbers), entry.place])
                replaces, kept = wish.replaces, int(wish.kept)
                arguments += [entry.key, entry.generation, wish.slot, replaces, kept, row]
            outcomes += [CommitOutcome(int(each)) for each in self._server.run("commit", arguments)]
        return outcomes

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back."""
        for some in _cut(reservations, _KEYS_AT_A_TIME):
            self._server.run("release", [number for each in some for number in each])

    def drop(self, entries: Sequence[Entry]) -> None:
        """Forget entries of these generations."""
        for some in _cut(entries, _KEYS_AT_A_TIME):
            self._server.run(
                "drop", [part for each in some for part in (each.key, each.generation)]
            )

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget the entries of these keys."""
        for some in _cut(keys, _KEYS_AT_A_TIME):
            self._server.run("remove", some)

    def entries(self) -> Iterator[list[Used]]:
        """Yield all entries."""
        cursor = 0
        while True:
            cursor, rows = self._server.ask(
                "HSCAN", self._entries, cursor, "COUNT", _KEYS_AT_A_TIME
            )
            keys = list(rows)
            if keys:
                uses = self._server.ask("ZMSCORE", self._used, *keys)
                seconds, microseconds = self._server.ask("TIME")
                now = int(seconds) * 1_000_000 + int(microseconds)
                told = zip((_entry(key, rows[key]) for key in keys), uses, strict=True)
                yield [
                    Used(entry, None if use is None else max(0.0, (now - float(use)) / 1e6))
                    for entry, use in told
                    if entry is not None
                ]
            if not int(cursor):
                return

    def close(self) -> None:
        """Disconnect."""
        self._server.close()

    def _set_default(self, name: str, value: str) -> str:
        """Return a setting of the index, which is `value` now if there was none."""
        return bytes(self._server.run("set_default", [name, value])).decode("ascii", "replace")

    def _number(self, answer: bytes | str) -> int:
        try:
            return int(answer)
        except ValueError as error:
            raise StorageError(f"index {self.text} is damaged: {error}") from error


def _check_options(url: str) -> None:
    """Raise `ConfigError` for options that are not for redis-py to get, which would take any."""
    _, _, query = url.partition("?")
    for option, _ in parse_qsl(query, keep_blank_values=True):
        if option not in _OPTIONS and not option.startswith(_OPTIONS_TLS):
            raise ConfigError(
                f"index {without_secrets(url)!r}: unknown option {option!r}; it knows: "
                f"{', '.join(sorted(_OPTIONS))} and those of TLS, {_OPTIONS_TLS}..."
            )


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _entry(key: bytes, row: bytes | None) -> Entry | None:
    """Return a row as an entry, or None if it is not what this module wrote."""
    if row is None:
        return None
    try:
        generation, _, offset, length, present, place = row.decode("utf-8").split(" ", 5)
        entry = Entry(key, place, int(offset), int(length), int(present), int(generation))
    except ValueError:
        return None
    return entry if is_sane(entry) else None

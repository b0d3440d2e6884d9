"""A directory of groups in Redis or Valkey: for any number of hosts.

Each call is one script, so it happens at once for everybody, and by one clock, the server's. What a
directory has lies under three keys with the prefix `{lockstep:groups:<name>}`. A server that forgets
them leaves an empty directory, to which groups come back as they find that they cannot renew.
"""

from typing import Final

from ....storage_backends.redis_scripts import RedisScripts
from ....storage_backends.uri import without_secrets
from .directory import (
    Lease,
    Listing,
    Member,
    Registration,
    from_record,
    require_lease,
    to_record,
)

_PRELUDE: Final = """
local members, leases, counters = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
-- Numbers that Lua writes itself lose digits.
local function exact(number) return string.format('%.0f', number) end
local function raise(name)
    local before = tonumber(redis.call('HGET', counters, name) or '0')
    local value = exact(math.max(before + 1, now))
    redis.call('HSET', counters, name, value)
    return value
end
local function life_of(name)
    local row = redis.call('HGET', members, name)
    return row and string.match(row, '^%d+')
end
local over = redis.call('ZRANGEBYSCORE', leases, '-inf', exact(now))
for _, name in ipairs(over) do redis.call('HDEL', members, name) end
if #over > 0 then
    redis.call('ZREMRANGEBYSCORE', leases, '-inf', exact(now))
    raise('version')
end
"""
"""`members` is a hash from names to rows, which are a life, a space and a record; `leases` is a sorted
set of the names by when their leases are over, in microseconds since 1970."""

_SCRIPTS: Final = {
    "register": """
local life = raise('life')
redis.call('HSET', members, ARGV[1], life .. ' ' .. ARGV[3])
redis.call('ZADD', leases, exact(now + tonumber(ARGV[2])), ARGV[1])
raise('version')
return life
""",
    "renew": """
if life_of(ARGV[1]) ~= ARGV[3] then return 0 end
redis.call('ZADD', leases, exact(now + tonumber(ARGV[2])), ARGV[1])
return 1
""",
    "leave": """
if life_of(ARGV[1]) ~= ARGV[2] then return end
redis.call('HDEL', members, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
raise('version')
""",
    "groups": """
return {redis.call('HGET', counters, 'version') or '0', redis.call('HVALS', members)}
""",
}


class RedisDirectory:
    """Keeps the contract of `GroupDirectory` with redis-py, from the extra `redis`."""

    def __init__(self, url: str, name: str = "default") -> None:
        """`name` keeps several directories in one database apart."""
        self.text = f"{without_secrets(url)} (groups {name!r})"
        prefix = f"{{lockstep:groups:{name}}}"
        keys = [f"{prefix}:{each}" for each in ("members", "leases", "counters")]
        scripts = {script: _PRELUDE + body for script, body in _SCRIPTS.items()}
        what = f"directory {self.text}"
        self._server = RedisScripts(what, url, scripts, keys, repeats=False)

    def open(self) -> None:
        """Connect, and see that the server answers."""
        self._server.open(lambda: self._server.ask("PING"))

    def register(self, registration: Registration, lease_s: float) -> Lease:
        """List a group, in the place of one of its name."""
        require_lease(lease_s)
        name = registration.name
        life = self._server.run("register", [name, int(lease_s * 1e6), to_record(registration)])
        return Lease(name, int(life))

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Let a lease last longer, if it is not over."""
        require_lease(lease_s)
        return bool(self._server.run("renew", [lease.name, int(lease_s * 1e6), lease.life]))

    def leave(self, lease: Lease) -> None:
        """Take a group off the list."""
        self._server.run("leave", [lease.name, lease.life])

    def groups(self) -> Listing:
        """Return who is there."""
        version, rows = self._server.run("groups")
        members = (_member(bytes(row)) for row in rows)
        known = [each for each in members if each is not None]
        return Listing(int(version), tuple(sorted(known, key=lambda each: each.registration.name)))

    def close(self) -> None:
        """Disconnect."""
        self._server.close()


def _member(row: bytes) -> Member | None:
    """Return a row as a member; None if it is not what this module wrote."""
    life, separator, record = row.partition(b" ")
    registration = from_record(record)
    if not separator or not life.isdigit() or registration is None:
        return None
    return Member(registration, int(life))

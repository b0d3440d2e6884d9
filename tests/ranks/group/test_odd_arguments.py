"""Pass invalid types to every call of both facades: each raises a named error and changes nothing."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError, GroupError, UsageError
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.group.member.rank_cache import RankCache
from lockstep.ranks.protocol.config import NamespaceLimit
from lockstep.ranks.protocol.network_config import Peers
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn
from tests.kit.ranks.passing_time import PassingTime

TOKENS = list(range(2 * PAGE_TOKENS))
GAPS = np.arange(2 * PAGE_TOKENS, dtype=np.int32).data[::2]
ODD: tuple[object, ...] = (
    None,
    5,
    -5,
    1.5,
    float("nan"),
    1e300,
    1 << 70,
    "1",
    "half \ud800",
    f"peer://a:{'1' * 5000}",
    Decimal("nan"),
    b"abc",
    [],
    [1.5],
    ["a"],
    [[1]],
    {"kv": 5},
    {"zz": [1]},
    GAPS,
    np.zeros((2, 3), np.int32),
    np.zeros(3),
    object(),
)
GOOD: dict[str, object] = {
    "device_pages": range(2),
    "device_tokens": 0,
    "limit": NamespaceLimit(namespace=""),
    "name": "p",
    "pool": "kv",
    "request": "r",
    "reserve_tokens": 3 * PAGE_TOKENS,
    "timeout_s": 0.01,
    "tokens": TOKENS,
    "total_tokens": 3 * PAGE_TOKENS,
    "ttl_s": 1.0,
    "uri": "memory://odd",
}
"""Valid values for the other required parameters of a call."""
OUR_OWN = {"log", "carry_out", "then", "done", "proposal", "patience_s", "level"}
"""Parameters that only Lockstep's own drivers pass; their values are functions and Lockstep's objects.
"""


def calls_of(kind: type[RankCache]) -> list[tuple[type[RankCache], str, str]]:
    """Return each parameter of each public call: class, call, parameter."""
    found: list[tuple[type[RankCache], str, str]] = []
    for name, each in inspect.getmembers(kind, inspect.isfunction):
        if name[0] == "_" or name != each.__name__:  # Skip private and former names.
            continue
        parameters = list(inspect.signature(each).parameters)[1:]
        found += [(kind, name, of) for of in parameters if of not in OUR_OWN]
    return found


def cache_of(kind: type[RankCache]) -> RankCache:
    """Return a cache of the given class with one request, `r`, that has pages."""
    peers = Peers(address="127.0.0.1:0")
    if kind is Cache:
        owned = RanksInTurn(1, peers=peers)
        owned.now_ms, (cache,) = PassingTime(100_000), owned.caches
        cache.load_back("r", TOKENS[:-1], reserve_tokens=len(TOKENS))
        return cache
    lent = HostRanksInTurn(1, peers=peers)
    lent.now_ms, (host,) = PassingTime(100_000), lent.caches
    host.back_up("r", TOKENS, range(2))
    return host


def changed_by(kind: type[RankCache], name: str, parameter: str, odd: object) -> str:
    """Pass an odd value to a call; return how a refused call changed the state, or an empty string."""
    cache = cache_of(kind)
    call: Callable[..., Any] = getattr(cache, name)
    by_place: list[object] = []
    by_name: dict[str, object] = {}
    for each in inspect.signature(call).parameters.values():
        value = odd if each.name == parameter else GOOD.get(each.name)
        if each.kind is each.KEYWORD_ONLY and (
            each.name == parameter or each.default is each.empty
        ):
            by_name[each.name] = value
        elif each.name == parameter or each.default is each.empty:
            by_place.append(value)
    before = cache.inspection.digest
    with suppress(GroupError):
        try:
            call(*by_place, **by_name)
        except (UsageError, ConfigError) as error:
            return str(error) if cache.inspection.digest != before else ""
    return ""


@pytest.mark.parametrize("kind", [Cache, HostCache])
def test_a_cache_is_not_opened_without_a_configuration(kind: Any) -> None:
    with pytest.raises(ConfigError, match="the configuration is None, must be a CacheConfig or"):
        kind.open(None, {})


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [*calls_of(Cache), *calls_of(HostCache)],
    ids=lambda each: each.__name__ if isinstance(each, type) else each,
)
def test_an_argument_of_an_odd_type_is_refused_by_name_and_changes_nothing(
    kind: type[RankCache], name: str, parameter: str
) -> None:
    assert [odd for odd in ODD if changed_by(kind, name, parameter, odd)] == []

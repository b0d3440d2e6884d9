"""Settings are validated once, when they are created, and errors name the field."""

import math
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from lockstep import (
    Bounds,
    CacheConfig,
    Column,
    ConfigError,
    Control,
    HostCacheConfig,
    NamespaceLimit,
    PageLayout,
    Peers,
    Recurrent,
    SlidingWindow,
    Timeouts,
)

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=4, elements=1),))


def pools(**others: Any) -> dict[str, Any]:
    """Return the settings that a cache of 8 host pages needs, updated with `others`."""
    return {"model": "m", "layout": LAYOUT, "host_pages": 8} | others


def window(**settings: Any) -> SlidingWindow:
    usual: dict[str, Any] = {"window_tokens": 8, "layout": LAYOUT, "host_pages": 4}
    return SlidingWindow(**usual | settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Timeouts(round_s=0.0), "round_s is 0.0, must be more than 0"),
        (lambda: Timeouts(open_s=math.inf), "open_s is inf, must be at most 1000000"),
        (lambda: Bounds(prefetches=0), "prefetches is 0, must be at least 1"),
        (lambda: Bounds(quarantine_pages=-5), "quarantine_pages is -5, must be at least 0"),
        (lambda: NamespaceLimit(namespace="a", ttl_s=0), "ttl_s is 0, must be at least 0.001"),
        (lambda: Control(path="a\0b"), "the path of control has a NUL character"),
        (
            lambda: Peers(secret="a" * 15),
            "secret of peers has 15 bytes, must be 16 or more",
        ),
        (lambda: Peers(address="10.0.0.4"), "write host:port"),
        (lambda: Peers(address="10.0.0.4:99999"), "must be 0 to 65535"),
        (lambda: Peers(reached_at="[[::1]]"), "is not a host"),
        (lambda: Peers(reached_at="a host"), "is not a host"),
        (lambda: Peers(reached_at="[::]:80"), "which is no host to connect to"),
        (lambda: Peers(reached_at="peer://gpu-7"), "the port of"),
        (lambda: Peers(allow_sources=("10.0.0.4/8",)), "is not a network"),
        (
            lambda: Peers(transfer=cast("Any", "nixl")),
            "transfer is 'nixl', must be one of tcp",
        ),
        (lambda: Peers(device="mlx5_0"), "protocol, device and insists need transfer=mooncake"),
        (lambda: window(pool="kv"), "a pool cannot be called 'kv'"),
        (lambda: window(window_tokens=0), "window_tokens is 0, must be at least 1"),
        (
            lambda: Recurrent(checkpoint_tokens=4, layout=LAYOUT, host_pages=1),
            "pool 'state': the layout of a state has pages of 4 tokens, must be 1",
        ),
        (lambda: CacheConfig(**pools(), device_pages=0), "device_pages is 0, must be at least 1"),
        (lambda: CacheConfig(**pools(), device_pages=1 << 31), "must be at most 2147483647"),
        (lambda: HostCacheConfig(**pools(host_pages=-1)), "host_pages is -1"),
        (lambda: HostCacheConfig(**pools(model="")), "model is '', must be non-empty text"),
        (
            lambda: HostCacheConfig(**pools(), eviction="mru"),
            "unknown eviction policy 'mru'; known",
        ),
        (
            lambda: HostCacheConfig(**pools(host_pages=0), store="memory://"),
            "store needs host memory: set host_pages to 1 or more",
        ),
        (
            lambda: HostCacheConfig(**pools(), components=(window(), window())),
            "pool names must differ: window, window",
        ),
        (
            lambda: HostCacheConfig(**pools(), components=(window(device_pages=3),)),
            "pool 'window': device_pages is 3, and the engine owns the device's pages",
        ),
        (
            lambda: HostCacheConfig(
                **pools(), limits=(NamespaceLimit(namespace="a", device_pages=3),)
            ),
            "limit of namespace 'a': device_pages is 3, and the engine owns",
        ),
        (
            lambda: CacheConfig(**pools(), device_pages=8, components=(window(device_pages=2),)),
            "pool 'window': device_pages is 2, must be 3 or more: a window, and a page to compute in",
        ),
        (
            lambda: CacheConfig(**pools(), device_pages=8, components=(window(host_pages=0),)),
            "pool 'window': host_pages is 0, and full attention has 8",
        ),
    ],
)
def test_what_makes_no_sense_is_named_with_its_value_and_the_remedy(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", ["device_pages", "write_policy", "selective_hits"])
def test_a_cache_under_lent_pages_takes_no_setting_for_pages_of_its_own(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        HostCacheConfig(**pools(**{name: 1}))

"""Settings are validated once, when they are made, and errors name the field."""

import math
from typing import Any

import pytest

from lockstep import (
    Bounds,
    CacheConfig,
    Column,
    ConfigError,
    PageLayout,
    Peers,
    Timeouts,
)

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=4, elements=1),))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", ["round_s", "miss_memory_s", "flush_s", "open_s"])
def test_a_wait_that_is_not_bounded_is_refused(field: str, value: float) -> None:
    """Rule R10: each wait has a deadline."""
    with pytest.raises(ConfigError, match=field):
        Timeouts(**{field: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"secret": "fifteen letters"}, "the secret of peers has 15 bytes, must be 16 or more"),
        ({"address": "10.0.0.4"}, "write host:port"),
        ({"address": "10.0.0.4:99999"}, "must be 0 to 65535"),
        ({"reached_at": "[[::1]]"}, "is no host"),
        ({"reached_at": "peer://gpu-7"}, "the port of"),
        ({"allow_sources": ("10.0.0.4/8",)}, "is no network"),
        ({"transfer": "nixl"}, "transfer of peers is 'nixl', must be one of tcp, mooncake"),
        ({"transfer": "mooncake", "protocol": "udp"}, "is 'udp', must be one of tcp, rdma"),
        ({"device": "mlx5_0"}, "protocol, device and insists of peers need transfer='mooncake'"),
    ],
)
def test_peers_have_an_address_a_secret_that_nobody_guesses_and_what_moves_their_pages(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Peers(**settings)


@pytest.mark.parametrize("field", ["prefetches", "persists", "prefetch_pages", "quarantine_pages"])
def test_a_negative_bound_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Bounds(**{field: -5})


@pytest.mark.parametrize(
    ("field", "value"),
    [("device_pages", -1), ("device_pages", 1 << 31), ("host_pages", -1), ("model", "")],
)
def test_sizes_and_names_that_cannot_be_are_refused(field: str, value: object) -> None:
    settings: dict[str, object] = {"model": "m", "device_pages": 1, "host_pages": 1}
    with pytest.raises(ConfigError, match=field):
        CacheConfig(layout=LAYOUT, **(settings | {field: value}))  # type: ignore[arg-type]

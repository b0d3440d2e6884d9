"""A model description that does not match its pools is refused; the error names the missing part."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from lockstep import (
    CacheConfig,
    Column,
    ConfigError,
    KeptState,
    ModelDescription,
    PageLayout,
    Recurrent,
    SlidingWindow,
)


def layout(page_tokens: int, *columns: str) -> PageLayout:
    return PageLayout(
        page_tokens=page_tokens,
        columns=tuple(Column(name=name, layers=1, heads=1, elements=1) for name in columns),
    )


LOCAL = SlidingWindow(
    window_tokens=8, layout=layout(4, "k", "v"), device_pages=8, host_pages=8, pool="local"
)
WIDE = SlidingWindow(
    window_tokens=16, layout=layout(4, "latent"), device_pages=8, host_pages=8, pool="wide"
)
STATE = Recurrent(
    checkpoint_tokens=8, layout=layout(1, "ssm", "conv"), device_pages=8, host_pages=8
)
DESCRIPTION = ModelDescription(
    model="everything",
    keeps=(
        KeptState(kind="full_attention", layers=4, columns=("k", "v", "index_k")),
        KeptState(kind="sliding_window", layers=8, columns=("k", "v")),
        KeptState(kind="sliding_window", layers=2, columns=("latent",)),
        KeptState(kind="recurrent", layers=12, columns=("ssm", "conv")),
    ),
)
WHOLE = CacheConfig(
    model="everything",
    layout=layout(4, "k", "v", "index_k"),
    components=(LOCAL, WIDE, STATE),
    device_pages=8,
    host_pages=8,
)


@pytest.mark.parametrize("components", [(LOCAL, WIDE, STATE), (STATE, WIDE, LOCAL)])
def test_a_cache_that_holds_all_that_the_model_keeps_is_accepted(
    components: tuple[SlidingWindow | Recurrent, ...],
) -> None:
    replace(WHOLE, components=components, description=DESCRIPTION)


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (
            (LOCAL, WIDE),
            "keeps recurrent state in 12 layers (ssm, conv), and the cache has no pool",
        ),
        ((STATE,), "keeps sliding_window state in 8 layers (k, v), and the cache has no pool"),
        (
            (LOCAL, STATE),
            "keeps sliding_window state in 2 layers (latent), and the cache has no pool",
        ),
    ],
)
def test_a_kind_of_state_without_a_pool_is_refused_by_name(
    components: tuple[SlidingWindow | Recurrent, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(WHOLE, components=components, description=DESCRIPTION)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "column"),
    [
        ({"layout": layout(4, "k", "v")}, "index_k"),
        ({"components": (structs.replace(LOCAL, layout=layout(4, "k")), WIDE, STATE)}, "v"),
        ({"components": (LOCAL, WIDE, structs.replace(STATE, layout=layout(1, "ssm")))}, "conv"),
    ],
    ids=["index", "window", "state"],
)
def test_a_pool_without_a_column_is_refused_by_name(changed: dict[str, Any], column: str) -> None:
    """A pool that lacks a column is refused; without index keys, restored requests produced garbage."""
    with pytest.raises(ConfigError, match=f"pages have no column '{column}'; add it to the layout"):
        replace(WHOLE, **changed, description=DESCRIPTION)


def test_pools_too_small_to_serve_one_request_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="pool 'local': device_pages is 2, must be 3 or more"):
        replace(WHOLE, components=(structs.replace(LOCAL, device_pages=2),))
    with pytest.raises(ConfigError, match="pool 'state': device_pages is 1, must be 2 or more"):
        replace(WHOLE, components=(structs.replace(STATE, device_pages=1),))

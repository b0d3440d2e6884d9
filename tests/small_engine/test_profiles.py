"""Profiles: real geometry, scaled by a factor that is said, and nothing of a model left out."""

import re
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.cli.settings import ReplaySettings
from lockstep.page_format.page_layout import PageLayout
from lockstep.ranks.protocol.config import CacheConfig, ComponentConfig, Recurrent, SlidingWindow
from lockstep.ranks.protocol.model_description import FULL_ATTENTION
from lockstep.small_engine.profile import PoolGeometry
from lockstep.small_engine.profiles import PROFILES, find_profile

PAGE = 64


def config_of(name: str) -> CacheConfig:
    return ReplaySettings(profile=name).cache_config()


def real_bytes(pool: PoolGeometry | None) -> int:
    assert pool is not None
    return PageLayout(page_tokens=1, columns=pool.columns).shard(0, 1).page_bytes


def without_column(layout: PageLayout, name: str) -> PageLayout:
    """The layout with another column in the place of the one with this name."""
    return replace(
        layout,
        columns=tuple(
            replace(column, name="another") if column.name == name else column
            for column in layout.columns
        ),
    )


def component_of(config: CacheConfig, kind: str) -> ComponentConfig:
    return next(each for each in config.components if each.kind == kind)


ALL_COMPONENTS = [
    (name, component.kind) for name in PROFILES for component in config_of(name).components
]
ALL_COLUMNS = [
    (name, FULL_ATTENTION, column.name)
    for name in PROFILES
    for column in config_of(name).layout.columns
] + [
    (name, component.kind, column.name)
    for name in PROFILES
    for component in config_of(name).components
    for column in component.layout.columns
]


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama", 2 * 32 * 8 * 128 * 2),
        ("gemma", 2 * (48 // 6) * 8 * 256 * 2),
        ("qwen-next", 2 * (48 // 4) * 2 * 256 * 2),
        ("gpt-oss", 2 * (36 // 2) * 8 * 64 * 2),
        ("deepseek", 61 * (512 + 64) * 2),
        ("glm", 78 * ((512 + 64) * 2 + 128 + 4)),
    ],
)
def test_full_attention_keeps_for_a_token_what_the_real_model_does(
    name: str, token_bytes: int
) -> None:
    assert real_bytes(find_profile(name).full) == token_bytes


@pytest.mark.parametrize(
    ("name", "window_tokens", "token_bytes"),
    [("gemma", 1024, 2 * 40 * 8 * 256 * 2), ("gpt-oss", 128, 2 * 18 * 8 * 64 * 2)],
)
def test_a_window_is_as_long_as_the_real_models_in_the_layers_between_full_attention(
    name: str, window_tokens: int, token_bytes: int
) -> None:
    window = component_of(config_of(name), SlidingWindow.kind)

    assert isinstance(window, SlidingWindow)
    assert window.window_tokens == window_tokens
    assert real_bytes(find_profile(name).window) == token_bytes


def test_qwen_nexts_state_is_its_delta_nets_matrices_and_its_convolutions_last_inputs() -> None:
    matrices = 36 * 32 * 128 * 128 * 4
    convolution = 36 * 3 * (16 * 128 + 16 * 128 + 32 * 128) * 2

    assert real_bytes(find_profile("qwen-next").state) == matrices + convolution


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_small_enough_to_replay_and_says_its_scale_for_every_pool(name: str) -> None:
    profile = find_profile(name)
    config = config_of(name)

    layouts = [config.layout, *(each.layout for each in config.components)]
    assert sum(layout.shard(0, 1).page_bytes for layout in layouts) <= 20 << 10
    assert profile.model in profile.scale
    assert "\n" not in profile.scale
    assert profile.scale.count(" scaled to ") == len(layouts)
    assert len(re.findall(r"instead of \d+, 1/\d+", profile.scale)) == len(layouts)


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_every_rank_keeps_the_whole_latent_and_the_whole_index(name: str) -> None:
    layout = config_of(name).layout

    assert layout.shard(0, 1).page_bytes == layout.shard(6, 7).page_bytes


def test_in_hybrid_all_ranks_divide_keys_values_scales_and_states_and_repeat_the_index() -> None:
    config = config_of("hybrid-all")
    layouts = [config.layout, *(each.layout for each in config.components)]

    replicated = [c.name for layout in layouts for c in layout.columns if c.replicated]
    sharded = [c.name for layout in layouts for c in layout.columns if not c.replicated]
    assert replicated == ["index_k"]
    assert sharded == ["k", "v", "scale", "k", "v", "state", "conv"]
    assert [each.pool for each in config.components] == ["window", "state"]


@pytest.mark.parametrize("name", PROFILES)
def test_the_cache_of_a_profile_covers_everything_that_the_model_keeps(name: str) -> None:
    config = config_of(name)

    assert config.description is not None
    kept = {each.kind: each.columns for each in config.description.keeps}
    columns = {FULL_ATTENTION: tuple(column.name for column in config.layout.columns)}
    for component in config.components:
        columns[component.kind] = tuple(column.name for column in component.layout.columns)
    assert kept == columns


@pytest.mark.parametrize(("name", "kind"), ALL_COMPONENTS)
def test_a_cache_without_one_of_the_models_pools_is_refused_by_its_name(
    name: str, kind: str
) -> None:
    config = config_of(name)
    rest = tuple(each for each in config.components if each.kind != kind)

    with pytest.raises(ConfigError, match=f"keeps {kind} state .* the cache has no pool for it"):
        replace(config, components=rest)


@pytest.mark.parametrize(("name", "kind", "column"), ALL_COLUMNS)
def test_a_page_without_one_of_the_models_columns_is_refused_by_its_name(
    name: str, kind: str, column: str
) -> None:
    config = config_of(name)
    layout = without_column(config.layout, column) if kind == FULL_ATTENTION else config.layout
    components = tuple(
        replace(each, layout=without_column(each.layout, column)) if each.kind == kind else each
        for each in config.components
    )

    with pytest.raises(
        ConfigError, match=f"keeps {kind} state .* its pages have no column '{column}'"
    ):
        replace(config, layout=layout, components=components)


def test_by_default_windows_have_half_the_pages_and_states_two_slots_a_checkpoint() -> None:
    sizes = find_profile("hybrid-all").sizes(PAGE, 8192, 65536)

    assert sizes == {
        "window_device_pages": 4096,
        "window_host_pages": 32768,
        "state_device_pages": 2 * 8192 * PAGE // 1024,
        "state_host_pages": 2 * 65536 * PAGE // 1024,
    }


@pytest.mark.parametrize("name", PROFILES)
def test_derived_sizes_serve_at_least_one_request_however_small_the_kv_pool_is(name: str) -> None:
    profile = find_profile(name)

    sizes, least = profile.sizes(PAGE, 1, 1), profile.least_sizes(PAGE)

    assert sizes.keys() == least.keys()
    assert all(sizes[each] >= least[each] for each in least)


def test_sizes_that_are_given_are_not_derived() -> None:
    settings = ReplaySettings(profile="hybrid-all", window_host_pages=77, state_device_pages=5)

    window, state = settings.cache_config().components

    assert (window.device_pages, window.host_pages) == (4096, 77)
    assert (state.device_pages, state.host_pages) == (5, 2 * 65536 * PAGE // 1024)


def test_checkpoints_lie_at_page_boundaries_whatever_the_page_size_is() -> None:
    state = component_of(
        ReplaySettings(profile="qwen-next", page_tokens=48).cache_config(), Recurrent.kind
    )

    assert isinstance(state, Recurrent)
    assert state.checkpoint_tokens == 1056


def test_ranks_with_pools_of_different_sizes_use_the_smallest_of_each_pool() -> None:
    settings = ReplaySettings(profile="gemma", device_pages=1000)
    smaller = ReplaySettings(profile="gemma", device_pages=800, window_host_pages=500)

    sizes = {
        name: min(pages, smaller.pool_sizes()[name])
        for name, pages in settings.pool_sizes().items()
    }
    agreed = settings.with_sizes(sizes)

    assert agreed.pool_pages() == {"kv": (800, 65536), "window": (400, 500)}
    assert settings.fingerprint() == smaller.fingerprint()

"""Profiles are models scaled by a stated factor; each covers all state that its model keeps."""

import re

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.ranks.protocol.config import CacheConfig, ComponentConfig, Recurrent
from lockstep.ranks.protocol.model_description import FULL_ATTENTION
from lockstep.small_engine.profiles import PROFILES, find_profile

PAGE = 64


def config_of(name: str) -> CacheConfig:
    return ReplaySettings(profile=name).cache_config()


def component_of(config: CacheConfig, kind: str) -> ComponentConfig:
    return next(each for each in config.components if each.kind == kind)


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


@pytest.mark.parametrize("name", PROFILES)
def test_the_cache_of_a_profile_covers_everything_that_the_model_keeps(name: str) -> None:
    config = config_of(name)

    assert config.description is not None
    kept = {each.kind: each.columns for each in config.description.keeps}
    columns = {FULL_ATTENTION: tuple(column.name for column in config.layout.columns)}
    for component in config.components:
        columns[component.kind] = tuple(column.name for column in component.layout.columns)
    assert kept == columns


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

"""Pools too large for the machine: the error names the option and the largest value that fits."""

import re

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.replay.pool_memory import check_pool_memory

FAR_TOO_MANY = 999_999_999


def refused(settings: ReplaySettings) -> tuple[str, int]:
    """Return the option that the error names, and the largest value that fits."""
    with pytest.raises(ConfigError) as error:
        check_pool_memory(settings, ranks_here=2)
    found = re.fullmatch(
        r"(--[a-z-]+) is \d+: .* GiB is available .*; at most (\d+) fits", str(error.value)
    )
    assert found is not None, error.value
    return found[1], int(found[2])


@pytest.mark.parametrize(
    ("profile", "name", "value"),
    [
        ("llama", "device_pages", FAR_TOO_MANY),
        ("llama", "host_pages", FAR_TOO_MANY),
        ("deepseek", "page_tokens", 60_000),
        ("gemma", "device_pages", FAR_TOO_MANY),
        ("gemma", "window_host_pages", FAR_TOO_MANY),
        ("qwen-next", "state_device_pages", FAR_TOO_MANY),
    ],
)
def test_the_option_that_was_given_is_blamed_and_what_it_says_fits_does_fit(
    profile: str, name: str, value: int
) -> None:
    settings = ReplaySettings(profile=profile).with_sizes({name: value})

    option, fits = refused(settings)

    assert option == f"--{name.replace('_', '-')}"
    # Try only half of the size that fits, because other processes use the machine's memory, too.
    check_pool_memory(settings.with_sizes({name: fits // 2}), ranks_here=2)
    assert refused(settings.with_sizes({name: 2 * fits}))[0] == option


def test_options_of_which_no_one_alone_can_be_lowered_enough_are_all_named() -> None:
    settings = ReplaySettings(device_pages=FAR_TOO_MANY, host_pages=FAR_TOO_MANY)
    both = f"--device-pages is {FAR_TOO_MANY} and --host-pages is {FAR_TOO_MANY}: the pools of 2"

    with pytest.raises(ConfigError, match=both):
        check_pool_memory(settings, ranks_here=2)


def test_what_the_device_of_its_own_holds_is_not_counted_as_host_memory() -> None:
    check_pool_memory(ReplaySettings(device="cuda", device_pages=FAR_TOO_MANY), ranks_here=2)

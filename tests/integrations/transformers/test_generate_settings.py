"""Valid settings of `LockstepCache.open`, and the errors for invalid ones."""

from importlib.util import find_spec
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.transformers.generate_settings import GenerateSettings


def test_the_longest_sequence_is_whole_pages() -> None:
    settings = GenerateSettings.read({"host_pages": 4, "max_tokens": 1000, "page_tokens": 32})

    assert (settings.pages, settings.pipeline_depth) == (32, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give host_memory_gib"),
        ({"host_pages": 4, "max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"host_pages": 4, "page_tokens": True}, "page_tokens is True, must be a whole number"),
        ({"host_pages": 4, "adapter_versions": {"a": "1"}}, "there is no key 'adapter_versions'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"LockstepCache.open: {message}"):
        GenerateSettings.read(given)


@pytest.mark.engines
def test_the_packages_are_there_without_which_no_other_test_of_this_folder_is_collected() -> None:
    assert [name for name in ("transformers", "accelerate") if find_spec(name) is None] == []

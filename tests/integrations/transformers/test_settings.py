"""What may be given to `LockstepCache.open`, and what is said when it is wrong."""

from importlib.util import find_spec
from typing import Any

import pytest

from lockstep.coordinator.stop_policy import StopRule
from lockstep.errors import ConfigError
from lockstep.integrations.transformers.settings import parse


def test_every_setting_arrives_where_it_belongs() -> None:
    settings = parse(
        {
            "host_memory_gib": 2,
            "store": "file:///kv",
            "max_tokens": 1000,
            "page_tokens": 32,
            "stop_policy": {"rule": "wait_complete"},
        }
    )

    assert (settings.store, settings.max_tokens, settings.page_tokens) == ("file:///kv", 1000, 32)
    assert settings.stop_policy.rule is StopRule.WAIT_COMPLETE
    assert settings.pages == 32
    assert settings.host_pages_of(1 << 20) == 2048


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give host_memory_gib"),
        ({"host_pages": 4, "max_token": 5}, "there is no key 'max_token'"),
        ({"host_pages": 4, "max_tokens": 0}, "max_tokens is 0, must be 1 to"),
        ({"host_pages": 4, "page_tokens": True}, "page_tokens must be an integer"),
        ({"host_pages": 4, "host_memory_gib": 1}, "and not both"),
        ({"host_pages": 4, "adapter_versions": {"a": "1"}}, "for engines that serve adapters"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"LockstepCache.open.*{says}"):
        parse(given)


@pytest.mark.engines
def test_the_packages_are_there_without_which_no_other_test_of_this_folder_is_collected() -> None:
    assert [name for name in ("transformers", "accelerate") if find_spec(name) is None] == []

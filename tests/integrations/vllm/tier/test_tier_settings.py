"""What a user may write into an entry of `secondary_tiers`, and what is said of the rest."""

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations.vllm.tier.settings import TierSettings, parse


def test_a_store_is_all_that_must_be_given() -> None:
    assert parse({"store": "file:///kv"}) == TierSettings(store="file:///kv")


def test_every_key_is_taken() -> None:
    given = {
        "store": "memory://",
        "model": "org/model",
        "weights_version": "7",
        "weight_digests": "/var/digests",
        "quota_gib": 0.5,
        "in_flight_mib": 64,
        "open_timeout_s": 1,
        "lookup_timeout_s": 2,
        "read_timeout_s": 3,
        "write_timeout_s": 4,
        "close_timeout_s": 5,
        "on_reset": "keep",
        "enable_kv_events": True,
        "locality": "REMOTE",
    }

    assert parse(given) == TierSettings(**given)  # type: ignore[arg-type]


def test_none_is_as_good_as_nothing_where_nothing_is_the_default() -> None:
    nothing = {"model": None, "weights_version": None, "quota_gib": None, "locality": None}

    assert parse({"store": "memory://", **nothing}) == TierSettings(store="memory://")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, 'secondary_tiers: give "store", a URI'),
        ({"store": 7}, "secondary_tiers: store must be text, not 7"),
        ({"store": None}, "store must be text, not None"),
        ({"store": "memory://", "shop": 1}, "there is no key 'shop'; known: close_timeout_s, "),
        ({"store": "memory://", "read_timeout_s": 0}, "read_timeout_s is 0 seconds, must be more"),
        ({"store": "memory://", "read_timeout_s": "1"}, "read_timeout_s must be a number"),
        ({"store": "memory://", "write_timeout_s": 1e9}, "at most 86400"),
        ({"store": "memory://", "quota_gib": -1}, "quota_gib is -1 GiB, must be more than 0"),
        ({"store": "memory://", "in_flight_mib": True}, "in_flight_mib must be a number"),
        ({"store": "memory://", "in_flight_mib": 0}, "in_flight_mib is 0 MiB"),
        ({"store": "memory://", "on_reset": "stay"}, "on_reset is 'stay'; known: leave, keep"),
        ({"store": "memory://", "enable_kv_events": "yes"}, "must be true or false, not 'yes'"),
        (
            {"store": "memory://", "locality": "local"},
            "'local', which is no Locality; known: LOCAL",
        ),
        ({"store": "memory://", "locality": ""}, "no Locality"),
        ({"store": "memory://", "model": ""}, "model must be text"),
    ],
)
def test_a_setting_that_is_wrong_is_named_with_what_it_may_be(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(given)

    assert said in str(raised.value)

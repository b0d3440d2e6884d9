"""Stop policies: whether the engine waits for a prefetch, and the longest wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.errors import ConfigError

seconds = st.floats(0.0, 1000.0)


def test_a_timeout_grows_with_the_tokens_up_to_its_cap() -> None:
    policy = StopPolicy(rule=StopRule.TIMEOUT, base_s=1.0, per_ki_token_s=0.5, cap_s=4.0)

    assert [policy.timeout_s(tokens) for tokens in (0, 1024, 1536, 6144, 1 << 20)] == [
        1.0,
        1.5,
        1.75,
        4.0,
        4.0,
    ]


@pytest.mark.parametrize("rule", [StopRule.BEST_EFFORT, StopRule.WAIT_COMPLETE])
def test_the_other_rules_are_bounded_by_the_cap_alone(rule: StopRule) -> None:
    policy = StopPolicy(rule=rule, base_s=1.0, per_ki_token_s=0.5, cap_s=4.0)

    assert [policy.timeout_s(tokens) for tokens in (0, 1024, 1 << 20)] == [4.0] * 3


@given(
    rule=st.sampled_from(StopRule),
    base_s=seconds,
    per_ki_token_s=seconds,
    cap_s=seconds,
    tokens=st.lists(st.integers(0, 1 << 24), min_size=2, max_size=2).map(sorted),
)
def test_every_rule_has_a_deadline_that_never_shrinks_with_the_tokens(
    rule: StopRule, base_s: float, per_ki_token_s: float, cap_s: float, tokens: list[int]
) -> None:
    policy = StopPolicy(rule=rule, base_s=base_s, per_ki_token_s=per_ki_token_s, cap_s=cap_s)
    fewer, more = (policy.timeout_s(each) for each in tokens)

    assert 0.0 <= fewer <= more <= cap_s


def test_only_best_effort_lets_the_engine_go_on() -> None:
    waits = {rule: StopPolicy(rule=rule).engine_waits for rule in StopRule}

    assert waits == {
        StopRule.BEST_EFFORT: False,
        StopRule.WAIT_COMPLETE: True,
        StopRule.TIMEOUT: True,
    }


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_a_time_that_is_no_time_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=f"base_s is {value}, must be at"):
        StopPolicy(base_s=value)


def test_the_rules_have_the_names_that_the_settings_use() -> None:
    assert {rule.value for rule in StopRule} == {"best_effort", "wait_complete", "timeout"}

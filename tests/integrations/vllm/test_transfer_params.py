"""Parameters that routers carry between engines: round trips, and invalid input from clients."""

from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.integrations.vllm.transfer_params import Handoff, goes_elsewhere

READ = {"do_remote_prefill": True, "remote_host": "10.0.0.4", "remote_port": 7, "remote_tokens": 64}


@pytest.mark.parametrize("source", ["peer://10.0.0.4:7001", "peer://[::1]:7001", ""])
def test_what_one_engine_answers_another_reads(source: str) -> None:
    handoff = Handoff(source, 640)

    assert Handoff.read(handoff.params("engine")) == handoff


def test_a_request_is_for_another_engine_only_where_the_router_says_so() -> None:
    assert goes_elsewhere({"do_remote_decode": True, "do_remote_prefill": False})
    assert not goes_elsewhere({"do_remote_decode": False})
    assert not goes_elsewhere({"do_remote_decode": "yes"})
    assert not goes_elsewhere(None)
    assert not goes_elsewhere("do_remote_decode")


@pytest.mark.parametrize("params", [None, {}, {**READ, "do_remote_prefill": False}])
def test_a_request_that_was_computed_nowhere_is_like_any_other(
    params: dict[str, Any] | None,
) -> None:
    assert Handoff.read(params) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_tokens", -1),
        ("remote_tokens", "64"),
        ("remote_host", 7),
        ("remote_host", "user:secret@host"),
        ("remote_host", "::1"),
        ("remote_port", None),
        ("remote_port", 0),
        ("remote_port", 65536),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=key):
        Handoff.read({**READ, key: value})


@pytest.mark.parametrize("params", ["", 0, [], "do_remote_prefill", 1.5], ids=repr)
def test_what_is_no_map_is_refused(params: object) -> None:
    """Handoff parameters that are no map are refused, because vLLM does not check `vllm_xargs`."""
    with pytest.raises(UsageError, match="Expected `object`"):
        Handoff.read(params)

"""Unsupported configurations are refused when the engine starts, each with the option's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.sglang.hooks import after_check
from lockstep.integrations.starting import Lockstep
from tests.kit.sglang.engine import EngineEndedError
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.tree.here import begin, of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

SERVED: dict[str, Any] = {
    "model_path": "none",
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "page_size": 16,
    "enable_hierarchical_cache": True,
    "radix_cache_backend": "lockstep",
}
DYNAMIC = {"hicache_storage_backend": "dynamic"}
WRONG: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({"enable_hierarchical_cache": False}, None, "lockstep needs --enable-hierarchical-cache"),
    ({"pp_size": 2}, None, "--pp-size is 2: pipeline parallelism is untested"),
    ({"hicache_write_policy": "write_back"}, None, "use 'write_through_selective'"),
    (
        {"hicache_storage_backend": "file"},
        None,
        "give 'dynamic', and the URI of a Lockstep store as 'store'",
    ),
    ({}, {"store": "file:///kv"}, "only with --hicache-storage-backend dynamic; add it"),
    (DYNAMIC, {"stroe": "file:///kv"}, "there is no key 'stroe'; known: adapter_versions"),
    (DYNAMIC, {"store": "flie:///kv"}, "store 'flie:///kv': unknown scheme 'flie'; known: 3fs,"),
    (DYNAMIC, {"host_pages": 0}, "host_pages is 0, must be at least 1"),
    (DYNAMIC, {"timeouts": {"lookup_s": -1}}, "timeouts.lookup_s is -1, must be more than 0"),
    (DYNAMIC, {"compare_batches": 1}, "compare_batches is 1, must be true or false"),
]
"""For each case: flags, extra configuration, and texts that the error must contain."""


def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    engine = lockstep_engine(tmp_path, model, extra={"stroe": "file:///kv"})

    with pytest.raises(EngineEndedError, match=r"\nLockstep: .* there is no key 'stroe'"), engine:
        pass

    assert "Load weight begin" not in engine.log()


@pytest.mark.parametrize(("flags", "extra", "message"), WRONG)
def test_what_is_wrong_is_named_with_sglang_s_own_checks(
    flags: dict[str, Any], extra: dict[str, Any] | None, message: str
) -> None:
    given = {} if extra is None else {"hicache_storage_backend_extra_config": json.dumps(extra)}
    begin()
    arguments = of("sglang.srt.server_args", "ServerArgs")(**SERVED | given | flags)
    arguments.resolve_once()

    with pytest.raises(Lockstep) as refused:
        after_check(None, arguments)

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)

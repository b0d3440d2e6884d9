"""SGLang as users start it: by its command, with the plug-in found by its entry point."""

from pathlib import Path

import pytest

from tests.kit.servers.processes import until
from tests.kit.sglang.served import generate, served

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPT = range(3, 103)


def test_a_server_that_is_killed_and_started_anew_has_its_pages_from_its_store(
    tmp_path: Path, model: Path
) -> None:
    objects = tmp_path / "kv" / "objects"
    with served(model, tmp_path / "log", (tmp_path / "kv").as_uri()) as address:
        first, again = generate(address, PROMPT), generate(address, PROMPT)
        # Six pages and two manifests.
        until(lambda: sum(each.is_file() for each in objects.rglob("*")) >= 8)
    with served(model, tmp_path / "restarted", (tmp_path / "kv").as_uri()) as address:
        restarted = generate(address, PROMPT)

    assert [first[0], again[0]] == [restarted[0]] * 2
    assert (first[1], again[1], restarted[1]) == (0, 96, 96)
    assert "Lockstep under SGLang" in (tmp_path / "log").read_text()

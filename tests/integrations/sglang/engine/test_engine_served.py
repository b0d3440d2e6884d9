"""SGLang started by its command, with the plug-in found by its entry point."""

from pathlib import Path
from urllib.request import urlopen

import pytest

from lockstep.launch.top.group_sample import label_of, numbers_in
from tests.kit.servers.ports import free_port
from tests.kit.servers.processes import until
from tests.kit.sglang.served import generate, served

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPT = range(3, 103)


def hits(address: str, name: str, tier: str) -> dict[str, float]:
    with urlopen(f"{address}/metrics", timeout=60) as answer:  # noqa: S310 - on loopback.
        numbers = numbers_in(answer.read().decode())
    return {label_of(key, tier): n for key, n in numbers.items() if key[0] == name and n}


def told_by_both(address: str, port: int) -> list[dict[str, float]]:
    """Return the hits by tier that Lockstep's metrics and SGLang's own metrics report."""
    return [
        hits(f"http://127.0.0.1:{port}", "lockstep_hit_tokens_total", "tier"),
        hits(address, "sglang:cached_tokens_total", "cache_source"),
    ]


def test_a_server_that_is_killed_and_started_anew_has_its_pages_from_its_store(
    tmp_path: Path, model: Path
) -> None:
    objects = tmp_path / "kv" / "objects"
    port = free_port()
    with served(model, tmp_path / "log", (tmp_path / "kv").as_uri(), port) as address:
        first, again = generate(address, PROMPT), generate(address, PROMPT)
        # Six pages and two manifests are in the store.
        until(lambda: sum(each.is_file() for each in objects.rglob("*")) >= 8)
        warm = told_by_both(address, port)
    with served(model, tmp_path / "restarted", (tmp_path / "kv").as_uri(), port) as address:
        restarted = generate(address, PROMPT)
        from_store = told_by_both(address, port)

    assert [first[0], again[0]] == [restarted[0]] * 2
    assert (first[1], again[1], restarted[1]) == (0, 96, 96)
    assert warm == [{"device": 96}] * 2
    assert from_store == [{"storage": 96}] * 2
    assert "Lockstep under SGLang" in (tmp_path / "log").read_text()

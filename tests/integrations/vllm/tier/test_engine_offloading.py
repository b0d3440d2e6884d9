"""An engine with vLLM's own offloading, and Lockstep's tier below it, says what it says without.

The same tokens and the same log-probabilities. vLLM's connector, its scheduler's half, its shared
memory and its manager of tiers are the real ones; only the copies between the device and that memory,
which vLLM does with CUDA alone, are the test's own.
"""

from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.kit.vllm.group import Group, assert_exact, offloading_connector
from tests.kit.vllm.mixed_prompts import mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan, RankResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts(60)
SMALL = 4 << 20
"""Less memory than the chunks of all prompts take."""
COLD, WARM, FROM_STORE = "cold", "warm from host memory", "after a reset"


TWO_WORKERS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
"""One scheduler, whose tier sees the memory of both workers."""


def run(
    group: Group,
    *phases: str,
    store: str,
    host_bytes: int = 64 << 20,
    engine: dict[str, Any] | None = None,
    canonical: bool = False,
) -> RankResult:
    """Start an engine with the tier, and send the prompts in each phase."""
    connector = offloading_connector(store, host_bytes=host_bytes, canonical=canonical)
    asked = [Phase(PROMPTS, name, reset_connector=name == FROM_STORE) for name in phases]
    plan = Plan(model=group.model, phases=asked, connector=connector, engine=engine or {})
    (result,) = group.run(plan, ranks=1)
    return result


def alone(group: Group, **engine: Any) -> list[Output]:
    """What the prompts come to without a connector."""
    plan = Plan(model=group.model, phases=[Phase(PROMPTS)], engine=engine)
    (result,) = group.run(plan, ranks=1)
    return result.phases[0].outputs


@dataclass(frozen=True)
class Written:
    """What an engine without a connector says, and what one with the tier says and has stored."""

    alone: list[Output]
    result: RankResult
    folder: Path

    def copied(self, to: Path) -> str:
        """Return the URI of a copy of the store."""
        copytree(self.folder, to)
        return f"file://{to}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Written:
    folder = tmp_path_factory.mktemp("written")
    group, store = Group(folder, model), folder / "store"
    result = run(group, COLD, WARM, FROM_STORE, store=f"file://{store}")
    return Written(alone(group), result, store)


def objects_in(store: str) -> list[Path]:
    objects = Path(store.removeprefix("file://")) / "objects"
    return sorted(each for each in objects.rglob("*") if each.is_file())


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)


def test_cold_and_warm_and_after_a_reset(written: Written) -> None:
    assert_exact(written.alone, [written.result])
    cold, warm, from_store = (each.cached_tokens for each in written.result.phases)
    assert cold < warm == from_store


def test_after_a_restart_all_comes_from_the_store(
    group: Group, written: Written, tmp_path: Path
) -> None:
    result = run(group, COLD, store=written.copied(tmp_path / "store"))

    assert_exact(written.alone, [result])
    assert result.phases[0].cached_tokens == written.result.phases[1].cached_tokens


def test_half_of_the_objects_are_flipped_or_lost_and_host_memory_is_small(
    group: Group, written: Written, tmp_path: Path
) -> None:
    store = written.copied(tmp_path / "store")
    objects = objects_in(store)
    for each in objects[::4]:
        flip(each)
    for each in objects[1::4]:
        each.unlink()

    result = run(group, COLD, FROM_STORE, store=store, host_bytes=SMALL)

    assert_exact(written.alone, [result])
    whole = written.result.phases[1].cached_tokens
    harmed, mended = (each.cached_tokens for each in result.phases)
    assert 0 < harmed < mended <= whole


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fault.error=1", "fault.timeout=0.2&fault.seed=2"])
def test_a_store_that_fails_or_does_not_answer_in_time(
    group: Group, written: Written, tmp_path: Path, fault: str
) -> None:
    result = run(group, COLD, WARM, store=f"fault+{written.copied(tmp_path / 'store')}?{fault}")

    assert_exact(written.alone, [result])


@pytest.mark.slow
def test_with_two_workers(group: Group, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = run(group, COLD, WARM, FROM_STORE, store=store, engine=TWO_WORKERS)
    for each in objects_in(store)[::5]:
        flip(each)
    second = run(group, COLD, store=store, engine=TWO_WORKERS)

    assert_exact(alone(group, **TWO_WORKERS), [first, second])
    assert 0 < second.phases[0].cached_tokens < first.phases[1].cached_tokens


@pytest.mark.slow
def test_one_worker_goes_on_with_what_two_have_stored_in_vllms_canonical_layout(
    group: Group, written: Written, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/store"
    two = run(group, COLD, WARM, store=store, engine=TWO_WORKERS, canonical=True)
    one = run(group, COLD, store=store, canonical=True)

    # The sums of two workers differ from those of one in the last digits.
    outputs = one.phases[0].outputs
    assert [each.tokens for each in outputs] == [each.tokens for each in written.alone]
    assert [each.logprobs for each in outputs] == [
        pytest.approx(each.logprobs, abs=1e-3) for each in written.alone
    ]
    assert one.phases[0].cached_tokens == two.phases[1].cached_tokens


@pytest.mark.slow
def test_one_worker_computes_what_two_have_stored_in_their_own_order(
    group: Group, written: Written, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/store"
    run(group, COLD, store=store, engine=TWO_WORKERS)
    one = run(group, COLD, store=store)

    assert_exact(written.alone, [one])
    assert one.phases[0].cached_tokens == written.result.phases[0].cached_tokens

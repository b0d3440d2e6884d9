"""One store serves vLLM and SGLang: what either wrote the other reads as its own (rule R16)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
import torch

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Request, differences
from tests.kit.sglang.stock import PROBE
from tests.kit.sharing.steps import Came, Step, run
from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.plan import BLOCK_TOKENS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPT = list(range(3, 403))
PREFIX = 384
"""Whole pages of it, without the last token."""
LONGER = [*PROMPT[:PREFIX], *range(9, 41)]
SALT = "a tenant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_llama.make(folder)
    return folder


def vllm(
    folder: Path, model: Path, store: str, steps: Sequence[Step], **options: Any
) -> list[Came]:
    """Have vLLM answer with Lockstep over a store; `options` are arguments of `LLM`."""
    return run(folder, model, steps, lockstep_connector(store), **options)


def sglang(folder: Path, model: Path, store: str, **options: Any) -> RunningEngine:
    """Return SGLang with Lockstep over a store, with pages as large as vLLM's blocks."""
    arguments: dict[str, Any] = {"page_size": BLOCK_TOKENS, **options}
    return lockstep_engine(folder, model, tp=1, store=store, **arguments)


def test_sglang_restores_what_vllm_wrote_and_goes_on_as_if_it_had_been_given_it(
    tmp_path: Path, model: Path
) -> None:
    store = f"file://{tmp_path}/store"
    _, again, _ = vllm(
        tmp_path / "vllm", model, store, [Step(PROMPT), Step(PROMPT, keep=True), Step(PROMPT, SALT)]
    )
    with sglang(tmp_path / "sglang", model, store) as engine:
        [restored_once] = engine.generate([Request(tokens=PROMPT)])
        restored = engine.kv(PROMPT[:PREFIX])
        [from_storage] = engine.generate([Request(tokens=LONGER)])
        salted = engine.generate(
            [Request(tokens=PROMPT, salt=SALT), Request(tokens=PROMPT, salt="another")],
            together=False,
        )
    with RunningEngine(
        tmp_path / "stock", model, tp=1, plugins=(PROBE,), page_size=BLOCK_TOKENS
    ) as stock:
        stock.generate([Request(tokens=PROMPT)])
        assert again.kv is not None
        stock.plant(PROMPT[:PREFIX], again.kv)
        [given] = stock.generate([Request(tokens=LONGER)])

    assert restored_once.cached_by_tier["storage"] == PREFIX
    assert torch.equal(again.kv, restored)
    assert (from_storage.cached_tokens, given.cached_tokens) == (PREFIX, PREFIX)
    assert differences([given], [from_storage]) == []
    assert [each.cached_tokens for each in salted] == [PREFIX, 0]


def test_vllm_restores_what_sglang_wrote_and_goes_on_as_if_it_had_been_given_it(
    tmp_path: Path, model: Path
) -> None:
    store = f"file://{tmp_path}/store"
    with sglang(tmp_path / "sglang", model, store) as engine:
        engine.generate([Request(tokens=PROMPT)])
        written = engine.kv(PROMPT[:PREFIX])
        engine.generate([Request(tokens=PROMPT, salt=SALT)])
        assert engine.shutdown() == []
    torch.save(written, tmp_path / "written.pt")

    restored_once, again, from_storage, salted, other = vllm(
        tmp_path / "vllm",
        model,
        store,
        [
            *(Step(PROMPT), Step(PROMPT, keep=True), Step(LONGER, keep=True)),
            *(Step(PROMPT, SALT), Step(PROMPT, "another")),
        ],
    )
    planted = Step(LONGER, keep=True, plant=f"{tmp_path}/written.pt")
    _, given = run(tmp_path / "stock", model, [Step(PROMPT), planted])

    assert restored_once.cached_tokens == PREFIX
    assert again.kv is not None
    assert torch.equal(written, again.kv)
    assert (from_storage.cached_tokens, given.cached_tokens) == (PREFIX, PREFIX)
    assert (from_storage.tokens, from_storage.logprobs) == (given.tokens, given.logprobs)
    assert (salted.cached_tokens, other.cached_tokens) == (PREFIX, 0)

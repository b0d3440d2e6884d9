"""What two ranks wrote one rank reads: the same bytes, in heads of the whole model."""

from pathlib import Path

import pytest
import torch

from tests.kit.sglang.engine import RunningEngine
from tests.kit.sglang.lockstep import lockstep_engine
from tests.kit.sglang.requests import Request, differences
from tests.kit.sglang.stock import PROBE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPT = list(range(3, 403))
PREFIX = 384
"""Whole pages of it, without the last token."""
ONCE, LONGER = Request(tokens=PROMPT), Request(tokens=[*PROMPT[:PREFIX], *range(9, 41)])


def test_one_rank_restores_what_two_ranks_wrote_and_goes_on_as_if_it_had_been_given_it(
    tmp_path: Path, model: Path
) -> None:
    store = f"file://{tmp_path}/store"
    with lockstep_engine(tmp_path / "two", model, tp=2, store=store) as two:
        two.generate([ONCE])
        written = two.kv(PROMPT[:PREFIX])
        assert two.shutdown() == []
    with lockstep_engine(tmp_path / "one", model, tp=1, store=store) as one:
        [restored_once] = one.generate([ONCE])
        restored = one.kv(PROMPT[:PREFIX])
        [from_storage] = one.generate([LONGER])
    with RunningEngine(tmp_path / "stock", model, tp=1, plugins=(PROBE,)) as stock:
        stock.generate([ONCE])
        own = stock.kv(PROMPT[:PREFIX])
        stock.plant(PROMPT[:PREFIX], written)
        [given] = stock.generate([LONGER])

    assert restored_once.cached_by_tier["storage"] == PREFIX
    assert torch.equal(written, restored)
    assert not torch.equal(written, own)
    assert (from_storage.cached_tokens, given.cached_tokens) == (PREFIX, PREFIX)
    assert differences([given], [from_storage]) == []

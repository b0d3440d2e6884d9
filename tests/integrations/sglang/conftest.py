"""Fixtures of the SGLang tests: tiny models, and stock SGLang's answers with them."""

from pathlib import Path

import pytest
import tiny_llama

from tests.kit.sglang.stock import Stock, run_stock
from tests.kit.sglang.tiny_models import make_lfm2, make_mellum


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny Llama model with different weights, as if it had been trained further."""
    folder = tmp_path_factory.mktemp("models") / "trained"
    tiny_llama.make(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mellum"
    make_mellum(folder)
    return folder


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "lfm2"
    make_lfm2(folder)
    return folder


@pytest.fixture(scope="session")
def stock_tp1(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Stock:
    return run_stock(tmp_path_factory.mktemp("stock"), model, tp=1)


@pytest.fixture(scope="session")
def stock_tp2(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Stock:
    return run_stock(tmp_path_factory.mktemp("stock"), model, tp=2)

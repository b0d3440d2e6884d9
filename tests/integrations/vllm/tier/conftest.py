"""What tests of the tier inside vLLM share. vLLM is imported where a test runs, not before."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kit.vllm.tier.tiering import Tiered

Opens = Callable[..., "Tiered"]


@pytest.fixture
def kit() -> ModuleType:
    """`tests.kit.vllm.tier.tiering`. What vLLM and torch warn of as they are imported is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("tests.kit.vllm.tier.tiering")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def opens(kit: ModuleType) -> Iterator[Opens]:
    """Opens managers with entries of `secondary_tiers`, which are closed at the end."""
    with ExitStack() as stack:

        def opens(*tiers: dict[str, Any], **options: Any) -> "Tiered":
            opened: Tiered = kit.Tiered(kit.configuration(*tiers, **options))
            stack.callback(opened.close)
            return opened

        yield opens


@pytest.fixture
def tiered(opens: Opens, kit: ModuleType, store: str) -> "Tiered":
    """VLLM's manager with one tier of ours, over files."""
    return opens(kit.tier_of(store))

"""Fixtures of the Transformers tests: tiny models, and caches for them."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

NEEDED = ("transformers", "accelerate")

collect_ignore = (
    []
    if all(map(find_spec, NEEDED))
    else [
        *("test_example.py", "test_generate_exact.py", "test_kv_identity.py", "test_refusals.py"),
        "test_tensor_parallel.py",
    ]
)
"""Test modules that are not collected if Transformers or Accelerate is missing.
`test_generate_settings.py` is always collected: one of its tests fails if a package is missing, so that
the gap is noticed."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lockstep.integrations.transformers import LockstepCache

    Load = Callable[..., PreTrainedModel]
    Open = Callable[..., LockstepCache]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from tests.kit.transformers.tiny_models import make

    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return folder


@pytest.fixture
def load(folders: Callable[[str], Path]) -> "Load":
    from tests.kit.transformers.tiny_models import load

    def load_one(kind: str = "llama", **options: Any) -> "PreTrainedModel":
        return load(folders(kind), **options)

    return load_one


@pytest.fixture
def opened(tmp_path: Path) -> "Generator[Open]":
    """Opens caches of one rank with a store in the test's folder; they are closed after the test."""
    from lockstep.integrations.transformers import LockstepCache

    with ExitStack() as stack:

        def open_one(model: Any, **settings: Any) -> "LockstepCache":
            common = {"host_pages": 64, "max_tokens": 256, "weight_digests": str(tmp_path)}
            return stack.enter_context(LockstepCache.open(model, **(common | settings)))

        yield open_one


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv"

"""SGLang in this process: for tests that use its tree and its pools themselves, without an engine."""

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from tests.kit.source_tree import ROOT

STAND_INS = ROOT / "tests" / "install" / "stand_ins"

MARKS = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    # SGLang imports modules when it first needs them.
    pytest.mark.filterwarnings("ignore"),
]
"""What a module of such tests is marked with."""


@cache
def begin() -> None:
    """Make SGLang importable on a CPU, and publish a configuration; the first call imports it."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # At the end: a real package comes before what stands in for it.
    sys.path.append(str(STAND_INS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = of("sglang.srt.server_args", "ServerArgs")(
            model_path="none",
            device="cpu",
            attention_backend="torch_native",
            skip_tokenizer_init=True,
            enable_hierarchical_cache=True,
            hicache_storage_backend="dynamic",
        )
        # Where states are kept, of a model that has them; SGLang would read it from the model's files.
        arguments._mamba_cache_chunk_size = 4
        of("sglang.srt.runtime_context", "publish")(arguments, role="test")
        import_module("sglang.srt.managers.schedule_batch")
        import_module("lockstep.integrations.sglang.radix_cache")


def of(module: str, name: str) -> Any:
    """Return what a module of SGLang's, or one that needs SGLang, has by a name."""
    return getattr(import_module(module), name)

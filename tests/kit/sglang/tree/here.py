"""SGLang imported in this process, for tests that use its tree and pools without an engine."""

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
    # SGLang imports modules lazily, which may warn.
    pytest.mark.filterwarnings("ignore"),
]
"""The pytest marks of modules with such tests."""


@cache
def begin() -> None:
    """Make SGLang importable on a CPU, import it once, and publish a configuration."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Appended last, so that a real package takes precedence over its stand-in.
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
        # Interval at which states are kept; SGLang would read it from the model's files.
        arguments._mamba_cache_chunk_size = 4
        of("sglang.srt.runtime_context", "publish")(arguments, role="test")
        import_module("sglang.srt.managers.schedule_batch")
        import_module("lockstep.integrations.sglang.radix_cache")


def of(module: str, name: str) -> Any:
    """Return an attribute of a module of SGLang, or of a module that imports SGLang."""
    return getattr(import_module(module), name)

"""Imports SGLang in the test's process, for tests of its tree and pools without an engine."""

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
    # Ignore warnings that SGLang's lazy imports may raise during a test.
    pytest.mark.filterwarnings("ignore"),
]
"""The pytest marks of test modules that import SGLang in their process."""


@cache
def begin() -> None:
    """Make SGLang importable on a CPU, import it once, and publish a configuration."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # Append the substitutes for missing packages to the import path, so that an installed package takes
    # precedence.
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
        # Set the number of tokens between saved recurrent states, because there are no model files from
        # which SGLang could read it.
        arguments._mamba_cache_chunk_size = 4
        of("sglang.srt.runtime_context", "publish")(arguments, role="test")
        import_module("sglang.srt.managers.schedule_batch")
        import_module("lockstep.integrations.sglang.radix_cache")


def of(module: str, name: str) -> Any:
    """Return an attribute of a module by name; the module is SGLang's or imports SGLang."""
    return getattr(import_module(module), name)

"""Prints the names of SGLang's settings and environment variables as JSON.

This is a separate program because importing SGLang changes how a process logs, warns and exits.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

NAME = r"""["']([A-Z][A-Z0-9_]+)["']"""
READ = re.compile(
    rf"(?:env_var\(|getenv\(|environ\[|environ\.(?:get|pop|setdefault)\()\s*{NAME}"
    rf"|{NAME} (?:not )?in os\.environ"
)

OTHER_PROGRAMS = ("multimodal_gen", "diffusion", "unit_test", "benchmark", "/test")
"""Path parts of source files to skip: programs of SGLang that have no KV cache, tests, and benchmarks.
"""


def settings() -> dict[str, list[str]]:
    arg_utils: Any = import_module("sglang.srt.arg_groups.arg_utils")
    arguments: Any = import_module("sglang.srt.server_args").ServerArgs
    found: dict[str, list[str]] = {}
    for name, namespace in sorted(arg_utils.namespace_of(arguments).items()):
        found.setdefault(namespace, []).append(name)
    graphs: Any = import_module("sglang.srt.model_executor.cuda_graph_config")
    for kind in (graphs.CudaGraphConfig, graphs.PhaseConfig):
        found[kind.__qualname__] = sorted(each.name for each in fields(kind))
    return found


def variables() -> Iterator[str]:
    """Yield the environment variables that SGLang declares or that its source files read."""
    environ: Any = import_module("sglang.srt.environ")
    declared: list[Any] = [*vars(environ.Envs).values()]
    yield from (str(each.name) for each in declared if isinstance(each, environ.EnvField))
    package = Path(import_module("sglang").__path__[0])
    for part in ("srt", "kernels", "jit_kernel"):
        for path in sorted((package / part).rglob("*.py")):
            if not any(each in str(path.relative_to(package)) for each in OTHER_PROGRAMS):
                for match in READ.finditer(path.read_text()):
                    yield match[1] or match[2]


if __name__ == "__main__":
    json.dump(settings() | {"variables": sorted(set(variables()))}, sys.stdout, sort_keys=True)

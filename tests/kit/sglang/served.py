"""Runs an SGLang server with `sglang.launch_server`."""

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.kit.servers.engines import serving
from tests.kit.servers.ports import free_port
from tests.kit.sglang.engine import ARGUMENTS
from tests.kit.sglang.lockstep import lockstep_flags
from tests.kit.sglang.processes import environment


@contextmanager
def served(model: Path, log: Path, store: str, metrics_port: int) -> Generator[str]:
    """Run a one-rank server with a store until the block ends; yield the server's address.

    Lockstep's metrics are served on `metrics_port`, SGLang's own metrics at the yielded address.
    """
    flags = lockstep_flags(store, metrics_port=metrics_port)
    options = {"model_path": model, **ARGUMENTS, **flags, "enable_metrics": True}
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with serving(command, environment(1, ["lockstep"]), log, free_port()) as address:
        yield address


def generate(address: str, tokens: Sequence[int]) -> tuple[list[int], int]:
    """Return a server's output tokens for a prompt, and how many prompt tokens were cached."""
    body: dict[str, Any] = {
        "input_ids": [*tokens],
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    headers = {"Content-Type": "application/json"}
    request = Request(f"{address}/generate", json.dumps(body).encode(), headers)  # noqa: S310
    with urlopen(request, timeout=120) as answer:  # noqa: S310 - on loopback.
        reply = json.load(answer)
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]

"""A vLLM server of its own, as `vllm serve` starts one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import tiny_llama

from tests.kit.servers.ports import free_port
from tests.kit.servers.processes import until
from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.processes import START_S, environment


def make_model(folder: Path) -> None:
    """Write a tiny model, and a tokenizer that has one word for each token."""
    tiny_llama.make(folder)
    words = {f"w{token}": token for token in range(tiny_llama.VOCABULARY)}
    tokenizers: Any = import_module("tokenizers")
    transformers: Any = import_module("transformers")
    unknown = {"unk_token": "w0"}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, **unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **unknown).save_pretrained(
        folder
    )


@contextmanager
def served(
    model: Path, log: Path, *, role: str = "kv_both", ranks: int = 1, **settings: Any
) -> Generator[str]:
    """Start a server with the connector in this role; give its address, and end it."""
    port = free_port()
    options: dict[str, object] = {
        "model": model,
        "port": port,
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": 8,
        "tensor-parallel-size": ranks,
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": 64 << 20,
        "kv-transfer-config": json.dumps(lockstep_connector(**settings) | {"kv_role": role}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(),
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or _is_up(address), START_S)
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tokens_from_peers(address: str) -> int:
    """Return how many tokens of its prompts a server has had from another engine."""
    with urlopen(f"{address}/metrics") as answer:  # noqa: S310 - on loopback.
        lines = answer.read().decode().splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total"
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith(name) and 'source="p2p"' in line
    )


def _is_up(address: str) -> bool:
    try:
        with urlopen(f"{address}/health") as answer:  # noqa: S310 - on loopback.
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False

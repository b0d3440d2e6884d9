"""Runs a vLLM server, started with `vllm serve`."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import tiny_llama

from tests.kit.servers.engines import serving
from tests.kit.servers.ports import free_port
from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.plan import BLOCK_TOKENS
from tests.kit.vllm.processes import environment


def make_model(folder: Path) -> None:
    """Write a tiny model, and a tokenizer with one word for each token."""
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
    """Run a server whose connector has this `kv_role`; yield the server's address."""
    options: dict[str, object] = {
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": 8,
        "tensor-parallel-size": ranks,
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": 64 << 20,
        "kv-transfer-config": json.dumps(lockstep_connector(**settings) | {"kv_role": role}),
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with serving(command, environment(), log, free_port()) as address:
        yield address


def tokens_from_peers(address: str) -> int:
    """Return how many prompt tokens a server has received from another engine."""
    with urlopen(f"{address}/metrics") as answer:  # noqa: S310 - on loopback.
        lines = answer.read().decode().splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total"
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith(name) and 'source="p2p"' in line
    )

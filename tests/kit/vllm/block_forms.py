"""Checks that the plug-in's views of a block read the tokens that vLLM's CPU kernel wrote.

The program prints the differences. It is a separate program because a process loads vLLM's kernels only
once.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import torch

from lockstep.integrations.vllm.block_forms import keys_and_values

HEADS, BLOCKS, USED = 2, 3, 1
CPU: Any = torch.cpu
"""Torch's private functions that query CPU features. vLLM calls the same functions."""
CASES = [
    *product(("vec", "vec16"), (torch.bfloat16, torch.float32), (32, 64), (32, 80, 128)),
    *product(
        ("amx",) if CPU._is_amx_tile_supported() else (),
        (torch.bfloat16,),
        (32, 64),
        (32, 128),
    ),
]
"""Test cases: instruction set, dtype, tokens per block and elements per head. Cases with AMX are
included only if the CPU has AMX."""


def wrong() -> Iterator[str]:
    """Yield a line for each case whose values are read back wrong."""
    kernels: Any = import_module("vllm._custom_ops")
    for isa, dtype, tokens, elements in CASES:
        blocks = torch.zeros(BLOCKS, HEADS, tokens, 2 * elements, dtype=dtype)
        written = torch.rand(2, tokens, HEADS, elements).to(dtype)
        halves = blocks.view(BLOCKS, HEADS, 2 * tokens, elements).chunk(2, dim=2)
        slots = torch.arange(tokens) + USED * tokens
        kernels.cpu_attn_reshape_and_cache(*written, *halves, slots, isa, 1.0, 1.0, "auto")
        found = keys_and_values(f"CPU_ATTN {isa}", blocks, elements)
        assert found is not None
        for side, views, expected in zip(("keys", "values"), found, written, strict=True):
            if not torch.equal(
                views[USED].reshape(HEADS, tokens, elements), expected.transpose(0, 1)
            ):
                yield f"{side} of {isa}, {dtype}, {tokens} tokens of {elements} elements"


def main() -> None:
    import_module("vllm.platforms").current_platform.import_kernels()
    print(json.dumps(list(wrong())))  # noqa: T201 - the test reads it.


if __name__ == "__main__":
    main()

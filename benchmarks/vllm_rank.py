"""One process of a vLLM engine that answers prompts on command and reports how long they took.

`vllm_overhead` starts the process, under torchrun if every rank has a scheduler, and sends the same
commands to all processes of an engine.
"""

import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

METHODS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "wait_for_save",
    "get_transfer_results",
    "update_connector_output",
    "request_finished_all_groups",
)
"""The methods of a KV connector that vLLM calls in a step. Their durations are measured."""


class MeasuredEngine:
    """A vLLM engine that records the time spent in its connector's methods."""

    def __init__(self, arguments: dict[str, Any], vocabulary: int) -> None:
        # Import vllm here, because only these processes have it and the import takes seconds.
        from vllm import LLM  # noqa: PLC0415

        self._llm = LLM(**arguments)
        self._vocabulary = vocabulary
        self._requests = 0
        self.spent: defaultdict[str, float] = defaultdict(float)
        """The seconds spent in each measured method, by name, and the number of engine steps under
        `steps`."""
        core = self._llm.llm_engine.engine_core.engine_core
        self._count(core.scheduler, "schedule", calls="steps")
        if core.scheduler.connector is not None:
            for name in METHODS:
                self._count(type(core.scheduler.connector), name)

    def answer(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Compute `tokens` output tokens for a prompt; return latencies and the time in each method."""
        from vllm import SamplingParams  # noqa: PLC0415

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self._requests += 1
        self.spent.clear()
        first_s, cached, steps_to_first = 0.0, 0, 0.0
        spent_first: dict[str, float] = {}
        began = time.perf_counter()
        engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs and not first_s:
                first_s, cached = time.perf_counter() - began, outputs[0].num_cached_tokens
                steps_to_first = self.spent["steps"]
                spent_first = dict(self.spent)
                self.spent.clear()
        ended_s = time.perf_counter() - began
        return {
            "first_s": first_s,
            "token_s": (ended_s - first_s) / max(1, tokens - 1),
            "cached": cached,
            "steps_to_first": steps_to_first,
            "spent_first": spent_first,
            "spent_rest": dict(self.spent),
        }

    def drop(self) -> dict[str, Any]:
        """Drop the engine's prefix cache on the device; the connector's tiers keep their pages."""
        return {"dropped": self._llm.reset_prefix_cache()}

    def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute one command from `vllm_overhead` and return its result."""
        if command["do"] == "drop":
            return self.drop()
        generator = random.Random(command["seed"])
        prompt = [generator.randrange(3, self._vocabulary) for _ in range(command["prompt_tokens"])]
        return self.answer(prompt, command["tokens"])

    def _count(self, owner: Any, name: str, calls: str = "") -> None:
        """Replace a method of `owner` by a new one that adds its duration in seconds to `spent[name]`.

        If `calls` is not empty, the new method also counts its calls in `spent[calls]`.
        """
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.spent[name] += time.perf_counter() - began
                if calls:
                    self.spent[calls] += 1

        setattr(owner, name, timed)


def main(plan: Path) -> None:
    """Start the engine that the file `plan` describes, and execute commands until disconnected."""
    config = json.loads(plan.read_text())
    engine = MeasuredEngine(config["arguments"], config["vocabulary"])
    with socket(AF_UNIX) as parent:
        parent.connect(config["address"])
        with parent.makefile("rw") as lines:
            print(json.dumps({"rank": _rank()}), file=lines, flush=True)
            for line in lines:
                print(json.dumps(engine.execute(json.loads(line))), file=lines, flush=True)


def _rank() -> int:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.get_rank() if dist.is_initialized() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))

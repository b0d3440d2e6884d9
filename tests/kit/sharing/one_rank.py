"""One vLLM in one process, which reads and writes the KV that it has of a prompt on the device.

`tests.kit.sharing.steps` starts it with the path of a plan, and reads what it leaves beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm import LLM

from lockstep.integrations.vllm.block_forms import form_of, keys_and_values
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import BLOCK_TOKENS, Phase
from tests.kit.vllm.rank import Preemptions, run_phase


class DeviceKv:
    """What an engine has of the prompt that it looked for last, [side, layer, token, head, element]."""

    def __init__(self, llm: Any) -> None:
        core: Any = llm.llm_engine.engine_core.engine_core
        runner: Any = core.model_executor.driver_worker.worker.model_runner
        names: list[str] = runner.kv_cache_config.kv_cache_groups[0].layer_names
        context = runner.vllm_config.compilation_config.static_forward_context
        self._layers = [(context[name], context[name].kv_cache) for name in names]
        self._head_size: int = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.head_size
        self.blocks: list[int] = []
        self.planted: torch.Tensor | None = None
        coordinator: Any = core.scheduler.kv_cache_manager.coordinator
        find = coordinator.find_longest_cache_hit

        def found(*arguments: Any, **options: Any) -> Any:
            hit = find(*arguments, **options)
            self.blocks = [block.block_id for block in hit[0][0]]
            planted, self.planted = self.planted, None
            if planted is not None:
                self.write(planted)
            return hit

        coordinator.find_longest_cache_hit = found

    def read(self) -> torch.Tensor:
        """Return what is in the blocks."""
        sides = [[self._in_order(view) for view in views] for views in self._views()]
        return torch.stack([torch.stack(layers) for layers in sides])

    def write(self, kv: torch.Tensor) -> None:
        """Put KV into the place of what is in the blocks."""
        for views, layers in zip(self._views(), kv, strict=True):
            for view, layer in zip(views, layers, strict=True):
                blocks = (len(layer) // BLOCK_TOKENS, BLOCK_TOKENS, *layer.shape[1:])
                by_block = layer.reshape(blocks).transpose(1, 2)
                view[self.blocks] = by_block.reshape(view[self.blocks].shape)

    def _views(self) -> Any:
        """Return keys and values of each layer, [blocks, heads, tokens, elements]."""
        found = [
            keys_and_values(form_of(layer), blocks, self._head_size)
            for layer, blocks in self._layers
        ]
        return zip(*(each for each in found if each is not None), strict=True)

    def _in_order(self, view: torch.Tensor) -> torch.Tensor:
        """Return a layer's blocks as [token, head, element]."""
        chosen = view[self.blocks]
        shape = (*chosen.shape[:2], BLOCK_TOKENS, self._head_size)
        return chosen.reshape(shape).transpose(1, 2).flatten(0, 1)


def main() -> None:
    """Carry out the plan that the command line names, and leave what came of it beside it."""
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    llm: Any = LLM(**plan["engine"])
    preemptions, device = Preemptions(), DeviceKv(llm)
    results: list[Any] = []
    for number, step in enumerate(plan["steps"]):
        if step["plant"]:
            device.planted = torch.load(step["plant"])
        phase = Phase([Prompt(tuple(step["tokens"]), step["salt"])], keep=step["keep"])
        [output] = run_phase(llm, phase, preemptions).outputs
        results.append([output.tokens, output.logprobs, output.cached_tokens])
        if device.blocks:
            torch.save(device.read(), path.with_name(f"kv{number}.pt"))
    llm.llm_engine.engine_core.shutdown()
    path.with_name("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

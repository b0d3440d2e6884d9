"""One rank of a tensor-parallel Transformers model; torchrun starts it with the path of a plan."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from lockstep import GroupError
from lockstep.integrations.transformers import LockstepCache
from tests.kit.transformers.generated import Generated, alone, reusing
from tests.kit.transformers.plan import Phase, PhaseResult, read_plan, write_results
from tests.kit.transformers.tiny_models import load


def run(model: PreTrainedModel, phase: Phase, rank: int) -> PhaseResult:
    prompts = [[rank + 3, *each] if phase.apart else each for each in phase.prompts]
    if phase.settings is None:
        return PhaseResult([alone(model, each) for each in prompts], {}, "")
    came: list[Generated] = []
    cache = LockstepCache.open(model, **phase.settings)
    try:
        with cache:
            came += [reusing(cache, model, each) for each in prompts]
            cache.cache.flush()
            cache.cache.inspection.check()
            stats = cache.cache.stats()
    except GroupError as error:
        return PhaseResult(came, {}, f"{type(error).__name__}: {error}")
    return PhaseResult(came, {"corrupt": stats.pages_corrupt, "digest": stats.digest}, "")


def main(path: Path) -> None:
    """Run the plan, and write this rank's results to a file in the plan's folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder, phases = read_plan(path)
    model = load(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    results = [run(model, each, rank) for each in phases]
    write_results(path.with_name(f"rank{rank}.pt"), results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

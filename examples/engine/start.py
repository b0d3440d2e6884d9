"""A small engine with a cache: `python start.py`, or `torchrun --nproc-per-node 2 start.py`.

With `--store file:///some/folder` the pages persist, and the next start finds them, at any TP size.
Exit status 0: every output token equals the model's output without a cache.
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
from tiny_transformer import Shape, TinyTransformer
from tour import VISITED, config, tour, without_cache

ROW = "{:<24}{:>7}{:>10}{:>8}{:>7}{:>9}  {}"


def main() -> int:
    """Run the engine of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="a URI; by default a folder that is removed at the end")
    store: str | None = parser.parse_args().store
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
        else:
            alone = f"file://{folder}/ranks"
            dist.init_process_group("gloo", init_method=alone, rank=0, world_size=1)
        # Broadcast rank 0's store URI, because every rank needs the same one.
        uris = [store or f"file://{folder}/store"]
        dist.broadcast_object_list(uris)
        is_right = show(uris[0])
        dist.barrier()
        dist.destroy_process_group()
    return 0 if is_right else 1


def show(store: str) -> bool:
    """Serve the tour's prompts, print each result on rank 0; return whether all outputs are right."""
    shape, rank, ranks = Shape(), dist.get_rank(), dist.get_world_size()
    model = TinyTransformer(shape, rank=rank, world_size=ranks, add_up=add_up)
    lines = [
        f"tensor parallel over {ranks}; prompt tokens by origin",
        ROW.format("", "prompt", "computed", "device", "host", "storage", "output"),
    ]
    is_right = True
    for scene in tour(config(shape, store), model):
        is_right &= scene.equal
        counts = (scene.prompt, scene.computed, scene.device, scene.host, scene.storage)
        happened = [f"{count} {event}" for event, count in sorted(scene.events.items())]
        outcome = "; ".join(["as without a cache" if scene.equal else "WRONG", *happened])
        lines.append(ROW.format(scene.name, *counts, outcome))
    lines.append(f"output of the repeated prompt: {without_cache(shape, VISITED)}")
    if not rank:
        print(*lines, sep="\n")
    return is_right


def add_up(numbers: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks."""
    dist.all_reduce(numbers)


if __name__ == "__main__":
    sys.exit(main())

"""The user's code of this example: a tensor-parallel model and a cache that persists between runs.

    torchrun --nproc-per-node 2 generate.py MODEL PROMPTS STORE

PROMPTS is a JSON file with the token ids of each prompt. STORE is the URI of a store.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lockstep.integrations.transformers import LockstepCache

path, prompts, store = sys.argv[1:]
dist.init_process_group("gloo")
divided = DistributedConfig(tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=divided)
with LockstepCache.open(model, host_memory_gib=1, store=store) as cache:
    for prompt in json.loads(Path(prompts).read_text()):
        input_ids = torch.tensor([prompt])
        began = time.perf_counter()
        with cache.reuse(input_ids) as past:
            output = model.generate(
                input_ids, past_key_values=past, max_new_tokens=8, do_sample=False
            )
        took_s = time.perf_counter() - began
        if cache.cache.rank == 0:
            continuation = output[0, len(prompt) :].tolist()
            found = f"{past.reused_tokens:4} of {len(prompt)} tokens reused"
            print(f"{found}, {took_s:5.2f} s, goes on with {continuation}", flush=True)
dist.destroy_process_group()

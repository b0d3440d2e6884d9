"""The same prompts and the same ranks, without a cache: `torchrun without.py MODEL PROMPTS`."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

path, prompts = sys.argv[1:]
dist.init_process_group("gloo")
divided = DistributedConfig(tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=divided)
for prompt in json.loads(Path(prompts).read_text()):
    input_ids = torch.tensor([prompt])
    began = time.perf_counter()
    output = model.generate(input_ids, max_new_tokens=8, do_sample=False)
    took_s = time.perf_counter() - began
    if dist.get_rank() == 0:
        said = output[0, len(prompt) :].tolist()
        print(
            f"   0 of {len(prompt)} tokens reused, {took_s:5.2f} s, goes on with {said}", flush=True
        )
dist.destroy_process_group()

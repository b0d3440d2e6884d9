"""Create a small model and prompts, and run `generate.py` twice on two ranks: `python run.py`.

Downloads nothing: the model has random weights, and prompts are token ids. Exit status 0: every output
token equals the model's output without a cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError:
    sys.exit("this example needs the extra: pip install 'lockstep-kv[transformers]'")

HERE = Path(__file__).parent
RANKS = 2
SHARED_TOKENS, OWN_TOKENS = 1400, 50
"""A prompt begins with `SHARED_TOKENS` tokens that all prompts share, like instructions. `OWN_TOKENS`
tokens of its own follow, like a question."""


def make_model(folder: Path) -> None:
    """Write a Llama model with 25 million random weights to `folder`."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        # Define no padding token, because prompts are not padded, and no end token, so that every
        # output has full length.
        "pad_token_id": None,
        "eos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(folder)


def make_prompts(path: Path) -> list[torch.Tensor]:
    """Write three prompts, the third equal to the first, and return them."""
    shared = torch.randint(1024, (SHARED_TOKENS,))
    first, second = (torch.cat([shared, torch.randint(1024, (OWN_TOKENS,))]) for _ in range(2))
    prompts = [first, second, first]
    path.write_text(json.dumps([each.tolist() for each in prompts]))
    return prompts


def alone(folder: Path, prompts: list[torch.Tensor]) -> list[str]:
    """Compute the prompts in this process without a cache; return the output of each."""
    print("without a cache, on one rank")
    model = AutoModelForCausalLM.from_pretrained(folder)
    continuations: list[str] = []
    for prompt in prompts:
        began = time.perf_counter()
        output = model.generate(prompt[None], max_new_tokens=8, do_sample=False)
        took_s = time.perf_counter() - began
        continuations.append(str(output[0, len(prompt) :].tolist()))
        print(
            f"     0 of {len(prompt)} tokens reused, {took_s:5.2f} s, goes on with {continuations[-1]}"
        )
    return continuations


def start(title: str, *arguments: object) -> list[str]:
    """Run `generate.py` under torchrun; return the output for each prompt."""
    print(title, flush=True)
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, *ranks, str(HERE / "generate.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **quiet},
    )
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    lines = ended.stdout.splitlines()
    print(*(f"  {line}" for line in lines), sep="\n", flush=True)
    return [line.partition("goes on with ")[2] for line in lines]


def main() -> int:
    """Compute prompts without a cache, then twice on two ranks with a cache, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        prompts = make_prompts(folder / "prompts.json")
        expected = alone(folder / "model", prompts)
        given = (folder / "model", folder / "prompts.json", f"file://{folder}/store")
        titles = ("with a cache, on two", "with a cache, started again")
        results = [start(title, *given) for title in titles]
    is_right = results == [expected] * 2
    print("every token is as without a cache" if is_right else "WRONG: tokens differ without it")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

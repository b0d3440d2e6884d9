"""Makes a small model and prompts, and starts `generate.py` twice on two ranks: `python run.py`.

Nothing is fetched: the model has random weights, and prompts are token ids. Exit status 0: every token
was what the same ranks say without a cache.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
RANKS = 2
SHARED_TOKENS, OWN_TOKENS = 1400, 50
"""Every prompt begins with the same instructions, and goes on with a question of its own."""


def make_model(folder: Path) -> None:
    """Write a Llama of 25 million parameters."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        # With these no prompt is padded, and no answer ends early.
        "pad_token_id": None,
        "eos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(folder)


def make_prompts(path: Path) -> None:
    """Write three prompts, the last of which is the first one again."""
    shared = torch.randint(1024, (SHARED_TOKENS,))
    first, second = (torch.cat([shared, torch.randint(1024, (OWN_TOKENS,))]) for _ in range(2))
    path.write_text(json.dumps([each.tolist() for each in (first, second, first)]))


def start(title: str, program: str, *arguments: object) -> list[str]:
    """Run a program on all ranks; return what came out of each prompt."""
    print(title, flush=True)
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, *ranks, str(HERE / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **quiet},
    )
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    print(*(f"  {line}" for line in ended.stdout.splitlines()), sep="\n", flush=True)
    return [line.partition("goes on with")[2] for line in ended.stdout.splitlines()]


def main() -> int:
    """Run the ranks without a cache, with one, and with one again after a restart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        make_prompts(folder / "prompts.json")
        given = (folder / "model", folder / "prompts.json")
        expected = start("without a cache", "without.py", *given)
        store = f"file://{folder}/store"
        titles = ("with a cache", "with a cache, started again")
        said = [start(title, "generate.py", *given, store) for title in titles]
    is_right = len(expected) == 3 and said == [expected] * 2
    print("every token is as without a cache" if is_right else "WRONG: other tokens than without")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

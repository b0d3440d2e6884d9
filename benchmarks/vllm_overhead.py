"""What Lockstep costs vLLM where nothing ever hits: time to first token, and time per token.

Two ranks on the CPU, one request at a time, every prompt new, with a file:// store that never has it.
Engines with and without the connector are started in turns, and the medians of all their requests are
compared. The difference is then divided over what the connector's methods take and the engine's steps
that it adds. Needs vLLM: `make bench-engines`.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANKS = 2
PAIRS = 3
REQUESTS = 40
PROMPT_TOKENS = 512
ANSWER_TOKENS = 33
BLOCK_TOKENS = 32
START_S = 300
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
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

Samples = dict[str, Any]


def main() -> None:
    """Start engines in turns, and print what the connector costs."""
    if len(sys.argv) > 1:
        # Only the ranks that this program starts are told a folder and a connector.
        _serve(Path(sys.argv[1]), sys.argv[2])
        return
    samples: dict[str, list[Samples]] = {"none": [], "lockstep": []}
    for _ in range(PAIRS):
        for connector, collected in samples.items():
            collected.append(_start(connector))
    _print(samples["none"], samples["lockstep"])


def _start(connector: str) -> Samples:
    """Start two ranks, and return what rank 0 has measured."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        command = [
            "env",
            *(f"{key}={value}" for key, value in ENVIRONMENT.items()),
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
            *("-m", "lockstep.benchmarks.vllm_overhead", name, connector),
        ]
        finished = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if finished.returncode:
            sys.exit(f"the ranks have failed:\n{(finished.stdout + finished.stderr)[-4000:]}")
        samples: Samples = json.loads((folder / "samples.json").read_text())
        return samples


def _serve(folder: Path, connector: str) -> None:
    """Be one rank: answer prompts one by one, and write down how long each took."""
    # Only the ranks have vLLM, and it takes seconds to import.
    import torch.distributed as dist  # noqa: PLC0415
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    arguments: dict[str, Any] = {}
    if connector == "lockstep":
        arguments["kv_transfer_config"] = {
            "kv_connector": "LockstepConnector",
            "kv_connector_module_path": "lockstep.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_pages": 2000, "store": f"file://{folder}/store"},
        }
    llm = LLM(
        model=str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=RANKS,
        **arguments,
    )
    spent: defaultdict[str, float] = defaultdict(float)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    _count(spent, "steps", scheduler, "schedule")
    if connector == "lockstep":
        for name in METHODS:
            _count(spent, "", type(scheduler.connector), name)
    prompts = _prompts()

    def answer(tokens: int) -> float:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": next(prompts)}
        began = time.perf_counter()
        llm.generate([prompt], sampling, use_tqdm=False)
        return time.perf_counter() - began

    for _ in range(5):
        answer(4)
    spent.clear()
    first = [answer(1) for _ in range(REQUESTS)]
    spent_first = dict(spent)
    spent.clear()
    whole = [answer(ANSWER_TOKENS) for _ in range(REQUESTS // 2)]
    if dist.get_rank() == 0:
        samples = {
            "first_s": first,
            "whole_s": whole,
            "spent_first": spent_first,
            "spent_whole": dict(spent),
        }
        (folder / "samples.json").write_text(json.dumps(samples))


def _prompts() -> Iterator[list[int]]:
    """Yield prompts that share nothing, the same on every rank."""
    generator = random.Random(0)
    while True:
        yield [generator.randrange(3, MODEL["vocab_size"]) for _ in range(PROMPT_TOKENS)]


def _count(spent: defaultdict[str, float], calls: str, owner: Any, name: str) -> None:
    """Let a method add the seconds that it takes to `spent`, and its calls under another name."""
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            spent[name] += time.perf_counter() - began
            if calls:
                spent[calls] += 1

    setattr(owner, name, timed)


def _print(without: list[Samples], with_it: list[Samples]) -> None:
    first = [_median_ms(runs, "first_s") for runs in (without, with_it)]
    whole = [_median_ms(runs, "whole_s") for runs in (without, with_it)]
    each = [(end - start) / (ANSWER_TOKENS - 1) for start, end in zip(first, whole, strict=True)]
    write = sys.stdout.write
    write(f"{'':28}{'without':>10}{'Lockstep':>10}{'ratio':>8}\n")
    for name, (before, after) in (("time to first token, ms", first), ("time per token, ms", each)):
        write(f"{name:28}{before:10.3f}{after:10.3f}{after / before:8.3f}\n")
    for name, key, tokens in (
        ("first token", "spent_first", REQUESTS),
        ("a further token", "spent_whole", REQUESTS // 2 * ANSWER_TOKENS),
    ):
        steps = [
            statistics.mean(run[key]["steps"] for run in runs) / tokens
            for runs in (without, with_it)
        ]
        write(f"\n{name}: engine steps {steps[0]:.2f} without, {steps[1]:.2f} with; ms in\n")
        for method in METHODS:
            spent = statistics.mean(run[key].get(method, 0.0) for run in with_it) / tokens
            write(f"  {method:34}{spent * 1e3:8.3f}\n")


def _median_ms(runs: list[Samples], key: str) -> float:
    samples: list[float] = [sample for run in runs for sample in run[key]]
    return statistics.median(samples) * 1e3


if __name__ == "__main__":
    main()

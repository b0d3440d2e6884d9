"""Overhead of Lockstep in vLLM when no prompt hits, and its savings when prompts hit host memory.

Two engines run at the same time, one with the connector and one without. Each prompt goes to both, in
alternating order, so that other load on the machine affects both. Each pair of answers gives the ratio
of the two times. First, all prompts are new, and a file:// store has none of them. Then prompts of 4k
tokens are repeated after the engine has dropped its own prefix cache. The overhead of a miss is
compared with a forward pass of at least 30 ms. Needs vLLM: `make bench-engines`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import AF_UNIX, socket
from types import TracebackType
from typing import Any, NoReturn, Self, TextIO

from .vllm_rank import METHODS

PAIRS = 20
LONG_PAIRS = 3
PROMPTS_TOKENS = (64, 512)
LONG_TOKENS = 4096
ANSWER_TOKENS = 17
BLOCK_TOKENS = 32
SETTLE_S = 0.3
"""Seconds to pause after each request, so that its background writes do not slow the next request."""
START_S = 300
FORWARD_MS = 30
LAYERS = {1: 12, 2: 20}
"""For each number of ranks: the number of model layers with which a forward pass of one token takes 30
ms on two CPU cores of the year 2026."""
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
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

MODES = {"every": "a scheduler on every rank", "one": "one scheduler"}

Sample = dict[str, Any]


def main() -> None:
    """Run the measurement with each number of ranks, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--long-pairs", type=int, default=LONG_PAIRS)
    parser.add_argument(
        "--beside",
        default=[],
        nargs="+",
        help="also measure these vLLM connectors, with long prompts",
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args()
    for ranks in options.ranks:
        for mode in options.modes:
            _measure(ranks, mode, options)


def _measure(ranks: int, mode: str, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        engines: list[StartedEngine] = []
        for connector in ("none", "lockstep", *options.beside):
            folder = Path(name, connector)
            folder.mkdir()
            started = StartedEngine(folder, connector, ranks, one_scheduler=mode == "one")
            engines.append(stack.enter_context(started))
        seeds = iter(range(1 << 30))
        for engine in engines:
            for _ in range(3):
                engine.answer(next(seeds), max(PROMPTS_TOKENS), 4)
        sys.stdout.write(f"\n{ranks} rank(s), {MODES[mode]}\n")
        without, with_it, *beside = engines
        for tokens in PROMPTS_TOKENS if options.pairs else ():
            _print_cold(tokens, _pairs([without, with_it], seeds, tokens, options.pairs))
        for name, engine in zip(("Lockstep", *options.beside), (with_it, *beside), strict=True):
            _print_long(name, *_long(without, engine, seeds, options.long_pairs))


class StartedEngine:
    """An engine in separate processes, which is idle between the requests that it receives."""

    def __init__(self, folder: Path, connector: str, ranks: int, *, one_scheduler: bool) -> None:
        self._folder = folder
        self._listener = socket(AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen()
        self._listener.settimeout(1.0)
        self._connections: list[TextIO] = []
        """The control connection to each process of the engine, by rank."""
        self._processes = 1 if one_scheduler else ranks
        _write_plan(folder, connector, ranks, one_scheduler=one_scheduler)
        launcher = () if one_scheduler else _torchrun(ranks)
        command = [
            "env",
            *(f"{key}={value}" for key, value in ENVIRONMENT.items()),
            sys.executable,
            *launcher,
            *("-m", "lockstep.benchmarks.vllm_rank", str(folder / "plan.json")),
        ]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        """Wait until all of the engine's processes have connected."""
        until = time.monotonic() + START_S
        met: dict[int, TextIO] = {}
        while len(met) < self._processes:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > until:
                    self._fail()
                continue
            connection.settimeout(START_S)
            lines = connection.makefile("rw")
            met[json.loads(lines.readline())["rank"]] = lines
        self._connections = [met[rank] for rank in sorted(met)]
        # vLLM's CPU ranks meet in a shared memory file with a fixed name. Remove the file, so that the
        # next engine can use the name.
        for left in Path("/dev/shm").glob("*-cpushm_*"):  # noqa: S108 - it is what it is.
            left.unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the engine's processes."""
        for each in self._connections:
            each.close()
        self._listener.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def answer(self, seed: int, prompt_tokens: int, tokens: int) -> Sample:
        """Send a prompt, wait for the answer and for background writes; return the measured times."""
        command = {"do": "answer", "seed": seed, "prompt_tokens": prompt_tokens, "tokens": tokens}
        sample = self._send(command)
        time.sleep(SETTLE_S)
        return sample

    def drop(self) -> None:
        """Make the engine drop its prefix cache on the device."""
        if not self._send({"do": "drop"})["dropped"]:
            sys.exit("the engine could not drop its prefix cache because blocks are in use")

    def _send(self, command: dict[str, Any]) -> Sample:
        try:
            for each in self._connections:
                print(json.dumps(command), file=each, flush=True)
            samples: list[Sample] = [json.loads(each.readline()) for each in self._connections]
        except (ValueError, OSError):
            self._fail()
        return samples[0]

    def _fail(self) -> NoReturn:
        self._process.kill()
        sys.exit(f"an engine failed:\n{(self._folder / 'log').read_text()[-4000:]}")


def _torchrun(ranks: int) -> Sequence[str]:
    return "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"


def _write_plan(folder: Path, connector: str, ranks: int, *, one_scheduler: bool) -> None:
    (folder / "model").mkdir()
    model = MODEL | {"num_hidden_layers": LAYERS[ranks]}
    (folder / "model" / "config.json").write_text(json.dumps(model))
    executor = "mp" if one_scheduler else "external_launcher"
    arguments: dict[str, Any] = {
        "model": str(folder / "model"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": LONG_TOKENS + 64,
        "max_num_seqs": 4,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "seed": 0,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": True,
        "distributed_executor_backend": executor,
        "tensor_parallel_size": ranks,
    }
    if connector not in {"none", "lockstep"}:
        arguments["kv_transfer_config"] = {"kv_connector": connector, "kv_role": "kv_both"}
    elif connector == "lockstep":
        arguments["kv_transfer_config"] = {
            "kv_connector": "LockstepConnector",
            "kv_connector_module_path": "lockstep.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_memory_gib": 1.5 / ranks,
                "store": f"file://{folder}/store",
            },
        }
    plan = {
        "arguments": arguments,
        "vocabulary": MODEL["vocab_size"],
        "address": str(folder / "socket"),
    }
    (folder / "plan.json").write_text(json.dumps(plan))


def _pairs(
    engines: Sequence[StartedEngine], seeds: Iterator[int], prompt_tokens: int, pairs: int
) -> list[tuple[Sample, Sample]]:
    """Send each prompt to both engines, alternating which engine is first."""
    found: list[tuple[Sample, Sample]] = []
    for pair in range(pairs):
        seed, turn = next(seeds), (engines if pair % 2 else engines[::-1])
        one, other = [each.answer(seed, prompt_tokens, ANSWER_TOKENS) for each in turn]
        found.append((one, other) if pair % 2 else (other, one))
    return found


def _long(
    without: StartedEngine, with_it: StartedEngine, seeds: Iterator[int], pairs: int
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Return samples of long prompts: without the connector, and with it at first and second use."""
    plain: list[Sample] = []
    cold: list[Sample] = []
    warm: list[Sample] = []
    for _ in range(pairs):
        seed = next(seeds)
        plain.append(without.answer(seed, LONG_TOKENS, 2))
        cold.append(with_it.answer(seed, LONG_TOKENS, 2))
        with_it.drop()
        warm.append(with_it.answer(seed, LONG_TOKENS, 2))
    return plain, cold, warm


def _print_cold(prompt_tokens: int, pairs: list[tuple[Sample, Sample]]) -> None:
    write = sys.stdout.write
    write(f"\nprompts of {prompt_tokens} tokens, {len(pairs)} pairs, nothing hits\n")
    write(f"{'ms, medians':26}{'without':>10}{'with':>10}   paired ratio (quartiles)\n")
    forward_ms = 0.0
    for name, key in (("time to first token", "first_s"), ("time per token", "token_s")):
        without, with_it = ([pair[at][key] * 1e3 for pair in pairs] for at in (0, 1))
        ratios = [after / before for before, after in zip(without, with_it, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = [statistics.median(each) for each in (without, with_it)]
        write(
            f"{name:26}{medians[0]:10.2f}{medians[1]:10.2f}   {middle:.3f} ({low:.3f}-{high:.3f})\n"
        )
        forward_ms = medians[0]
    if forward_ms < FORWARD_MS:
        write(
            f"a forward pass takes {forward_ms:.1f} ms, must take {FORWARD_MS}; use a larger model\n"
        )
    _print_methods("first token", "spent_first", [pair[1] for pair in pairs])
    _print_methods("a further token", "spent_rest", [pair[1] for pair in pairs])
    steps = statistics.mean(pair[0]["steps_to_first"] for pair in pairs)
    write(f"engine steps to the first token without a connector: {steps:.2f}\n")


def _print_methods(what: str, key: str, samples: list[Sample]) -> None:
    """Print the time spent in the connector's methods per engine step, in microseconds."""
    steps = sum(each[key].get("steps", 0) for each in samples)
    if not steps:
        return
    tokens = len(samples) * (1 if key == "spent_first" else ANSWER_TOKENS - 1)

    def us_of(*names: str) -> float:
        spent = [sum(each[key].get(name, 0.0) for name in names) for each in samples]
        rates = [took / each[key]["steps"] for took, each in zip(spent, samples, strict=True)]
        return float(statistics.median(rates)) * 1e6

    sys.stdout.write(
        f"{what}: {steps / tokens:.2f} engine steps, {us_of(*METHODS):.0f} us in each:"
    )
    for name in METHODS:
        if us_of(name) >= 1:
            sys.stdout.write(f" {name} {us_of(name):.0f}")
    sys.stdout.write("\n")


def _print_long(
    connector: str, plain: list[Sample], cold: list[Sample], warm: list[Sample]
) -> None:
    if not warm:
        return
    names = ("computed, without", "computed, with", "repeated, with")
    sys.stdout.write(f"\n{connector}: a prompt of {LONG_TOKENS} tokens, time to first token, ms\n")
    for name, samples in zip(names, (plain, cold, warm), strict=True):
        spent = [each["first_s"] * 1e3 for each in samples]
        cached = min(each["cached"] or 0 for each in samples)
        sys.stdout.write(f"{name:26}{statistics.median(spent):10.1f}   {cached} tokens cached\n")
    pairs = zip(plain, warm, strict=True)
    times = [before["first_s"] / after["first_s"] for before, after in pairs]
    sys.stdout.write(f"speed-up over computing: at least {min(times):.1f}\n")


if __name__ == "__main__":
    main()

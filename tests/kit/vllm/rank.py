"""Runs one scheduler of a vLLM engine. It serves one rank, or all ranks in one-scheduler mode."""

import os
import sys
import zlib
from dataclasses import asdict
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from lockstep import HostCache
from tests.kit.vllm import afflicted
from tests.kit.vllm.faults import afflict
from tests.kit.vllm.plan import (
    BLOCK_TOKENS,
    NO_LOGPROB,
    Output,
    Phase,
    PhaseResult,
    Plan,
    RankResult,
    read_plan,
    write,
)

AT_A_TIME = 8


class Preemptions:
    """Counts preemptions by vLLM's scheduler."""

    def __init__(self) -> None:
        self.count = 0
        scheduler: Any = Scheduler
        preempt = scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return preempt(*arguments, **options)

        scheduler._preempt_request = counted


def run(plan: Plan, rank: int, ranks: int) -> RankResult:
    if plan.fault is not None and not plan.one_scheduler and rank == ranks - 1:
        afflict(plan.fault)
    preemptions = Preemptions()
    llm = LLM(**engine_arguments(plan, ranks))
    phases = [run_phase(llm, phase, preemptions) for phase in plan.phases]
    stats: dict[str, Any] = {}
    if plan.connector is not None and plan.connector["kv_connector"] == "LockstepConnector":
        core = llm.llm_engine.engine_core.engine_core
        cache: HostCache = core.scheduler.connector._side.cache
        cache.flush()
        # Step until the scheduler is idle. In one-scheduler mode, writes to the store complete only in
        # steps.
        while core.scheduler.has_requests():
            core.step_fn()
        stats = asdict(cache.stats())
        stats.pop("round_us")
    llm.llm_engine.engine_core.shutdown()
    return RankResult(phases, stats)


def engine_arguments(plan: Plan, ranks: int) -> dict[str, Any]:
    """Return `LLM` arguments for a small engine with exact results, equal on every rank."""
    connector = plan.connector
    if connector is not None and plan.fault is not None and plan.one_scheduler:
        # Pass the faulty connector by configuration and the fault by environment variable, because the
        # workers are separate processes.
        connector = connector | {"kv_connector_module_path": afflicted.__name__}
        os.environ[afflicted.FAULT] = plan.fault
    arguments: dict[str, Any] = {
        "model": plan.model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_seqs": AT_A_TIME,
        "seed": 0,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "distributed_executor_backend": "mp" if plan.one_scheduler else "external_launcher",
        "tensor_parallel_size": ranks,
    }
    if connector is not None:
        arguments["kv_transfer_config"] = connector
    return arguments | plan.engine


def run_phase(llm: LLM, phase: Phase, preemptions: Preemptions) -> PhaseResult:
    """Reset vLLM's prefix cache, run a phase's requests, and return the phase's result."""
    if phase.weights:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": phase.weights})
    if phase.weights_version:
        llm.update_weight_version(phase.weights_version)
    assert llm.reset_prefix_cache(reset_connector=phase.reset_connector)
    before = preemptions.count
    prompts = [
        {"prompt_token_ids": list(prompt.tokens)}
        | ({"cache_salt": prompt.salt} if prompt.salt else {})
        for prompt in phase.prompts
    ]
    sampling = SamplingParams(
        temperature=0,
        max_tokens=phase.output_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
    )
    adapter = adapter_of(phase.adapter) if phase.adapter else None
    generate: Any = llm.generate
    if phase.aborts:
        finished = generate_half(llm, prompts, sampling)
    elif phase.sleeps:
        finished = generate_between_sleeps(llm, prompts, sampling, phase.sleeps)
    else:
        finished = generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    outputs = [output_of(request) for request in finished]
    return PhaseResult(phase.name, outputs, preemptions.count - before)


def adapter_of(folder: str) -> Any:
    """Return a LoRA request for the adapter in a folder. vLLM requires an adapter number above 0."""
    kind: Any = import_module("vllm.lora.request").LoRARequest
    return kind(Path(folder).name, 1 + zlib.crc32(folder.encode()), folder)


def generate_half(llm: LLM, prompts: list[Any], sampling: SamplingParams) -> list[Any]:
    """Send all prompts and abort every second request while it runs; return the other outputs."""
    engine = llm.llm_engine
    names = [f"{at:04}" for at in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, sampling)
    finished: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        finished |= {each.request_id: each for each in engine.step() if each.finished}
        # Abort one request at a time. If requests are aborted together, vLLM frees them in an order
        # that differs between ranks.
        engine.abort_request(names[1 + 2 * steps : 2 + 2 * steps])
        steps += 1
    return [finished[name] for name in names[::2]]


def generate_between_sleeps(
    llm: LLM, prompts: list[Any], sampling: SamplingParams, sleeps: int
) -> list[Any]:
    """Send all prompts; while they are served, the engine sleeps and wakes up `sleeps` times.

    Before each sleep the engine steps until no finished request holds blocks. Backups of running
    requests may still be in flight. No request is loading, because vLLM refuses to sleep while a
    request loads.
    """
    engine = llm.llm_engine
    names = [f"{at:04}" for at in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, sampling)
    core: Any = engine.engine_core
    core = core.engine_core
    paused: Any = import_module("vllm.v1.core.sched.interface").PauseState
    finished: dict[str, Any] = {}
    slept = 0
    while engine.has_unfinished_requests():
        finished |= {each.request_id: each for each in engine.step() if each.finished}
        if slept < sleeps and core.scheduler.running and not any(map(loads, requests_of(core))):
            core.scheduler.set_pause_state(paused.PAUSED_ALL)
            while core.scheduler.has_finished_requests():
                finished |= {each.request_id: each for each in engine.step() if each.finished}
            core.sleep(mode="keep")
            core.wake_up()
            slept += 1
    assert slept == sleeps, f"all requests had ended after {slept} of {sleeps} sleeps"
    core.sleep()
    core.wake_up()
    return [finished[name] for name in names]


def requests_of(core: Any) -> list[Any]:
    return list(core.scheduler.requests.values())


def loads(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def output_of(request: Any) -> Output:
    tokens = list(request.outputs[0].token_ids)
    logprobs = request.outputs[0].logprobs
    chosen = [each[token].logprob for each, token in zip(logprobs, tokens, strict=True)]
    # Replace NaN, because JSON has no NaN. Wrong bytes in a page can lead to NaN.
    chosen = [NO_LOGPROB if isnan(each) else each for each in chosen]
    return Output(tokens, chosen, request.num_cached_tokens)


def main() -> None:
    """Run the plan named on the command line, and write the result to a file in the plan's folder."""
    path, ranks = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    write(path.with_name(f"rank{rank}.json"), run(read_plan(path), rank, ranks))


if __name__ == "__main__":
    main()

"""Runs a vLLM prefill engine, and decode engines that continue the same prompts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.mixed_prompts import Prompt
from tests.kit.vllm.plan import Output, Plan
from tests.kit.vllm.processes import START_S, Program, run_together

if TYPE_CHECKING:
    from vllm import LLM

FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that vLLM's routers send with a prompt to the prefill engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handing:
    """Settings of a run: a prefill engine of two ranks, then one decode engine after the other."""

    model: str
    prompts: list[Prompt]
    store: str
    """URI of the prefill engine's store. At the end, a one-rank engine reads all pages from this store.
    """


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one decode engine."""

    outputs: list[Output]
    asked_tokens: int
    """Number of tokens that the decode engine's requests could have used from the cache.

    vLLM's own count is not used, because for handed-over requests it counts the prefill engine's cached
    tokens.
    """
    hit_tokens: int
    """Number of the tokens in `asked_tokens` that were cached."""


def hand_over(handing: Handing, folder: Path) -> dict[str, Found]:
    """Run all engines; return the results of the decode engines.

    The key of a result is the engine's number of ranks as text. The key "store" has the result of a
    one-rank engine that reads from the prefill engine's store.
    """
    path = folder / "handing.json"
    path.write_bytes(msgspec.json.encode(handing))
    program = Program("tests.kit.vllm.two_engines", [path])
    run_together([program], folder, within_s=2 * START_S).check()
    return msgspec.json.decode(path.with_suffix(".found").read_bytes(), type=dict[str, Found])


def _run(handing: Handing) -> dict[str, Found]:
    sent = [FOR_ANOTHER] * len(handing.prompts)
    prefill = _start(handing, "kv_producer", 2, handing.store)
    computed = _generate(prefill, handing.prompts, sent, 1)
    _rest(prefill)
    answers = [each.kv_transfer_params for each in computed]
    found: dict[str, Found] = {}
    for ranks in (1, 2):
        decode = _start(handing, "kv_consumer", ranks)
        found[str(ranks)] = _gone_on(decode, handing, answers)
    prefill.llm_engine.engine_core.shutdown()
    reader = _start(handing, "kv_consumer", 1, handing.store)
    found["store"] = _gone_on(reader, handing, [None] * len(answers))
    return found


def _start(handing: Handing, role: str, ranks: int, store: str | None = None) -> "LLM":
    from vllm import LLM

    from tests.kit.vllm.rank import engine_arguments

    connector = lockstep_connector(
        store,
        peers={},
        handing_over={"ttl_s": 300.0, "patience_s": 1.0},
    )
    plan = Plan(
        model=handing.model,
        phases=[],
        connector=connector | {"kv_role": role},
        one_scheduler=True,
    )
    return LLM(**engine_arguments(plan, ranks))


def _generate(
    llm: "LLM", prompts: list[Prompt], params: Sequence[object], output_tokens: int
) -> list[Any]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            extra_args={} if each is None else {"kv_transfer_params": each},
        )
        for each in params
    ]
    requests = [{"prompt_token_ids": list(each.tokens)} for each in prompts]
    generate: Any = llm.generate
    found: list[Any] = generate(requests, sampling, use_tqdm=False)
    return found


def _rest(llm: "LLM") -> None:
    """Step an engine as long as its connector has work, as vLLM's own engine process does."""
    core: Any = llm.llm_engine.engine_core
    while core.engine_core.scheduler.has_requests():
        core.engine_core.step_fn()


def _gone_on(llm: "LLM", handing: Handing, params: Sequence[object]) -> Found:
    """Generate outputs on a decode engine, shut the engine down, and return its result."""
    from tests.kit.vllm.rank import output_of

    outputs = _generate(llm, handing.prompts, params, 8)
    core: Any = llm.llm_engine.engine_core
    replica = core.engine_core.scheduler.connector._side.cache.stats().replica
    core.shutdown()
    hits = sum(replica.hit_tokens.values())
    return Found([output_of(each) for each in outputs], replica.asked_tokens, hits)


def main() -> None:
    """Run the engines with the settings file named on the command line; write the result beside it."""
    path = Path(sys.argv[1])
    found = _run(msgspec.json.decode(path.read_bytes(), type=Handing))
    path.with_suffix(".found").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()

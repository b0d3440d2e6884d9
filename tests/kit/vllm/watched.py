"""Serves prompts twice with one vLLM engine, and prints its events, metrics and statistics.

This is a separate program because an engine changes how a process logs, warns and exits. Arguments: the
model, and a folder for sockets and pages. The program prints one JSON object after the engine's log.
"""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

from tests.kit.vllm.group import lockstep_connector
from tests.kit.vllm.plan import BLOCK_TOKENS

PREFIX = [7 * each % 251 for each in range(4 * BLOCK_TOKENS)]
PROMPTS = [
    ([*PREFIX, *range(number, number + 40)], salt)
    for number, salt in ((1, None), (2, None), (3, "tenant"))
]
PATIENCE_S = 10.0

msgspec: Any = import_module("msgspec")
zmq: Any = import_module("zmq")
loggers: Any = import_module("vllm.v1.metrics.loggers")
published: Any = import_module("vllm.distributed.kv_events")


def replayed(endpoint: str) -> list[Any]:
    """Return all KV events that the engine has published, in order."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        events: list[Any] = []
        while True:
            *_, number, payload = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return events
            events += msgspec.msgpack.decode(payload, type=published.KVEventBatch).events


def plain(event: Any) -> dict[str, Any]:
    """Return a KV event as JSON data. Its block hashes are numbers, which is vLLM's default."""
    fields: dict[str, Any] = msgspec.structs.asdict(event)
    return fields | {"type": type(event).__name__}


def samples(prefix: str) -> dict[str, float]:
    """Return the samples of vLLM's metrics whose names begin with a prefix, by name and labels."""
    return {
        f"{sample.name} {sorted(set(sample.labels.items()) - {('engine', '0')})}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    llm = LLM(
        model=model,
        served_model_name="m",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=4,
        seed=0,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=16 << 20,
        disable_log_stats=False,
        kv_transfer_config=lockstep_connector(f"file://{folder}/kv"),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        },
    )
    at_the_start = samples("lockstep_")
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    cache = llm.llm_engine.engine_core.engine_core.scheduler.connector._side.cache
    for _ in range(2):
        for tokens, salt in PROMPTS:
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            llm.generate(
                [prompt | ({"cache_salt": salt} if salt else {})], sampling, use_tqdm=False
            )
        cache.flush()
        llm.reset_prefix_cache()
    for _ in range(2):
        # Serve a prompt twice. The second time, vLLM's own prefix cache has the whole prompt.
        llm.generate([{"prompt_token_ids": PROMPTS[0][0]}], sampling, use_tqdm=False)
    llm.generate([{"prompt_token_ids": [9, 9, 9]}], sampling, use_tqdm=False)
    llm.llm_engine.do_log_stats()
    # Wait until the publisher's thread has published all events, because the test can read only
    # published events.
    llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher._event_queue.join()
    seen = {
        "events": [plain(each) for each in replayed(f"ipc://{folder}/replay")],
        "metrics": samples("lockstep_") | samples("vllm:prompt_tokens_cached"),
        "at_the_start": at_the_start,
        "names": [
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in REGISTRY.collect()
        ],
        "stats": asdict(cache.stats(rounds=0)),
    }
    llm.llm_engine.engine_core.shutdown()
    # Create a second logger, as a second engine in this process would. The new logger makes vLLM
    # unregister the first engine's metrics.
    loggers.PrometheusStatLogger(llm.llm_engine.vllm_config)
    print(json.dumps(seen, default=str))  # noqa: T201 - the test reads it.


if __name__ == "__main__":
    main()

"""The process in which SGLang runs for a test, forked from a process that has imported SGLang.

The test first sends the engine's arguments over the connection, and then commands, each as `(number,
name, keywords)`. Commands run concurrently. The reply to a command is `(number, error or None, value)`.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tests.kit.sglang.requests import Answer, Request

POLL_S = 0.001
POLLED_S = 60.0
"""Timeout in seconds of waits in this process. It is shorter than the timeout of the test."""
STARTED = 0
"""Number of the reply that reports that the engine has started."""


class Sent:
    def __init__(self, request: Request, name: str) -> None:
        self.request = request
        self.name = name
        self.streamed = 0
        self.is_over = False


class Driver:
    """Executes the test's commands. Each public method except `serve` is a command."""

    def __init__(self, engine: Any, connection: Connection) -> None:
        self._engine = engine
        self._tokenizer: Any = engine.tokenizer_manager
        self._messages: Any = import_module("sglang.srt.managers.io_struct")
        self._refused: Any = import_module("fastapi").HTTPException
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Execute commands until the test closes the connection."""
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._receive)
        await self._over.wait()

    def _receive(self) -> None:
        try:
            number, name, keywords = self._connection.recv()
        except EOFError:
            self._over.set()
            return
        if name == "generate":
            requests = keywords["requests"]
            names = [f"request-{number}-{at}-" for at in range(len(requests))]
            keywords["requests"] = list(map(Sent, requests, names))
        task = asyncio.create_task(self._carry_out(number, getattr(self, name), keywords))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(
        self,
        number: int,
        command: Callable[..., Coroutine[Any, Any, Any]],
        keywords: dict[str, Any],
    ) -> None:
        try:
            value = await command(**keywords)
        except Exception:  # noqa: BLE001 - whatever failed is the answer.
            self._connection.send((number, traceback.format_exc(), None))
        else:
            self._connection.send((number, None, value))

    async def generate(self, requests: list[Sent], *, together: bool) -> list[Answer]:
        """Send requests, all at once or each after the previous answer; return the answers."""
        if together:
            return list(await asyncio.gather(*map(self._answer, requests)))
        return [await self._answer(sent) for sent in requests]

    async def _answer(self, sent: Sent) -> Answer:
        request = sent.request
        wanted = self._messages.GenerateReqInput(
            rid=sent.name,
            input_ids=list(request.tokens),
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": request.output_tokens,
                "ignore_eos": True,
            },
            return_logprob=request.logprobs,
            stream=request.abort_after is not None,
            cache_salt=request.salt,
            lora_path=request.adapter,
        )
        aborting = asyncio.create_task(self._abort_in_time(sent))
        chunk: dict[str, Any] = {"output_ids": [], "meta_info": {}}
        try:
            async for chunk in self._tokenizer.generate_request(wanted, None):
                sent.streamed = len(chunk["output_ids"])
        except (ValueError, self._refused) as error:
            chunk["meta_info"]["finish_reason"] = {"type": "refused", "message": str(error)}
        finally:
            sent.is_over = True
            await aborting
        return _read(chunk)

    async def _abort_in_time(self, sent: Sent) -> None:
        after = sent.request.abort_after
        if after is None:
            return
        await _until(lambda: sent.is_over or self._has(sent, after), POLLED_S, sent.name)
        if not sent.is_over:
            self._tokenizer.abort_request(sent.name)

    def _has(self, sent: Sent, tokens: int) -> bool:
        return self._is_dispatched(sent) and sent.streamed >= tokens

    def _is_dispatched(self, sent: Sent) -> bool:
        """Return whether the scheduler has the request. SGLang ignores an abort before that."""
        state = self._tokenizer.rid_to_state.get(sent.name)
        return state is not None and state.dispatched

    async def flush(self, within_s: float) -> None:
        """Flush the engine's caches, retrying until the engine is idle."""
        ends = time.monotonic() + within_s
        while not (await self._tokenizer.flush_cache()).success:
            assert time.monotonic() < ends, f"not flushed in {within_s} s"
            await asyncio.sleep(POLL_S)

    async def update_weights(self, **fields: Any) -> tuple[bool, str]:
        """Load weights from disk; return SGLang's result."""
        wanted = self._messages.UpdateWeightFromDiskReqInput(**fields)
        success, message, _ = await self._tokenizer.update_weights_from_disk(wanted)
        return success, message

    async def begin_update(self) -> None:
        await self._tokenizer.begin_weight_update(self._messages.BeginWeightUpdateReqInput(), None)

    async def end_update(self) -> None:
        await self._tokenizer.end_weight_update(self._messages.EndWeightUpdateReqInput(), None)

    async def send_weights(
        self, path: str, part: int, parts: int, **fields: Any
    ) -> tuple[bool, str]:
        serializer: Any = import_module("sglang.srt.utils").MultiprocessingSerializer
        sent = _weights(path)[part::parts]
        wanted = self._messages.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                serializer.serialize(sent) for _ in range(self._engine.server_args.tp_size)
            ],
            **fields,
        )
        success, message = await self._tokenizer.update_weights_from_tensor(wanted, None)
        return success, message

    async def release_memory(self, tags: list[str] | None) -> None:
        wanted = self._messages.ReleaseMemoryOccupationReqInput(tags=tags)
        await self._tokenizer.release_memory_occupation(wanted, None)

    async def resume_memory(self, tags: list[str] | None) -> None:
        wanted = self._messages.ResumeMemoryOccupationReqInput(tags=tags)
        await self._tokenizer.resume_memory_occupation(wanted, None)

    async def attach_storage(self, **fields: Any) -> tuple[bool, str]:
        """Attach a storage backend, as `PUT /hicache/storage-backend` does."""
        answer = await self._tokenizer.attach_hicache_storage(**fields)
        return answer.success, answer.message

    async def detach_storage(self) -> tuple[bool, str]:
        """Detach the storage backend, as `DELETE /hicache/storage-backend` does."""
        answer = await self._tokenizer.detach_hicache_storage()
        return answer.success, answer.message

    async def load_adapter(self, name: str, path: str) -> tuple[bool, str]:
        wanted = self._messages.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path)
        answer = await self._tokenizer.load_lora_adapter(wanted, None)
        return answer.success, answer.error_message or ""

    async def metrics(self) -> str:
        """Return the engine's metrics in Prometheus text format; requires `enable_metrics`."""
        prometheus: Any = import_module("prometheus_client")
        processes: Any = import_module("prometheus_client.multiprocess")
        registry = prometheus.CollectorRegistry()
        processes.MultiProcessCollector(registry)
        text: bytes = prometheus.generate_latest(registry)
        return text.decode()

    async def rpc(self, method: str, keywords: dict[str, Any]) -> None:
        self._engine.collective_rpc(method, **keywords)

    async def shutdown(self, within_s: float) -> list[int]:
        """Ask the ranks to shut down; return the processes that still run after `within_s` seconds."""
        pids: list[int] = self._engine.get_all_child_pids()[: self._engine.server_args.tp_size]
        self._tokenizer._subprocess_watchdog.stop()
        self._tokenizer._dispatch_to_scheduler(self._messages.ShutdownReq())
        with suppress(AssertionError):
            await _until(lambda: not any(map(_runs, pids)), within_s, "shutdown")
        return [pid for pid in pids if _runs(pid)]


def _weights(path: str) -> list[tuple[str, Any]]:
    load: Any = import_module("safetensors.torch").load_file
    tensors = [each for file in Path(path).glob("*.safetensors") for each in load(file).items()]
    return sorted(tensors, key=lambda each: str(each[0]))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends, f"{what}: it did not happen in {within_s} s"
        await asyncio.sleep(POLL_S)


def _read(chunk: dict[str, Any]) -> Answer:
    meta = chunk["meta_info"]
    finish = meta["finish_reason"]
    return Answer(
        tokens=list(chunk["output_ids"]),
        logprobs=[each[0] for each in meta.get("output_token_logprobs", ())],
        cached_tokens=meta.get("cached_tokens", 0),
        cached_by_tier=meta.get("cached_tokens_details") or {},
        retractions=meta.get("num_retractions", 0),
        finish=finish["type"],
    )


def drive(handle: int) -> None:
    """Start the engine with the arguments from the connection, and serve commands."""
    with Connection(handle) as connection:
        arguments = connection.recv()
        try:
            engine = import_module("sglang").Engine(**arguments)
        except Exception:  # noqa: BLE001 - whatever failed is the answer.
            connection.send((STARTED, traceback.format_exc(), None))
            return
        driver = Driver(engine, connection)
        connection.send((STARTED, None, None))
        engine.loop.run_until_complete(driver.serve())
        engine.shutdown()

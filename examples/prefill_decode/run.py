"""Two ranks prefill prompts and one rank decodes them: `python run.py`, or `python run.py --ray`.

Each group is started under torchrun, or its ranks are Ray actors. The producer serves computed pages
from host memory and the consumer prefetches them; their TP sizes may differ. All other data goes from
producer to consumer in one msgpack message. A page of the second request is corrupted in transit, so
the consumer recomputes the page. Exit status 0: pages were transferred, all KV is right, and the
consumer's sampler continued from the producer's sampler state.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from socket import create_connection, create_server, socket

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lockstep import (
    Admission,
    Cache,
    CacheConfig,
    Column,
    LoadState,
    PageLayout,
    Peers,
    StopPolicy,
    Timeouts,
)
from lockstep.launch.replay.ray_cluster import ray_cluster
from lockstep.small_engine.contents import KeyedTokens
from lockstep.small_engine.forward_pass import ForwardPass, TokenSpan
from lockstep.small_engine.request import TokenIds

PREFILL, DECODE = "prefill", "decode"
RANKS = {PREFILL: 2, DECODE: 1}
SEEDS = {"whole": 1, "damaged": 2}
"""The seed of each request, by the request's name. The request's prompt and its sampling derive from
it."""
PAGE_TOKENS, OUTPUTS, VOCABULARY = 16, 20, 50_000
PROMPT_TOKENS = 8 * PAGE_TOKENS + 7
LAYOUT = PageLayout(
    page_tokens=PAGE_TOKENS,
    columns=(Column(name="kv", layers=2, heads=4, elements=128, dtype="float32"),),
)
FAR = "127.0.0.2"
DAMAGED_BYTE = 400_000
"""Position of the corrupted byte among the bytes that the producer's last rank sends. It lies in a page
of the second request."""
PATIENCE_S = 600.0


class Rank:
    """One rank of the producer or consumer. Its model writes different content to every page."""

    def __init__(self, role: str, rank: int, folder: str) -> None:
        """Join the group `role`, whose ranks meet in `folder`. All ranks must see the folder."""
        meets_at = f"file://{folder}/{role}"
        dist.init_process_group("gloo", meets_at, rank=rank, world_size=RANKS[role])
        is_far = role == PREFILL and rank == RANKS[role] - 1
        config = CacheConfig(
            model="example",
            layout=LAYOUT,
            device_pages=64,
            host_pages=128,
            peers=Peers(reached_at=FAR if is_far else ""),
            # Use long timeouts, because a timeout on a slow machine would cause recomputation.
            stop_policy=StopPolicy(base_s=60.0, cap_s=60.0),
            timeouts=Timeouts(lookup_s=60.0),
        )
        self._cache = Cache.open(config)
        self._forward = ForwardPass(self._cache)
        if is_far:
            _lay_bad_cable(int(self._cache.serving_uri.rpartition(":")[2]))

    def prefill(self, name: str) -> bytes:
        """Compute a prompt and serve it; return the handoff message for the consumer."""
        prompt, random = _prompt(name), torch.Generator().manual_seed(SEEDS[name])
        self._cache.load_back(name, prompt[:0], reserve_tokens=len(prompt))
        self._compute(name, prompt, 0)
        self._cache.insert(name, prompt)
        message = {"name": name, "prompt": prompt.tobytes(), "first_token": _sample(random)}
        message["random_state"] = random.get_state().numpy().tobytes()
        whole = len(prompt) // PAGE_TOKENS * PAGE_TOKENS
        self._until(lambda: self._cache.serve(name, prompt, ttl_s=PATIENCE_S) == whole)
        return msgspec.msgpack.encode({**message, "source": self._cache.serving_uri})

    def decode(self, message: bytes) -> str:
        """Decode the request that a handoff message describes; return a line with the result."""
        handed = msgspec.msgpack.decode(message)
        name, prompt = handed["name"], np.frombuffer(handed["prompt"], dtype=np.int32)
        self._cache.prefetch(name, prompt, source=handed["source"])
        self._until(lambda: self._cache.prefetch_done(name))
        found = self._cache.load_back(name, prompt, reserve_tokens=len(prompt) + OUTPUTS)
        assert isinstance(found, Admission)
        self._until(lambda: self._cache.load_state(name) is LoadState.READY)
        wrong = self._wrong_pages(name, prompt[: found.cached_tokens])
        # Compute the pages that are missing or were corrupt.
        self._compute(name, prompt, found.cached_tokens)
        random = torch.Generator()
        random.set_state(torch.frombuffer(bytearray(handed["random_state"]), dtype=torch.uint8))
        answer = [handed["first_token"]]
        tokens = prompt
        while len(answer) < OUTPUTS:
            tokens = np.append(prompt, np.array(answer, dtype=np.int32))
            self._compute(name, tokens, len(tokens) - 1)
            answer.append(_sample(random))
        wrong += self._wrong_pages(name, tokens)
        self._cache.release(name)
        alone = torch.Generator().manual_seed(SEEDS[name])
        is_exact = not wrong and answer == [_sample(alone) for _ in range(OUTPUTS)]
        came = f"{found.cached_tokens} of {len(prompt)} prompt tokens came"
        return f"{name}: {came}, {'exact' if is_exact else 'WRONG'}"

    def close(self) -> None:
        """Close the cache and leave the group. Every rank of the group must do so."""
        self._cache.close()
        dist.destroy_process_group()

    def _compute(self, name: str, tokens: TokenIds, start: int) -> None:
        keyed = KeyedTokens(tokens, PAGE_TOKENS)
        self._forward.compute(
            [TokenSpan(request=name, tokens=keyed, start=start, stop=len(tokens))]
        )
        self._cache.step()

    def _wrong_pages(self, name: str, tokens: TokenIds) -> int:
        found = self._forward.verify(name, KeyedTokens(tokens, PAGE_TOKENS), len(tokens))
        return sum(each.corrupt for each in found.values())

    def _until(self, done: Callable[[], bool]) -> None:
        # `done` is equal on every rank, so all ranks take the same number of steps.
        while not done():
            self._cache.step(idle_s=0.002)


def _prompt(name: str) -> TokenIds:
    return np.random.default_rng(SEEDS[name]).integers(
        VOCABULARY, size=PROMPT_TOKENS, dtype=np.int32
    )


def _sample(random: torch.Generator) -> int:
    return int(torch.randint(VOCABULARY, (1,), generator=random))


def _lay_bad_cable(port: int) -> None:
    """Start a proxy at the address FAR that forwards each connection to this rank's `port`.

    The proxy flips one bit of this rank's replies, to simulate a corruption in transit.
    """
    listening, sent = create_server((FAR, port)), [0]

    def carry(source: socket, sink: socket, *, flips: bool) -> None:
        while data := bytearray(source.recv(1 << 14)):
            at = DAMAGED_BYTE - sent[0]
            if flips and 0 <= at < len(data):
                data[at] ^= 1
            sent[0] += len(data) if flips else 0
            sink.sendall(data)

    def accept() -> None:
        while True:
            reader, server = listening.accept()[0], create_connection(("127.0.0.1", port))
            for source, sink in ((reader, server), (server, reader)):
                flips = {"flips": source is server}
                threading.Thread(
                    target=carry, args=(source, sink), kwargs=flips, daemon=True
                ).start()

    threading.Thread(target=accept, daemon=True).start()


def as_actors(folder: str) -> list[str]:
    """Run each rank as a Ray actor and pass messages between groups; return the decode results."""
    results: list[str] = []
    with ray_cluster(None, ranks=sum(RANKS.values())) as cluster:
        actor, get = cluster.ray.remote(Rank), cluster.ray.get
        prefill, decode = (
            [actor.remote(role, rank, folder) for rank in range(RANKS[role])] for role in RANKS
        )
        for name in SEEDS:
            message = get([each.prefill.remote(name) for each in prefill])[0]
            results.append(get([each.decode.remote(message) for each in decode])[0])
        get([each.close.remote() for each in (*prefill, *decode)])
    return results


def under_torchrun(folder: str) -> list[str]:
    """Start both groups under torchrun; return the results of the decoding group.

    If a process of one group exits with an error, both groups are stopped.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    groups = [
        subprocess.Popen((*torchrun, str(ranks), __file__, role, folder))
        for role, ranks in RANKS.items()
    ]
    try:
        while None in (ended := [each.poll() for each in groups]) and not any(ended):
            time.sleep(0.05)
    finally:
        # Stop both groups, because after one has failed the other would wait for it.
        for each in groups:
            each.terminate()
            each.wait()
    if any(ended):
        sys.exit(f"the groups have ended with {dict(zip(RANKS, ended, strict=True))}")
    return [_messages(folder).get(f"{name}.said").decode() for name in SEEDS]


def one_rank(role: str, folder: str) -> None:
    """Run one rank. Messages pass through a file; in production a router would carry them."""
    number, messages = int(os.environ["RANK"]), _messages(folder)
    rank = Rank(role, number, folder)
    for name in SEEDS:
        if role == PREFILL:
            key, text = name, rank.prefill(name).hex()
        else:
            key, text = f"{name}.said", rank.decode(bytes.fromhex(messages.get(name).decode()))
        if not number:
            messages.set(key, text)
    # Wait for all results, because the producer must serve its pages until all requests are finished.
    messages.wait([f"{name}.said" for name in SEEDS])
    rank.close()


def _messages(folder: str) -> Store:
    # Ignore the type errors: torch's stubs do not export `FileStore`, although it is documented.
    store = dist.FileStore(  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]
        f"{folder}/messages"
    )
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    return store


def main() -> int:
    """Start both groups, print each request's result, and return the exit status."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        one_rank(sys.argv[1], sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description="Hand requests over between two groups.")
    parser.add_argument("--ray", action="store_true", help="start the ranks as Ray actors")
    by_ray = parser.parse_args().ray
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = as_actors(folder) if by_ray else under_torchrun(folder)
        except KeyboardInterrupt:
            return 130
    print(*results, sep="\n")
    came = "whole: 0 of" not in results[0]
    return 0 if came and all(each.endswith("exact") for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())

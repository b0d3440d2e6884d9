"""One rank of the path benchmark: a process that writes prompts, or one that reads them.

All ranks start each repetition of a measurement together. Each rank records its start and finish on the
clock that the processes of a machine share.
"""

import gc
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from ...coordinator.operation import OperationKind
from ...coordinator.stop_policy import StopPolicy, StopRule
from ...errors import StorageError
from ...page_format.object_name import NAME_DIGEST_BYTES, object_path
from ...ranks.executor.base import BytesMoved
from ...ranks.executor.population import POPULATION_THREADS
from ...ranks.group.cache import Cache
from ...ranks.protocol.answers import Admission
from ...ranks.protocol.config import CacheConfig
from ...ranks.replica.operations.requests import LoadState
from ...small_engine.contents import PageContents, chain_keys
from ..rank_processes import RankProcess, Say
from .bare_files import (
    BareFiles,
    StoredPage,
    forget,
    fresh_memory,
    pages_of_files,
    pages_of_slots,
    read_device,
)
from .path_settings import PAGE_TOKENS, PROMPTS, TURNS, PathSettings

_IDLE_S: Final = 0.02
"""Maximum seconds that a step waits for progress while the benchmark has nothing else to do."""
_CAP_S: Final = 120.0
_SEED: Final = b"lockstep bench path"


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """The times at which a rank started and finished a measured action, and its CPU seconds."""

    began: float
    ended: float
    cpu_s: float


@dataclass(slots=True)
class RankSpans:
    """The measurements of one rank: for each measured action, its repetitions in order."""

    turns: dict[str, list[TimedSpan]] = field(default_factory=dict[str, list[TimedSpan]])
    open_s: float = 0.0

    @contextmanager
    def span(self, what: str) -> Generator[None]:
        """Wait for all ranks, then measure the `with` block as one repetition of the action `what`."""
        dist.barrier()
        begun = _now()
        yield
        self.note(what, [_since(begun)])

    def note(self, what: str, parts: Sequence[TimedSpan]) -> None:
        """Record one repetition of an action measured in parts; the parts' durations are added up."""
        began = parts[0].began
        lasted_s = sum(part.ended - part.began for part in parts)
        cpu_s = sum(part.cpu_s for part in parts)
        self.turns.setdefault(what, []).append(TimedSpan(began, began + lasted_s, cpu_s))


def _now() -> TimedSpan:
    now = time.perf_counter()
    return TimedSpan(now, now, time.process_time())


def _since(begun: TimedSpan) -> TimedSpan:
    now = _now()
    return TimedSpan(begun.began, now.ended, now.cpu_s - begun.cpu_s)


def _like_an_engine() -> None:
    """Freeze imported objects, as engines do, so that garbage collection does not visit them."""
    gc.collect()
    gc.freeze()


TokenArray = npt.NDArray[np.int32]


class _Prompt(NamedTuple):
    """The tokens of a prompt, and the id of the request that submits it."""

    request: str
    tokens: TokenArray


class _Prompts:
    """A rank's cache, and the prompts that one process writes and another reads."""

    def __init__(self, settings: PathSettings, member: RankProcess) -> None:
        self.settings = settings
        pages = settings.turn_pages
        config = CacheConfig(
            model=settings.model,
            layout=settings.layout,
            device_pages=pages + 1,
            host_pages=pages * TURNS,
            populate_host=True,
            store=settings.store,
            stop_policy=StopPolicy(rule=StopRule.WAIT_COMPLETE, cap_s=_CAP_S),
        )
        self.cache = Cache.open(config)
        self._contents = PageContents(settings.layout.shard(member.rank, member.ranks))

    def of_turn(self, turn: int) -> list[_Prompt]:
        """Return the prompts of repetition number `turn`; each prompt fills whole pages."""
        noise = np.random.default_rng(turn)
        length = self.settings.prompt_pages * PAGE_TOKENS
        return [
            _Prompt(f"{turn}.{number}", noise.integers(0, 1 << 30, length, dtype=np.int32))
            for number in range(PROMPTS)
        ]

    def admit(self, prompts: Sequence[_Prompt]) -> None:
        """Admit prompts and wait until their cached pages have been loaded back to the device."""
        for prompt in prompts:
            admission = self.cache.load_back(
                prompt.request, prompt.tokens, reserve_tokens=len(prompt.tokens)
            )
            if not isinstance(admission, Admission):
                raise StorageError(f"prompt {prompt.request} was not admitted: {admission}")
        states = (LoadState.READY, LoadState.FAILED)
        self.until(lambda: all(self.cache.load_state(each.request) in states for each in prompts))

    def compute(self, prompts: Sequence[_Prompt]) -> None:
        """Fill the device pages of admitted prompts, as a forward pass would."""
        for prompt in prompts:
            self._contents.fill(self.cache.device_pool, *self._pages(prompt))

    def persist(self, prompt: _Prompt) -> TimedSpan:
        """Insert and release an admitted prompt; return the timing of its write to storage."""
        self.cache.insert(prompt.request, prompt.tokens)
        self.cache.release(prompt.request)
        self.until(self.backed_up)
        begun = _now()
        self.until(lambda: self.cache.inspection.idle)
        return _since(begun)

    def verify(self, prompts: Sequence[_Prompt]) -> None:
        """Raise `StorageError` unless the device pages of admitted prompts are correct to the byte."""
        for prompt in prompts:
            bad = self._contents.verify(self.cache.device_pool, *self._pages(prompt))
            if bad:
                raise StorageError(
                    f"{bad} pages of prompt {prompt.request} were read back with wrong bytes"
                )

    def until(self, done: Callable[[], bool]) -> None:
        """Step the cache until `done()` is true, like an engine without other work."""
        while not done():
            self.cache.step(idle_s=_IDLE_S)

    def backed_up(self) -> bool:
        """Return whether no backup is in flight.

        Each inserted page is then on the host, or its backup has failed.
        """
        in_flight = self.cache.inspection.in_flight.values()
        return all(operation.kind is not OperationKind.BACKUP for operation in in_flight)

    def moved(self) -> BytesMoved:
        """Return the bytes moved between tiers on this rank so far."""
        return self.cache.inspection.executor.counts().bytes_moved

    def _pages(self, prompt: _Prompt) -> tuple[TokenArray, list[bytes]]:
        keys = chain_keys(_SEED, prompt.tokens.tobytes(), PAGE_TOKENS)
        return self.cache.page_table(prompt.request), keys


Work = Callable[[PathSettings, str, RankProcess, Say], RankSpans]


def measure(
    work: Work, settings: PathSettings, namespace: str, member: RankProcess, say: Say
) -> RankSpans:
    """Run the `work` of a rank; convert errors of the operating system into `StorageError`."""
    try:
        return work(settings, namespace, member, say)
    except OSError as error:
        raise StorageError(
            f"the benchmark failed: {error.strerror or error}; it needs"
            f" {settings.ranks * settings.rank_bytes} bytes of free space in {settings.limit_directory}"
            " and four times as much memory; give less with --bytes"
        ) from error


def write_prompts(
    settings: PathSettings, namespace: str, member: RankProcess, say: Say
) -> RankSpans:
    """Write all prompts through a cache.

    Before each repetition, write the same number of bytes by bare system calls, as the upper bound.
    """
    _like_an_engine()
    spans = RankSpans()
    bare = BareFiles(settings.page_bytes, settings.threads, direct=settings.direct)
    directory = settings.limit_directory / f"bench-{namespace[:16]}-{member.rank}"
    directory.mkdir(parents=True)
    memory = fresh_memory(settings.turn_bytes, touched=True)
    # Write and delete some files before the measurement, because the first files are slower: the kernel
    # allocates new memory for them, and reuses that memory for later files.
    names = [f"first-{page}" for page in range(settings.turn_pages)]
    bare.write(directory, names, memory)
    _unlink(directory, names)
    prompts = _Prompts(settings, member)
    try:
        for turn in range(TURNS):
            _progress(say, member, f"writing, turn {turn + 1} of {TURNS}")
            names = [f"{turn}-{page}" for page in range(settings.turn_pages)]
            with spans.span("limit_l2_l3"):
                bare.write(directory, names, memory)
            if settings.in_directory:
                _unlink(directory, names)
            of_turn = prompts.of_turn(turn)
            prompts.admit(of_turn)
            prompts.compute(of_turn)
            spans.note("l2_l3", [prompts.persist(prompt) for prompt in of_turn])
        stored = prompts.moved().l2_to_l3
        if stored != settings.turn_bytes * TURNS:
            raise StorageError(
                f"the store took {stored} bytes of {settings.turn_bytes * TURNS}; check its free space"
            )
    finally:
        prompts.cache.close()
        bare.close()
    return spans


def read_prompts(
    settings: PathSettings, namespace: str, member: RankProcess, say: Say
) -> RankSpans:
    """Read all prompts through a new cache.

    Before each repetition, read the same number of bytes by bare system calls, as the upper bound.
    """
    _like_an_engine()
    spans = RankSpans()
    bare = BareFiles(settings.page_bytes, settings.threads, direct=settings.direct)
    shares = _shares(settings, namespace, member)
    _take_from_host(settings.turn_bytes * (TURNS + 1))
    _forget_all(settings, shares)
    cold = fresh_memory(settings.turn_bytes, touched=False)
    with spans.span("limit_first"):
        bare.read(shares[0], cold)
    warm = fresh_memory(settings.turn_bytes * TURNS, touched=True)
    _forget_all(settings, shares)
    if settings.cold:
        with spans.span("device"):
            read_device(shares[0], settings.page_bytes)
    _take_from_host(settings.turn_bytes * (TURNS + 2))
    began = time.perf_counter()
    prompts = _Prompts(settings, member)
    spans.open_s = time.perf_counter() - began
    try:
        for turn in range(TURNS):
            _progress(say, member, f"reading, turn {turn + 1} of {TURNS}")
            if turn:
                into = warm[turn * settings.turn_bytes :][: settings.turn_bytes]
                _forget_all(settings, shares)
                with spans.span("limit_l3_l2"):
                    bare.read(shares[turn], into)
                _forget_all(settings, shares)
            _read(prompts, turn, spans)
            _load(prompts, turn, spans, warm)
            _until_populated()
    finally:
        prompts.cache.close()
        bare.close()
    return spans


def _unlink(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        (directory / name).unlink()


def _read(prompts: _Prompts, turn: int, spans: RankSpans) -> None:
    cache, before = prompts.cache, prompts.moved().l3_to_l2
    of_turn = prompts.of_turn(turn)
    with spans.span("l3_l2" if turn else "first"):
        for prompt in of_turn:
            cache.prefetch(prompt.request, prompt.tokens)
        prompts.until(lambda: all(cache.prefetch_done(each.request) for each in of_turn))
    wanted, came = prompts.settings.turn_bytes, prompts.moved().l3_to_l2 - before
    if came != wanted:
        raise StorageError(
            f"the store returned {came} bytes of {wanted}; check the warnings above and its other"
            " clients"
        )


def _load(prompts: _Prompts, turn: int, spans: RankSpans, memory: memoryview) -> None:
    nbytes = prompts.settings.turn_bytes
    source = np.frombuffer(memory[turn * nbytes : (turn + 1) * nbytes], dtype=np.uint8)
    target = np.frombuffer(memory[:nbytes] if turn else memory[nbytes:][:nbytes], dtype=np.uint8)
    step = prompts.settings.page_bytes
    with spans.span("limit_l2_l1"):
        # Copy each page separately, as the cache does. One large copy would be faster, because it would
        # bypass the CPU caches.
        for at in range(0, nbytes, step):
            np.copyto(target[at : at + step], source[at : at + step])
    of_turn = prompts.of_turn(turn)
    with spans.span("l2_l1"):
        prompts.admit(of_turn)
    prompts.verify(of_turn)
    for prompt in of_turn:
        prompts.cache.release(prompt.request)


def _forget_all(settings: PathSettings, shares: Sequence[Sequence[StoredPage]]) -> None:
    """If `cold`, drop the stored files of all ranks from the page cache while no rank reads."""
    if settings.cold:
        dist.barrier()
        forget([page for share in shares for page in share])


def _shares(
    settings: PathSettings, namespace: str, member: RankProcess
) -> Sequence[Sequence[StoredPage]]:
    """Return, for each repetition, the stored pages that this rank reads by bare system calls."""
    count = settings.turn_pages * TURNS
    directory = Path(settings.uri.path)
    if settings.files_of_its_own:
        path = object_path(namespace, bytes(NAME_DIGEST_BYTES))
        found = pages_of_files((directory / path).parents[1], settings.page_bytes)
    elif settings.slots:
        found = pages_of_slots(directory, settings.slot_bytes, namespace)
    else:
        found = [
            page
            for folder in sorted(settings.limit_directory.glob(f"bench-{namespace[:16]}-*"))
            for page in pages_of_files(folder, settings.page_bytes)
        ]
    if len(found) != count * member.ranks:
        raise StorageError(f"the files have {len(found)} pages, must be {count * member.ranks}")
    mine = found[member.rank * count : (member.rank + 1) * count]
    return [mine[at : at + settings.turn_pages] for at in range(0, count, settings.turn_pages)]


def _take_from_host(nbytes: int) -> None:
    """Touch `nbytes` of memory, so that the host's hypervisor need not supply memory later.

    A hypervisor may reclaim a virtual machine's free memory. Supplying the memory again takes twenty
    times as long as clearing it. This would distort the measurement that allocates the memory.
    """
    dist.barrier()
    memory = fresh_memory(nbytes, touched=True)
    dist.barrier()
    del memory


def _until_populated() -> None:
    """Wait until the cache's host memory is populated, because populating slows measured calls."""
    for thread in threading.enumerate():
        if thread.name == POPULATION_THREADS:
            thread.join()


def _progress(say: Say, member: RankProcess, what: str) -> None:
    if not member.rank:
        say(what)

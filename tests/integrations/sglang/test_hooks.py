"""SGLang's hooks, and decisions that all ranks take alike although SGLang uses local clocks.

Small stand-ins have the attributes of SGLang's objects.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.integrations.sglang import hooks
from lockstep.integrations.sglang.identity.kv_identity import Update
from lockstep.integrations.sglang.scheduler_controls import SchedulerControls
from lockstep.integrations.sglang.weights import WeightsUpdate
from tests.kit.ranks.in_turn import HostRanksInTurn

TIMEOUT_S = 10.0


class Cache:
    """Stand-in for Lockstep's cache, which records each call: its name and its arguments."""

    def __init__(self, controls: object) -> None:
        self.lockstep, self.calls = controls, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: self.calls.append((name, *given, *named.values()))

    def check_prefetch_progress(self, handle: str) -> bool:
        return handle != "not yet"


class Scheduler:
    def __init__(self, controls: object = None) -> None:
        self.idle = False
        self.tree_cache = Cache(controls)
        self.calls = self.tree_cache.calls

    def flush_cache(self) -> bool:
        return True


class Flushes:
    """Stand-in for SGLang's deferred flush, which waits for an idle engine or a local timeout."""

    def __init__(self, scheduler: Any, clock_s: float) -> None:
        self.scheduler, self.clock_s = scheduler, clock_s
        self._flush_cache = scheduler.flush_cache
        self._pending: tuple[Any, float] | None = None
        self.answers: list[bool] = []

    @property
    def pending(self) -> object:
        return self._pending

    def handle(self, timeout_s: float) -> None:
        request = SimpleNamespace(timeout_s=timeout_s)
        self._pending = request, self.clock_s + timeout_s
        hooks.after_deferred_flush(None, self, request)

    def check(self) -> None:
        hooks.around_deferred_flush(Flushes._check, self)

    def _check(self) -> None:
        if self._pending is not None and (self.scheduler.idle or self.clock_s >= self._pending[1]):
            self.answers.append(self.scheduler.idle)
            self._pending = None


class Session:
    """A client's session; the time of its last activity is read from the rank's clock."""

    def __init__(self, active_s: float, timeout: float | None = TIMEOUT_S) -> None:
        self.last_active_time, self.timeout = active_s, timeout


def without_agreed_time(session: Session) -> bool:
    """Stand-in for SGLang's check of a session, with a clock at which every timeout has expired."""
    return session.timeout is not None


class Sessions:
    def __init__(self, tree_cache: object, **sessions: Session) -> None:
        self.tree_cache, self.sessions = tree_cache, sessions
        self.asked_at: list[float] = []

    def reap(self, now: float) -> list[str]:
        reaped: list[str] = hooks.around_reaping(Sessions._reap, self, now)
        return reaped

    def _reap(self, now: float, interval: float) -> list[str]:
        assert interval == 1.0
        self.asked_at.append(now)
        out = [
            name
            for name, each in self.sessions.items()
            if hooks.is_timed_out(without_agreed_time, each)
        ]
        for name in out:
            del self.sessions[name]
        return out


class Clocked:
    """Two ranks with different clocks and one agreed time."""

    def __init__(self) -> None:
        self.ranks = HostRanksInTurn(2, store=False)
        self.controls = [
            SchedulerControls(each, compare_batches=False) for each in self.ranks.caches
        ]
        self.schedulers = [Scheduler(each) for each in self.controls]

    def step(self, *seconds: float) -> None:
        """Run one round; `seconds` has the time on each rank's clock."""
        self.ranks.now_ms[:] = [int(each * 1000) for each in seconds]
        self.ranks.step()


@pytest.fixture
def clocked() -> Clocked:
    made = Clocked()
    made.step(1000, 1000)
    return made


def test_a_deferred_flush_times_out_in_the_same_step_on_every_rank(clocked: Clocked) -> None:
    waiting = [
        Flushes(each, clock_s) for each, clock_s in zip(clocked.schedulers, (0, 1e9), strict=True)
    ]
    for each in waiting:
        each.handle(TIMEOUT_S)

    answers: list[list[list[bool]]] = []
    for late in (0, 9, 20):
        clocked.step(1000 + late, 1000 + late)
        answers.append([_checked(each, clock_s=late * 1e9) for each in waiting])

    assert answers == [[[], []], [[], []], [[False], [False]]]
    assert [each.pending for each in waiting] == [None, None]


def _checked(flushes: Flushes, clock_s: float) -> list[bool]:
    """Set the clock and check the deferred flushes; return the answers to all flushes so far."""
    flushes.clock_s = clock_s
    flushes.check()
    return flushes.answers.copy()


def test_a_deferred_flush_that_finds_the_engine_idle_is_carried_out(clocked: Clocked) -> None:
    flushes = Flushes(clocked.schedulers[0], 0)
    flushes.handle(TIMEOUT_S)
    clocked.schedulers[0].idle = True

    assert _checked(flushes, 0) == [True]
    assert _checked(flushes, 0) == [True]


def test_a_flush_that_was_answered_at_once_waits_for_nothing(clocked: Clocked) -> None:
    flushes = Flushes(clocked.schedulers[0], 0)

    hooks.after_deferred_flush(object(), flushes, SimpleNamespace(timeout_s=None))

    assert flushes.pending is None


def test_a_session_times_out_in_the_same_step_on_every_rank(clocked: Clocked) -> None:
    kept = [
        Sessions(each.tree_cache, a=Session(active_s), lasts=Session(active_s, timeout=None))
        for each, active_s in zip(clocked.schedulers, (3, 1e9), strict=True)
    ]

    reaped: list[list[list[str]]] = []
    for late in (1, 2, 3, 12, 14):
        clocked.step(1000 + late, 1000 + late)
        reaped.append([each.reap(rank * 1e9) for rank, each in enumerate(kept)])

    assert reaped == [[[], []]] * 4 + [[["a"], ["a"]]]
    assert kept[0].asked_at == kept[1].asked_at == [1001, 1002, 1003, 1012, 1014]
    assert [[*each.sessions] for each in kept] == [["lasts"]] * 2


def test_a_session_that_is_active_again_begins_anew(clocked: Clocked) -> None:
    session = Session(1)
    sessions = Sessions(clocked.schedulers[0].tree_cache, a=session)
    for late in (1, 2, 3):
        clocked.step(1000 + late, 1000 + late)
        sessions.reap(0)

    session.last_active_time = 2
    reaped: list[list[str]] = []
    for late in (12, 13, 14, 23, 25):
        clocked.step(1000 + late, 1000 + late)
        reaped.append(sessions.reap(0))

    assert reaped == [[], [], [], [], ["a"]]


def test_a_step_that_took_long_ends_no_session_that_became_active_after_it(
    clocked: Clocked,
) -> None:
    """A session that became active after a slow step does not expire by the step's old agreed time."""
    sessions = Sessions(clocked.schedulers[0].tree_cache, a=Session(1))

    reaped = [sessions.reap(0)]
    for late in (1, 3600, 3601):
        clocked.step(1000 + late, 1000 + late)
        reaped.append(sessions.reap(0))

    assert reaped == [[], [], [], []]


FILES = SimpleNamespace(weight_version="7", model_path="/step", load_format="auto")
TENSORS = SimpleNamespace(weight_version=None, load_format="direct")
BUSY = "Weights were updated, but the cache was not flushed because requests are still running"
NO_FILES = "Failed to get weights iterator: no files."


@pytest.mark.parametrize(
    ("request_", "success", "message", "arguments"),
    [
        (FILES, True, "", (WeightsUpdate.ALL, Update("7", "/step", "auto"))),
        (FILES, False, BUSY, (WeightsUpdate.ALL, Update("7", "/step", "auto"))),
        (FILES, False, NO_FILES, (WeightsUpdate.NOTHING, Update("7", "/step", "auto"))),
        (FILES, False, "Rolling back", (WeightsUpdate.PERHAPS, Update("7", "/step", "auto"))),
        (TENSORS, True, "", (WeightsUpdate.ALL, Update())),
        (TENSORS, False, NO_FILES, (WeightsUpdate.PERHAPS, Update())),
    ],
    ids=["files", "busy", "no files", "rolled back", "tensors", "not all tensors"],
)
def test_copies_end_before_an_update_and_its_outcome_is_told_after_it(
    request_: Any, success: bool, message: str, arguments: tuple[WeightsUpdate, Update]
) -> None:
    scheduler = Scheduler()

    def update(updater: Any, request: Any) -> Any:
        scheduler.calls.append(("update",))
        return SimpleNamespace(success=success, message=message)

    outcome = hooks.around_update(update, SimpleNamespace(scheduler=scheduler), request_)

    assert outcome.success is success
    assert scheduler.calls == [
        ("weights_may_change",),
        ("update",),
        ("weights_changed", *arguments),
    ]


@pytest.mark.parametrize(("is_open", "calls"), [(False, [("weights_session_begins",)]), (True, [])])
def test_a_session_of_updates_is_told_from_before_its_begin_until_after_its_end(
    is_open: bool, calls: list[tuple[str]]
) -> None:
    scheduler = Scheduler()
    updater = SimpleNamespace(scheduler=scheduler, _session=object() if is_open else None)

    def begin(updater: Any, request: Any) -> None:
        assert scheduler.calls == calls
        updater._session = object()

    def end(updater: Any, request: Any) -> None:
        scheduler.calls.append(("end",))
        updater._session = None

    hooks.around_session_begin(begin, updater, None)
    hooks.around_session_end(end, updater, None)
    # The hook passes a session's end to SGLang even if the session never began, so that SGLang refuses
    # the end.
    hooks.around_session_end(end, updater, None)

    assert scheduler.calls == [*calls, ("end",), ("weights_session_ends",), ("end",)]


def test_sglang_asks_whether_a_request_may_be_admitted_also_without_a_store() -> None:
    lockstep, other = Scheduler(), Other()

    for scheduler in (lockstep, other):
        hooks.before_loop(scheduler)

    assert vars(lockstep)["enable_lmcache"]
    assert not vars(other)


def test_a_cache_hears_in_which_order_requests_are_visited_and_what_room_there_is() -> None:
    scheduler = Scheduler()
    policy = SimpleNamespace(tree_cache=scheduler.tree_cache)
    adder = SimpleNamespace(
        tree_cache=scheduler.tree_cache, memory_budget="room", can_run_list=["admitted"]
    )

    hooks.after_order(None, policy, ["first", "second"], "running batch", processed_tokens=3)
    hooks.before_visit(adder, "first", has_chunked_req=False)

    assert scheduler.calls == [("will_visit", ["first", "second"]), ("visits", "room", 1)]


def test_whom_sglang_preempts_is_queued_in_one_order_and_nobody_is_for_one_that_waits() -> None:
    others = [SimpleNamespace(rid=name) for name in "cab"]
    before = SimpleNamespace(rid="z")
    adder = SimpleNamespace(tree_cache=Scheduler().tree_cache, preempt_list=[before])

    def preempt(adder: Any, request: Any) -> bool:
        adder.preempt_list.extend(others)
        return True

    results = [
        hooks.around_preemption(preempt, adder, SimpleNamespace(cache_request_handle=each))
        for each in ("not yet", "ready")
    ]

    assert results == [False, True]
    assert [each.rid for each in adder.preempt_list] == ["z", "a", "b", "c"]


@pytest.mark.parametrize(("session", "count"), [(None, 0), (object(), 2)])
def test_an_update_outside_a_session_is_refused_and_nothing_is_forgotten_for_it(
    session: object, count: int
) -> None:
    scheduler = Scheduler()
    updater = SimpleNamespace(scheduler=scheduler, _session=session)
    request = SimpleNamespace(weight_version=None)
    refused = SimpleNamespace(success=False, message="outside a session")

    outcome = hooks.around_update_in_session(lambda *_: refused, updater, request)

    assert outcome is refused
    assert len(scheduler.calls) == count


def test_a_cache_hears_of_a_flush_of_sleep_of_idleness_and_of_adapters() -> None:
    scheduler = Scheduler()

    hooks.before_flush(scheduler, empty_cache=True)
    hooks.before_sleep(SimpleNamespace(scheduler=scheduler), object())
    hooks.on_idle(scheduler)
    hooks.after_adapter_load(object(), scheduler, None)

    names = [name for name, *_ in scheduler.calls]
    assert names == ["settle", "settle", "engine_idles", "adapters_were_loaded"]


def files(streamer: object) -> str:
    """Stand-in for SGLang's function, which returns `file` as the type of a HiCache store."""
    return "file"


def test_the_store_s_scheme_is_what_sglang_tells_of_cached_tokens() -> None:
    controls = SchedulerControls(HostRanksInTurn(1).caches[0], compare_batches=False)
    streamer = SimpleNamespace(tree_cache=SimpleNamespace(lockstep=controls))

    assert hooks.storage_type(files, streamer) == "memory"


def test_a_batch_is_compared_before_it_is_computed_and_one_that_fails_is_told_of() -> None:
    controls = Cache(None)

    def fail(scheduler: Any, batch: Any, *more: Any) -> Any:
        assert (controls.calls, more) == ([("batch_is_next", "batch")], (7,))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.around_batch(fail, Scheduler(controls), "batch", 7)
    assert controls.calls == [("batch_is_next", "batch"), ("batch_failed",)]


class Other:
    tree_cache = object()

    flush_cache = Scheduler.flush_cache


OTHERS: dict[str, Callable[[], Any]] = {
    "idle": lambda: hooks.on_idle(Other()),
    "no cache yet": lambda: hooks.on_idle(SimpleNamespace()),
    "flush": lambda: hooks.before_flush(Other()),
    "adapters": lambda: hooks.after_adapter_load(None, Other(), None),
    "order": lambda: hooks.after_order(None, Other(), []),
    "visit": lambda: hooks.before_visit(Other(), None),
    "sleep": lambda: hooks.before_sleep(SimpleNamespace(scheduler=Other()), None),
    "deferred flush": lambda: Flushes(Other(), 0).handle(1),
    "pending flush": lambda: Flushes(Other(), 0).check(),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_an_engine_with_another_cache_hears_nothing(call: Callable[[], Any]) -> None:
    assert call() is None


def test_an_engine_with_another_cache_does_as_ever() -> None:
    scheduler = SimpleNamespace(scheduler=Other())
    sessions = SimpleNamespace(tree_cache=object())
    streamer = SimpleNamespace(tree_cache=object())

    assert hooks.around_update(lambda *given: len(given), scheduler, None) == 2
    assert hooks.around_batch(lambda *given: len(given), Other(), None, 1) == 3
    assert hooks.around_preemption(lambda *given: len(given) == 2, Other(), None)
    assert hooks.around_reaping(lambda *given: given[1:], sessions, 5.0) == (5.0, 1.0)
    assert hooks.storage_type(files, streamer) == "file"
    assert hooks.is_timed_out(without_agreed_time, Session(0))


def test_a_request_of_which_less_is_cached_than_when_it_came_is_not_read_again() -> None:
    requests: list[str] = []

    def read_again(scheduler: object, request: str) -> bool:
        requests.append(request)
        return True

    ours, others = Scheduler(), SimpleNamespace(tree_cache=SimpleNamespace())

    assert not hooks.around_hit_loss(read_again, ours, "r")
    assert hooks.around_hit_loss(read_again, others, "s")
    assert requests == ["s"]

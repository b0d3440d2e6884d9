"""Hooks into SGLang for events that Lockstep needs and that SGLang does not report to its cache.

Each hook does nothing in an engine that does not use Lockstep's cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ..starting import ending_the_start
from .identity.kv_identity import Update
from .refusals import read_settings
from .weights import WeightsUpdate

NAME = "lockstep"
"""The value of `--radix-cache-backend` that selects Lockstep."""

_CHECKS = "sglang.srt.arg_groups.validation_hook.check_server_args"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POLICY = "sglang.srt.managers.schedule_policy"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"

_FLUSHES = "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper"
_SESSIONS = "sglang.srt.session.session_controller"

_UPDATES = ("update_weights_from_disk", "update_weights_from_ipc")
_UPDATES_IN_SESSION = ("update_weights_from_distributed", "update_weights_from_tensor")
_LOADS_OF_ADAPTERS = ("load_lora_adapter", "load_lora_adapter_from_tensors")

_FLUSH_REFUSED = "Weights were updated"
"""First words of SGLang's message after a weight update whose cache flush was refused because the
engine was busy."""
_NOT_BEGUN = "Failed to get "
"""First words of SGLang's message that a weight update failed before it read any weight file."""

_ACTIVITY = "_lockstep_activity"
"""Name of the attribute that the hooks add to an SGLang chat session; its value is an `_Activity`."""


@dataclass(slots=True)
class _Activity:
    """Last activity of an SGLang chat session, in agreed time and by this rank's clock."""

    own_s: float
    """Time of the session's last activity by this rank's clock. A change of this time shows new
    activity."""
    since_s: float
    now_s: float
    unsure: int = 2
    """Number of next rounds whose agreed time may still be older than the session's last activity.

    Until these rounds have completed, each new agreed time is stored in `since_s` as the time of the
    last activity, so that no session times out early.
    """

    def look(self, agreed_s: float) -> None:
        """Record the agreed time of a round.

        The first two new agreed times after an activity are also stored as the time of the session's
        last activity (see `unsure`).
        """
        if self.unsure and agreed_s > self.now_s:
            self.unsure -= 1
            self.since_s = agreed_s
        self.now_s = agreed_s


def register_hooks() -> None:
    """Register all hooks; SGLang applies them after it has loaded all plug-ins."""
    # Import SGLang here, so that the hooks can be tested without SGLang.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    register = HookRegistry.register
    register(_CHECKS, after_check, HookType.AFTER)
    register(f"{_SCHEDULER}.run_event_loop", before_loop, HookType.BEFORE)
    register(f"{_SCHEDULER}.on_idle", on_idle, HookType.BEFORE)
    register(f"{_POLICY}.SchedulePolicy.calc_priority", after_order, HookType.AFTER)
    register(f"{_POLICY}.PrefillAdder.add_one_req", before_visit, HookType.BEFORE)
    register(f"{_POLICY}.PrefillAdder.preempt_to_schedule", around_preemption, HookType.AROUND)
    register(f"{_SCHEDULER}.flush_cache", before_flush, HookType.BEFORE)
    for name in _UPDATES:
        register(f"{_UPDATER}.{name}", around_update, HookType.AROUND)
    for name in _UPDATES_IN_SESSION:
        register(f"{_UPDATER}.{name}", around_update_in_session, HookType.AROUND)
    register(f"{_UPDATER}.begin_weight_update", around_session_begin, HookType.AROUND)
    register(f"{_UPDATER}.end_weight_update", around_session_end, HookType.AROUND)
    for name in _LOADS_OF_ADAPTERS:
        register(f"{_SCHEDULER}.{name}", after_adapter_load, HookType.AFTER)
    register(f"{_UPDATER}.release_memory_occupation", before_sleep, HookType.BEFORE)
    register(f"{_STREAMER}._get_storage_backend_type", storage_type, HookType.AROUND)
    register(f"{_SCHEDULER}.run_batch", around_batch, HookType.AROUND)
    register(f"{_SCHEDULER}._prefetch_after_device_hit_loss", around_hit_loss, HookType.AROUND)
    register(f"{_FLUSHES}.handle", after_deferred_flush, HookType.AFTER)
    register(f"{_FLUSHES}.check_pending", around_deferred_flush, HookType.AROUND)
    register(f"{_SESSIONS}.SessionController.maybe_reap", around_reaping, HookType.AROUND)
    register(f"{_SESSIONS}.Session.is_timed_out", is_timed_out, HookType.AROUND)


def after_check(outcome: Any, server_args: Any) -> None:
    """Check Lockstep's settings during SGLang's own checks, before any process starts."""
    if server_args.radix_cache_backend != NAME:
        return
    import sglang  # noqa: PLC0415
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: PLC0415

    with ending_the_start():
        read_settings(server_args, resolving_view(server_args), sglang.__version__)


def before_loop(scheduler: Any) -> None:
    """Set `enable_lmcache`, so that SGLang asks the cache before every admission.

    Without this flag, SGLang asks only a cache that has a store.
    """
    if _lockstep(scheduler) is not None:
        scheduler.enable_lmcache = True


def after_order(outcome: Any, policy: Any, queue: Any, *args: Any, **kwargs: Any) -> None:
    """Pass the waiting requests, which SGLang has just sorted for admission, to the cache."""
    cache = _lockstep(policy)
    if cache is not None:
        cache.will_visit(queue)


def before_visit(adder: Any, *args: Any, **kwargs: Any) -> None:
    """Pass SGLang's memory budget to the cache just before SGLang visits a waiting request."""
    cache = _lockstep(adder)
    if cache is not None:
        cache.visits(adder.memory_budget, len(adder.can_run_list))


def around_preemption(original: Callable[..., bool], adder: Any, request: Any) -> bool:
    """Preempt only for a request that may be admitted, and requeue in the same order on every rank.

    Without the hook, SGLang preempts before it asks whether the new request may be admitted. A request
    that waits for storage would then preempt others in each iteration. SGLang also requeues preempted
    requests in the iteration order of a set, which differs between ranks. The hook sorts the requests
    by id.
    """
    cache = _lockstep(adder)
    if cache is None:
        return original(adder, request)
    if not cache.check_prefetch_progress(request.cache_request_handle):
        return False
    begin = len(adder.preempt_list)
    preempted = original(adder, request)
    adder.preempt_list[begin:] = sorted(adder.preempt_list[begin:], key=lambda each: each.rid)
    return preempted


def on_idle(scheduler: Any) -> None:
    """Allow the next step to wait for storage and copies, because the engine is idle."""
    cache = _lockstep(scheduler)
    if cache is not None:
        cache.engine_idles()


def before_flush(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Finish loads from host memory before a flush, because SGLang refuses to flush during loads."""
    cache = _lockstep(scheduler)
    if cache is not None:
        cache.settle()


def before_sleep(updater: Any, request: Any) -> None:
    """Finish all copies before SGLang releases the memory that they access."""
    cache = _lockstep(updater.scheduler)
    if cache is not None:
        cache.settle()


def around_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Finish all copies before a weight update, and record the result after the update."""
    cache = _lockstep(updater.scheduler)
    if cache is None:
        return original(updater, request)
    path, load_format = (getattr(request, name, None) for name in ("model_path", "load_format"))
    cache.weights_may_change()
    outcome = original(updater, request)
    update = Update(request.weight_version, path, load_format if path else None)
    cache.weights_changed(_taken(outcome, of_files=path is not None), update)
    return outcome


def _taken(outcome: Any, *, of_files: bool) -> WeightsUpdate:
    if outcome.success or outcome.message.startswith(_FLUSH_REFUSED):
        return WeightsUpdate.ALL
    begun = not (of_files and outcome.message.startswith(_NOT_BEGUN))
    return WeightsUpdate.PERHAPS if begun else WeightsUpdate.NOTHING


def around_update_in_session(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Handle an update within a weight-update session in the same way as an update outside one.

    Without a session, SGLang refuses this kind of update, so the hook only calls SGLang's method.
    """
    if updater._session is None:  # noqa: SLF001
        return original(updater, request)
    return around_update(original, updater, request)


def around_session_begin(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Stop caching when a weight-update session begins, because it changes weights part by part."""
    cache = _lockstep(updater.scheduler)
    # Do nothing during a weight-update session, because SGLang refuses to begin a second one.
    if cache is not None and updater._session is None:  # noqa: SLF001
        cache.weights_session_begins()
    return original(updater, request)


def around_session_end(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Resume caching with the new weights when a weight-update session ends."""
    is_open = updater._session is not None  # noqa: SLF001
    outcome = original(updater, request)
    cache = _lockstep(updater.scheduler)
    if cache is not None and is_open:
        cache.weights_session_ends()
    return outcome


def after_adapter_load(outcome: Any, scheduler: Any, request: Any) -> None:
    """Hash an adapter's files right after SGLang has read them, before they can change."""
    cache = _lockstep(scheduler)
    if cache is not None:
        cache.adapters_were_loaded()


def storage_type(original: Callable[..., str], streamer: Any) -> str:
    """Return the URI scheme of the store; SGLang reports it in `cached_tokens_details`."""
    controls = getattr(streamer.tree_cache, "lockstep", None)
    return original(streamer) if controls is None else str(controls.storage_scheme)


def around_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add a batch to the state digest; if the batch fails, log whether all ranks ran the same batch."""
    cache = _lockstep(scheduler)
    if cache is None:
        return original(scheduler, batch, *args, **kwargs)
    cache.lockstep.batch_is_next(batch)
    try:
        return original(scheduler, batch, *args, **kwargs)
    except Exception:
        cache.lockstep.batch_failed()
        raise


def around_hit_loss(original: Callable[..., bool], scheduler: Any, request: Any) -> bool:
    """Skip SGLang's second prefetch of a request that lost part of its device hit.

    Lockstep has already requested the whole prefix from storage. A second prefetch would read storage
    again, and would hold a state slot until the prefetch ends.
    """
    return _lockstep(scheduler) is None and original(scheduler, request)


# The hooks below time out flushes and sessions by agreed time, which is equal on all ranks in one
# iteration. SGLang itself uses each rank's clock.


def after_deferred_flush(outcome: Any, wrapper: Any, request: Any) -> None:
    """Set a deadline in agreed time for a flush that waits until the engine is idle."""
    cache = _lockstep(_scheduler_of(wrapper))
    if cache is not None and outcome is None:
        deadline_s = cache.lockstep.agreed_s + float(request.timeout_s)
        wrapper._pending = (request, deadline_s)  # noqa: SLF001


def around_deferred_flush(original: Callable[..., Any], wrapper: Any) -> None:
    """Time out, in the same iteration on every rank, a flush that waits until the engine is idle."""
    cache, pending = _lockstep(_scheduler_of(wrapper)), _pending(wrapper)
    if cache is None or pending is None:
        original(wrapper)
        return
    request, deadline_s = pending
    wrapper._pending = (request, -inf if cache.lockstep.agreed_s >= deadline_s else inf)  # noqa: SLF001
    original(wrapper)
    if _pending(wrapper) is not None:
        wrapper._pending = pending  # noqa: SLF001


def _pending(wrapper: Any) -> Any:
    return wrapper._pending  # noqa: SLF001


def _scheduler_of(wrapper: Any) -> Any:
    return wrapper._flush_cache.__self__  # noqa: SLF001


def around_reaping(
    original: Callable[..., Any], controller: Any, now: float, interval: float = 1.0
) -> Any:
    """Time out SGLang's chat sessions in the same iteration on every rank."""
    if not hasattr(controller.tree_cache, "lockstep"):
        return original(controller, now, interval)
    agreed_s = controller.tree_cache.lockstep.agreed_s
    for session in controller.sessions.values():
        activity: _Activity | None = getattr(session, _ACTIVITY, None)
        if activity is None or activity.own_s != session.last_active_time:
            activity = _Activity(session.last_active_time, agreed_s, agreed_s)
            setattr(session, _ACTIVITY, activity)
        activity.look(agreed_s)
    return original(controller, agreed_s, interval)


def is_timed_out(original: Callable[..., bool], session: Any) -> bool:
    """Return whether a chat session's last activity is longer ago than its timeout, in agreed time."""
    activity: _Activity | None = getattr(session, _ACTIVITY, None)
    if activity is None or session.timeout is None:
        return original(session)
    return bool(activity.now_s - activity.since_s > session.timeout)


def _lockstep(scheduler: Any) -> Any:
    """Return the `tree_cache` of an SGLang object if this is Lockstep's cache, else None."""
    cache = getattr(scheduler, "tree_cache", None)
    return cache if hasattr(cache, "lockstep") else None

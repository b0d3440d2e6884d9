"""Starting the ranks of a replay, by the launcher that was chosen: `lockstep replay`."""

from ...small_engine.workload import count_requests
from ..cli.report_files import check_that_writable
from ..cli.settings import ReplaySettings
from .options import LaunchChoice, replay_command
from .pool_memory import check_pool_memory


def launch(settings: ReplaySettings, choice: LaunchChoice) -> int:
    """Check what can be checked before ranks exist, replay, and return the exit status."""
    count_requests(settings.trace, settings.requests)
    if choice.ray_address is None:
        check_pool_memory(settings, ranks_here=settings.ranks)
    if settings.report is not None:
        check_that_writable(settings.report)
    if settings.timeline is not None:
        check_that_writable(settings.timeline, "timeline")
    if choice.launcher == "ray":
        from .ray_replay import launch_with_ray

        return launch_with_ray(settings, choice)
    from .torch_launcher import launch_with_torch

    return launch_with_torch(settings)


replay = replay_command(launch)

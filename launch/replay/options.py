"""Options of `lockstep replay`, and of a rank under torchrun."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Final

from cyclopts import App, Parameter

from ...errors import ConfigError
from ..cli.options import AT_LEAST_1, command_line, option
from ..cli.replay_settings import ReplaySettings, Trace
from .meanings import print_meanings

EXIT_STATUSES: Final = (
    "Exit status: 0, all requests were served, and all compared pages were right; 1, a fault, named in"
    " the last lines; 2, wrong options or trace; 3, the ranks could not continue; 5, requests were"
    " refused because the pools are too small; 130, interrupted; 128 + signal, a rank was killed."
    " torchrun exits with 1 for all of them but 0."
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Options that say how the ranks are started."""

    launcher: Annotated[str, Parameter(choices=("torch", "ray"))] = "torch"
    """Launcher of the ranks. Ignored under torchrun."""
    ray_address: Annotated[
        str | None, Parameter(metavar="HOST:PORT", show_default="an embedded one")
    ] = None
    """Ray cluster for --launcher ray; auto for the one on this machine."""
    ranks_per_node: Annotated[int | None, AT_LEAST_1, Parameter(show_default="all of them")] = None
    """Maximum number of ranks on one node of the Ray cluster."""

    def __post_init__(self) -> None:
        for name in ("ray_address", "ranks_per_node"):
            if getattr(self, name) is not None and self.launcher != "ray":
                raise ConfigError(f"{option(name)} needs --launcher ray")


_DEFAULT: Final = ReplaySettings()
_HERE: Final = LaunchChoice()


def replay_command(run: Callable[[ReplaySettings, LaunchChoice], int]) -> App:
    """Return the command that parses a replay's options, calls `run`, and returns its status."""
    app = command_line("replay", help_epilogue=EXIT_STATUSES)

    @app.default
    def _replay(
        trace: Trace = None,
        /,
        *,
        settings: ReplaySettings = _DEFAULT,
        choice: LaunchChoice = _HERE,
        explain: Annotated[bool, Parameter(help="Only explain the rows of the table.")] = False,
    ) -> int:
        """Serve a workload on real ranks, and check every page."""
        if explain:
            print_meanings()
            return 0
        return run(replace(settings, trace=trace), choice)

    return app

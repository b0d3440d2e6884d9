"""The options of a replay, declared once for `lockstep replay` and for a rank under torchrun."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import ConfigError
from ...small_engine.profile import KV_PAGES_PER_WINDOW_PAGE, STATES_PER_CHECKPOINT
from ...small_engine.profiles import PROFILES
from ...small_engine.workload import REQUESTS_DEFAULT
from ..cli.option_values import check_choice, check_number, option
from ..cli.settings import DEVICES, ReplaySettings
from .meanings import print_meanings

LAUNCHERS = ("torch", "ray")


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """Says how the ranks are started."""

    launcher: str = "torch"
    ray_address: str | None = None
    ranks_per_node: int | None = None
    """How many ranks share a node of the cluster at most; None stands for all."""

    def __post_init__(self) -> None:
        check_choice("launcher", self.launcher, LAUNCHERS)
        for name in ("ray_address", "ranks_per_node"):
            if getattr(self, name) is not None and self.launcher != "ray":
                raise ConfigError(f"{option(name)} needs --launcher ray")
        if self.ranks_per_node is not None:
            check_number("ranks_per_node", self.ranks_per_node, 1)


Run = Callable[[ReplaySettings, LaunchChoice], None]

Trace = Annotated[
    Path | None,
    typer.Argument(
        help="Trace to replay, JSONL or that in gzip; without it the built-in workload."
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Number of ranks.", show_default="2; under torchrun as many as it started"),
]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Take only the first so many requests.",
        show_default=f"the whole trace; {REQUESTS_DEFAULT} of the built-in workload",
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        help="Requests in the system at a time: the next one enters when one has left, whatever the"
        " trace's timestamps say."
    ),
]
Namespaces = Annotated[
    int,
    typer.Option(
        help="Namespaces, as tenants or salts have them, that requests are spread over in turn; 0: each"
        " request has one of its own."
    ),
]
QuotaPages = Annotated[
    int | None,
    typer.Option(
        help="Pages that each namespace may keep in L1, and in L2.", show_default="no limit"
    ),
]
ProfileName = Annotated[
    str, typer.Option("--profile", help=f"Model geometry, scaled down: {', '.join(PROFILES)}.")
]
PageTokens = Annotated[int, typer.Option(help="Tokens of a page.")]
DevicePages = Annotated[int, typer.Option(help="Pages of each rank's device pool (L1).")]
HostPages = Annotated[int, typer.Option(help="Pages of each rank's host pool (L2).")]
WindowDevicePages = Annotated[
    int | None,
    typer.Option(
        help="L1 pages of the sliding-window pool, where the profile has one.",
        show_default=f"--device-pages / {KV_PAGES_PER_WINDOW_PAGE}",
    ),
]
WindowHostPages = Annotated[
    int | None,
    typer.Option(
        help="L2 pages of the sliding-window pool.",
        show_default=f"--host-pages / {KV_PAGES_PER_WINDOW_PAGE}",
    ),
]
_SLOTS = f"{STATES_PER_CHECKPOINT} for each checkpoint that the KV pages cover"
StateDevicePages = Annotated[
    int | None,
    typer.Option(
        help="L1 slots for recurrent states, where the profile has them.", show_default=_SLOTS
    ),
]
StateHostPages = Annotated[
    int | None, typer.Option(help="L2 slots for recurrent states.", show_default=_SLOTS)
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Store (L3), for example file:///var/kv; files are written with durability=none "
        "unless the URI says otherwise.",
        show_default="no store",
        metavar="URI",
    ),
]
StopPolicyName = Annotated[
    str,
    typer.Option(
        "--stop-policy", help="When a prefetch ends: best_effort, wait_complete or timeout."
    ),
]
WritePolicyName = Annotated[
    str,
    typer.Option(
        "--write-policy",
        help="When a computed page is copied down: write_through, write_through_selective or "
        "write_back.",
    ),
]
EvictionName = Annotated[
    str,
    typer.Option(
        "--eviction", help="Which page leaves a full pool first: lru, lfu, slru, priority."
    ),
]
Verify = Annotated[
    bool, typer.Option(help="Compare every page that comes from the cache byte by byte.")
]
Launcher = Annotated[
    str, typer.Option(help="What starts the ranks: torch or ray. Ignored under torchrun.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to use with --launcher ray, or auto for the one that runs here.",
        show_default="an embedded one",
        metavar="HOST:PORT",
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        help="Ranks that share a node of the Ray cluster, at most.",
        show_default="all of them",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the built-in workload.")]


def _explain(wanted: bool) -> None:
    if wanted:
        print_meanings()
        raise typer.Exit


Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        callback=_explain,
        is_eager=True,
        help="Only say what each row of the table means.",
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(help="Write the report here as JSON.", show_default="none", metavar="FILE.json"),
]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        help="Write what every rank did when here, as trace events for https://ui.perfetto.dev.",
        show_default="none",
        metavar="FILE.json",
    ),
]
Depth = Annotated[
    int, typer.Option(help="1: a step applies the round before. 0: it waits for its own.")
]
TransportName = Annotated[
    str,
    typer.Option(
        "--transport",
        help="What carries the rounds: auto, torch, shm or hierarchical; auto picks by the hosts "
        "of the ranks.",
    ),
]
Transfer = Annotated[
    str,
    typer.Option(
        help="What moves pages from host memory to host memory: tcp, or mooncake for Mooncake's"
        " transfer engine, over TCP as well."
    ),
]
OutputTokensMax = Annotated[
    int,
    typer.Option(
        help="Most output tokens of a request, since decode steps only repeat rounds; 0: as many "
        "as the trace says."
    ),
]
PrefillTokens = Annotated[int, typer.Option(help="Prompt tokens that a step computes at most.")]
Device = Annotated[str, typer.Option(help=f"Where L1 is: {' or '.join(DEVICES)}.")]
RoundTimeout = Annotated[
    float, typer.Option(help="Seconds after which a round without an answer ends the group.")
]

MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve metrics on loopback, rank 0's at this port and each other rank's at the next; for"
        " Prometheus and `lockstep top`.",
        show_default="none",
        metavar="PORT",
    ),
]

ControlPath = Annotated[
    Path | None,
    typer.Option(
        help="Take requests of `lockstep ctl` at this Unix socket, which is for its user alone.",
        show_default="none",
        metavar="SOCKET",
    ),
]

EXIT_STATUSES = (
    "Exit status: 0, every request was served, and every page that was compared was right; 1, something"
    " was wrong, and the last lines say what; 2, the options or the trace are wrong; 3, the ranks could"
    " not go on; 5, requests were refused, which the pools are too small for; 130, interrupted. 128 +"
    " the signal: a rank was killed. torchrun ends with 1 for all of them but 0."
)

_DEFAULT = ReplaySettings()


def _settings(options: Mapping[str, Any], ranks_default: Callable[[], int]) -> ReplaySettings:
    """Return the settings that the options of a replay say."""
    names = {each.name for each in fields(ReplaySettings)}
    given = {name: value for name, value in options.items() if name in names}
    for path in ("trace", "report", "timeline", "control"):
        # Ranks may run elsewhere.
        given[path] = None if given[path] is None else str(given[path].resolve())
    if given["ranks"] is None:
        given["ranks"] = ranks_default()
    return ReplaySettings(**given)


def replay_command(run: Run, *, ranks_default: Callable[[], int]) -> Callable[..., None]:
    """Return a command function with the options of a replay, which validates them and calls `run`.

    `ranks_default` says how many ranks there are when --ranks is not given.
    """

    def replay(
        *,
        trace: Trace = None,
        ranks: Ranks = None,
        requests: Requests = None,
        concurrency: Concurrency = _DEFAULT.concurrency,
        namespaces: Namespaces = _DEFAULT.namespaces,
        quota_pages: QuotaPages = None,
        profile: ProfileName = _DEFAULT.profile,
        page_tokens: PageTokens = _DEFAULT.page_tokens,
        device_pages: DevicePages = _DEFAULT.device_pages,
        host_pages: HostPages = _DEFAULT.host_pages,
        window_device_pages: WindowDevicePages = None,
        window_host_pages: WindowHostPages = None,
        state_device_pages: StateDevicePages = None,
        state_host_pages: StateHostPages = None,
        store: Store = None,
        stop_policy: StopPolicyName = _DEFAULT.stop_policy,
        write_policy: WritePolicyName = _DEFAULT.write_policy,
        eviction: EvictionName = _DEFAULT.eviction,
        verify: Verify = _DEFAULT.verify,
        launcher: Launcher = "torch",
        ray_address: RayAddress = None,
        ranks_per_node: RanksPerNode = None,
        seed: Seed = _DEFAULT.seed,
        report: ReportFile = None,
        timeline: TimelineFile = None,
        metrics_port: MetricsPort = None,
        control: ControlPath = None,
        explain: Explain = False,
        depth: Depth = _DEFAULT.depth,
        transport: TransportName = _DEFAULT.transport,
        output_tokens_max: OutputTokensMax = _DEFAULT.output_tokens_max,
        prefill_tokens: PrefillTokens = _DEFAULT.prefill_tokens,
        device: Device = _DEFAULT.device,
        round_timeout_s: RoundTimeout = _DEFAULT.round_timeout_s,
    ) -> None:
        """Serve a workload on real ranks, and check every page."""
        # Options are named as the settings that they set.
        settings = _settings(locals(), ranks_default)
        run(settings, LaunchChoice(launcher, ray_address, ranks_per_node))

    return replay

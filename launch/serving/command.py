"""The command `lockstep serve-sim`."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ...errors import ConfigError
from ...storage_backends.peer.engine_settings import TCP
from ..option_values import option
from ..options import (
    DevicePages,
    HostPages,
    LaunchChoice,
    Launcher,
    Namespaces,
    OutputTokensMax,
    PageTokens,
    PrefillTokens,
    ProfileName,
    RanksPerNode,
    RayAddress,
    ReportFile,
    Requests,
    RoundTimeout,
    Seed,
    Store,
    TimelineFile,
    Transfer,
    Verify,
)
from ..settings import ReplaySettings
from .settings import Kill, ServeSettings, Shape

EXIT_STATUSES = (
    "Exit status: 0, every request was served, and every page that was compared was right; 1, something"
    " was wrong, and the last lines say what; 2, the options or the trace are wrong; 3, the groups"
    " could not go on; 5, requests were refused, which no group has room for; 130, interrupted."
)

Trace = Annotated[
    Path | None,
    typer.Argument(help="Trace to serve, JSONL or that in gzip; without it the built-in workload."),
]
Prefill = Annotated[
    str, typer.Option(help="Groups that compute prompts, as GROUPSxRANKS.", metavar="RxTP")
]
Decode = Annotated[str, typer.Option(help="Groups that generate, as GROUPSxRANKS.", metavar="RxTP")]
Speed = Annotated[
    float,
    typer.Option(
        help="How many times faster than in the trace requests come; where it has no times, one comes"
        " each second on the mean, times this."
    ),
]
Concurrency = Annotated[
    int, typer.Option(help="Requests in all groups at a time, at most; more wait.")
]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct",
        help="Hand pages over from host memory to host memory (peer://), also where there is a store.",
        show_default="where no --store is given",
    ),
]
KillGroup = Annotated[
    str | None,
    typer.Option(
        help="Kill all ranks of a group once N requests have left, as prefill-0@50.",
        metavar="GROUP@N",
    ),
]
TokenUs = Annotated[
    float,
    typer.Option(
        help="Microseconds that the model takes for each token at least, as a real one would."
    ),
]
Patience = Annotated[
    float, typer.Option(help="How long a group waits for one that says nothing, in seconds.")
]
Directory = Annotated[
    str | None,
    typer.Option(
        help="Where groups register: a file's path, or redis://HOST:PORT/DB.",
        show_default="a file of this run's own",
    ),
]
GroupsFrom = Annotated[
    str | None,
    typer.Option(
        help="Serve by groups that are there already, and that this directory lists: as many and as"
        " large as --prefill and --decode say. They end with the run.",
        show_default="groups of this run's own",
        metavar="redis://HOST:PORT/DB",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        help="The address of this host at which groups on other hosts reach it.",
        show_default="the one from which it reaches the directory",
        metavar="ADDRESS",
    ),
]

_REPLAY = ReplaySettings()


def serve_sim(
    *,
    trace: Trace = None,
    prefill: Prefill = "1x2",
    decode: Decode = "1x2",
    requests: Requests = None,
    speed: Speed = 1.0,
    concurrency: Concurrency = 32,
    direct: Direct = False,
    transfer: Transfer = TCP,
    store: Store = None,
    kill: KillGroup = None,
    token_us: TokenUs = 0.0,
    patience_s: Patience = 30.0,
    namespaces: Namespaces = _REPLAY.namespaces,
    profile: ProfileName = _REPLAY.profile,
    page_tokens: PageTokens = _REPLAY.page_tokens,
    device_pages: DevicePages = _REPLAY.device_pages,
    host_pages: HostPages = _REPLAY.host_pages,
    verify: Verify = _REPLAY.verify,
    launcher: Launcher = "torch",
    ray_address: RayAddress = None,
    ranks_per_node: RanksPerNode = None,
    directory: Directory = None,
    groups_from: GroupsFrom = None,
    host: Host = None,
    seed: Seed = _REPLAY.seed,
    report: ReportFile = None,
    timeline: TimelineFile = None,
    output_tokens_max: OutputTokensMax = _REPLAY.output_tokens_max,
    prefill_tokens: PrefillTokens = 2048,
    round_timeout_s: RoundTimeout = _REPLAY.round_timeout_s,
) -> None:
    """Serve a workload by groups that prefill and groups that decode."""
    settings = ServeSettings(
        replay=ReplaySettings(
            trace=None if trace is None else str(trace.resolve()),
            requests=requests,
            concurrency=concurrency,
            namespaces=namespaces,
            profile=profile,
            page_tokens=page_tokens,
            device_pages=device_pages,
            host_pages=host_pages,
            store=store,
            verify=verify,
            seed=seed,
            output_tokens_max=output_tokens_max,
            prefill_tokens=prefill_tokens,
            round_timeout_s=round_timeout_s,
            report=None if report is None else str(report.resolve()),
            timeline=None if timeline is None else str(timeline.resolve()),
        ),
        prefill=Shape.parse(prefill, "--prefill"),
        decode=Shape.parse(decode, "--decode"),
        directly=direct or store is None,
        transfer=transfer,
        speed=speed,
        kill=None if kill is None else Kill.parse(kill),
        token_us=token_us,
        patience_s=patience_s,
        directory=directory or "",
    )
    choice = LaunchChoice(launcher, ray_address, ranks_per_node)
    raise typer.Exit(run(settings, choice, groups_from, host))


def run(
    settings: ServeSettings, choice: LaunchChoice, groups_from: str | None, host: str | None
) -> int:
    """Serve, and return the status to exit with."""
    if groups_from is None:
        return _serve(settings, choice, host)
    own = {
        "kill": settings.kill,
        "directory": settings.directory,
        "transfer": settings.transfer != TCP,
        "timeline": settings.replay.timeline,
    }
    for name, value in own.items():
        if value:
            raise ConfigError(f"{option(name)} is for groups that this command starts")
    if choice != LaunchChoice():
        raise ConfigError("--launcher ray is for groups that this command starts")
    from .found import serve_by_found

    return serve_by_found(settings, groups_from, host or "")


def _serve(settings: ServeSettings, choice: LaunchChoice, host: str | None) -> int:
    """Start groups, and serve by them."""
    if host is not None:
        raise ConfigError("--host needs --groups-from")
    # Importing torch takes seconds.
    from .groups import GroupStarter, ProcessStarter
    from .launching import serve

    starting: AbstractContextManager[GroupStarter] = nullcontext(ProcessStarter())
    if choice.launcher == "ray":
        from .ray_groups import ray_starter

        starting = ray_starter(settings.groups(), choice)
    return serve(settings, starting, one_host=choice.ray_address is None)

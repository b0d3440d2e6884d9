"""The options of one group that is started by hand, under torchrun, on hosts of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from ...ranks.disaggregation.groups.router import Role
from ...storage_backends.peer.engine_settings import TCP
from ..environment import read_secret
from ..option_values import check_choice
from ..options import (
    DevicePages,
    HostPages,
    OutputTokensMax,
    PageTokens,
    PrefillTokens,
    ProfileName,
    ReportFile,
    RoundTimeout,
    Store,
    Transfer,
    TransportName,
    Verify,
)
from ..settings import ReplaySettings
from .command import Concurrency, Direct, Host, Patience, TokenUs
from .directories import host_towards
from .settings import GroupSettings, ServeSettings, Shape

EXIT_STATUSES = (
    "Exit status: 0, the group was told that no more requests come, and every page that was compared"
    " was right; 1, something was wrong, and the last lines say what; 2, the options are wrong; 3, the"
    " ranks could not go on; 130, interrupted. torchrun ends with 1 for all of them but 0."
)

GroupRole = Annotated[
    str, typer.Option("--role", help=f"What the group does: {Role.PREFILL} or {Role.DECODE}.")
]
Name = Annotated[str, typer.Option(help="Its name, which no other group of the directory has.")]
Directory = Annotated[
    str,
    typer.Option(help="Where groups register: redis://HOST:PORT/DB, or a file on this host alone."),
]

_REPLAY = ReplaySettings()


def group_command(run: Callable[[GroupSettings, str], None], *, ranks: int) -> Callable[..., None]:
    """Return a command function that validates the options of a group of so many ranks and calls `run`.

    The second argument of `run` is the address at which others reach this rank.
    """

    def group(
        *,
        role: GroupRole,
        name: Name,
        directory: Directory,
        host: Host = None,
        direct: Direct = False,
        transfer: Transfer = TCP,
        store: Store = None,
        token_us: TokenUs = 0.0,
        patience_s: Patience = 30.0,
        concurrency: Concurrency = 32,
        profile: ProfileName = _REPLAY.profile,
        page_tokens: PageTokens = _REPLAY.page_tokens,
        device_pages: DevicePages = _REPLAY.device_pages,
        host_pages: HostPages = _REPLAY.host_pages,
        verify: Verify = _REPLAY.verify,
        transport: TransportName = _REPLAY.transport,
        report: ReportFile = None,
        output_tokens_max: OutputTokensMax = _REPLAY.output_tokens_max,
        prefill_tokens: PrefillTokens = 2048,
        round_timeout_s: RoundTimeout = _REPLAY.round_timeout_s,
    ) -> None:
        """Serve as one group, until whoever sends requests says that no more come."""
        check_choice("role", role, (Role.PREFILL, Role.DECODE))
        settings = ServeSettings(
            replay=ReplaySettings(
                concurrency=concurrency,
                profile=profile,
                page_tokens=page_tokens,
                device_pages=device_pages,
                host_pages=host_pages,
                store=store,
                verify=verify,
                transport=transport,
                output_tokens_max=output_tokens_max,
                prefill_tokens=prefill_tokens,
                round_timeout_s=round_timeout_s,
                report=None if report is None else str(report.resolve()),
            ),
            prefill=Shape(1, ranks),
            decode=Shape(1, ranks),
            directly=direct or store is None,
            transfer=transfer,
            token_us=token_us,
            patience_s=patience_s,
        )
        own = next(each for each in settings.groups(directory, read_secret()) if each.role == role)
        run(replace(own, name=name), host_towards(directory, host or ""))

    return group

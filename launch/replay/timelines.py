"""The file of a run's timelines."""

from collections.abc import Sequence

from ...telemetry.chrome_trace import trace_text
from ...telemetry.kept_events import RankEvents
from ..cli.report_files import write_text

VIEWER = "https://ui.perfetto.dev"


def write_timeline(path: str, ranks: Sequence[bytes], *, told: bool) -> None:
    """Write the events of all ranks, each as it was packed.

    `told` says whether to print where the file is. Raises `ConfigError` if it cannot be written.
    """
    write_text(path, trace_text([RankEvents.unpack(each) for each in ranks]), "timeline")
    if told:
        print(f"timeline: {path}, for {VIEWER}")

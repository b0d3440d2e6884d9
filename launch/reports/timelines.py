"""The file of a run's timelines."""

from collections.abc import Mapping, Sequence

from ...telemetry.chrome_trace import trace_text
from ...telemetry.kept_events import RankEvents
from ..report import write_text

VIEWER = "https://ui.perfetto.dev"


def write_timeline(path: str, groups: Mapping[str, Sequence[bytes]], *, told: bool) -> None:
    """Write the events of all ranks, each as it was packed, by the name of their group.

    `told` says whether to print where the file is. Raises `ConfigError` if it cannot be written.
    """
    ranks = {name: [RankEvents.unpack(each) for each in group] for name, group in groups.items()}
    write_text(path, trace_text(ranks), "timeline")
    if told:
        print(f"timeline: {path}, for {VIEWER}")

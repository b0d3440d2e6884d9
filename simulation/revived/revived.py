"""Historical bugs of serving engines, put back to prove that the simulator finds them.

A revived bug is a class with the old behaviour, from which the ranks are built. The product code has no
switches for it. The simulation then shows which checker finds the bug, and in which step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..rank.epoch import Build
from ..world.world import ENGINE, REPLICA
from . import handoffs, hits, incidents, votes


@dataclass(frozen=True, slots=True, kw_only=True)
class RevivedBug:
    """A historical bug, and the kind of schedules that can expose it."""

    name: str
    about: str
    """One line that describes the faulty behaviour, with the incident, issue or rule that it comes
    from."""
    build: Callable[[], Build]
    """Returns the classes from which ranks with this bug are built."""
    profile: str
    """A model profile whose components can show the bug."""
    faults: str = "mixed"
    l1: str = REPLICA


_BUGS = (
    RevivedBug(
        name="A",
        about="a transfer shares the page numbers of a cached prefix, and moving them to the device"
        " changes them in place (incident A)",
        build=incidents.shared_descriptor,
        profile="gemma",
        faults="pressure",
    ),
    RevivedBug(
        name="B",
        about="a load back extends to the last node with full attention in host memory, instead of the"
        " last one that every component accepts (incident B)",
        build=incidents.load_back_from_the_last_host_node,
        profile="gemma",
        faults="pressure",
    ),
    RevivedBug(
        name="C",
        about="a prefetch is over once its KV has landed, and its other pools' transfers run on"
        " (incident C)",
        build=incidents.complete_without_the_other_pools,
        profile="gemma",
        faults="storage",
    ),
    RevivedBug(
        name="D",
        about="the cleanup after an eviction checks device locks only, and removes a parent that a"
        " prefetch or backup has pinned (incident D)",
        build=incidents.cascade_past_pins,
        profile="hybrid-all",
        faults="pressure",
    ),
    RevivedBug(
        name="E",
        about="a request that is retracted saves its KV alone, and resumes in slots of the other pools"
        " that were used in between (incident E)",
        build=incidents.retract_the_kv_alone,
        profile="qwen-next",
    ),
    RevivedBug(
        name="views",
        about="a retraction saves views of its device slots, which other requests overwrite before"
        " the resume (incident E)",
        build=incidents.retract_hands_out_views,
        profile="qwen-next",
    ),
    RevivedBug(
        name="local-free",
        about="a rank frees pages once its own transfers have ended, before the other ranks'"
        " (sglang#33442, TensorRT-LLM#14020)",
        build=votes.free_on_local_evidence,
        profile="llama",
        faults="storage",
    ),
    RevivedBug(
        name="count-not-name",
        about="the ranks agree on the number of completed copies, and each settles its own"
        " completed ones (sglang#28429)",
        build=votes.count_without_names,
        profile="llama",
    ),
    RevivedBug(
        name="early-return",
        about="a rank whose own transfers are over returns before the vote, and the others wait for"
        " it (sglang#30760, #33029, #26923)",
        build=votes.return_before_the_vote,
        profile="llama",
    ),
    RevivedBug(
        name="min-of-lengths",
        about="the ranks restore the smallest of their longest lengths, at which one of them may have"
        " no recurrent state (rule R4)",
        build=votes.smallest_of_the_longest,
        profile="qwen-next",
        faults="crash",
    ),
    RevivedBug(
        name="write-once",
        about="a page that the store refused for a moment is never written again while it stays in"
        " memory (Mooncake#3331, #2997)",
        build=hits.write_once,
        profile="llama",
        faults="storage",
    ),
    RevivedBug(
        name="trust-for-good",
        about="a page that the store had once is never written again while it stays in memory,"
        " although a quota may have removed it (sglang#37172)",
        build=hits.trust_for_good,
        profile="llama",
    ),
    RevivedBug(
        name="backup-once",
        about="a prompt for which host memory had no room at once is never copied there, though the"
        " device still has it (sglang#39444, #28614)",
        build=hits.back_up_once,
        profile="llama",
        faults="pressure",
    ),
    RevivedBug(
        name="one-pin",
        about="a request is served up to several ends, and only what a match at the farthest of them"
        " needs is pinned",
        build=handoffs.one_pin_for_all_ends,
        profile="gemma",
        l1=ENGINE,
    ),
    RevivedBug(
        name="window-head",
        about="a prefetch reads as many of a window's pages as it needs, and takes the first ones that"
        " it has looked up for the last ones",
        build=handoffs.first_pages_of_a_window,
        profile="gemma",
    ),
    RevivedBug(
        name="unfilled",
        about="engine-owned window pages that a load does not fill are backed up as if they held the"
        " prefix's KV",
        build=incidents.backups_of_unfilled_pages,
        profile="gemma",
        l1=ENGINE,
    ),
)

REVIVED_BUGS = {bug.name: bug for bug in _BUGS}
"""All historical bugs, by the name that `lockstep simulate --revive` takes."""


def find_bug(name: str) -> RevivedBug:
    """Return the bug of this name, ignoring case. Raises `ValueError` for an unknown name."""
    bugs = REVIVED_BUGS
    bug = bugs.get(name) or bugs.get(name.upper()) or bugs.get(name.lower())
    if bug is None:
        raise ValueError(f"unknown bug {name!r}; known: {', '.join(bugs)}")
    return bug

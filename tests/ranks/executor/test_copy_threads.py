"""Copy threads: the order of their work, and the report of a thread that died."""

import threading
from queue import SimpleQueue

from lockstep.ranks.executor.copy_threads import CopyThread
from tests.kit.ranks.executor_parts import PATIENCE_S


def refuse(job: object = None) -> None:
    """Raise SystemExit, as if the device had failed or a failure handler had a bug."""
    raise SystemExit("no device")


def test_a_thread_that_cannot_even_begin_says_so_too() -> None:
    done: SimpleQueue[int] = SimpleQueue()
    thread: CopyThread[int] = CopyThread("copies", done.put, at_start=refuse)

    thread.put(1)

    assert thread.join(PATIENCE_S)
    assert thread.trouble() == "the thread copies has ended: SystemExit('no device')"
    assert done.empty()


def test_what_follows_a_thread_hears_of_its_end_also_when_it_dies() -> None:
    ended = threading.Event()
    thread: CopyThread[int] = CopyThread("copies", refuse, at_end=ended.set)

    thread.put(1)

    assert ended.wait(PATIENCE_S)
    assert thread.join(PATIENCE_S)

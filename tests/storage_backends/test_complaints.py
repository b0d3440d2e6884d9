"""What is wrong with a store is logged once, with the remedy, and again after it went well."""

import errno

import pytest

from lockstep.storage_backends.complaints import SAID_AGAIN_S, Complaints


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "give it more slots"),
        (errno.EPERM, "let this process use its directory and all that is in it"),
        (errno.EROFS, "mount its filesystem for writing, or open the store with read_only=1"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.EPROTO, "look at the filesystem that it is on"),
        (None, "look at the device and the kernel's log"),
    ],
    ids=str,
)
def test_a_failure_is_said_once_with_what_to_do_about_it(
    number: int | None, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = Complaints("3fs:///mount/kv", "give it more slots")

    complaints.say_failed("reads of slots fail", number)
    complaints.say_failed("reads of slots fail", number)

    (said,) = caplog.messages
    assert said.startswith("store 3fs:///mount/kv: reads of slots fail: ")
    assert said.endswith(f"; {remedy}")


def test_it_is_said_again_after_it_went_well_but_not_with_every_other_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    complaints = Complaints("file:///kv", clock=lambda: now)

    def said() -> int:
        before = len(caplog.records)
        complaints.say("room", "full")
        return len(caplog.records) - before

    first = said()
    now = 2 * SAID_AGAIN_S
    while_it_fails = said()
    complaints.went_well()
    again = said()
    complaints.went_well()
    at_once = said()
    now = 4 * SAID_AGAIN_S

    assert (first, while_it_fails, again, at_once, said()) == (1, 0, 1, 0, 1)

"""Faults of a store are logged with the remedy, at most once a minute, with a count."""

import errno

import pytest

from lockstep.storage_backends.error_log import SAID_AGAIN_S, ErrorLog


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "give it more slots"),
        (errno.EPERM, "give this process access to its directory and the files in it"),
        (errno.EROFS, "mount its filesystem for writing, or open the store with read_only=1"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.EPROTO, "check its filesystem"),
        (None, "check the device and the kernel's log"),
    ],
    ids=str,
)
def test_a_failure_is_said_once_with_what_to_do_about_it(
    number: int | None, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = ErrorLog("3fs:///mount/kv", "give it more slots")

    complaints.log_failure("reads of slots fail", number)
    complaints.log_failure("reads of slots fail", number)

    (warning,) = caplog.messages
    assert warning.startswith("store 3fs:///mount/kv: reads of slots fail: ")
    assert warning.endswith(f"; {remedy}")


def test_while_it_lasts_it_is_said_once_in_a_while_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    complaints = ErrorLog("file:///kv", clock=lambda: now)
    for _ in range(3):
        complaints.say("room", "full at %d %%", 100)
    now = SAID_AGAIN_S
    complaints.say("room", "full at %d %%", 99)
    now = 2 * SAID_AGAIN_S
    complaints.say("room", "full at %d %%", 98)

    assert caplog.messages == [
        "store file:///kv: full at 100 %",
        "store file:///kv: full at 99 % (and 2 similar warnings since the last one)",
        "store file:///kv: full at 98 %",
    ]

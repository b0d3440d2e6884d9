"""What is said of a `3fs://` store of which something fails."""

import errno

import pytest

from lockstep.storage_backends.three_fs.complaints import Complaints


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "let this process read and write all that is in the store's directory"),
        (errno.EPERM, "let this process read and write all that is in the store's directory"),
        (errno.EROFS, "mount its filesystem for writing"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ESTALE, "look at the filesystem that it is on"),
        (None, "look at the device and the kernel's log"),
    ],
    ids=str,
)
def test_a_failure_is_said_once_with_what_to_do_about_it_where_slots_are_read_too(
    number: int | None, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = Complaints("3fs:///mount/kv")

    complaints.say_failed("reads of slots fail", number)
    complaints.say_failed("reads of slots fail", number)

    (said,) = caplog.messages
    assert said.startswith("store 3fs:///mount/kv: reads of slots fail: ")
    assert said.endswith(f"; {remedy}")

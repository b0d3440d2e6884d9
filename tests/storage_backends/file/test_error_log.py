"""A file store that cannot be written logs one line, with the reason and the remedy."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from lockstep.storage_backends.base import WriteOutcome
from tests.kit.storage.calls import KIB, opened, opened_at, put_each
from tests.kit.storage.files import FileStore, failing, limited


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


async def test_writes_that_fail_are_named_once_with_what_the_system_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_at(f"file://{tmp_path}/store?durability=data") as backend:
        monkeypatch.setattr(os, "fdatasync", failing(errno.ENOSPC))
        assert await put_each(backend, range(10)) == {WriteOutcome.FAILED}

    (warning,) = warnings(caplog)
    assert warning.startswith(f"store file://{tmp_path}/store?durability=data: a page could not")
    assert "No space left on device; make room on its filesystem" in warning


async def test_a_file_that_may_not_become_so_long_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_at(f"file://{tmp_path}/store") as backend:
        with limited(resource.RLIMIT_FSIZE, 8 * KIB):
            assert await put_each(backend, range(3)) == {WriteOutcome.FAILED}
        assert await put_each(backend, range(3)) == {WriteOutcome.OK}

    (warning,) = warnings(caplog)
    assert "File too large; raise the limit of the size of a file" in warning


async def test_a_directory_that_was_removed_under_an_open_store_is_named(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store) as backend:
        for each in ("objects", "quarantine", "temporary"):
            (store.root / each).rmdir()
        store.root.rmdir()
        assert await put_each(backend, range(2)) == {WriteOutcome.FAILED}

    (warning,) = warnings(caplog)
    assert f"store file://{store.root}: " in warning
    assert "its directory is gone, so open the store again" in warning


def stale_for(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first calls of `os.link` fail with ESTALE, as if another host removed the directory."""
    link, stale = os.link, iter([failing(errno.ESTALE)] * times)

    def link_or_not(*args: Any, **named: Any) -> None:
        next(stale, link)(*args, **named)

    monkeypatch.setattr(os, "link", link_or_not)


async def test_a_directory_that_another_host_removes_meanwhile_costs_a_try(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store) as backend:
        stale_for(1, monkeypatch)
        assert await put_each(backend, range(1)) == {WriteOutcome.OK}

    assert warnings(caplog) == []


async def test_a_write_that_stays_stale_is_not_told_as_the_loss_of_the_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store) as backend:
        stale_for(1 << 10, monkeypatch)
        assert await put_each(backend, range(1)) == {WriteOutcome.FAILED}

    (warning,) = warnings(caplog)
    assert "Stale file handle; a file or directory of it is gone on the server" in warning

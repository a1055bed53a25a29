"""Facts that every benchmark says about itself: hardware, versions, commit; its figures as JSON and as a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "torch",
    "triton",
    "flash-attn-3",
    "tokenspeed-fa3",
    "sglang-kernel",
    "flashinfer-python",
    "ray",
    "transformers",
    "numpy",
)


class Report:
    """Figures of one run, written to `path` whenever some are added: what was measured outlives a run cut short."""

    def __init__(self, path: Path | None, **figures: Any) -> None:
        self.path = path
        self.figures: dict[str, Any] = {}
        self.add(**figures)

    def add(self, **figures: Any) -> None:
        """Adds JSON-ready values under their names, or replaces them."""
        self.figures.update(figures)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.figures, indent=2) + "\n")


def circumstances(commit: str | None = None) -> dict[str, Any]:
    """Circumstances that the figures depend on besides the config: `date`, `commit`, `hardware`, `versions`.

    Args:
        commit: of the code that is measured, where the checkout came without its git directory. None asks git.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or git_commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


def git_commit() -> str:
    """The checkout's commit, with `+` after it when tracked files differ; `unknown` where git cannot tell."""
    try:
        head = _output("git", "rev-parse", "--short", "HEAD")
        return head + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, and each GPU's name, memory and driver; starts no CUDA context."""
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpus": []}
    if shutil.which("nvidia-smi"):
        query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        try:
            found["gpus"] = _output("nvidia-smi", *query).splitlines()
        except (OSError, subprocess.CalledProcessError):
            found["gpus"] = ["nvidia-smi failed"]
    return found


def versions() -> dict[str, str]:
    """Python and the packages the figures depend on; those that are not installed are left out."""
    import torch  # figures of the ingress need none

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in nccl)
    return found


def describe_circumstances(figures: dict[str, Any]) -> str:
    """One line of `circumstances`: date, commit, machine and versions."""
    machine = figures["hardware"]
    gpus = machine["gpus"]
    device = f"{len(gpus)} x {gpus[0].split(',')[0]}, " if gpus else ""
    packages = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return (
        f"{figures['date']}, commit {figures['commit']}, {device}{machine['cores']} cores {machine['cpu']}; {packages}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under their titles."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()

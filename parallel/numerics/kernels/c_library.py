"""Compiles the C kernels of CPU ranks once per machine, and loads them.

The kernels are in C because a library's products add in an order that depends on their sizes. A source is compiled for
the current processor and cached, like Triton kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch  # also loads the OpenMP runtime, which the libraries should share

from configs.errors import ConfigError

HEADER = Path(__file__).with_name("exact.h")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of the dtypes in exact.h."""
# A product and a sum in one expression become one fused operation, as the contract requires. Nothing is reordered.
_FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_FLAGS_TO_LINK = ("-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wno-psabi", "-Werror", "-lm")


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The compiled library of `source`, which may include exact.h. Compiles it unless it is in the cache.

    Raises:
        ConfigError: there is no C compiler or no writable cache, or the compiler fails.
    """
    compiler = os.environ.get("CC", "cc")
    headers = [HEADER, *sorted(source.parent.glob("*.h"))]
    texts = (
        source.read_text(),
        *(it.read_text() for it in headers),
        *_FLAGS,
        *_FLAGS_TO_LINK,
        _version_of(compiler),
        _processor(),
    )
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
    library = _cache() / f"{source.stem}-{digest}.so"
    if not library.exists():
        try:
            _compile(compiler, source, library)
        except OSError as error:
            raise ConfigError(
                f"device=cpu keeps compiled kernels in {library.parent}, which cannot be written: {error}; set "
                "XDG_CACHE_HOME to a directory with room"
            ) from error
    return ctypes.CDLL(str(library))


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Ranks may compile at the same time. Each writes its own file, and the last one remains.
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    command = [compiler, *_FLAGS, f"-I{HEADER.parent}", str(source), "-o", made, *_FLAGS_TO_LINK]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"{compiler} did not compile {source.name} into {library.parent}, which device=cpu needs: "
                f"{done.stderr[-2000:]}"
            )
        os.chmod(made, 0o755)
        os.replace(made, library)
    finally:
        Path(made).unlink(missing_ok=True)


def _version_of(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"device=cpu needs a C compiler, and {compiler} does not run: {error}; install gcc, or set CC"
        ) from error


def _processor() -> str:
    """The processor's model, on which `-march=native` depends. Different nodes may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "kernels"

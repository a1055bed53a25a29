"""`system_fingerprint`: what an answer's bits depend on, in a few letters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cluster.engine.engine_spec import EngineSpec
from cluster.version import VERSION
from configs.numerics import CONTRACT

_SAMPLE_BYTES = 1 << 16


def system_fingerprint(
    spec: EngineSpec, platforms: Iterable[str], version: str = "", *, in_memory: bool = False
) -> str:
    """Version, and a hash of all that may change an answer.

    Where numerics are exact, that is what the model is, its weights, the types of activations and cache, where the
    ranks compute and the contract: whoever has the same fingerprint gives the same bits. Else it is the number of ranks
    and all settings but those of serving, and equal fingerprints promise nothing.

    Args:
        platforms: `worker.device.platform.platform_of` of each rank.
        version: of weights that took the place of those of the start.
        in_memory: no file has them, so that they are known by their version alone.
    """
    config = spec.config
    if not config.is_exact:
        settings = config.model_dump_json(exclude={"model", "tokenizer", "server", "placement", "num_replicas"})
        return f"lockstep-{VERSION}-tp{config.tensor_parallel_size}-{_digest(str(spec.model), settings + version)}"
    is_dummy = config.load_format == "dummy"
    weights = f"dummy{config.revision or ''}" if is_dummy else version if in_memory else _weights(spec.model_path)
    types = (config.dtype, config.quantization, config.kv_dtype, config.device)
    where = sorted(set(platforms))  # most often one, whatever the number of ranks
    return f"lockstep-{VERSION}-exact-{_digest(str(CONTRACT), str(spec.model), weights, *types, *where)}"


def _weights(path: Path) -> str:
    """Sizes of a checkpoint's files, and bytes from beginning, middle and end, which no two trainings share.

    A checkpoint that is not on this node is known by the last part of its path: for the Hub's a commit.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return path.name
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]

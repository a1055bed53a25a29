"""`system_fingerprint`: a short string that identifies everything that an answer's bits depend on."""

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
    """Lockstep's version, and a hash of everything that may change an answer.

    With exact numerics, the hash covers the model, its weights, the dtypes of activations and cache, the platform, and
    the contract: equal fingerprints mean equal bits. With fast numerics, it also covers the number of ranks and all
    settings except those of serving, and equal fingerprints promise nothing.

    Args:
        platforms: `worker.device.platform.platform_of` of each rank.
        version: version of weights that replaced the ones of the start. Empty if none did.
        in_memory: whether no file has the weights, so that only `version` identifies them.
    """
    config = spec.config
    if not config.is_exact:
        settings = config.model_dump_json(exclude={"model", "tokenizer", "server", "placement", "num_replicas"})
        return f"lockstep-{VERSION}-tp{config.tensor_parallel_size}-{_digest(str(spec.model), settings + version)}"
    is_dummy = config.load_format == "dummy"
    weights = f"dummy{config.revision or ''}" if is_dummy else version if in_memory else _weights(spec.model_path)
    types = (config.dtype, config.quantization, config.kv_dtype, config.device)
    where = sorted(set(platforms))  # usually one, for any number of ranks
    return f"lockstep-{VERSION}-exact-{_digest(str(CONTRACT), str(spec.model), weights, *types, *where)}"


def _weights(path: Path) -> str:
    """Hashes the sizes of a checkpoint's files, and bytes from their beginning, middle and end, which differ between
    trainings. If the checkpoint is not on this node, returns the last part of its path, for the Hub a commit."""
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

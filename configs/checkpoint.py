"""Finds the files that `model` and `tokenizer` name, on disk or on the Hugging Face Hub, and downloads missing ones.

This module decides which file formats are accepted. It opens none of them. Pickles are refused by name, because opening
one runs its code.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZER_FILES = ("tokenizer*", "*.model", "merges.txt", "vocab.txt")
_WANTED = ("*.safetensors", "*.json", "*.jinja", *_TOKENIZER_FILES)
# Subdirectories hold the same weights for other frameworks. Consolidated files repeat the weights under other names.
_UNWANTED = ("*/*", "consolidated*", *(f"*{suffix}" for suffix in _PICKLE_SUFFIXES))


def is_local(model: str) -> bool:
    """Whether `model` names a path on this machine: the path exists, or the string cannot be a Hub id."""
    if Path(model).expanduser().exists():
        return True
    return _HUB_ID.fullmatch(model) is None or model.startswith((".", "~"))


def model_name(model: str) -> str:
    """The model name for clients if `served_model_name` is not set: the Hub id, or the directory's name."""
    return Path(model).expanduser().resolve().name if is_local(model) else model


def resolve_model_path(
    model: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    on_progress: Callable[[float], None] | None = None,
) -> Path:
    """The directory of the model. Downloads the model first if it is on the Hub and not in the local cache.

    Args:
        model: a local directory, or a Hub id `owner/name`.
        revision: commit or tag of the Hub repository. None means its default branch.
        weights: if False, a directory with config.json alone is accepted and no safetensors are downloaded.
        on_progress: called with the downloaded share of the bytes, 0 to 1. It may fall when the Hub announces more
            files.

    Raises:
        CheckpointError: the model is not found, has no safetensors, or cannot be downloaded.
    """
    _refuse_gguf("model", model)
    path = Path(model).expanduser()
    if path.exists():
        return _weights_at(path) if weights else _config_at(path)
    if is_local(model):
        raise CheckpointError(f"model={model} does not exist; set it to a directory or a Hugging Face id owner/name")
    fetched = _fetch("model", model, revision, weights, on_progress)
    return _weights_at(fetched) if weights else _config_at(fetched)


def resolve_tokenizer_path(tokenizer: str, model: str, revision: str | None = None) -> Path:
    """The directory of the `tokenizer` setting. Downloads the tokenizer first if it is on the Hub.

    Args:
        tokenizer: a local directory, or a Hub id `owner/name`.
        model: the `model` setting.
        revision: commit or tag of the model's repository. Any other repository is read at its default branch.

    Raises:
        CheckpointError: the directory is not found, has no tokenizer, or cannot be downloaded.
    """
    _refuse_gguf("tokenizer", tokenizer)
    path = Path(tokenizer).expanduser()
    if not path.exists():
        if is_local(tokenizer):
            raise CheckpointError(
                f"tokenizer={tokenizer} does not exist; set it to a directory or a Hugging Face id owner/name, or "
                "leave it out to take the model's own"
            )
        own = tokenizer == model
        path = _fetch("tokenizer", tokenizer, revision if own else None, weights=False, on_progress=None)
    if not holds_tokenizer(path):
        raise CheckpointError(
            f"tokenizer={tokenizer} holds no tokenizer.json; set it to a directory with a tokenizer, or leave it out "
            "to take the model's own"
        )
    return path


def holds_tokenizer(path: Path) -> bool:
    """Whether a directory may hold a tokenizer, judged by file names."""
    return any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _refuse_gguf(key: str, value: str) -> None:
    """Raises CheckpointError if setting `key` names a GGUF file, or a Hub repository with GGUF in its name."""
    if value.lower().endswith("gguf") and not Path(value).expanduser().is_dir():
        raise CheckpointError(
            f"{key}={value} is in GGUF format, which Lockstep does not read; set it to the model's checkpoint in "
            "safetensors, or convert the GGUF file to a directory of safetensors with transformers"
        )


def _config_at(path: Path) -> Path:
    """Returns `path` if it is a directory with the model's config. Raises CheckpointError otherwise."""
    return path if (path / "config.json").is_file() else _weights_at(path)


def _weights_at(path: Path) -> Path:
    if path.is_file():
        if path.suffix in _PICKLE_SUFFIXES:
            raise CheckpointError(f"model={path} is a pickle, and opening a pickle can run code; {_ALTERNATIVES}")
        raise CheckpointError(f"model={path} is a file; set it to the directory that holds the model's files")
    if any(path.glob("*.safetensors")):
        return path
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"model={path} holds its weights as pickles only ({pickles[0]}), and opening a pickle can run code; "
            f"{_ALTERNATIVES}"
        )
    raise CheckpointError(f"model={path} holds no .safetensors files; set `model` to where the weights are")


_FULL = (errno.ENOSPC, errno.EDQUOT)
_ALTERNATIVES = "use a checkpoint in safetensors format"


def _fetch(
    key: str, model: str, revision: str | None, weights: bool, on_progress: Callable[[float], None] | None
) -> Path:
    """Downloads `model` from the Hub. `key` is the setting that names it."""
    # This import costs more than all of configs, and most starts use local files.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    bars: Any = None if on_progress is None else _reporting_bars(on_progress)
    try:
        unwanted = [*_UNWANTED] if weights else [*_UNWANTED, "*.safetensors"]
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=unwanted, tqdm_class=bars
            )
        )
    except (OSError, ValueError, httpx.HTTPError, EntryNotFoundError) as error:
        # huggingface_hub raises OSError or ValueError if a repository is missing or gated, the network is down, or the
        # disk is full.
        reason = str(error).strip().split("\n")[0]
        at = f" at revision={revision}" if revision else ""
        if isinstance(error, OSError) and error.errno in _FULL:
            raise CheckpointError(
                f"{key}={model}{at} does not fit on the disk to which it is downloaded: {reason}; set HF_HOME to a "
                "directory with room, or make room"
            ) from error
        raise CheckpointError(
            f"{key}={model}{at} is no local path and cannot be fetched from the Hugging Face Hub: {reason}; check the "
            f"name, or set `{key}` to a local directory"
        ) from error


def _reporting_bars(on_progress: Callable[[float], None]) -> type:
    """Progress bars that report to `on_progress`. huggingface_hub reports downloads in no other way."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # of huggingface_hub's, as above

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B" and self.total:  # the other bars count files
                on_progress(min(self.n / self.total, 1.0))
            return shown

    return ReportingBar

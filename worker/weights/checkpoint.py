"""Checkpoints: reads this rank's ranges of each tensor from the files.

Names are those of Hugging Face checkpoints. The headers are compared with the model's shape before any weights are
read, so a missing, surplus or misshapen tensor stops the start.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from configs.draft_head import PREFIX, MTPHead
from configs.errors import CheckpointError
from configs.layers import tensors_of
from configs.model_config import ModelConfig
from configs.quantization import INPUT_SCALE, WeightScales
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span, as_matrix, blocks_of
from worker.weights.mxfp4 import BLOCKS, SCALES, read_matrices, stored_shapes
from worker.weights.safetensors_file import SafetensorsFile
from worker.weights.stacked_experts import by_expert

if TYPE_CHECKING:  # checks of headers skip torch's slow import
    import torch

logger = logging.getLogger(__name__)

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_IGNORED_SUFFIXES = (
    # Old checkpoints store the rotary frequencies, which follow from the config.
    ".rotary_emb.inv_freq",
    # Buffers of old attention modules.
    ".self_attn.bias",
    ".self_attn.masked_bias",
)
_COMPARED_ROWS = 4096
_SHOWN_NAMES = 8
_UNREAD_OF_HEADS = ("t2d", "embed_tokens.weight")
"""Tensors of draft heads that are not read: the inverse of d2t, and a copy of the model's embedding."""


class TensorFile(Protocol):
    """One open checkpoint file."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by its name."""

    def scaled(self) -> set[str]:
        """Names of the tensors that must be multiplied by scales, which another tensor contains."""

    def read(self, name: str, out: torch.Tensor, rows: Span, columns: Span | None) -> None:
        """Fills `out`, a matrix or vector, with rows (and columns) of a tensor. Reads no other pages of the file."""

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far, without headers."""

    def close(self) -> None:
        """Closes the file."""


class AnyCheckpoint(TensorSource, Protocol):
    """A checkpoint, or a substitute for one. A context manager that reads nothing after its end."""

    keeps_fp8: bool = True
    """Whether weights in FP8 may be read without conversion."""

    @property
    def bytes_loaded(self) -> int:
        """Bytes of the tensors filled so far, counted in the dtype of the filled tensors."""

    def kv_scales(self) -> list[tuple[float, ...]]:
        """For each layer, the factors by which its keys and values are divided before they are stored in FP8."""

    def __enter__(self) -> AnyCheckpoint:
        """Returns the checkpoint itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the checkpoint's files."""


class _Memory:
    """Tensors in memory as a TensorFile."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.bytes_read = 0

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def scaled(self) -> set[str]:
        import torch

        return {name for name, it in self._tensors.items() if it.dtype in (torch.float8_e4m3fn, torch.uint8)}

    def read(self, name: str, out: torch.Tensor, rows: Span, columns: Span | None) -> None:
        whole = self._tensors[name]
        part = whole.view(as_matrix(whole.shape))[slice(*rows)]
        out.copy_(part if columns is None else part[:, slice(*columns)])
        self.bytes_read += out.numel() * whole.itemsize

    def close(self) -> None:
        """Does nothing, as nothing is open."""


class Checkpoint(AnyCheckpoint):
    """All files of a checkpoint as one TensorSource. A context manager that reads nothing after `close`."""

    def __init__(self, files: Sequence[TensorFile], model: ModelConfig) -> None:
        self._files = by_expert(files, model)
        self._model = model
        self._owner: dict[str, TensorFile] = {}
        self._packed: dict[str, tuple[int, ...]] = {}  # shapes of the tensors that are stored in four bits
        self._bytes_loaded = 0

    @classmethod
    def open(cls, path: Path, model: ModelConfig, draft_head: Path | None = None) -> Checkpoint:
        """Opens a directory, and the directory of a draft head, and checks the tensors against `model`.

        Raises CheckpointError for missing and surplus tensors, wrong shapes, truncated files and refused formats.
        """
        files = [SafetensorsFile.open(file) for file in _weight_files(path)]
        checkpoint = cls([*files, *_head_files(draft_head)], model)
        try:
            checkpoint._check(path)
        except CheckpointError:
            checkpoint.close()
            raise
        return checkpoint

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], model: ModelConfig, draft_head: Path | None = None
    ) -> Checkpoint:
        """A checkpoint from tensors in memory, by name, with the draft head from files. It is checked as in `open`."""
        checkpoint = cls([_Memory(tensors), *_head_files(draft_head)], model)
        checkpoint._check(Path("memory"))
        return checkpoint

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far, of all files."""
        return sum(file.bytes_read for file in self._files)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of the tensors filled so far, counted in the dtype of the filled tensors."""
        return self._bytes_loaded

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, cast to its dtype, with tensor `name` or its given rows or columns."""
        before, stored = self._bytes_loaded, self._packed.get(name) or self._owner[name].shapes()[name]
        shape = as_matrix(stored)
        rows = Span(0, shape[0]) if rows is None else rows
        expected = (rows.size,) + ((columns.size,) if columns is not None else shape[1:])
        assert as_matrix(out.shape) == expected, f"{name}: asked for {expected} into {tuple(out.shape)}"
        if name in self._packed:
            whole = Span(0, shape[1]) if columns is None else columns
            read_matrices(self.read_mxfp4, name, stored, out.view(expected), rows, whole)
        elif out.numel() > 0:
            self._owner[name].read(name, out.view(expected), rows, columns)
            if (scales := self._model.weight_scales) is not None and name + scales.suffix in self._owner:
                import torch

                from parallel.numerics.fp8 import multiply

                block, whole = scales.block(shape), Span(0, shape[1]) if columns is None else columns
                of_blocks = torch.empty(blocks_of(rows, block[0]).size, blocks_of(whole, block[1]).size)
                self._read_scales(name + scales.suffix, block, of_blocks, rows, whole)
                multiply(out.view(expected), of_blocks, block, rows, whole)
        self._bytes_loaded = before + out.nbytes

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """Implements TensorSource."""
        kind = self._model.weight_scales
        if kind is None or not self.keeps_fp8 or name + kind.suffix not in self._owner:
            return None
        return kind.block(self._owner[name].shapes()[name])

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        """Implements TensorSource."""
        kind, file = self._model.weight_scales, self._owner[name]
        assert kind is not None, "there are no scales"
        shape = file.shapes()[name]
        file.read(name, out, rows, columns)
        self._read_scales(name + kind.suffix, kind.block(shape), scales, rows, columns)
        self._bytes_loaded += out.nbytes + scales.nbytes

    def is_mxfp4(self, name: str) -> bool:
        """Implements TensorSource."""
        return name in self._packed

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        """Implements TensorSource."""
        if rows.size == 0:
            return True
        _, inputs, outputs = self._packed[name]
        matrix, first = divmod(rows.start, inputs)
        stored = Span(matrix * outputs + columns.start, matrix * outputs + columns.stop)
        for end, out in ((BLOCKS, codes), (SCALES, exponents)):
            begin = first * out.shape[1] // rows.size
            self._owner[name + end].read(name + end, out, stored, Span(begin, begin + out.shape[1]))
            self._bytes_loaded += out.nbytes
        return True

    def kv_scales(self) -> list[tuple[float, ...]]:
        """For each layer, the factors by which its keys and values are divided in FP8. 1 if the files have none.

        Raises CheckpointError for a factor that is not a positive number.
        """
        layers = self._model.prefixed_layers
        return [tuple(self._kv_scale(prefix, names) for names in it.mixer.kv_scales) for prefix, it in layers]

    def close(self) -> None:
        """Closes every file."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_scales(
        self, name: str, block: tuple[int, int], out: torch.Tensor, rows: Span, columns: Span
    ) -> torch.Tensor:
        """Fills `out` with the scales of all blocks that contain these rows and columns."""
        file = self._owner[name]
        if prod(file.shapes()[name]) == 1:
            file.read(name, out.view(1), Span(0, 1), None)  # one scale for the whole matrix may have any shape
        else:
            file.read(name, out, blocks_of(rows, block[0]), blocks_of(columns, block[1]))
        return out

    def _kv_scale(self, prefix: str, names: Sequence[str]) -> float:
        name = next((prefix + name for name in names if prefix + name in self._owner), None)
        if name is None:
            return 1.0
        import torch

        file, value = self._owner[name], torch.empty(1)
        shape = file.shapes()[name]
        if prod(shape) != 1:
            raise CheckpointError(
                f"tensor {name} has shape {list(shape)}; kv_cache.dtype=fp8_e4m3 takes one factor for all heads of a "
                "layer. Choose kv_cache.dtype=auto"
            )
        file.read(name, value, Span(0, 1), None)
        if not 0.0 < value.item() < math.inf:
            raise CheckpointError(
                f"tensor {name} is {value.item()}, not a valid factor of an FP8 KV cache; choose kv_cache.dtype=auto"
            )
        return value.item()

    def _check(self, path: Path) -> None:
        expected = expected_shapes(self._model)
        optional = {
            prefix + name
            for prefix, layer in self._model.prefixed_layers
            for names in layer.mixer.kv_scales
            for name in names
        }
        kind = self._model.weight_scales
        scales = {} if kind is None else _scale_shapes(expected, kind)
        packed = {name: stored for name, shape in expected.items() if (stored := stored_shapes(name, shape))}
        known = expected | scales | {name: shape for it in packed.values() for name, shape in it.items()}
        surplus = []
        for file in self._files:
            for name, shape in file.shapes().items():
                if name not in known and name not in optional:
                    if not self._is_ignored(name):
                        surplus.append(name)
                    continue
                if name in self._owner:
                    raise CheckpointError(f"{path}: tensor {name} is in more than one file; download it again")
                wanted = known.get(name, shape)
                if shape != wanted and (name not in scales or prod(shape) > 1 or prod(wanted) > 1):
                    raise CheckpointError(
                        f"{path}: tensor {name} has shape {list(shape)}, the model's config asks for {list(wanted)}; "
                        "config and weights are of different models"
                    )
                self._owner[name] = file
        self._packed = {name: expected[name] for name, it in packed.items() if it.keys() <= self._owner.keys()}
        missing = [name for name in expected if name not in self._owner and name not in self._packed]
        if missing and surplus:
            raise CheckpointError(
                f"{path}: missing tensors: {_listed(missing)}; the files have {_listed(_nearest(missing, surplus))} "
                "instead, so config.json is not that of these weights"
            )
        if missing:
            raise CheckpointError(f"{path}: missing tensors: {_listed(missing)}; download the rest")
        if surplus:
            raise CheckpointError(
                f"{path} has tensors that a {self._model.model_type} model does not use: {_listed(surplus)}; check "
                "that config.json belongs to these weights, because ignoring them would change the answers"
            )

        if self._model.tie_word_embeddings and _has_own_lm_head(self._files, self._model):
            raise CheckpointError(
                f"{path}: config.json ties the LM head to the embedding, but the file has another lm_head.weight; "
                "download the checkpoint and set `model` to its directory"
            )
        have = {name for name in expected if kind is not None and name + kind.suffix in self._owner}
        if odd := have ^ {name for file in self._files for name in file.scaled() if name in expected}:
            raise CheckpointError(
                f"{path}: tensors in FP8 or bytes without scales, or scales of other tensors: {_listed(sorted(odd))}; "
                "weights in FP8 need scales, and config.json's quantization_config must describe them"
            )

    def _is_ignored(self, name: str) -> bool:
        # A tied model needs no separate LM head, but some checkpoints store the copy.
        tied_copy = self._model.tie_word_embeddings and name == f"{self._model.tensor_prefix}lm_head.weight"
        of_activations = self._model.weight_scales is not None and name.endswith(INPUT_SCALE)
        is_beside = not name.startswith(self._model.tensor_prefix) or name.startswith(self._model.unread)
        layer = re.match(self._model.layer_prefix(r"(\d+)"), name)
        is_mtp = layer is not None and 0 <= int(layer[1]) - self._model.num_hidden_layers < self._model.num_mtp_layers
        head = self._model.draft_head
        if isinstance(head, MTPHead) and name.startswith(head.layer_prefix):
            is_mtp = name in head.unread
        return tied_copy or is_beside or is_mtp or of_activations or name.endswith(_IGNORED_SUFFIXES)


def with_own_lm_head(model: ModelConfig, path: Path) -> ModelConfig:
    """`model`, with an LM head of its own if the checkpoint at `path` has one that differs from the embedding. Logs a
    warning then: config.json says that the two are one tensor."""
    if not model.tie_word_embeddings:
        return model
    files = [SafetensorsFile.open(file) for file in _weight_files(path)]
    try:
        if not _has_own_lm_head(files, model):
            return model
    finally:
        for file in files:
            file.close()
    logger.warning("%s: tie_word_embeddings is true, but lm_head.weight is not the embedding, so both are used", path)
    return replace(model, tie_word_embeddings=False)


def _has_own_lm_head(files: Sequence[TensorFile], model: ModelConfig) -> bool:
    """Whether the files have an LM head, and it differs from the embedding."""
    [head], [embedding] = (
        tensors_of(it) for it in (replace(model, tie_word_embeddings=False).lm_head, model.embedding) if it is not None
    )
    owner = {name: file for file in files for name in file.shapes() if name in (head.name, embedding.name)}
    if len(owner) < 2:
        return False
    if any(owner[name].shapes()[name] != head.shape for name in owner):
        return True
    import torch

    for start in range(0, model.vocab_size, _COMPARED_ROWS):
        rows = Span(start, min(start + _COMPARED_ROWS, model.vocab_size))
        parts = torch.empty(2, rows.size, model.hidden_size)
        for part, name in zip(parts, owner, strict=True):
            owner[name].read(name, part, rows, None)
        if not torch.equal(*parts):
            return True
    return False


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of `model`, with its full shape."""
    return {name: tensor.shape for name, tensor in model.stored_tensors().items()}


def _scale_shapes(expected: Mapping[str, tuple[int, ...]], kind: WeightScales) -> dict[str, tuple[int, ...]]:
    """Every tensor of scales that a checkpoint may have, with its shape."""
    shapes = {}
    for name, shape in expected.items():
        if len(shape) == 2:
            shapes[name + kind.suffix] = tuple(
                -(-size // of) for size, of in zip(shape, kind.block(shape), strict=True)
            )
    return shapes


def _head_files(path: Path | None) -> list[TensorFile]:
    """Opens the files of a draft head. They name the head's layer `midlayer`, or layer 0 of the model."""

    def name_of(name: str) -> str | None:
        own = name.removeprefix("model.").replace("layers.0.", "midlayer.")
        return None if own in _UNREAD_OF_HEADS else PREFIX + own

    return [] if path is None else [SafetensorsFile.open(file, name_of) for file in _weight_files(path)]


def _weight_files(path: Path) -> list[Path]:
    """The files in a directory that hold the weights."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; set `model` to where the weights are")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    if files := sorted(path.glob("*.safetensors")):
        # Mistral's checkpoints have a copy in another format, whose tensors have other names.
        return [file for file in files if not file.name.startswith("consolidated")] or files
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights only ({_listed(pickles)}), which can run any code when opened; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{path} holds no .safetensors file; set `model` to where the weights are")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files ({error!r}); download it again") from error
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{index.parent} lacks files its index names: {_listed(missing)}; download them")
    return files


def _nearest(names: Sequence[str], found: Sequence[str]) -> list[str]:
    """The most similar name among `found` for each of the first `names`."""
    nearest = (difflib.get_close_matches(name, found, 1, 0.0)[0] for name in names[:_SHOWN_NAMES])
    return list(dict.fromkeys(nearest))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"

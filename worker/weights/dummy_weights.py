"""Random weights of any model's shape, for benchmarks of checkpoints that cannot be downloaded.

A value depends only on the revision, the tensor's name, its row and its column, through a hash of 32-bit integers. So
every sharding, device and run gets bits of the same model, and no generator has state.
"""

from __future__ import annotations

import hashlib
import math
import struct
from types import TracebackType

import torch

from configs.layers import Role
from configs.model_config import ModelConfig
from parallel.plan import Span, as_matrix
from worker.weights.checkpoint import AnyCheckpoint
from worker.weights.mxfp4 import encode, read_matrices
from worker.weights.uniform import USED_BITS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Weights of std 1/sqrt(inputs) preserve the unit size that norms give their inputs. Residuals then grow as the root of
# the number of layers, to about 4 after 28. The gains below were tried at Qwen3-0.6B's shape, on 256 random tokens and
# 48 greedy ones in fp32: logits of std 2.0, no cycles (95 of 96 tokens distinct), bf16 logits off by 0.10 rms with 90 %
# of the best tokens the same.
_GAINS = {
    Role.MATRIX: 1.0,
    # Standard deviation of the logits, if the embedding is the LM head.
    Role.EMBEDDING: 2.0,
    # Sharper attention amplifies every perturbation: at 1.5, bf16 logits were off by 0.28.
    Role.QUERY_KEY: 0.85,
    # At 1, the part of attention's output that all positions share outgrew their differences, and greedy decoding ran
    # in cycles.
    Role.ATTENTION_OUTPUT: 0.6,
}
# With this mean of its decays, a state remembers some thirty tokens.
_MEANS = {Role.NORM: 1.0, Role.QUERY_KEY_NORM: _GAINS[Role.QUERY_KEY], Role.BIAS: 0.0, Role.DECAY: -3.0}
_VECTOR_STD = 0.1


class DummyCheckpoint(AnyCheckpoint):
    """Acts as a checkpoint of `model` in `model.dtype`, with the same bits as files that hold these values.

    A TensorSource and a context manager, like worker.weights.checkpoint.Checkpoint.

    Args:
        revision: each revision has other values.
    """

    def __init__(self, model: ModelConfig, revision: str | None = None) -> None:
        self._model = model
        self._seed = revision or ""
        self._tensors = model.stored_tensors()
        self._dtype = _DTYPES[model.dtype]
        self._bytes_loaded = 0

    @property
    def bytes_loaded(self) -> int:
        """Bytes of the tensors filled so far, counted in the dtype of the filled tensors."""
        return self._bytes_loaded

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, cast to its dtype, with tensor `name` or its given rows or columns, on the device of `out`."""
        before, tensor = self._bytes_loaded, self._tensors[name]
        shape = as_matrix(tensor.shape)
        width = shape[1] if len(shape) > 1 else 1
        rows = Span(0, shape[0]) if rows is None else rows
        expected = (rows.size,) + ((columns.size,) if columns is not None else shape[1:])
        assert as_matrix(out.shape) == expected, f"{name}: asked for {expected} into {tuple(out.shape)}"
        columns = columns or Span(0, width)
        if self.is_mxfp4(name):
            read_matrices(self.read_mxfp4, name, tensor.shape, out.view(rows.size, -1), rows, columns)
        elif out.numel() > 0:
            self._make(name, out.view(rows.size, -1), rows, columns)
        self._bytes_loaded = before + out.nbytes

    def is_mxfp4(self, name: str) -> bool:
        """Implements TensorSource."""
        return self._model.has_mxfp4 and self._tensors[name].may_be_mxfp4

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        """Implements TensorSource."""
        values = torch.empty(rows.size, columns.size, device=codes.device)
        self._make(name, values, rows, columns)
        encode(values.t().contiguous(), codes, exponents)
        self._bytes_loaded += codes.nbytes + exponents.nbytes
        return True

    def kv_scales(self) -> list[tuple[float, ...]]:
        """The scales of a checkpoint that has none: all 1."""
        return [(1.0,) * len(layer.mixer.kv_scales) for layer in self._model.all_layers]

    def _make(self, name: str, out: torch.Tensor, rows: Span, columns: Span) -> None:
        tensor = self._tensors[name]
        # Dimension 1 has the inputs, both for a matrix and for stacked matrices.
        mean, std = _mean_and_std(tensor.role, tensor.shape[1] if len(tensor.shape) > 1 else 1)
        _fill(out, self._seed + name, mean - tensor.offset, std, rows, columns, self._dtype)

    def __enter__(self) -> DummyCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Does nothing, as no file is open."""


def _mean_and_std(role: Role, num_inputs: int) -> tuple[float, float]:
    return (_MEANS[role], _VECTOR_STD) if role in _MEANS else (0.0, _GAINS[role] / math.sqrt(num_inputs))


def _fill(out: torch.Tensor, seed: str, mean: float, std: float, rows: Span, columns: Span, dtype: torch.dtype) -> None:
    """Fills out [rows.size, columns.size] with uniform values, rounded to `dtype` and then to the dtype of `out`."""
    # Rows and columns have separate seeds, or two tensors with seeds close together would share rows.
    row_seed, column_seed = struct.unpack_from("<2i", hashlib.sha256(seed.encode()).digest())
    # Uniform on [-2^23, 2^23) has a standard deviation of 2^23 / sqrt(3).
    scale = std * math.sqrt(3.0) / (1 << (USED_BITS - 1))
    if out.is_cuda:
        from worker.weights.uniform_kernel import fill
    else:
        from worker.weights.uniform import fill
    fill(out, (row_seed, column_seed), scale, mean, rows, columns, dtype)

"""Rows of logits that the sampler draws from, by its Triton kernels or by torch, whole or sharded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.sampler import Sampler

Params = npt.NDArray[np.void]
CPU = torch.device("cpu")


def plan_of(tp_size: int, vocab_size: int) -> ShardPlan:
    """The ranges of a small model with that vocabulary."""
    return ShardPlan.create(dense_model(vocab_size=vocab_size), tp_size)


def sampler_alone(vocab: int, num_rows: int, device: torch.device = CPU, *, use_triton: bool) -> Sampler:
    """The sampler of a group of one rank, with rows 1 to `num_rows`."""
    return Sampler(plan_of(1, vocab), TensorParallelGroup.single(device), num_rows + 1, use_triton=use_triton)


def draw(
    sampler: Sampler, logits: torch.Tensor, params: Params, positions: npt.NDArray[np.integer]
) -> tuple[list[int], LogprobTensors | None]:
    """Samples every row, then those again that the plain rule is not enough for.

    Args:
        logits: [num_rows, columns of this rank].
        params: [num_rows] PARAMS_DTYPE, of distinct rows.
    """
    device = sampler.tables.records.device
    sampler.tables.update(params)
    local, rows = logits.to(device), torch.from_numpy(params["row"].copy()).to(device)
    at = torch.from_numpy(positions.astype(np.int32)).to(device)
    resampled = sampler.find_resampled(params["row"], positions)
    tokens = sampler.sample(local, rows, at, resampled.indices[resampled.is_redrawn])
    logprobs = sampler.resample(local, rows, at, tokens, resampled)
    return tokens.tolist(), logprobs


def draw_by_torch(
    logits: torch.Tensor, params: Params, positions: npt.NDArray[np.integer]
) -> tuple[list[int], LogprobTensors | None]:
    """`draw` from whole rows on the CPU by torch, each row of `params` a row of its own."""
    numbered = params.copy()
    numbered["row"] = np.arange(1, len(params) + 1)
    return draw(sampler_alone(logits.shape[1], len(params), use_triton=False), logits, numbered, positions)

"""Log probabilities of some tokens of a step, computed by the sampler and sent in a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class LogprobTensors(NamedTuple):
    """Log probabilities, before adjustments, temperature and filters, of one token in each of some rows of logits."""

    logprobs: torch.Tensor
    """[num_rows] fp32: log probability of the token itself."""
    top_ids: torch.Tensor
    """[num_rows, k] int64: likeliest tokens, descending, ties by id. k is the largest number that a row requested."""
    top_logprobs: torch.Tensor
    """[num_rows, k] fp32: log probabilities of `top_ids`."""
    requested_logprobs: torch.Tensor
    """[num_rows, m] fp32: log probabilities of the requested tokens. m is the largest number that a row requested."""

    @classmethod
    def joined(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """The rows of one or more parts, concatenated."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def to_host(self) -> LogprobTensors:
        """Queues the copies to the host. On CPU, returns the tensors themselves."""
        # A non-blocking copy to the host goes to pinned memory. An event of the caller marks when it is filled.
        return LogprobTensors(*(part.to("cpu", non_blocking=True) for part in self))

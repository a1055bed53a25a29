"""Log probabilities of some tokens of a step, as the sampler finds them and a result takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class LogprobTensors(NamedTuple):
    """Log probabilities, before adjustments, temperature and filters, of one token in each of some rows of logits."""

    logprobs: torch.Tensor
    """[num_rows] fp32: of the token itself."""
    top_ids: torch.Tensor
    """[num_rows, k] int64: likeliest tokens, descending, equal ones by id; k is the most asked for."""
    top_logprobs: torch.Tensor
    """[num_rows, k] fp32."""
    requested_logprobs: torch.Tensor
    """[num_rows, m] fp32: of the tokens that were asked for; m is the most a row asked for."""

    @classmethod
    def joined(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """The rows of at least one part, one part after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def to_host(self) -> LogprobTensors:
        """Queues the copies; on CPU the tensors themselves."""
        # A non-blocking copy to the host lands in pinned memory, which an event behind it says is filled.
        return LogprobTensors(*(part.to("cpu", non_blocking=True) for part in self))

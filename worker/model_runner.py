"""One forward pass: a step's frame to logits of the rows that are sampled."""

from __future__ import annotations

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from configs.errors import EngineError
from worker.models.decoder import Decoder
from worker.protocol import RowFlag, StepFrame


class ModelRunner:
    """Owns the last token of every row; reads the page table, writes KV through the backend.

    Args:
        vocab_size: input ids are checked against it.
        max_model_len: most tokens of one sequence.
        device: where the decoder's tensors are.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        *,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._device = device
        num_rows = len(req_to_token_pool.page_table)
        self._last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def forward(self, frame: StepFrame) -> torch.Tensor:
        """Logits [num_sampled, vocab_size] fp32 of the frame's SAMPLE rows; page deltas are applied first.

        Raises:
            EngineError: the frame does not fit this rank's tables.
        """
        self._check(frame)
        self._req_to_token_pool.apply(frame.page_deltas, self._token_to_kv_pool.num_pages)
        sampled = (frame.flags & RowFlag.SAMPLE) != 0
        batch = ForwardBatch.create(
            req_pool_indices=frame.rows.astype(np.int64),
            prefix_lens=frame.starts.astype(np.int64),
            extend_lens=frame.lens.astype(np.int64),
            input_ids=self._input_ids(frame),
            page_table=self._req_to_token_pool.page_table,
            page_size=self._token_to_kv_pool.page_size,
            sampled=sampled,
        )
        self._backend.init_forward_metadata(batch)
        hidden = self._decoder.forward(batch, self._backend)
        if len(batch.sample_indices) == 0:
            return torch.empty(0, self._vocab_size, device=self._device)
        return self._decoder.logits(hidden.index_select(0, batch.sample_indices))

    def set_last_tokens(self, frame: StepFrame, tokens: torch.Tensor) -> None:
        """Remembers `tokens` [num_sampled] int64 as the next input of the frame's SAMPLE rows."""
        rows = frame.rows[(frame.flags & RowFlag.SAMPLE) != 0]
        self._last_tokens.index_copy_(0, torch.from_numpy(rows.astype(np.int64)).to(self._device), tokens)

    def _input_ids(self, frame: StepFrame) -> torch.Tensor:
        has_tokens = (frame.flags & RowFlag.HAS_TOKENS) != 0
        if not has_tokens.any():
            return self._last_tokens.index_select(0, torch.from_numpy(frame.rows.astype(np.int64)).to(self._device))
        given = torch.from_numpy(frame.token_ids.astype(np.int64)).to(self._device)
        if has_tokens.all():
            return given
        from_frame = torch.from_numpy(np.repeat(has_tokens, frame.lens)).to(self._device)
        rows = torch.from_numpy(np.repeat(frame.rows, frame.lens).astype(np.int64)).to(self._device)
        input_ids = self._last_tokens.index_select(0, rows)
        return input_ids.masked_scatter_(from_frame, given)

    def _check(self, frame: StepFrame) -> None:
        num_rows = len(self._req_to_token_pool.page_table)
        has_tokens = (frame.flags & RowFlag.HAS_TOKENS) != 0
        wrong = None
        if len(frame.rows) == 0:
            wrong = "has no rows"
        elif not ((frame.rows >= 1) & (frame.rows < num_rows)).all():
            wrong = f"names a row outside 1 to {num_rows - 1}"
        elif not (frame.lens >= 1).all() or not (frame.lens[~has_tokens] == 1).all():
            wrong = "has a row of impossible length"
        elif int(frame.lens[has_tokens].sum()) != len(frame.token_ids):
            wrong = f"has {len(frame.token_ids)} token ids for {int(frame.lens[has_tokens].sum())} inputs"
        elif not ((frame.token_ids >= 0) & (frame.token_ids < self._vocab_size)).all():
            wrong = f"has a token id outside a vocabulary of {self._vocab_size}"
        elif not ((frame.starts >= 0) & (frame.starts + frame.lens <= self._max_model_len)).all():
            wrong = f"has a row outside positions 0 to {self._max_model_len - 1}"
        if wrong is not None:
            raise EngineError(f"step {frame.step} of generation {frame.generation} {wrong}")

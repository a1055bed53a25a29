"""Small random models of any family, as transformers makes them, and what tests of several families look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from configs.read_config import read_model_config
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from tests.helpers.rank_threads import on_ranks
from tests.whole.test_models import Case, Rank, save
from worker.models.decoder import Decoder

CPU = torch.device("cpu")


def random_case(model_type: str, config: Mapping[str, Any], path: Path, factor: float = 4.0) -> Case:
    """A model of that config, written to `path`. Of the initial size, scores would be far below a softcap, routers
    hardly prefer any expert and layers hardly add to the residual: matrices are `factor` times as large."""
    torch.manual_seed(0)
    config = {**config, "attn_implementation": "eager"}
    hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1.0)
        for name, tensor in (*hf.named_parameters(), *hf.named_buffers()):
            if name.endswith(("sinks", "e_score_correction_bias")):
                tensor.normal_()
    save(hf, path)
    return Case(hf, path, read_model_config(path))


def decoder_of(plan: ShardPlan, rank: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """One of `plan.tp_size` ranks, by itself."""
    group = TensorParallelGroup(rank=rank, size=plan.tp_size, device=CPU, collectives=None)
    return Decoder(plan.model, plan, group, dtype=dtype, device=CPU)


def check_exact_logits(case: Case, dtype: torch.dtype, sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Every bit is the same on so many ranks, of a prompt alone, in chunks beside others, and token by token."""
    first, second = (np.random.default_rng(seed).integers(0, case.model.vocab_size, 37).tolist() for seed in (1, 2))

    def of_rank(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, dtype, exact=True)
        alone = [rank.logits([(row, 0, tokens)])[0] for row, tokens in ((1, first), (2, second))]
        chunks = [rank.logits([(1, 0, first[:11]), (2, 0, second[:5])]), rank.logits([(2, 5, second[5:24])])]
        chunks += [rank.logits([(2, i, [second[i]]), (1, i - 13, [first[i - 13]])])[::-1] for i in range(24, 37)]
        chunks.append(rank.logits([(1, 24, first[24:])]))
        of_second = [chunks[0][1], chunks[1][0], *(rows[1] for rows in chunks[2:-1])]
        of_first = [rows[0] for rows in (chunks[0], *chunks[2:])]
        return [*alone, torch.cat(of_first), torch.cat(of_second)]

    expected = on_ranks(1, of_rank)[0][:2] * 2
    assert all(logits.isfinite().all() for logits in expected)
    for size in sizes:
        for logits in on_ranks(size, of_rank):
            for rows, meant in zip(logits, expected, strict=True):
                assert torch.equal(rows.view(torch.int32), meant.view(torch.int32)), size

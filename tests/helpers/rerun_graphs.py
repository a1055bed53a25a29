"""What stands for CUDA graphs on the CPU: a captured step is run again, padded, over the same static tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attention.backend import AttentionBackend
from attention.layer import AttentionLayer
from attention.step_shape import StepShape
from worker.step.cuda_graph_runner import CudaGraphRunner, DeviceOutput, _Captured


class PagedBackend(AttentionBackend):
    """Attention that reads nothing of a batch but its paged tensors, as a captured step must."""

    captures_cuda_graphs = True

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        out, heads, paged = torch.empty(q.shape), q.view(len(q), -1, layer.head_dim), self.batch_of(layer).paged
        bounds = paged.cu_seqlens_q.tolist()
        for i, num_keys in enumerate(paged.cache_seqlens.tolist()):
            tokens = slice(bounds[i], bounds[i + 1])
            if tokens.start < tokens.stop:
                pages = paged.page_table[i, : -(-num_keys // self.token_to_kv_pool.page_size)].long()
                keys, values = (
                    part[pages].flatten(0, 1)[:num_keys].transpose(0, 1)
                    for part in self.token_to_kv_pool.pages(layer.layer_id)
                )
                positions = torch.arange(num_keys)
                visible = positions <= positions[tokens.start - tokens.stop :, None]
                if layer.window is not None:
                    first = positions[tokens.start - tokens.stop :, None] - (layer.window - 1)
                    visible &= positions >= first
                    unseen = int(first[0].clamp(min=0))
                    keys[:, :unseen], values[:, :unseen] = 0, 0  # other rows' by now, or never written
                row = F.scaled_dot_product_attention(
                    heads[tokens].transpose(0, 1), keys, values, visible, scale=layer.scale, enable_gqa=True
                )
                out[tokens] = row.transpose(0, 1).flatten(1)
        return out


@dataclass(frozen=True)
class _Rerun:
    """Stands for torch.cuda.CUDAGraph."""

    step: Callable[[StepShape], DeviceOutput]
    shape: StepShape
    output: DeviceOutput

    def reset(self) -> None:
        pass

    def replay(self) -> None:
        again = self.step(self.shape)
        self.output.tokens.copy_(again.tokens)
        assert again.logits.data_ptr() == self.output.logits.data_ptr()


@dataclass(frozen=True)
class _RerunPass:
    """Stands for torch.cuda.CUDAGraph."""

    replay: Callable[[], None]

    def reset(self) -> None:
        pass


class RerunGraphs(CudaGraphRunner):
    """A CudaGraphRunner whose graphs are run again."""

    def capture(
        self,
        step: Callable[[StepShape], DeviceOutput],
        shapes: Sequence[StepShape],
        *,
        prepare: Callable[[StepShape], None],
    ) -> None:
        for shape in shapes:
            self.capture_one(step, shape, prepare=prepare)

    def capture_one(
        self, step: Callable[[StepShape], DeviceOutput], shape: StepShape, *, prepare: Callable[[StepShape], None]
    ) -> None:
        prepare(shape)
        output = step(shape)
        self._captured[shape] = _Captured(_Rerun(step, shape, output), output)

    def capture_pass(self, name: str, shape: StepShape, run: Callable[[], None]) -> None:
        run()
        self._passes[name, shape] = _RerunPass(run)

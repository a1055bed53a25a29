"""Time of one layer's attention in a step with a prompt and decodes, by FA3 with and without splits, on one GPU.

    python -m benchmarks.prompt_attention [--commit COMMIT]

A CUDA graph for the most rows of a step (256 and one for padding) holds 12 decodes of some length, a prompt that takes
almost all of the tokens, and the padding. `FlashAttentionBackend.capture_shapes` goes by what this shows: in one piece
a row's keys take a time of their own, and to join what was split takes one for every token that every row may have.
"""

from __future__ import annotations

import argparse

import torch

from attention.fa3_builds import FA3Provider, load_provider
from attention.forward_batch import PagedMetadata
from attention.layer import AttentionLayer
from benchmarks.graph_timing import graph_us
from benchmarks.report import circumstances, describe_circumstances, table

HEADS = ((32, 8), (16, 4), (8, 2))  # on a rank of Qwen3-8B at TP 1, 2, 4
NUM_TOKENS = (32, 128, 256, 512, 1024, 2048)
LENGTHS = (300, 600, 1200, 2400, 4800, 9600, 38_400)
NUM_DECODES, MAX_ROWS = 12, 256
HEAD_DIM, PAGE_SIZE, NUM_PAGES, MAX_TOKENS = 128, 64, 8192, 40_960
NUM_LAYERS = 4
DEVICE = torch.device("cuda")


class Step:
    """One layer's pool on a rank with so many heads, and the graph's time of a step on it."""

    def __init__(self, provider: FA3Provider, num_q_heads: int, num_kv_heads: int) -> None:
        self._provider = provider
        self._layer = AttentionLayer(
            layer_id=0,
            tp_q_head_num=num_q_heads,
            tp_k_head_num=num_kv_heads,
            head_dim=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
        )
        shape = (NUM_PAGES, PAGE_SIZE, num_kv_heads, HEAD_DIM)
        self._k, self._v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def us(self, num_tokens: int, length: int, num_splits: int) -> float:
        """Microseconds of one layer in a graph for `num_tokens`, with decodes of `length` tokens."""
        num_rows = min(MAX_ROWS, num_tokens - 1) + 1
        prompt = num_tokens - NUM_DECODES - 1
        lens = torch.tensor([*[1] * NUM_DECODES, prompt, *[0] * (num_rows - NUM_DECODES - 2), 1])
        seq_lens = torch.where(lens == 1, length, lens)
        seq_lens[-1] = 1
        paged = PagedMetadata(
            cache_seqlens=seq_lens.to(DEVICE, torch.int32),
            cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(DEVICE, torch.int32),
            page_table=torch.randint(NUM_PAGES, (num_rows, MAX_TOKENS // PAGE_SIZE), dtype=torch.int32, device=DEVICE),
            max_seqlen_q=num_tokens,  # a graph for any prompt has to allow for it
        )
        q = torch.randn(num_tokens, self._layer.tp_q_head_num, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty_like(q)

        def run() -> None:
            for _ in range(NUM_LAYERS):
                self._provider.attend(q, self._k, self._v, paged, self._layer, num_splits=num_splits, out=out)

        return graph_us(run, NUM_LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of this code, where git is not there to tell")
    args = parser.parse_args()
    print("# python -m benchmarks.prompt_attention")
    print(f"# {describe_circumstances(circumstances(args.commit))}; bf16")
    print("us of one layer: keys split as FA3 chooses/in one piece; by the tokens of each decode", flush=True)
    provider = load_provider(None)
    for heads in HEADS:
        step = Step(provider, *heads)
        rows = [
            [str(num_tokens)]
            + ["/".join(f"{step.us(num_tokens, length, splits):.0f}" for splits in (0, 1)) for length in LENGTHS]
            for num_tokens in NUM_TOKENS
        ]
        print(f"\n{heads[0]} query heads, {heads[1]} KV heads")
        print(table(["tokens", *(f"{length:,}" for length in LENGTHS)], rows), flush=True)


if __name__ == "__main__":
    main()

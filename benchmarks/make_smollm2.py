"""Writes the SmolLM2 of a GGUF file as a directory that Lockstep and transformers read; `make setup` calls it.

    python -m benchmarks.make_smollm2 MODEL.gguf OUT

transformers reads the GGUF file. OUT gets config.json, model.safetensors and the files of the tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, out: Path) -> None:
    """Fills `out`, which is made when it is not there."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2's own tokenizer makes each digit a piece (`tokenizer.ggml.pre` is `smollm`); transformers ignores that.
    rust = tokenizer.backend_tokenizer
    rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), rust.pre_tokenizer])
    tokenizer.save_pretrained(out)

    # Products of four-bit numbers and fp16 scales fit in no shorter type.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The LM head is the embedding. `model.save_pretrained` refuses a model that was read from a GGUF file.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    # The type that the model was trained in, and GPUs run it in.
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

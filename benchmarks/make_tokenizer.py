"""Writes the tokenizer inside a GGUF file as a directory for `tokenizer:`, where a model's own cannot be downloaded.

    python -m benchmarks.make_tokenizer MODEL.gguf OUT

A model with random weights then serves text all the same: what it generates means nothing, and ids that the tokenizer
does not know are no text at all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.openai.tokenizer import Tokenizer, convert_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path, help="a directory; made when it is not there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    convert_gguf(args.gguf, args.out)
    tokenizer = Tokenizer.load(args.out)
    template = "no chat template" if tokenizer.chat_template is None else "a chat template"
    print(f"{args.out}: {tokenizer.vocab_size} ids, {template}")


if __name__ == "__main__":
    main()

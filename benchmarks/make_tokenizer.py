"""Writes another model's tokenizer as a directory for `tokenizer:`, where a model's own cannot be downloaded.

    python -m benchmarks.make_tokenizer MODEL OUT [--vocab-size N]

A model with random weights then serves text all the same: what it generates means nothing, and ids that the tokenizer
does not know are no text at all. Give the model's vocab_size where streams are timed: a stream says nothing of a token
without text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cluster.text.tokenizer import Tokenizer


def fill(path: Path, vocab_size: int) -> None:
    """Gives ids without a token, up to `vocab_size`, one that no text is encoded to: a space and a word of its own.

    Args:
        path: a tokenizer.json of byte-level BPE, which is changed. Its special tokens are in the vocabulary too, as
            SmolLM2's are.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    known = set(vocab.values())
    vocab |= {f"\u0120word{i}": i for i in range(vocab_size) if i not in known}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory with a tokenizer.json")
    parser.add_argument("out", type=Path, help="a directory; made when it is not there")
    parser.add_argument("--vocab-size", type=int, default=0, help="make words up for ids below this that have no token")
    args = parser.parse_args()
    PreTrainedTokenizerFast.from_pretrained(args.model).save_pretrained(args.out)
    fill(args.out / "tokenizer.json", args.vocab_size)
    tokenizer = Tokenizer.load(args.out)
    template = "no chat template" if tokenizer.template is None else "a chat template"
    print(f"{args.out}: {tokenizer.vocab_size} ids, {template}")


if __name__ == "__main__":
    main()

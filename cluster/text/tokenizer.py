"""The tokenizer of a model's directory: text to ids, ids to bytes, and the model's chat template.

transformers reads the directory. Encoding and decoding use the Rust tokenizer directly, which is thread-safe. Only its
batch calls release the GIL, so a single text is encoded as a batch of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jinja2.exceptions import TemplateSyntaxError
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from cluster.text.chat_template import ChatTemplate, read_template
from cluster.text.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from configs.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The Rust tokenizer would start a thread pool, which batches of one do not need, and would warn about it in each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer. Any thread may call all methods."""

    def __init__(self, fast: PreTrainedTokenizerFast, *, chat_template: str | None = None) -> None:
        """`chat_template` replaces the model's own. `fast` belongs to this object from now on, and may be changed."""
        self._fast = fast
        self._rust: RustTokenizer = fast.backend_tokenizer
        # A tokenizer.json may contain the truncation and padding of the training.
        self._rust.no_truncation()
        self._rust.no_padding()
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The largest token id plus one, including added tokens."""
        added = self._rust.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_level = isinstance(self._rust.decoder, decoders.ByteLevel)
        source = fast.chat_template if chat_template is None else chat_template
        self.template = None if source is None else ChatTemplate(source, fast.special_tokens_map)
        """The chat template. None if the model has none."""
        self._bytes: dict[int, bytes] = {}  # bytes of the tokens seen so far, at most of the whole vocabulary
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Reads a directory with tokenizer.json.

        Args:
            chat_template: a Jinja file that replaces the model's own template.

        Raises:
            CheckpointError: there is no tokenizer at `path`, or it cannot be read.
            ConfigError: `chat_template` cannot be read, or is not Jinja.
        """
        source = Path(path).expanduser()
        fast = _load_directory(source)
        template = None if chat_template is None else read_template(chat_template)
        try:
            return cls(fast, chat_template=template)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template in {source} is not Jinja ({error}); set server.chat_template to one that is"
            ) from None

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters that one token stands for. 0 if that is unknown, because the tokenizer drops or
        shortens characters before it splits a text."""
        strips = any(token.lstrip or token.rstrip for token in self._rust.get_added_tokens_decoder().values())
        if strips or not self._byte_level or self._rust.normalizer is not None:
            return 0
        # In a byte-level vocabulary, a piece has one character for each byte of its text.
        return max(map(len, self._rust.get_vocab(with_added_tokens=True)))

    @property
    def bos_token_id(self) -> int | None:
        return self._fast.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._fast.eos_token_id

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json, added tokens included."""
        return str(self._rust.to_str())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`, which must not contain lone surrogates. Releases the GIL. Takes 1 to 2 ms for 4 kB."""
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, decoded without context. Releases the GIL."""
        [text] = self._rust.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def added_tokens(self) -> dict[str, bool]:
        """The texts that always become one token, and whether each token is flagged as special."""
        return {token.content: token.special for token in self._rust.get_added_tokens_decoder().values()}

    def token_id(self, text: str) -> int | None:
        """Id of the token that is written as `text`. None if no token is."""
        id_: int | None = self._rust.token_to_id(text)
        return id_

    def special_id(self, text: str) -> int | None:
        """Id of the special token that is written as `text`. None if no special token is."""
        id_ = self._rust.token_to_id(text)
        return id_ if id_ in self._special_ids else None

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """A decoder for the tokens after `prompt_ids`. It leaves out special tokens, except `shown` ones."""
        hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            hidden = self._special_ids.difference(map(self.special_id, shown)) if shown else self._special_ids
        if self._byte_level:
            return ByteDetokenizer(lambda id_: b"" if id_ in hidden else self.token_bytes(id_))
        return StreamDetokenizer(self._rust, prompt_ids, hidden)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, which may be half an emoji. Empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete characters."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self._rust.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            # The Rust decoder does the same: a piece with any character outside the table is plain text.
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return str(piece).encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes((int(match.group(1), 16),))
        return str(piece).replace("▁", " ").encode()


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, and the other 68 for U+0100 onwards."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _load_directory(directory: Path) -> PreTrainedTokenizerFast:
    if not directory.is_dir():
        raise CheckpointError(f"no tokenizer, because {directory} is no directory; set `tokenizer` to one")
    try:
        if (directory / "tokenizer.json").is_file():
            # AutoTokenizer would import torch (2.7 s instead of 0.6 s), and find out only what tokenizer.json has.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the tokenizer in {directory} cannot be read: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"the tokenizer in {directory} has no tokenizer.json; save it once as a fast tokenizer")
    if not tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids:
        # With only a config.json, transformers would make a family's tokenizer without a vocabulary.
        raise CheckpointError(f"{directory} holds no tokenizer; set `tokenizer` to a directory with one")
    return cast("PreTrainedTokenizerFast", tokenizer)  # is_fast means this type

"""The tokenizer inside a GGUF file, built from its vocabulary, merges, token types and flags.

Owns what those fields mean. How text is cut before merging is `gguf_splits`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from cluster.text.gguf_splits import SPLITS, TextSplit
from configs.errors import CheckpointError
from configs.gguf_header import GGUFHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_ADVICE = "set `tokenizer` to the model's own, as a directory"
_ARRAYS = tuple(_PREFIX + key for key in ("tokens", "token_type", "merges", "scores"))
_ENDS = ("bos", "eos", "eot", "eom")
_MARK = "▁"  # SentencePiece writes it for a space
# Types of tokens; unused ones and single bytes have others.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def check_gguf_tokenizer(path: Path) -> None:
    """Looks at the kind of the tokenizer inside `path`, which takes milliseconds. Raises CheckpointError, which names
    it, where `read_gguf_tokenizer` does not know that kind."""
    _split(path, GGUFHeader.read(path).metadata)


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer inside `path` with its chat template; takes 0.2 s for 49k tokens and as many merges. Raises
    CheckpointError where it is of an unknown kind, or its parts do not fit together."""
    # Imported late: half a second.
    from transformers import PreTrainedTokenizerFast

    metadata = GGUFHeader.read(path, arrays=_ARRAYS).metadata
    split = _split(path, metadata)
    fields = _Fields(path, metadata)
    rust = _sentencepiece(fields) if split is None else _byte_level(fields, split)
    _add_tokens(rust, fields)
    _add_ends(rust, fields, add_bos=split is None or split.add_bos)
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers annotates it in part
        tokenizer_object=rust,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **fields.named_tokens(),
    )


def _split(path: Path, metadata: Mapping[str, object]) -> TextSplit | None:
    """How text is cut before merging; None for SentencePiece, which does not cut it."""
    kind, name = metadata.get(_PREFIX + "model"), metadata.get(_PREFIX + "pre")
    if kind == _SENTENCEPIECE:
        return None
    if kind != _BYTE_LEVEL:
        rule = f"supported are {_BYTE_LEVEL} and {_SENTENCEPIECE}"
        raise CheckpointError(f"{path}: {_PREFIX}model={kind or 'nothing'} is not supported; {rule}; {_ADVICE}")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        rule = "it says how text is split, and splitting otherwise gives other tokens"
        raise CheckpointError(f"{path}: {_PREFIX}pre={name or 'nothing'} is not supported; {rule}; {_ADVICE}")
    return split


class _Fields:
    """The fields of one file's tokenizer, checked as they are read."""

    def __init__(self, path: Path, metadata: Mapping[str, object]) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens = [token or f"[EMPTY_{id_}]" for id_, token in enumerate(self.strings("tokens"))]
        """Tokens by id, each once."""
        if not self.tokens or len(set(self.tokens)) < len(self.tokens):
            raise self.error("tokens is missing or names a token twice")
        self.types = [int(type_) for type_ in self._for_tokens("token_type")]
        """Types by id; empty where the file has none."""
        self.is_sentencepiece = metadata[_PREFIX + "model"] == _SENTENCEPIECE

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {_PREFIX}{what}; {_ADVICE}")

    def strings(self, key: str) -> list[str]:
        """Empty where the file has none."""
        values = self._metadata.get(_PREFIX + key, ())
        if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
            raise self.error(f"{key} is no list of strings")
        return list(values)

    def scores(self) -> list[float]:
        return [float(score) for score in self._for_tokens("scores")]

    def _for_tokens(self, key: str) -> Sequence[int | float]:
        values = self._metadata.get(_PREFIX + key, ())
        if not isinstance(values, tuple) or (values and len(values) != len(self.tokens)):
            raise self.error(f"{key} does not have one number for each token")
        return values

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(_PREFIX + key, default))

    def id(self, name: str) -> int | None:
        """The id under `<name>_token_id`; what SentencePiece's own defaults are where the file says nothing."""
        default = {"unknown": 0, "bos": 1, "eos": 2}.get(name) if self.is_sentencepiece else None
        id_ = self._metadata.get(f"{_PREFIX}{name}_token_id", default)
        if id_ is not None and not (isinstance(id_, int) and 0 <= id_ < len(self.tokens)):
            raise self.error(f"{name}_token_id={id_} is not below the number of tokens, {len(self.tokens)}")
        return id_

    def special_ids(self) -> set[int]:
        """Ids of tokens that stand for no text. A token that ends or begins an answer is one whatever its type."""
        ids = {id_ for id_, type_ in enumerate(self.types) if type_ in (_UNKNOWN, _CONTROL)}
        return ids | {id_ for name in _ENDS if (id_ := self.id(name)) is not None}

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and the like, by name. A padding token that is ordinary text is no special one and left out."""
        special = self.special_ids()
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {key: self.id(name) for key, name in keys.items()}
        return {key: self.tokens[id_] for key, id_ in ids.items() if id_ in special}


def _bpe(fields: _Fields, merges: list[tuple[str, str]], **options: Any) -> BPE:
    """The model of `merges`, pairs with the best first. `options` are BPE's own."""
    try:
        return BPE(vocab={token: id_ for id_, token in enumerate(fields.tokens)}, merges=merges, **options)
    except Exception as error:  # noqa: BLE001 -- the library raises no narrower type
        raise fields.error(f"merges and tokens do not fit together ({error})") from None


def _byte_level(fields: _Fields, split: TextSplit) -> RustTokenizer:
    """BPE over bytes, each written as a printable character; the file has the merges."""
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields.strings("merges"))]
    rust = RustTokenizer(_bpe(fields, merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        rust.normalizer = normalizers.NFC()
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    return rust


def _sentencepiece(fields: _Fields) -> RustTokenizer:
    """BPE over characters, with a token for each byte of those that have none; merges follow from the scores."""
    unknown = fields.tokens[fields.id("unknown") or 0]
    rust = RustTokenizer(_bpe(fields, _merges_by_score(fields), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", _MARK)
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", True):
        # Llama 2's own does so: what follows a token that is found before splitting gets a space as well.
        rust.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), mark])
        rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        rust.normalizer = mark
        rust.decoder = decoders.Sequence(steps)
    return rust


def _merges_by_score(fields: _Fields) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the third's best score first, then the longer left part."""
    scores = fields.scores()
    if not scores:
        raise fields.error("scores is missing")
    ordinary = {
        token: score
        for id_, (token, score) in enumerate(zip(fields.tokens, scores, strict=True))
        if not fields.types or fields.types[id_] == _NORMAL
    }
    merges = [
        (-score, -at, -len(token), token[:at], token[at:])
        for token, score in ordinary.items()
        for at in range(1, len(token))
        if token[:at] in ordinary and token[at:] in ordinary
    ]
    # A stable sort of what precedes the texts: among equals the file's order stays.
    return [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:3])]


def _add_tokens(rust: RustTokenizer, fields: _Fields) -> None:
    """Makes the tokens that are found in text before it is split: special ones, and those users have defined."""
    special = fields.special_ids()
    rust.add_special_tokens([AddedToken(fields.tokens[id_], normalized=False, special=True) for id_ in sorted(special)])
    rust.add_tokens(
        [
            AddedToken(token, normalized=False)
            for id_, (token, type_) in enumerate(zip(fields.tokens, fields.types, strict=False))
            if type_ == _USER_DEFINED and id_ not in special
        ]
    )


def _add_ends(rust: RustTokenizer, fields: _Fields, *, add_bos: bool) -> None:
    """Puts BOS before a prompt and EOS after it where the file's flags, or else the defaults, say so."""
    bos = fields.id("bos") if fields.flag("add_bos_token", add_bos) else None
    eos = fields.id("eos") if fields.flag("add_eos_token", False) else None
    rust.post_processor = processors.TemplateProcessing(
        single=[*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])],
        special_tokens=[
            {"id": name, "ids": [id_], "tokens": [fields.tokens[id_]]}
            for name, id_ in (("bos", bos), ("eos", eos))
            if id_ is not None
        ],
    )

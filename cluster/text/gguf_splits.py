"""How text is cut into pieces before byte-level BPE merges within each, by the name that a GGUF file gives for it.

A GGUF names the way (`tokenizer.ggml.pre`) and holds no pattern. llama.cpp defines the names; the patterns are those of
the models' own tokenizer.json. Of the names that llama.cpp knows, those are here that come with models of the served
families, and others whose pattern is the same. The rest is left out rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TextSplit:
    """One way to cut text, and what else goes with its name."""

    patterns: tuple[str, ...]
    """In Oniguruma's syntax, applied in order, each to every piece that those before have left. A match is a piece,
    and so is what lies between two matches."""
    nfc: bool = False
    """Whether the text is brought to Unicode's normalization form C first."""
    ignore_merges: bool = False
    """Whether a piece that is a token as it stands becomes this token, wherever merges would lead."""
    add_bos: bool = False
    """Whether a prompt begins with BOS where the file has no flag for it."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# A word ends where a capital follows a small letter.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of two cases, as DeepSeek's tokenizer lists them: of Unicode 11, and not of every script.
_DEEPSEEK_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _table() -> dict[str, TextSplit]:
    llama3 = TextSplit((_LLAMA3,), ignore_merges=True, add_bos=True)
    digits = TextSplit((r"\p{N}", _GPT2))
    return {
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), llama3),
        **dict.fromkeys(("dbrx", "smaug-bpe"), TextSplit((_LLAMA3,))),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), TextSplit((_QWEN2,), nfc=True)),
        "qwen35": TextSplit((_QWEN35,), nfc=True),
        "seed-coder": TextSplit((_SEED,)),
        "tekken": TextSplit((_TEKKEN,), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4"), TextSplit((_GPT4O,))),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), digits),
        "command-r": TextSplit(digits.patterns, nfc=True),
        **dict.fromkeys(("gpt-2", "phi-2", "mellum", "trillion", "a.x-4.0", "gigachat"), TextSplit((_GPT2,))),
        **dict.fromkeys(("mpt", "olmo"), TextSplit((_GPT2,), nfc=True)),
        "deepseek-llm": TextSplit(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_CASED}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}",
            )
        ),
        "deepseek-coder": TextSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
        "deepseek-v3": TextSplit((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
        **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), TextSplit((_BLOOM,))),
        "viking": TextSplit((_BLOOM, r"\p{N}")),
    }


SPLITS: Mapping[str, TextSplit] = _table()
"""Splits by the value of `tokenizer.ggml.pre`."""

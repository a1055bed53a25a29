"""A GGUF's tokenizer gives the ids that the model's own tokenizer.json would, or is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers

from cluster.text.gguf_splits import SPLITS
from cluster.text.gguf_tokenizer import check_gguf_tokenizer, read_gguf_tokenizer
from cluster.text.tokenizer import Tokenizer, _byte_of_char
from configs.errors import CheckpointError

BYTES = list(_byte_of_char())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ZWJ = "\u200d"


def write(
    path: Path,
    tokens: Sequence[str],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = (),
    scores: Sequence[float] | None = None,
    **fields: bool | int,
) -> Path:
    """A GGUF file with a tokenizer and nothing else. `fields` are of `tokenizer.ggml`."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if types is not None:
        writer.add_token_types(list(types))
    if merges:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for key, value in fields.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(rust: RustTokenizer, text: str) -> list[str]:
    """What merges are applied within."""
    if rust.normalizer is not None:
        text = rust.normalizer.normalize_str(text)
    assert rust.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in rust.pre_tokenizer.pre_tokenize_str(text)]


# ---- How text is split

TEXTS = {
    "digits": "In 2024, x12345!",
    "newlines": "a.\n\n1. b\r\nc",
    "spaces": "=  5\t  x   ",
    "contractions": "I'm WE'LL o'clock fooBar",
    "cjk": "中文，日本語テスト 한국어 né",
    "emoji": f"hi👩{ZWJ}👩{ZWJ}👧!😀😀 ok",
    "marks": "नमस्ते x",
}
EMOJI = f"hi|👩{ZWJ}👩{ZWJ}👧!😀😀| ok"
# Written out by hand from the patterns of the models' own tokenizer.json; | is between two pieces.
GPT2 = {
    "digits": "In| 2024|,| x|12345|!",
    "newlines": "a|.|\n|\n|1|.| b|\r|\n|c",
    "spaces": "=| | 5|\t | x|   ",
    "contractions": "I|'m| WE|'|LL| o|'|clock| fooBar",
    "cjk": "中文|，|日本語テスト| 한국어| né",
    "emoji": EMOJI,
    "marks": "नमस|्|त|े| x",
}
DIGITS_THEN_GPT2 = GPT2 | {
    "digits": "In| |2|0|2|4|,| x|1|2|3|4|5|!",
    "newlines": "a|.|\n\n|1|.| b|\r|\n|c",
    "spaces": "=|  |5|\t | x|   ",
}
LLAMA3 = {
    "digits": "In| |202|4|,| x|123|45|!",
    "newlines": "a|.\n\n|1|.| b|\r\n|c",
    "spaces": "=| | |5|\t | x|   ",
    "contractions": "I|'m| WE|'LL| o|'clock| fooBar",
    "cjk": "中文|，日本語テスト| 한국어| né",
    "emoji": EMOJI,
    "marks": "नमस|्त|े| x",
}
QWEN2 = LLAMA3 | {"digits": "In| |2|0|2|4|,| x|1|2|3|4|5|!"}
QWEN35 = QWEN2 | {"marks": "नमस्ते| x"}
SEED = QWEN2 | {"newlines": "a|.|\n\n|1|.| b|\r\n|c"}
TEKKEN = QWEN35 | {"contractions": "I|'m| WE|'LL| o|'clock| foo|Bar"}
GPT4O = TEKKEN | {"digits": LLAMA3["digits"], "contractions": "I'm| WE'LL| o|'clock| foo|Bar"}
DEEPSEEK_LLM = {
    "digits": "In| |2|0|2|4|,| x|1|2|3|4|5|!",
    "newlines": "a|.|\n|\n|1|.| b|\r|\n|c",
    "spaces": "=|  |5|\t | x|   ",
    "contractions": "I|'|m| WE|'|LL| o|'|clock| fooBar",
    "cjk": "中文|，|日本語テスト| |한국어| n|é",  # the range `:-~` of the third pattern has the letters of ASCII
    "emoji": f"hi|👩|{ZWJ}|👩|{ZWJ}|👧|!|😀😀| ok",  # what joins emoji is in the range from U+0800 to U+4E00
    "marks": "नमस्ते| x",
}
DEEPSEEK_CODER = DEEPSEEK_LLM | {
    "spaces": "=  |5|\t | x|   ",
    "cjk": "中文|，|日本語テスト| |한국어| né",
    "marks": "नमस|्|त|े| x",
}
DEEPSEEK_V3 = {
    "digits": "In| |202|4|,| x|123|45|!",
    "newlines": "a|.\n\n|1|.| b|\r\n|c",
    "spaces": "=|  |5|\t | x|   ",
    "contractions": "I|'m| WE|'LL| o|'clock| fooBar",
    "cjk": "中文|，|日本語テスト| 한국어| né",
    "emoji": f"hi|👩|{ZWJ}|👩|{ZWJ}|👧!😀😀| ok",
    "marks": "नमस्ते| x",
}
BLOOM = {
    "digits": "In| 2024|,| x12345|!",
    "newlines": "a|.\n\n|1|.| b|\r\n|c",
    "spaces": "=| | 5|\t | x|   ",
    "contractions": "I'm| WE'LL| o'clock| fooBar",
    "cjk": "中文|，|日本語テスト| 한국어| né",
    "emoji": f"hi👩{ZWJ}👩{ZWJ}👧|!|😀😀| ok",
    "marks": "नमस्ते| x",
}
VIKING = BLOOM | {"digits": "In| |2|0|2|4|,| x|1|2|3|4|5|!", "spaces": "=| | |5|\t | x|   "}
EXPECTED = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": QWEN35,
    "seed-coder": SEED,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "command-r"), DIGITS_THEN_GPT2),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "trillion", "a.x-4.0", "gigachat", "mpt", "olmo"), GPT2),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "viking": VIKING,
}


def test_every_supported_split_is_written_out_here() -> None:
    assert EXPECTED.keys() == SPLITS.keys()


@pytest.mark.parametrize("pre", EXPECTED)
def test_text_is_split_as_the_models_own_tokenizer_splits_it(pre: str, tmp_path: Path) -> None:
    rust = read_gguf_tokenizer(write(tmp_path / "m.gguf", BYTES, pre=pre)).backend_tokenizer
    for kind, text in TEXTS.items():
        assert pieces(rust, text) == EXPECTED[pre][kind].split("|"), kind


def split_by(patterns: Sequence[str], text: str) -> list[str]:
    """Another engine's: every match of a pattern is a piece of its own, and so is what lies between."""
    parts = [text]
    for pattern in patterns:
        parts = [part for whole in parts for part in regex.split(f"({pattern})", whole, flags=regex.V0) if part]
    return parts


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "qwen35", "smollm", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3", "viking"]
)
def test_splits_of_random_text_equal_those_of_another_engine(pre: str, tmp_path: Path) -> None:
    rust = read_gguf_tokenizer(write(tmp_path / "m.gguf", BYTES, pre=pre)).backend_tokenizer
    parts = [*"aBzÉßж中語ञ्한7९½.,!'’()-_=+$€\n\r\t  ", "'ll", "'S", "12345", "\u00a0", "😀", ZWJ, "。", "ﬁ", "Ωmega"]
    choose = random.Random(0)
    for _ in range(500):
        text = "".join(choose.choices(parts, k=choose.randrange(1, 24)))
        assert pieces(rust, text) == split_by(SPLITS[pre].patterns, text), text


def test_the_letters_of_two_cases_that_deepseek_lists_are_such() -> None:
    # Some lists that circulate were normalized, which turns `K-ℭ` of letter-like symbols into half of Unicode.
    letters = SPLITS["deepseek-llm"].patterns[1].removeprefix(r"\s?")
    listed = set("".join(regex.findall(letters, "".join(map(chr, range(0x110000))))))
    assert {char for char in listed if not regex.fullmatch(r"\p{Lu}|\p{Ll}|\p{Lt}", char)} == {
        "ʕ"
    }  # small until lately
    assert len(listed) == 2729


def test_decomposed_characters_are_composed_where_the_model_does_so(tmp_path: Path) -> None:
    composed, decomposed = "né", "ne\u0301"
    for pre, same in (("qwen2", True), ("qwen35", True), ("command-r", True), ("llama-bpe", False), ("smollm", False)):
        tokenizer = Tokenizer.load(write(tmp_path / f"{pre}.gguf", BYTES, pre=pre))
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (composed, decomposed)]
        assert (ids[0] == ids[1]) is same, pre


# ---- Merges


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("qwen2", ["a", "bc"])])
def test_a_piece_that_is_a_token_needs_no_merges_where_the_model_says_so(
    pre: str, expected: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", [*BYTES, "bc", "abc"], pre=pre, merges=["b c"])
    tokenizer = Tokenizer.load(path)
    assert [tokenizer.token_text(id_) for id_ in tokenizer.encode("abc", add_special_tokens=False)] == expected


def test_sentencepiece_merges_are_those_that_transformers_derives(tmp_path: Path) -> None:
    from transformers.tokenization_utils_base import generate_merges

    choose = random.Random(1)
    words = sorted({"".join(choose.choices("abc▁", k=choose.randrange(2, 6))) for _ in range(300)})
    choose.shuffle(words)
    tokens = ["<unk>", "<s>", "</s>", *"abc▁", *words]
    scores = [float(-choose.randrange(50)) for _ in tokens]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)]
    path = write(tmp_path / "m.gguf", tokens, model="llama", types=types, scores=scores)
    merges = json.loads(read_gguf_tokenizer(path).backend_tokenizer.to_str())["model"]["merges"]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    expected = generate_merges(ids, dict(zip(tokens, scores, strict=True)))
    assert len(merges) > 300
    assert [tuple(merge) for merge in merges] == expected


# ---- SentencePiece

SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁hi", "▁h", "hi", "▁hi", "</user>"]
SP_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6, USER_DEFINED]
SP_SCORES = [*[0.0] * 259, *[-10.0] * 3, -2.0, -1.0, -3.0, 0.0]


def sentencepiece(path: Path, **fields: bool | int) -> Tokenizer:
    # Converters write `default` here, which means nothing for SentencePiece.
    return Tokenizer.load(
        write(path, SP_TOKENS, model="llama", pre="default", types=SP_TYPES, scores=SP_SCORES, **fields)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hi", ["<s>", "▁hi"]),
        (" hi", ["<s>", "▁", "▁hi"]),
        ("h  ih", ["<s>", "▁h", "▁", "▁", "i", "h"]),
        ("é\n", ["<s>", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]),
        ("hi</s>hi", ["<s>", "▁hi", "</s>", "▁hi"]),
        ("hi</user>hi", ["<s>", "▁hi", "</user>", "▁hi"]),
    ],
)
def test_sentencepiece_text_is_encoded_as_llama_2s_own_tokenizer_does(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    tokenizer = sentencepiece(tmp_path / "m.gguf")
    assert [SP_TOKENS[id_] for id_ in tokenizer.encode(text, add_special_tokens=True)] == expected


def test_sentencepiece_without_a_space_prefix_begins_with_the_text(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "m.gguf", add_space_prefix=False)
    assert [SP_TOKENS[id_] for id_ in tokenizer.encode("hi hi", add_special_tokens=False)] == ["hi", "▁hi"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_comes_back_as_it_was(prefix: bool, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "m.gguf", add_space_prefix=prefix)
    for text in ("hi", "  hi  hi ", "né 漢字 😀", "a\n\n1."):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


# ---- BOS, EOS and the types of tokens


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("llama-bpe", {}, "<b>x"),
        ("tekken", {}, "<b>x"),
        ("llama-bpe", {"add_bos_token": False}, "x"),
        ("qwen2", {}, "x"),
        ("smollm", {}, "x"),
        ("deepseek-llm", {"add_bos_token": True}, "<b>x"),
        ("qwen2", {"add_eos_token": True}, "x<e>"),
        ("llama-bpe", {"add_eos_token": True}, "<b>x<e>"),
    ],
)
def test_bos_and_eos_are_added_as_the_flags_say_or_else_the_kind(
    pre: str, flags: dict[str, bool], expected: str, tmp_path: Path
) -> None:
    types = [*[NORMAL] * 256, CONTROL, CONTROL]
    path = write(
        tmp_path / "m.gguf", [*BYTES, "<b>", "<e>"], pre=pre, types=types, bos_token_id=256, eos_token_id=257, **flags
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("x", add_special_tokens=True), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("x", add_special_tokens=False), skip_special_tokens=False) == "x"


def test_a_flag_for_bos_without_a_bos_adds_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", BYTES, pre="llama-bpe"))
    assert tokenizer.bos_token_id is None
    assert tokenizer.decode(tokenizer.encode("x", add_special_tokens=True), skip_special_tokens=False) == "x"


def test_each_type_of_token_is_treated_as_it_should(tmp_path: Path) -> None:
    tokens = [*BYTES, "<|end|>", "<think>", "<｜wide▁mark｜>", "[PAD7]", "<eos>", ""]
    types = [*[NORMAL] * 256, CONTROL, USER_DEFINED, CONTROL, UNUSED, NORMAL, UNUSED]
    exclamation = BYTES.index("!")
    path = write(tmp_path / "m.gguf", tokens, pre="qwen2", types=types, eos_token_id=260, padding_token_id=exclamation)
    tokenizer = Tokenizer.load(path)
    text = "a<|end|><think><｜wide▁mark｜>[PAD7]<eos>!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [id_ for id_ in ids if id_ >= 256] == [256, 257, 258, 260]
    assert tokenizer._special_ids == {256, 258, 260}
    assert tokenizer.decode(ids) == "a<think>[PAD7]!"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_text(257) == "<think>"


# ---- What is refused


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("gpt2", "hunyuan", r"tokenizer\.ggml\.pre=hunyuan is not supported.*set `tokenizer`"),
        ("gpt2", "default", r"tokenizer\.ggml\.pre=default is not supported"),
        ("gpt2", None, r"tokenizer\.ggml\.pre=nothing is not supported.*set `tokenizer`"),
        *((kind, None, rf"tokenizer\.ggml\.model={kind} is not supported") for kind in ("t5", "bert", "rwkv")),
        ("gemma4", "gemma4", r"tokenizer\.ggml\.model=gemma4 is not supported.*set `tokenizer`"),
    ],
)
def test_an_unknown_kind_is_refused_by_name(model: str, pre: str | None, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", BYTES, model=model, pre=pre)
    with pytest.raises(CheckpointError, match=message):
        check_gguf_tokenizer(path)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(path)


BROKEN: list[tuple[list[str], dict[str, Any], str]] = [
    ([*BYTES, "a"], {}, "names a token twice"),
    ([], {}, "tokens is missing"),
    (BYTES, {"merges": ["a zz"]}, "merges and tokens do not fit together"),
    (BYTES, {"merges": ["ab"]}, "merges and tokens do not fit together"),
    (BYTES, {"types": [NORMAL] * 9}, "token_type does not have one number for each token"),
    (BYTES, {"eos_token_id": 256}, "eos_token_id=256 is not below the number of tokens, 256"),
    (BYTES, {"model": "llama"}, "scores is missing"),
]


@pytest.mark.parametrize(("tokens", "fields", "message"), BROKEN)
def test_parts_that_do_not_fit_together_are_named(
    tokens: list[str], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", tokens, **{"pre": "gpt-2", **fields})
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(path)


# ---- The default model


@pytest.mark.parametrize(
    ("text", "expected"),
    [("\n\n1.", "\n\n|1|."), ("=  5", "=|  |5"), ("    123", "    |1|2|3"), ("In 2024,", "In| |2|0|2|4|,")],
)
def test_smollm2_takes_digits_one_by_one_before_anything_else(smollm2: Tokenizer, text: str, expected: str) -> None:
    ids = smollm2.encode(text, add_special_tokens=True)
    assert [smollm2.token_text(id_) for id_ in ids] == expected.split("|")


def test_smollm2_encodes_as_its_own_tokenizer_json_says(smollm2: Tokenizer) -> None:
    published = RustTokenizer.from_str(smollm2.to_json())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [*TEXTS.values(), Path(__file__).read_text("utf-8")]
    for text in texts:
        assert smollm2.encode(text, add_special_tokens=True) == published.encode(text).ids

"""Incremental decoding equals the full decode, leaks no prompt, and finds stop strings wherever text is cut."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from cluster.text.detokenizer import Detokenizer, StreamDetokenizer
from cluster.text.stop_regex import StopRegex
from cluster.text.stops import TextEnd, TextOptions
from cluster.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> RustTokenizer:
    """A Llama-2 kind of vocabulary: a few words with a leading mark, every byte as `<0xNN>`, no byte-level decoder."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ["▁", "▁Hello", "▁world", "a", "b", "▁c", "�"]:
        vocab[piece] = len(vocab)
    tokenizer = RustTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([detokenizer.push(id_) for id_ in ids]) + detokenizer.flush()


def test_every_token_alone_has_the_bytes_transformers_decodes(smollm2: Tokenizer) -> None:
    for id_ in range(smollm2.vocab_size):
        assert smollm2.token_text(id_) == smollm2._fast.decode([id_]), id_


def test_a_prompt_that_ends_inside_an_emoji_does_not_leak(smollm2: Tokenizer) -> None:
    *head, last = smollm2.encode("hi 😀", add_special_tokens=False)
    text = run(smollm2.detokenizer(head), [last])
    assert "hi" not in text
    assert text == smollm2.decode([last])


def test_an_answer_cut_inside_an_emoji_ends_in_a_replacement_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok 😀", add_special_tokens=False)[:-1]
    detokenizer = smollm2.detokenizer([])
    streamed = "".join(detokenizer.push(id_) for id_ in ids)
    assert "�" not in streamed
    assert streamed + detokenizer.flush() == smollm2.decode(ids)


def test_an_emoji_comes_out_whole(smollm2: Tokenizer) -> None:
    detokenizer = smollm2.detokenizer([])
    pieces = [detokenizer.push(id_) for id_ in smollm2.encode("ok 😀", add_special_tokens=False)]
    assert pieces[-1].endswith("😀")
    assert "�" not in "".join(pieces)


def test_an_id_outside_the_vocabulary_is_silent(smollm2: Tokenizer) -> None:
    assert run(smollm2.detokenizer([]), [10**6]) == ""


def test_ids_that_a_larger_model_has_and_the_tokenizer_lacks_are_silent_between_others(
    smollm2: Tokenizer, byte_fallback: RustTokenizer
) -> None:
    unknown = 150_000
    ids = smollm2.encode("a 😀", add_special_tokens=False)
    assert run(smollm2.detokenizer([unknown]), [unknown, *ids, unknown]) == "a 😀"
    assert (smollm2.token_text(unknown), smollm2.token_bytes(unknown)) == ("", b"")
    a, world = byte_fallback.token_to_id("a"), byte_fallback.token_to_id("▁world")
    assert run(StreamDetokenizer(byte_fallback, [a, unknown]), [unknown, a, unknown, world]) == "a world"
    # More of them than a stream holds back.
    assert run(StreamDetokenizer(byte_fallback, [a]), [a, *[unknown] * 40, a]) == "aa"


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab c😀é漢\U0001f468\u200d�"), max_size=12))
def test_byte_fallback_streams_equal_their_text(byte_fallback: RustTokenizer, text: str) -> None:
    prompt = byte_fallback.encode("Hello world").ids
    ids = byte_fallback.encode(text).ids
    assert run(StreamDetokenizer(byte_fallback, prompt), ids) == text


def test_a_first_word_keeps_its_leading_space_after_a_prompt(byte_fallback: RustTokenizer) -> None:
    prompt = [byte_fallback.token_to_id("▁Hello")]
    world = byte_fallback.token_to_id("▁world")
    assert byte_fallback.decode([world]) == "world"
    assert run(StreamDetokenizer(byte_fallback, prompt), [world]) == " world"


def test_byte_fallback_does_not_leak_a_prompt_cut_inside_a_character(byte_fallback: RustTokenizer) -> None:
    ids = byte_fallback.encode("a😀b").ids
    text = run(StreamDetokenizer(byte_fallback, ids[:3]), ids[3:])
    assert "a" not in text
    assert text.endswith("b")


def test_endless_broken_bytes_neither_stall_nor_raise(byte_fallback: RustTokenizer) -> None:
    broken = byte_fallback.token_to_id("<0x9F>")
    detokenizer = StreamDetokenizer(byte_fallback, [])
    pieces = [detokenizer.push(broken) for _ in range(200)]
    assert "".join(pieces).count("�") > 150
    assert "".join(pieces).count("�") + detokenizer.flush().count("�") == 200


def test_special_tokens_that_an_answer_needs_are_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>a<|im_end|>é", add_special_tokens=False)
    assert run(smollm2.detokenizer([]), ids) == "aé"
    assert run(smollm2.detokenizer([], shown=frozenset({"<|im_end|>", "no token"})), ids) == "a<|im_end|>é"


def test_special_tokens_are_shown_by_byte_fallback_tokenizers_too(byte_fallback: RustTokenizer) -> None:
    tokenizer = RustTokenizer.from_str(byte_fallback.to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "</s>"])
    call, end = tokenizer.token_to_id("[TOOL_CALLS]"), tokenizer.token_to_id("</s>")
    world = tokenizer.token_to_id("▁world")
    detokenizer = StreamDetokenizer(tokenizer, [world, end], hidden=frozenset({end}))
    assert run(detokenizer, [call, world, end]) == "[TOOL_CALLS] world"


def find_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The plain definition: the match that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


def match_in_pieces(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = TextEnd(TextOptions(stops=stops))
    out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            return out, matched
    return out + matcher.flush(), None


@pytest.mark.parametrize("stops", [["STOP"], ["\n\n", "STOP"], ["P d"], ["c", "cST"], ["nothing"], []])
def test_a_stop_string_is_found_at_every_split_position(stops: list[str]) -> None:
    text = "abcSTOP def\n\n"
    expected = find_stop(text, stops)
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert match_in_pieces([text[:i], text[i:j], text[j:]], stops) == expected, (i, j)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True),
)
def test_stop_strings_that_overlap_themselves_match_the_plain_definition(pieces: list[str], stops: list[str]) -> None:
    assert match_in_pieces(pieces, stops) == find_stop("".join(pieces), stops)


def test_only_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = TextEnd(TextOptions(stops=["</end>"]))
    assert matcher.push("text</e") == ("text", None)
    assert matcher.push("m>") == ("</em>", None)
    assert matcher.push("<") == ("", None)
    assert matcher.flush() == "<"


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    sources=st.lists(st.sampled_from(["ab+c", "a.b", "[bc]{3}", "a|bb", "ca?c"]), min_size=1, max_size=2, unique=True),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=1),
    num_quiet=st.integers(0, 3),
)
def test_patterns_end_a_text_at_the_same_character_however_it_is_cut(
    pieces: list[str], sources: list[str], stops: list[str], num_quiet: int
) -> None:
    text, quiet = "".join(pieces), len("".join(pieces[:num_quiet]))
    ends = [
        end
        for end in range(quiet + 1, len(text) + 1)
        if any(re.fullmatch(source, text[start:end]) for source in sources for start in range(end))
    ]
    found = [end for end in range(quiet + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if found and (not ends or found[0] <= ends[0]):
        expected = text[: found[0] - len(stops[0])]
    elif ends:
        expected = text[: ends[0]]
    matcher = TextEnd(TextOptions(stops=stops, patterns=[StopRegex(source, "stop_regex") for source in sources]))
    out, matched = "", None
    for i, piece in enumerate(pieces):
        certain, matched = matcher.push(piece, may_end=i >= num_quiet)
        out += certain
        if matched is not None:
            break
    assert out + ("" if matched else matcher.flush()) == expected


def test_a_pattern_looks_back_over_a_window() -> None:
    matcher = TextEnd(TextOptions(patterns=[StopRegex("<x+>", "stop_regex")]))
    assert matcher.push("<" + "x" * 300) == ("<" + "x" * 300, None)
    assert matcher.push(">")[1] is None  # longer than the window
    assert matcher.push("<" + "x" * 200)[1] is None
    assert matcher.push(">") == (">", "<x+>")


def test_a_hostile_pattern_costs_little() -> None:
    pattern = StopRegex("(.{1,20}a){3}z", "stop_regex")
    began = time.process_time()
    for _ in range(200):
        assert pattern.first_end("ab" * 128, "abab") is None
    assert time.process_time() - began < 1

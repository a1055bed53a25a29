"""From engine tokens to the text of an answer, on real tokenizers: equal to the decode of the whole, whatever a step
brings and wherever a stop string is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from cluster.messages.engine import Finished, FinishReason, SamplingParams, TokenLogprobs
from cluster.requests.engine_client import RequestStream, TokenChunk
from cluster.requests.generation import Delta, Output
from cluster.text.stops import TextOptions
from cluster.text.tokenizer import Tokenizer

MULTI_BYTE = "👩‍👩‍👧‍👦 né 漢字 🏳️‍🌈 Ünïcödé \U0001f600 �"


@pytest.fixture(scope="module")
def llama_like() -> Tokenizer:
    """A vocabulary of Llama 2's kind: words with a leading mark, single characters, every byte as `<0xNN>`."""
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁Hello", "▁world", "▁cat", "s", "ing", *"abcdeiou.,!STOP:", "\n", "é", "漢"]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = RustTokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(fast)


def _row(id_: int) -> TokenLogprobs:
    """Log probabilities in a token's place: its own, which says which token it is."""
    return TokenLogprobs(1, -float(id_), np.int32(id_).tobytes(), np.float32(-id_).tobytes())


@dataclass
class Steps:
    """An engine's stream of one sequence, so many tokens a step; it ends by length."""

    ids: Sequence[int]
    sizes: Sequence[int]
    with_logprobs: bool = False
    stop_token_id: int | None = None
    aborted: bool = False
    sampling: SamplingParams = SamplingParams(max_tokens=1)  # noqa: RUF009 -- frozen
    taken: int = 0
    step: int = field(default=0)

    def take(self) -> TokenChunk:
        size = self.sizes[self.step % len(self.sizes)] if self.sizes else len(self.ids)
        self.step += 1
        ids = list(self.ids[self.taken : self.taken + size])
        self.taken += len(ids)
        finished = None
        if self.taken >= len(self.ids):
            reason = FinishReason.LENGTH if self.stop_token_id is None else FinishReason.STOP
            finished = Finished(id=1, reason=reason, stop_token_id=self.stop_token_id)
        logprobs = [_row(id_) for id_ in ids] if self.with_logprobs else None
        return TokenChunk(ids, logprobs, None, finished)

    def abort(self) -> None:
        self.aborted = True


def generate(tokenizer: Tokenizer, steps: Steps, prompt: Sequence[int] = (1,), **fields: Any) -> list[Delta]:
    """All deltas of one sequence; `fields` are those of TextOptions, and min_tokens."""
    steps.sampling = SamplingParams(max_tokens=len(steps.ids), min_tokens=fields.pop("min_tokens", 0))
    output = Output(0, cast("RequestStream", steps), tokenizer, prompt, TextOptions(**fields))
    deltas = []
    while output.finish_reason is None:
        deltas.append(output.advance())
    assert output.num_tokens == sum(len(delta.token_ids) for delta in deltas)
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def cut_at(text: str, stops: Sequence[str], *, keep: bool = False) -> str:
    """The plain definition: up to the match that ends first, and of those that end together the longest."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end if keep else end - max(map(len, matched))]
    return text


def random_ids(tokenizer: Tokenizer, rng: random.Random, parts: Sequence[Sequence[int]]) -> list[int]:
    """Random tokens with parts of multi-byte characters, whole or broken, and special tokens between them."""
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 24))]
    specials = sorted(tokenizer._special_ids)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(ids) + 1)
        part = rng.choice(parts)
        ids[at:at] = part[: rng.randrange(len(part) + 1)] if rng.random() < 0.7 else [rng.choice(specials)]
    return ids


def test_two_thousand_random_streams_equal_transformers_decode_of_the_whole(smollm2: Tokenizer) -> None:
    rng = random.Random(0)
    parts = [smollm2.encode(word, add_special_tokens=False) for word in MULTI_BYTE.split(" ")]
    for _ in range(2000):
        ids = random_ids(smollm2, rng, parts)
        skip = rng.random() < 0.5
        expected = smollm2._fast.decode(ids, skip_special_tokens=skip)
        steps = Steps(ids, [rng.randrange(1, 4) for _ in range(3)])
        prompt = [rng.randrange(smollm2.vocab_size) for _ in range(3)]
        assert text_of(generate(smollm2, steps, prompt, skip_special_tokens=skip)) == expected, ids
        if len(expected) > 1:
            # What stops them is a piece of themselves, most often across a border of tokens.
            start = rng.randrange(len(expected) - 1)
            stops = [expected[start : start + rng.randrange(1, 9)], "never to be seen"]
            keep = rng.random() < 0.3
            steps = Steps(ids, steps.sizes)
            deltas = generate(smollm2, steps, prompt, skip_special_tokens=skip, stops=stops, include_stop=keep)
            assert text_of(deltas) == cut_at(expected, stops, keep=keep), (ids, stops)
            assert deltas[-1].stop_reason == stops[0]


@pytest.mark.parametrize("stop", ["\n\nUser:", "<|im_start|>", "aaab", "né 漢字", "👩‍👩‍👧‍👦!", "STOP"])
def test_a_stop_string_is_found_however_its_bytes_are_dealt_to_tokens(smollm2: Tokenizer, stop: str) -> None:
    token_of = {smollm2.token_bytes(id_): id_ for id_ in range(smollm2.vocab_size - 1, -1, -1)}

    def spell(raw: bytes) -> list[int]:
        """The longest tokens first, so that most of a piece is one token."""
        ids = []
        while raw:
            length = next(n for n in range(len(raw), 0, -1) if raw[:n] in token_of)
            ids.append(token_of[raw[:length]])
            raw = raw[length:]
        return ids

    raw = f"before aaa{stop}after".encode()
    start = len("before aaa")
    end = start + len(stop.encode())
    for i in range(start - 2, end + 2):
        for j in range(i, end + 2):
            ids = spell(raw[:i]) + spell(raw[i:j]) + spell(raw[j:])
            for size in (1, 2, 99):
                deltas = generate(smollm2, Steps(ids, [size]), stops=[stop], skip_special_tokens=False)
                assert text_of(deltas) == cut_at(raw.decode(), [stop]), (i, j)
                assert deltas[-1].stop_reason == stop
                # Tokens count up to the one that completed the stop string.
                counted = [id_ for delta in deltas for id_ in delta.token_ids]
                assert stop in smollm2.decode(counted, skip_special_tokens=False)
                assert stop not in smollm2.decode(counted[:-1], skip_special_tokens=False)


def llama_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Words, characters of several bytes, special tokens, and bytes that are no characters; these stand alone, as one
    broken byte makes transformers show none of those around it."""
    ids: list[int] = []
    words = list(range(259, tokenizer.vocab_size))
    for _ in range(rng.randrange(1, 16)):
        kind = rng.random()
        if kind < 0.5:
            ids.append(rng.choice(words))
        elif kind < 0.75:
            ids += [3 + byte for byte in rng.choice("😀ü字\n\U0001f468\u200d").encode()]
        elif kind < 0.85:
            ids.append(rng.choice([0, 1, 2]))
        else:
            ids += [rng.choice(words), 3 + rng.randrange(0x80, 0x100), rng.choice(words)]
    return ids


def test_two_thousand_byte_fallback_streams_equal_transformers_decode_of_the_whole(llama_like: Tokenizer) -> None:
    rng = random.Random(0)
    prompt = llama_like.encode("Hello world", add_special_tokens=False)
    for _ in range(2000):
        ids = llama_ids(llama_like, rng)
        skip = rng.random() < 0.5
        before = llama_like._fast.decode(prompt, skip_special_tokens=skip)
        whole = llama_like._fast.decode([*prompt, *ids], skip_special_tokens=skip)
        expected = whole.removeprefix(before)
        sizes = [rng.randrange(1, 4)]
        assert text_of(generate(llama_like, Steps(ids, sizes), prompt, skip_special_tokens=skip)) == expected, ids
        if len(expected) > 1:
            start = rng.randrange(len(expected) - 1)
            stops = [expected[start : start + rng.randrange(1, 6)]]
            deltas = generate(llama_like, Steps(ids, sizes), prompt, skip_special_tokens=skip, stops=stops)
            assert text_of(deltas) == cut_at(expected, stops), (ids, stops)


def test_logprobs_and_offsets_go_with_their_tokens_whatever_text_is_held(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one 😀 two </s three", add_special_tokens=False)
    for size in (1, 2, 99):
        deltas = generate(smollm2, Steps(ids, [size], with_logprobs=True), stops=["</s>"])
        text = text_of(deltas)
        assert text == "one 😀 two </s three"
        rows = [row for delta in deltas for row in delta.logprobs]
        offsets = [offset for delta in deltas for offset in delta.text_offsets]
        assert [row.top for row in rows] == [[(id_, -float(id_))] for id_ in ids]
        assert all(len(delta.logprobs) == len(delta.token_ids) == len(delta.text_offsets) for delta in deltas)
        pieces = [smollm2.token_text(id_) for id_ in ids]
        for piece, offset in zip(pieces, offsets, strict=True):
            assert "�" in piece or text[offset:].startswith(piece)


def test_stop_strings_wait_for_min_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a b a b a b", add_special_tokens=False)
    assert [smollm2.token_text(id_) for id_ in ids] == ["a", " b", " a", " b", " a", " b"]
    for min_tokens, text in [(0, "a"), (1, "a"), (2, "a b a"), (3, "a b a"), (4, "a b a b a"), (6, "a b a b a b")]:
        for size in (1, 3, 99):
            steps = Steps(ids, [size])
            assert text_of(generate(smollm2, steps, stops=[" b"], min_tokens=min_tokens)) == text
            assert steps.aborted is (min_tokens < 6)


def test_a_stop_token_counts_and_shows_only_where_asked(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("done", add_special_tokens=False), 2]
    for fields, text in [
        ({}, "done"),
        ({"skip_special_tokens": False}, "done"),
        ({"include_stop": True}, "done"),
        ({"include_stop": True, "skip_special_tokens": False}, "done<|im_end|>"),
    ]:
        deltas = generate(smollm2, Steps(ids, [1], stop_token_id=2), **fields)
        assert text_of(deltas) == text
        assert sum(len(delta.token_ids) for delta in deltas) == len(ids)


def test_a_sequence_for_its_prompt_alone_shows_nothing(smollm2: Tokenizer) -> None:
    [delta] = generate(smollm2, Steps([5], [1]), prompt_only=True)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], FinishReason.LENGTH)

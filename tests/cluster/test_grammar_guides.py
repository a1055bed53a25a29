"""Guides allow what the grammar allows, token by token, whatever the model would like to say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from cluster.messages.engine import Finished, FinishReason, GenerateRequest, SamplingParams, StepOutput
from cluster.scheduling.request import mask_of
from cluster.scheduling.scheduler import Scheduler
from cluster.structured.bad_words import BadWordsGuide, BothGuides
from cluster.structured.compiler import GrammarCompiler
from cluster.structured.guides import GrammarGuide, RequestGuides
from cluster.structured.spec import GrammarKind, GrammarSpec
from cluster.text.tokenizer import Tokenizer
from configs.errors import GuideError
from tests.helpers.chats import read_grammar
from tests.helpers.fake_engine import LIMITS
from tests.helpers.schemas import SchemaMaker
from worker.protocol import RowFlag, StepFrame, StepResult, UInt32Array, mask_words

EOS = 2
VOCAB = 49_200  # 48 more than the tokenizer has: a model's padding
TIMEOUT_S = 30.0


class Guides:
    """Guides over the real tokenizer, waited for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.woken = threading.Event()
        self.made = RequestGuides(VOCAB, [EOS], self.woken.set)
        self.made.set_tokenizer(tokenizer.to_json())
        self._compiler = GrammarCompiler({"<|im_start|>": 1, "<|im_end|>": 2})

    def compile(self, **fields: Any) -> str:
        spec = read_grammar(**fields)
        assert spec is not None
        return self._compiler.compile(spec)

    def open(self, **fields: Any) -> GrammarGuide:
        return self.made.open(self.compile(**fields))

    def wait(self, guide: GrammarGuide) -> UInt32Array | None:
        """The next mask; None: it is finished."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.woken.clear()
            mask = guide.poll()
            if guide.is_finished:
                return None
            if mask is not None:
                assert mask.shape == (mask_words(VOCAB),)
                return mask
            self.woken.wait(0.05)
        raise AssertionError("no mask came")

    def say(self, guide: GrammarGuide, text: str) -> None:
        guide.accept(self.tokenizer.encode(text, add_special_tokens=False))

    def sample(self, guide: GrammarGuide, seed: int, max_tokens: int = 2000) -> list[int] | None:
        """An answer of a model that has no preferences, without its end of sequence; None: it would not end."""
        random = np.random.default_rng(seed)
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            mask = self.wait(guide)
            if mask is None:
                return tokens
            token = int(random.choice(allowed(mask)))
            if token == EOS:
                return tokens
            tokens.append(token)
            guide.accept([token])
        return None


def allowed(mask: UInt32Array) -> np.ndarray[Any, Any]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@pytest.fixture(scope="module")
def guides(smollm2_path: Path) -> Iterator[Guides]:
    made = Guides(Tokenizer.load(smollm2_path))
    yield made
    made.made.close()


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 200), marks=(pytest.mark.slow, pytest.mark.exhaustive))]
)
def test_answers_of_many_schemas_are_valid_at_random(guides: Guides, seeds: range) -> None:
    checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
    kept = cut = 0
    for seed in seeds:
        schema = SchemaMaker(seed).schema()
        guide = guides.open(structured_outputs={"json": schema})
        tokens = guides.sample(guide, seed)
        guide.close()
        if tokens is None:
            cut += 1
            continue
        text = guides.tokenizer.decode(tokens, skip_special_tokens=False)
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"schema {seed} {schema} got {text!r}") from error
        kept += 1
    assert kept == len(seeds), f"{cut} answers did not end"


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"regex": r"[a-c]{3}-\d+"}, lambda text: text[:3].strip("abc") == "" and int(text[4:]) >= 0),
        ({"ebnf": 'root ::= ("ab" | "c"){2} "!"'}, lambda text: text in ("abab!", "abc!", "cab!", "cc!")),
        ({"structured_outputs": {"choice": ["x y", "é", "x"]}}, lambda text: text in ("x y", "é", "x")),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_other_grammars_are_kept_at_random(
    guides: Guides, fields: dict[str, Any], matches: Callable[[str], bool]
) -> None:
    texts = []
    for seed in range(4):
        tokens = guides.sample(guides.open(**fields), seed, max_tokens=200)
        if tokens is not None:
            texts.append(guides.tokenizer.decode(tokens))
    assert texts
    assert all(map(matches, texts)), texts


def test_json_has_no_whitespace_to_get_lost_in(guides: Guides) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "required": ["a", "b"]}
    for compact in (False, True):
        fields = {"json": schema, "disable_any_whitespace": compact}
        guide = guides.open(structured_outputs=fields)
        guides.say(guide, '{"a":')
        mask = guides.wait(guide)
        assert mask is not None
        texts = {guides.tokenizer.token_text(token) for token in allowed(mask).tolist()}
        assert any(text.startswith(" ") for text in texts) is not compact
        assert not any(text.startswith(("  ", "\n", "\t")) for text in texts)


def test_the_end_of_sequence_is_allowed_where_the_grammar_may_stop(guides: Guides) -> None:
    guide = guides.open(regex="ab?c?")
    for said, may_end in (("", False), ("a", True), ("b", True)):
        guides.say(guide, said)
        mask = guides.wait(guide)
        assert mask is not None
        assert (EOS in allowed(mask)) is may_end
    guides.say(guide, "c")
    assert guides.wait(guide) is None
    assert guide.is_finished


def test_ids_without_a_token_are_never_allowed(guides: Guides) -> None:
    mask = guides.wait(guides.open(regex="(.|\n)*"))
    assert mask is not None
    ids = allowed(mask)
    assert ids.max() < 49_152
    assert len(ids) > 48_000
    assert set(ids[ids < 17].tolist()) == {EOS}  # special tokens are no text


def test_a_tokenizer_with_byte_fallback_works_too() -> None:
    # As of Llama 2 and Mistral: words begin with U+2581, bytes without a token of their own are `<0xNN>`.
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "é"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    rust = RustTokenizer(models.BPE(ids, [("a", "b"), ("▁", "ab")], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    woken = threading.Event()
    made = RequestGuides(300, [2], woken.set)
    made.set_tokenizer(rust.to_str())
    guide = made.open(
        GrammarCompiler({}).compile(GrammarSpec(kind=GrammarKind.REGEX, body="(ab )+€é?".encode(), param=""))
    )

    def next_pieces() -> set[str]:
        while (mask := guide.poll()) is None:
            assert woken.wait(TIMEOUT_S)
            woken.clear()
        return {pieces[token] for token in allowed(mask).tolist()}

    assert next_pieces() == {"ab"}  # of text that is certain, the one way in which the tokenizer would write it
    guide.accept([ids["ab"], ids["▁ab"], ids["▁"]])
    assert next_pieces() == {"a", "ab", "<0x61>", "<0xE2>"}
    guide.accept([ids["<0xE2>"], ids["<0x82>"], ids["<0xAC>"]])
    assert next_pieces() == {"é", "<0xC3>", "</s>"}
    made.close()


def test_a_special_token_may_be_a_trigger(guides: Guides) -> None:
    tag = {"begin": "<|im_start|>call ", "schema": {"type": "object", "properties": {"a": {"const": 1}}}, "end": ";"}
    fields = {"type": "structural_tag", "structures": [tag], "triggers": ["<|im_start|>"]}
    guide = guides.open(response_format=fields)
    guides.say(guide, "anything { at all")
    mask = guides.wait(guide)
    assert mask is not None
    assert {1, EOS} <= set(allowed(mask).tolist())
    guide.accept([1])
    mask = guides.wait(guide)
    assert mask is not None
    texts = {guides.tokenizer.token_text(token) for token in allowed(mask).tolist()}
    assert texts == {"c", "ca", "call"} & texts
    guides.say(guide, "call {}")
    mask = guides.wait(guide)
    assert mask is not None
    assert all(guides.tokenizer.token_text(token).startswith(";") for token in allowed(mask).tolist())


def test_a_textual_trigger_forces_what_follows(guides: Guides) -> None:
    tag = {"begin": "<function=f>", "schema": {"type": "object", "properties": {}}, "end": "</function>"}
    fields = {"structural_tag": {"structures": [tag], "triggers": ["<function="]}}
    guide = guides.open(structured_outputs=fields)
    guides.say(guide, "I call <function=")
    mask = guides.wait(guide)
    assert mask is not None
    assert all(guides.tokenizer.token_text(token) in "f>{" for token in allowed(mask).tolist())
    guides.say(guide, "f>{}</function> and say")
    mask = guides.wait(guide)
    assert mask is not None
    assert EOS in allowed(mask)


def test_a_resumed_answer_goes_on_from_its_tokens(guides: Guides) -> None:
    grammar = guides.compile(json_schema={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3})
    said = guides.tokenizer.encode('["red", "gr', add_special_tokens=False)
    first, resumed = guides.made.open(grammar), guides.made.open(grammar)
    for token in said:
        first.accept([token])
        assert guides.wait(first) is not None
    resumed.accept(said)
    one, other = guides.wait(first), guides.wait(resumed)
    assert one is not None
    assert other is not None
    assert np.array_equal(one, other)


def test_an_answer_that_leaves_its_grammar_ends_with_an_error(guides: Guides) -> None:
    guide = guides.open(regex="abc")
    guides.say(guide, "x")
    with pytest.raises(GuideError, match="The answer was ended"):
        guides.wait(guide)


# They are compiled quickly and slow to follow: within its fuel the library itself gives up.
HOSTILE = [
    json.dumps({"grammars": [{"lark_grammar": 'start: s\ns: "" | s s s s | "a" | " "'}]}),
    json.dumps({"grammars": [{"lark_grammar": r"start: /(.*a.{30}|.*b.{29}|.*c.{31}|.*d.{33})x/"}]}),
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_grammar_ends_its_own_answer_alone(guides: Guides, hostile: str) -> None:
    good = guides.compile(json_schema={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 50})
    neighbours = [guides.made.open(good) for _ in range(4)]
    expected = guides.tokenizer.encode("[" + '"red", ' * 30, add_special_tokens=False)[:40]
    bad = guides.made.open(hostile)
    failure = None
    for token in expected:
        for guide in neighbours:
            mask = guides.wait(guide)
            assert mask is not None
            assert token in allowed(mask)
            guide.accept([token])
        if failure is None:
            try:
                mask = guides.wait(bad)
                assert mask is not None
                bad.accept([int(allowed(mask)[-1])])
            except GuideError as error:
                failure = str(error)
    assert failure is not None
    assert "\n" not in failure
    bad.close()
    for guide in neighbours:
        assert guides.wait(guide) is not None
        guide.close()


def test_one_answers_states_do_not_use_up_anothers(guides: Guides) -> None:
    # Sessions of one grammar share a lexer, which has room for so many states: who finds it full gets one of his own.
    grammar = json.dumps({"grammars": [{"lark_grammar": r"start: /(.*a.{12}|.*b.{11}|.*c.{13}|.*d.{9})*x{300}/"}]})
    ends = []
    for seed in range(12):
        guide = guides.made.open(grammar)
        random = np.random.default_rng(seed)
        tokens = 0
        try:
            while tokens < 25:
                mask = guides.wait(guide)
                assert mask is not None
                guide.accept([int(random.choice(allowed(mask)))])
                tokens += 1
        except GuideError:
            pass
        ends.append(tokens)
        guide.close()
    assert max(ends[6:]) >= max(1, min(ends[:6]) // 2), ends


def test_many_guides_share_the_threads_and_are_all_told(guides: Guides) -> None:
    grammar = guides.compile(regex="[a-z]{8}")
    letters = [guides.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghij"]
    many = [guides.made.open(grammar) for _ in range(64)]
    for _ in range(8):
        for i, guide in enumerate(many):
            mask = guides.wait(guide)
            assert mask is not None
            letter = letters[i % len(letters)]
            assert letter in allowed(mask)
            guide.accept([letter])
    for guide in many:
        assert guides.wait(guide) is None
        guide.close()


def test_closing_ends_the_threads(smollm2_path: Path) -> None:
    mine = Guides(Tokenizer.load(smollm2_path))
    assert mine.wait(mine.open(regex="a")) is not None
    mine.made.close()
    assert not any(thread.is_alive() for thread in mine.made._threads)


def test_an_answer_whose_masks_take_too_long_is_ended(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.structured.guides.MASK_CPU_S", 1e-9)
    guide = guides.open(regex="[ab]{3}")
    assert guides.wait(guide) is not None
    guides.say(guide, "a")
    with pytest.raises(GuideError, match="takes too much time"):
        guides.wait(guide)


def test_no_answer_is_begun_while_grammars_take_too_much_memory(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = guides.open(regex="[ab]{3}")
    assert guides.wait(begun) is not None
    monkeypatch.setattr(guides.made, "_enough_bytes", 0)
    with pytest.raises(GuideError, match="try again later"):
        guides.wait(guides.open(regex="[ab]{3}"))
    guides.say(begun, "a")
    assert guides.wait(begun) is not None


def test_an_engine_starts_with_a_tokenizer_that_grammars_cannot_use(guides: Guides) -> None:
    maker = RequestGuides(VOCAB, [EOS], guides.woken.set)
    maker.set_tokenizer('{"version": "1.0"}')
    with pytest.raises(GuideError, match="no tokenizer"):
        maker.make(request_of(grammar=guides.compile(regex="a")))


class Steps:
    """A scheduler with real guides over ranks that sample at random what the frames' masks allow."""

    def __init__(self, guides: Guides, num_pages: int) -> None:
        self.maker = RequestGuides(VOCAB, [EOS], guides.woken.set)
        self.maker.set_tokenizer(guides.tokenizer.to_json())
        self.scheduler = Scheduler(
            replace(
                LIMITS,
                num_pages=num_pages,
                max_num_seqs=6,
                max_num_batched_tokens=64,
                prefill_chunk_size=64,
                max_model_len=128,
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
            ),
            make_guide=self.maker.make,
        )
        self.woken = guides.woken
        self.random = np.random.default_rng(0)
        self.masks: dict[int, UInt32Array] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}

    def add(self, request_id: int, grammar: str) -> None:
        self.tokens[request_id] = []
        sampling = SamplingParams(max_tokens=60, grammar=grammar)
        request = GenerateRequest(id=request_id, prompt=np.full(6, 50, np.int32).tobytes(), sampling=sampling)
        assert not self.scheduler.add([request])

    def run(self) -> None:
        """Until all have ended."""
        frames: list[StepFrame] = []
        while self.scheduler.has_work:
            while (frame := self.scheduler.next_step()) is not None:
                frames.append(frame)
            if frames:
                self._take(self.scheduler.retire(self._sample(frames.pop(0))))
            else:
                self.woken.wait(0.05)
                self.woken.clear()
            self._take(self.scheduler.drain_finished())
            self.scheduler.check_integrity()

    def _sample(self, frame: StepFrame) -> StepResult:
        self.masks |= dict(zip(frame.mask_rows.tolist(), frame.masks, strict=True))
        sampled = frame.rows[(frame.flags & RowFlag.SAMPLE) != 0].tolist()
        tokens = [int(self.random.choice(allowed(self.masks[row]))) for row in sampled]
        return StepResult(frame.generation, frame.step, np.array(tokens, np.int32))

    def _take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        ids = np.frombuffer(output.ids, "<i8").tolist()
        for request_id, token in zip(ids, np.frombuffer(output.tokens, "<i4").tolist(), strict=True):
            self.tokens[request_id].append(token)
        self.ended |= {finished.id: finished for finished in output.finished}


def test_preempted_answers_still_follow_their_grammars(guides: Guides) -> None:
    pattern = "^[a-z]{3}-[0-9]{3}$"
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}, "minItems": 5, "maxItems": 5}
    steps = Steps(guides, num_pages=18)
    grammar = guides.compile(json_schema=schema)
    for request_id in range(1, 9):
        steps.add(request_id, grammar)
    steps.run()
    assert steps.scheduler.stats().total_preemptions > 0
    for request_id, tokens in steps.tokens.items():
        assert steps.ended[request_id].reason is FinishReason.STOP
        jsonschema.validate(json.loads(guides.tokenizer.decode(tokens)), schema)
    steps.maker.close()


def test_masks_behind_drafts_are_those_that_come_once_they_are_the_answer(guides: Guides) -> None:
    first, *drafts = guides.tokenizer.encode("yes no no no!", add_special_tokens=False)
    wrong = [drafts[0], first, *drafts[1:]]
    for given, num_foreseen in ((drafts, len(drafts) - 1), (wrong, 1), ([], 0)):
        guide, real = (guides.open(regex="(yes|no)( yes| no){3}!") for _ in range(2))
        guides.wait(guide)
        guide.accept([first], given)
        real.accept([first])
        guides.wait(guide)
        ahead = list(guide.ahead)
        assert len(ahead) == num_foreseen
        for token, mask in zip(given, ahead, strict=False):
            real.accept([token])
            expected = guides.wait(real)
            assert expected is not None
            assert mask.tolist() == expected.tolist()
        # What was only foreseen is forgotten.
        guides.say(guide, " no")
        texts = {guides.tokenizer.token_text(token) for token in allowed(guides.wait(guide))}  # type: ignore[arg-type]
        assert {" yes", " no"} <= texts
        assert not guide.ahead
        guide.close()
        real.close()


# Bad words

EVERY = mask_of(range(40), 40)


def after(guide: BadWordsGuide, tokens: Sequence[int]) -> set[int]:
    """What is banned next."""
    guide.accept(tokens)
    return set(range(40)) - set(allowed(guide.poll()).tolist())


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    guide = BadWordsGuide([(1, 2), (1, 3, 4), (3, 4, 5, 6)], EVERY)
    assert after(guide, []) == set()
    assert after(guide, [1]) == {2}
    assert after(guide, [3]) == {4}
    assert after(guide, [7]) == set()
    assert after(guide, [3, 4, 5]) == {6}
    guide.accept([7], [1, 3, 9])
    assert [set(range(40)) - set(allowed(mask).tolist()) for mask in guide.ahead] == [{2}, {4}, set()]
    assert after(guide, [1]) == {2}
    assert not guide.is_finished


def test_bad_words_hold_across_what_is_kept_of_the_answer() -> None:
    guide = BadWordsGuide([(5, 5, 5)], EVERY)
    for _ in range(50):
        assert after(guide, [1, 5]) == set()
        assert after(guide, [5]) == {5}


def request_of(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(id=1, prompt=b"\1\0\0\0", sampling=SamplingParams(max_tokens=5, **sampling))


def test_a_grammar_and_bad_words_hold_together(guides: Guides) -> None:
    maker = RequestGuides(VOCAB, [EOS], guides.woken.set)
    assert maker.make(request_of(bad_words=((3,),))) is None
    assert isinstance(maker.make(request_of(bad_words=((3,), (3, 4)))), BadWordsGuide)
    with pytest.raises(GuideError, match="outside"):
        maker.make(request_of(bad_words=((3, VOCAB),)))
    grammar = guides.compile(regex="(yes|no) (yes|no)!")
    with pytest.raises(GuideError, match="no tokenizer"):
        maker.make(request_of(grammar=grammar))
    maker.set_tokenizer(guides.tokenizer.to_json())
    encode = guides.tokenizer.encode
    yes = encode("yes yes", add_special_tokens=False)
    both = maker.make(request_of(grammar=grammar, bad_words=(tuple(yes),)))
    assert isinstance(both, BothGuides)
    both.accept([], yes[:-1])
    guides.woken.wait(1)
    both.accept(yes[:-1], yes[-1:])
    deadline = time.monotonic() + TIMEOUT_S
    while (mask := both.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    texts = {guides.tokenizer.token_text(token) for token in allowed(mask).tolist()}
    assert " no" in texts
    assert " yes" not in texts
    assert len(both.ahead) == 1
    both.close()
    maker.close()

"""A tokenizer with more ids than the model has embeddings for: no body of any route brings one of them to a rank, nor
anything else that makes a rank or the step loop raise.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from cluster.openapi import build_document
from cluster.requests.engine_client import EngineClient
from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.served_model import ServedModel
from cluster.routes import ROUTES
from cluster.version import VERSION
from configs.errors import RequestError
from configs.schema import ServerConfig
from tests.helpers.json_bodies import Bodies
from tests.helpers.tiny_engine import MODEL, PAD, SPECIALS, VOCAB_SIZE, WORDS, TinyEngine, make_tokenizer, tiny_engine

UNKNOWN = (PAD, "lock", " lockstep")
"""Texts with a token that the model has no embedding for."""
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/v1/score")
BODIES = Bodies(build_document(VERSION), words=[*SPECIALS, *WORDS, *UNKNOWN, "a", " "])
REQUESTS = {route.path: route.request for route in ROUTES if route.request is not None}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    with tiny_engine(tmp_path_factory.mktemp("tiny")) as engine:
        yield engine


def bodies_of(text: str) -> list[tuple[str, dict[str, Any], str]]:
    """Bodies by which `text` reaches the model, one for each way, with their route and the field that it is in."""
    chat = [*MESSAGES, {"role": "user", "content": text}]
    return [
        ("/v1/chat/completions", {"messages": chat}, "messages"),
        ("/v1/chat/completions", {"messages": chat, "truncate_prompt_tokens": 60}, "messages"),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text], "echo": True, "max_tokens": 0}, "prompt[1]"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/messages", {"messages": chat, "max_tokens": 4}, "messages"),
        ("/generate", {"text": text}, "text"),
        ("/generate", {"text": ["a", text], "sampling_params": {"max_new_tokens": 4}}, "text[1]"),
        ("/v1/score", {"query": "a", "items": ["b", text], "label_token_ids": [5]}, "items[1]"),
    ]


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_text_with_a_token_that_the_model_does_not_have_is_refused_on_every_route(
    engine: TinyEngine, text: str
) -> None:
    for path, body, param in bodies_of(text):
        reply = engine.post(path, {"model": MODEL, **body})
        if text == PAD and param in ("messages", "input"):
            assert reply.status_code == 200, "the texts of a chat have no special tokens"
            continue
        error = reply.json()["error"]
        assert reply.status_code == 400, reply.text
        assert f"contains {text.strip()!r}, token " in error["message"]
        assert f"this model has only tokens 0 to {VOCAB_SIZE - 1}" in error["message"]
        assert param in (error.get("param"), error["message"].split(" ")[0]), path
    engine.check()


def test_the_part_of_a_text_that_is_cut_off_is_not_refused(engine: TinyEngine) -> None:
    body = {"model": MODEL, "prompt": f"{PAD} and the rest", "truncate_prompt_tokens": 4, "max_tokens": 1}
    assert engine.post("/v1/completions", body).status_code == 200


def test_bad_words_that_the_model_cannot_write_change_nothing(engine: TinyEngine) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4, "temperature": 0}
    plain = engine.post("/v1/completions", body).json()["choices"]
    assert engine.post("/v1/completions", {**body, "bad_words": [PAD, f"a{PAD}", "lock"]}).json()["choices"] == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(lock|the){3}"}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_an_answer_that_follows_a_grammar_has_tokens_of_the_model_alone(
    engine: TinyEngine, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "return_token_ids": True, **fields}
    reply = engine.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    ids = reply.json()["choices"][0]["token_ids"]
    assert ids
    assert max(ids) < VOCAB_SIZE


def test_a_grammar_that_asks_for_a_token_that_the_model_does_not_have_is_refused(engine: TinyEngine) -> None:
    for grammar in (f'start: "a" {PAD}', f"start: {PAD}"):
        body = {"model": MODEL, "prompt": "a", "structured_outputs": {"grammar": grammar}}
        assert engine.post("/v1/completions", body).status_code == 400
    engine.check()


# --- Any text, any tokenizer ------------------------------------------------------------------------------------------

_texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.lists(
    st.sampled_from([*SPECIALS, *WORDS, *UNKNOWN, "a", " ", "\n"]), max_size=6
).map("".join)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    text=_texts,
    words=st.lists(st.sampled_from(WORDS), unique=True).map(tuple),
    added=st.lists(st.sampled_from([PAD, "<unused>", "a", "\n"]), unique=True).map(tuple),
    vocab_size=st.integers(1, 300),
)
@example(text=PAD, words=(), added=(PAD,), vocab_size=260)
def test_any_text_through_any_tokenizer_gives_ids_of_the_model_or_is_refused(
    text: str, words: tuple[str, ...], added: tuple[str, ...], vocab_size: int
) -> None:
    tokenizer = make_tokenizer(words, added)
    nobody = cast("EngineClient", None)  # no request goes as far
    model = ServedModel(
        nobody, tokenizer, model_name=MODEL, max_model_len=1024, server=ServerConfig(), vocab_size=vocab_size
    )
    ids = model.prompts.encode(text)
    assume(ids)
    if max(ids) < vocab_size:
        assert model.checked_max_tokens(ids, 1, param="prompt") == 1
        return
    with pytest.raises(RequestError, match="of the tokenizer, and this model has only") as caught:
        model.checked_max_tokens(ids, 1, param="prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


# --- Any body, any route ----------------------------------------------------------------------------------------------


def fuzz(engine: TinyEngine, path: str, num_examples: int) -> collections.Counter[int]:
    """Sends bodies that the document allows, and counts the answers by status. The engine must live through each."""
    schema = {"$ref": f"#/components/schemas/{REQUESTS[path].__name__}"}
    seen: collections.Counter[int] = collections.Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples < 100,
        suppress_health_check=list(HealthCheck),
    )
    @given(body=BODIES.valid(schema))
    def one(body: dict[str, Any]) -> None:
        if "model" in body:
            body["model"] = MODEL
        reply = engine.post(path, body)
        seen[reply.status_code] += 1
        assert reply.status_code < 500, f"{reply.text}\n{body}"
        engine.check()

    one()
    return seen


@pytest.mark.parametrize("path", GENERATING)
def test_no_body_that_is_accepted_makes_a_rank_or_the_step_loop_raise(engine: TinyEngine, path: str) -> None:
    seen = fuzz(engine, path, num_examples=15)
    assert seen[200] > 0 < seen[400], seen


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", GENERATING)
def test_no_body_of_hundreds_makes_a_rank_or_the_step_loop_raise(engine: TinyEngine, path: str) -> None:
    assert fuzz(engine, path, num_examples=300)[200] > 30


def test_every_sampling_field_changes_the_answer(engine: TinyEngine) -> None:
    """A field that is accepted and does nothing is one that somebody forgot to pass on."""
    body = {"model": MODEL, "prompt": "the", "max_tokens": 40, "temperature": 1.6, "seed": 5, "logprobs": 1}

    def choice_of(**fields: Any) -> Any:
        response = engine.post("/v1/completions", {**body, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    plain = choice_of()
    tokens = choice_of(return_token_ids=True)["token_ids"]
    letter = next(it for it in plain["text"] if it.isascii() and it.isprintable())
    stop, ends = {"stop": letter}, {"logit_bias": {"1": 100}}
    changes: dict[str, list[dict[str, Any]]] = {
        "temperature": [{"temperature": 0.5}],
        "top_p": [{"top_p": 0.2}],
        "top_k": [{"top_k": 2}],
        "min_p": [{"min_p": 0.9}],
        "frequency_penalty": [{"frequency_penalty": 2}],
        "presence_penalty": [{"presence_penalty": 2}],
        "repetition_penalty": [{"repetition_penalty": 50}],
        "seed": [{"seed": 6}],
        "logit_bias": [{"logit_bias": {str(tokens[0]): -100}}],
        "allowed_token_ids": [{"allowed_token_ids": [40, 41]}],
        "bad_words": [{"bad_words": [letter]}],
        "logprob_token_ids": [{"logprob_token_ids": [40]}],
        "min_tokens": [ends, {**ends, "min_tokens": 4}],
        "stop": [stop],
        "stop_regex": [{"stop_regex": f"[{letter}]"}],
        "stop_token_ids": [{"stop_token_ids": tokens[:1]}],
        "ignore_eos": [ends, {**ends, "ignore_eos": True}],
        "include_stop_str_in_output": [stop, {**stop, "include_stop_str_in_output": True}],
        "no_stop_trim": [stop, {**stop, "no_stop_trim": True}],
        "skip_special_tokens": [{"allowed_token_ids": [2]}, {"allowed_token_ids": [2], "skip_special_tokens": False}],
        "response_format": [{"response_format": {"type": "regex", "regex": "ab+"}}],
        "structured_outputs": [{"structured_outputs": {"regex": "ab+"}}],
        "regex": [{"regex": "ab+"}],
        "ebnf": [{"ebnf": 'root ::= "ab"'}],
        "json_schema": [{"json_schema": {"type": "boolean"}}],
    }
    assert set(changes) == set(SamplingFields.model_fields), "show that a new field changes the answer"
    for field, bodies in changes.items():
        before, after = [plain, *(choice_of(**it) for it in bodies)][-2:]
        assert before != after, field

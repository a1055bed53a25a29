"""Prevents texts of a request from becoming special tokens of its prompt.

A chat template writes tokens such as `<|im_end|>` around each turn. A tokenizer makes the same token from the same
characters in a user's text, which could then end the turn and begin a system turn. Two steps prevent that. Before
rendering, such characters are replaced by marks. Then a second tokenizer, the twin, encodes the rendered text. The twin
knows the special tokens only by secret names, which replace the names that the template wrote. Where the marks were,
the twin finds the user's characters, which are plain text for it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from cluster.text.conversation import Conversation, Turn
from cluster.text.formats import ModelFormats
from cluster.text.tokenizer import Tokenizer
from configs.errors import CheckpointError

_SEARCHED_CHARS = 1 << 20  # characters searched at once: a search holds the GIL for about 5 ms


class Marks:
    """The marks of one conversation. A mark is made of digits, which templates and JSON do not change, and is random,
    so that no client's text contains it."""

    def __init__(self) -> None:
        self._stem = _new_stem()
        self._texts: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The mark that stands for `text`."""
        return f"{self._stem}{self._texts.setdefault(text, len(self._texts)):06d}"

    def restored(self, marked: str) -> str:
        """Returns `marked` with the original text in place of each mark."""
        texts = list(self._texts)
        return marked if not texts else re.sub(rf"{self._stem}(\d{{6}})", lambda found: texts[int(found[1])], marked)


class _Finder:
    """Finds the characters of tokens in texts. It also finds a part of a token at the start or end of a text, because
    the other part may be next to it in the template or in another text."""

    def __init__(self, tokens: Collection[str], between: Collection[str] = ()) -> None:
        """`between` has tags at which templates may cut a text, or which they may remove. The text ends at each of
        them."""
        self._between = re.compile(f"({_pattern(between)})") if between else None
        self._tokens = re.compile(_pattern(tokens)) if tokens else None
        self._longest = max(map(len, tokens), default=0)
        self._begins = {token[:size] for token in tokens for size in range(1, len(token))}
        self._ends = {token[-size:] for token in tokens for size in range(1, len(token))}
        self._first, self._last = ({token[at] for token in tokens} for at in (0, -1))

    def marked(self, text: str, mark: Callable[[str], str]) -> str:
        """Returns `text` with a mark in place of everything that is found."""
        if self._tokens is None:
            return text
        if self._between is not None and len(pieces := self._between.split(text)) > 1:
            return "".join(piece if i % 2 else self.marked(piece, mark) for i, piece in enumerate(pieces))
        for start in range(0, len(text), _SEARCHED_CHARS):
            if self._tokens.search(text, start, start + _SEARCHED_CHARS + self._longest):
                text = self._tokens.sub(lambda found: mark(found[0]), text)
                break
        # Templates strip whitespace at the ends.
        kept = text.rstrip()
        if part := self._at_end(kept):
            text = kept[: -len(part)] + mark(part) + text[len(kept) :]
        kept = text.lstrip()
        if part := self._at_start(kept):
            text = text[: len(text) - len(kept)] + mark(part) + kept[len(part) :]
        return text

    def _at_end(self, text: str) -> str:
        tail = text[-self._longest :]
        if self._first.isdisjoint(tail):
            return ""
        return next((tail[at:] for at in range(len(tail)) if tail[at:] in self._begins), "")

    def _at_start(self, text: str) -> str:
        head = text[: self._longest]
        if self._last.isdisjoint(head):
            return ""
        return next((head[:size] for size in range(len(head), 0, -1) if head[:size] in self._ends), "")

    def replaced(self, text: str, names: Mapping[str, str]) -> str:
        """Returns `text` with each token replaced by its secret name."""
        return text if self._tokens is None else self._tokens.sub(lambda found: names[found[0]], text)


class SpecialTokens:
    """The tokens that only the chat template of one model may write. Any thread may use this object."""

    def __init__(self, tokenizer: Tokenizer, formats: ModelFormats) -> None:
        self._tokenizer = tokenizer
        source = "" if tokenizer.template is None else tokenizer.template.source
        added = tokenizer.added_tokens()
        # Some tokenizers do not flag the tokens of turns as special. A token that the template names counts too.
        names = {
            name for name, special in added.items() if name.strip() and (special or (_is_tag(name) and name in source))
        }
        # An answer that a client sends back contains the tags of the model's reasoning and calls, so these stay.
        calls = () if formats.calls is None else formats.calls.tags
        own = {name for name in calls if not added.get(name)}
        # Special tags do not stay, because they end whole messages.
        if formats.reasoning is not None and not formats.reasoning.special:
            own |= {formats.reasoning.begin, formats.reasoning.end}
        self._names = tuple(sorted(names))
        self._everywhere = _Finder(names)
        self._in_answers = _Finder(names - own, own)

    def prepare(self) -> None:
        """Creates the twin before the first `encode` needs it. This holds the GIL for some tenths of a second."""
        _twin(self._tokenizer, self._names)

    def marked(self, conversation: Conversation, marks: Marks) -> Conversation:
        """Returns `conversation` with marks in place of special tokens' characters in its texts. Raises RecursionError
        for JSON that is nested too deep."""
        tools = conversation.tools
        if tools is not None:
            shown = tuple(replace(tool, shown=self._value(tool.shown, marks)) for tool in tools.tools)
            tools = replace(tools, tools=shown)
        return replace(
            conversation,
            turns=[self._turn(turn, marks) for turn in conversation.turns],
            tools=tools,
            documents=self._value(conversation.documents, marks),
            options=[replace(option, value=self._value(option.value, marks)) for option in conversation.options],
        )

    def encode(self, rendered: str, marks: Marks, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a template's text with marks. Only special tokens that the template wrote become special
        tokens."""
        twin, names = _twin(self._tokenizer, self._names)
        text = marks.restored(self._everywhere.replaced(rendered, names))
        [encoding] = twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _turn(self, turn: Turn, marks: Marks) -> Turn:
        finder = self._in_answers if turn.role == "assistant" else self._everywhere

        def marked(text: Any) -> Any:
            return self._value(text, marks, finder)

        return replace(
            turn,
            text=marked(turn.text),
            thinking=marked(turn.thinking),
            calls=tuple(
                replace(call, name=marked(call.name), arguments=marked(call.arguments), id=marked(call.id))
                for call in turn.calls
            ),
            call_id=marked(turn.call_id),
            name=marked(turn.name),
        )

    def _value(self, value: Any, marks: Marks, finder: _Finder | None = None) -> Any:
        """Returns a JSON `value` with marks in its texts."""
        finder = finder or self._everywhere
        if isinstance(value, str):
            return finder.marked(value, marks.mark)
        if isinstance(value, Mapping):
            return {finder.marked(key, marks.mark): self._value(entry, marks, finder) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(entry, marks, finder) for entry in value]
        return value


@lru_cache(maxsize=4)
def _twin(tokenizer: Tokenizer, special: tuple[str, ...]) -> tuple[RustTokenizer, dict[str, str]]:
    """A copy of a tokenizer in which the `special` tokens have secret names, and these names by real name. Real names
    are plain text to the copy.

    Raises:
        CheckpointError: a token has another id under its secret name.
    """
    stem = _new_stem()
    names = {name: f"<{stem}{i:06d}>" for i, name in enumerate(special)}
    state = json.loads(tokenizer.to_json())
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    twin = RustTokenizer.from_str(json.dumps(state, ensure_ascii=False))
    for name, secret in names.items():
        if twin.token_to_id(secret) != tokenizer.token_id(name):
            raise CheckpointError(
                f"the tokenizer's special token {name!r} cannot be kept apart from text; set "
                "server.special_tokens_in_text=true if users may write special tokens"
            )
    return twin, names


def _new_stem() -> str:
    """Digits that cannot be guessed."""
    return f"{secrets.randbits(80):025d}"


def _is_tag(name: str) -> bool:
    """Whether an unflagged token looks like a tag of turns, and not like whitespace, digits or a word."""
    return len(name) > 2 and not any(end.isalnum() or end.isspace() for end in (name[0], name[-1]))


def _pattern(tokens: Collection[str]) -> str:
    """A regular expression for any of `tokens`, longest first. It tests each character once, even if a thousand tokens
    have the same beginning."""
    branches: dict[str, list[str]] = {}
    for token in tokens:
        if token:
            branches.setdefault(token[0], []).append(token[1:])
    choices = [re.escape(first) + _pattern(rest) for first, rest in branches.items()]
    if len(choices) == 1 and "" not in tokens:
        return choices[0]
    return f"(?:{'|'.join(choices)}){'?' if '' in tokens else ''}" if choices else ""

"""The formats in which models write tool calls, with one parser each.

A parser reads a whole answer. A call becomes an event as soon as its name is known and its arguments begin. Text that
only looked like a call becomes content. In every format, a call must name one of the request's tools.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cluster.text.tools import harmony
from cluster.text.tools.sink import Sink
from cluster.text.tools.text_stream import Reading, TextStream

StyleName = Literal["hermes", "llama3_json", "mistral", "json", "deepseek_v3", "qwen3_coder", "harmony"]


def _random_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """A random id for a call. Mistral's templates accept only ids of nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _as_mistral_id(id_: str) -> str:
    """An id that Mistral's templates accept: `id_` if they do, else the first nine digits of its hash."""
    return id_ if re.fullmatch("[a-zA-Z0-9]{9}", id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The text around calls in an answer that is only calls."""

    begin: str
    separator: str
    end: str
    arguments_key: str = "arguments"
    tag: str = ""
    """The tag at the start of `begin`. Empty if calls cannot appear among other text."""
    head: str = ""
    """The text before the arguments of a call, a format string for the tool's name. If empty, calls are JSON objects
    with name and arguments."""

    def around(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments of a call to `name`."""
        if self.head:
            return self.head.format(name), ""
        return f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments_key)}: ', "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """One format of tool calls."""

    name: StyleName
    read: Callable[[TextStream, Sink], Reading[None]]
    tags: tuple[str, ...] = ()
    """Tags of calls that may be special tokens. The detokenizer then shows them in the answer's text."""
    new_id: Callable[[], str] = _random_id
    shown_id: Callable[[str], str] = str
    """Converts the id of a call in the request to one that the template accepts."""
    layout: CallLayout | None = None
    """How a grammar writes calls in this format. None if no grammar can."""


def read_content(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses an answer without calls."""
    yield from text.take_until((), sink.content)


def _hermes(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3."""
    while tag := (yield from text.take_until(("<tool_call>",), sink.content)):
        text.mark(tag)
        yield from text.skip_space()
        if not (yield from _call_object(text, sink, stop_at="<")):
            _no_call(text, sink)
        else:
            yield from _closing(text, sink, "</tool_call>")


def _llama3_json(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses `{"name": …, "parameters": {…}}`, or several with `;` between, as the whole answer or after
    `<|python_tag|>`."""
    tag = ""
    while True:
        text.mark(tag)
        yield from text.skip_space()
        if not (yield from _calls(text, sink)):
            _no_call(text, sink)
        tag = yield from text.take_until(("<|python_tag|>",), sink.content)
        if not tag:
            return


def _plain_json(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses `{"name": …, "arguments": {…}}` or a list of such objects, as the whole answer."""
    text.mark()
    yield from text.skip_space()
    if not (yield from _calls(text, sink, in_list=(yield from text.peek()) == "[")):
        _no_call(text, sink)
    yield from read_content(text, sink)


def _mistral(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or since v11 `[TOOL_CALLS]name[ARGS]{…}`, repeated."""
    while tag := (yield from text.take_until(("[TOOL_CALLS]",), sink.content)):
        text.mark(tag)
        yield from text.skip_space()
        first = yield from text.peek()
        is_json = first in ("[", "{")
        if not (yield from _calls(text, sink, in_list=first == "[") if is_json else _mistral_named(text, sink)):
            _no_call(text, sink)


def _mistral_named(text: TextStream, sink: Sink) -> Reading[bool]:
    name = yield from text.take_name()
    id_ = None
    if (yield from text.skip("[CALL_ID]")):
        id_ = yield from text.take_name()
    yield from text.skip("[ARGS]")
    yield from text.skip_space()
    if name not in sink.tools or (yield from text.peek()) != "{":
        return False
    yield from _stream_arguments(text, sink, name, id_=id_)
    return True


def _deepseek_v3(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses V3's and R1's `…begin｜>function<｜tool▁sep｜>name`, a newline and the arguments in a fenced block. Also
    parses V3.1's `…begin｜>name<｜tool▁sep｜>{…}`."""
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"
    while tag := (yield from text.take_until(("<｜tool▁calls▁begin｜>", begin), sink.content)):
        text.mark(tag)
        if tag != begin:
            yield from text.skip_space()
            yield from text.skip(begin)
        if not (yield from _deepseek_call(text, sink)):
            _no_call(text, sink)
        else:
            yield from _closing(text, sink, end)


def _deepseek_call(text: TextStream, sink: Sink) -> Reading[bool]:
    name = yield from text.take_name()
    if not (yield from text.skip("<｜tool▁sep｜>")):
        return False
    fenced = (yield from text.peek()) != "{"
    if fenced:
        name = yield from text.take_name()
        yield from text.skip_space()
        if not (yield from text.skip("```json")):
            return False
        yield from text.skip_space()
    if name not in sink.tools or (yield from text.peek()) != "{":
        return False
    yield from _stream_arguments(text, sink, name, stop_at="<`")
    if fenced:
        yield from _closing(text, sink, "```")
    yield from _closing(text, sink, "<｜tool▁call▁end｜>")
    return True


def _qwen3_coder(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, with text values."""
    while tag := (yield from text.take_until(("<tool_call>", "<function="), sink.content)):
        text.mark(tag)
        is_call = tag == "<function="
        if not is_call:
            yield from text.skip_space()
            is_call = yield from text.skip("<function=")
        name = (yield from text.take_name()) if is_call else ""
        if name not in sink.tools or not (yield from text.skip(">")):
            _no_call(text, sink)
            continue
        text.unmark()
        sink.start_call(name)
        yield from _xml_parameters(text, sink, sink.tools[name])
        yield from _closing(text, sink, "</tool_call>")


def _xml_parameters(text: TextStream, sink: Sink, schema: Mapping[str, Any]) -> Reading[None]:
    """Parses parameters up to `</function>`, and emits them as JSON. The JSON is cut off if the answer is."""
    properties = schema.get("properties")
    is_empty = True
    while True:
        yield from text.skip_space()
        if not (yield from text.skip("<parameter=")):
            break
        parts: list[str] = []
        yield from text.take_until((">",), parts.append)
        key = "".join(parts)
        sink.arguments(f"{'{' if is_empty else ', '}{_json(key)}: ")
        is_empty = False
        known = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _xml_value(text, sink, known.get("type") if isinstance(known, Mapping) else "string")
    closed = yield from text.skip_last("</function>")
    if closed or (yield from text.peek()):
        sink.arguments("{}" if is_empty else "}")


def _xml_value(text: TextStream, sink: Sink, kind: object) -> Reading[None]:
    """Reads one value up to `</parameter>`. A string is the text without one newline at either end. If the schema's
    type `kind` is another one, the value is JSON, or a string if it is not valid JSON."""
    yield from text.skip("\n")
    ends = ("\n</parameter>", "</parameter>")
    if kind == "string":
        sink.arguments('"')
        if (yield from text.take_until(ends, lambda piece: sink.arguments(_json(piece)[1:-1]))):
            sink.arguments('"')
        return
    parts: list[str] = []
    closed = yield from text.take_until(ends, parts.append)
    value = "".join(parts).strip()
    sink.arguments(_typed(value, kind) if closed else value)


def _typed(value: str, kind: object) -> str:
    """JSON text of `value`, read as one of the types in `kind`: a name, a list of names, or None for any type."""
    kinds = [kind] if isinstance(kind, str) else kind
    text = value.lower() if value in ("True", "False") else "null" if value == "None" else value
    try:
        decoded = msgspec.json.decode(text)
    except ValueError:
        return _json(value)
    if not isinstance(kinds, list):
        return text
    names = {bool: ("boolean",), int: ("integer", "number"), float: ("number", "integer"), str: ("string",)}
    names |= {dict: ("object",), list: ("array",), type(None): ("null",)}
    return text if any(name in kinds for name in names[type(decoded)]) else _json(value)


# --- Pieces that several formats share --------------------------------------------------------------------------------


def _call_object(text: TextStream, sink: Sink, *, stop_at: str = "", needs_arguments: bool = False) -> Reading[bool]:
    """Reads `{"name": …, "arguments": {…}}`, with keys in any order. Other keys are dropped. Returns whether the object
    is a call. If it is, the mark is removed; if not, the object's text is still marked."""
    if not (yield from text.skip("{")):
        return False
    name: str | None = None
    arguments: str | None = None
    while True:
        key = yield from _key(text)
        if key is None:
            return False
        is_object = (yield from text.peek()) == "{"
        if key == "name" and name is None:
            name = yield from _tool_name(text, sink)
            if name is None:
                return False
        elif key in ("arguments", "parameters") and name is not None and arguments is None and is_object:
            yield from _stream_arguments(text, sink, name, stop_at=stop_at)
            yield from _rest_of_object(text)
            return True
        else:
            parts: list[str] = []
            yield from text.take_json(parts.append)
            if key in ("arguments", "parameters") and arguments is None:
                arguments = _argument_text("".join(parts))
                if arguments is None:
                    return False
        yield from text.skip_space()
        if not (yield from text.skip(",")):
            break
    if not (yield from text.skip("}")) or name is None or (arguments is None and needs_arguments):
        return False
    text.unmark()
    sink.start_call(name)
    sink.arguments(arguments or "{}")
    return True


def _calls(text: TextStream, sink: Sink, *, in_list: bool = False) -> Reading[bool]:
    """Reads calls one after another, with or without `;` or `,` between them. Returns whether there was at least one.

    Args:
        in_list: whether `[` and `]` enclose calls that are separated by `,`.
    """
    if in_list:
        yield from text.skip("[")
        yield from text.skip_space()
    if not (yield from _call_object(text, sink, needs_arguments=True)):
        return False
    is_call = True
    while is_call:
        text.mark(is_call=True)
        yield from text.skip_space()
        if in_list and (yield from text.skip("]")):
            text.unmark()
            return True
        is_separate = (yield from text.skip(",")) or (not in_list and (yield from text.skip(";")))
        yield from text.skip_space()
        is_call = (is_separate or not in_list) and (yield from _call_object(text, sink, needs_arguments=True))
    _no_call(text, sink)
    return True


def _stream_arguments(
    text: TextStream, sink: Sink, name: str, *, id_: str | None = None, stop_at: str = ""
) -> Reading[None]:
    """Begins a call to `name` and emits the JSON that follows as its arguments. The mark is removed."""
    text.unmark()
    sink.start_call(name, id_)
    yield from text.take_json(sink.arguments, stop_at=stop_at)


def _no_call(text: TextStream, sink: Sink) -> None:
    """Emits the marked text as content, because it was not a call. If the answer was cut off after a tag or a tool's
    name, the text is dropped: it is half a call. Without these it may have been any JSON, and is content."""
    marked = text.unmark()
    if not (text.cut and text.is_call):
        sink.content(marked)


def _rest_of_object(text: TextStream) -> Reading[None]:
    """Reads the keys after the arguments, such as a call's id, and the closing brace."""
    yield from text.skip_space()
    while (yield from text.skip(",")):
        if (yield from _key(text)) is None:
            return
        yield from text.take_json(lambda _: None)
        yield from text.skip_space()
    yield from text.skip("}")


def _closing(text: TextStream, sink: Sink, tag: str) -> Reading[None]:
    """Reads `tag` and the whitespace before it, if they are next. Models sometimes leave the tag out."""
    space = yield from text.skip_space()
    if not (yield from text.skip_last(tag)):
        sink.content(space)


def _key(text: TextStream) -> Reading[str | None]:
    """Reads the key of an object's next value, its colon and the whitespace around them. None without a key."""
    yield from text.skip_space()
    key, is_whole = yield from _string(text)
    yield from text.skip_space()
    if not is_whole or not (yield from text.skip(":")):
        return None
    yield from text.skip_space()
    return key


def _tool_name(text: TextStream, sink: Sink) -> Reading[str | None]:
    """Reads the next JSON string, and returns it if it is the name of a tool. If the answer is cut off inside the
    string, it is no name, but may be part of a call."""
    name, is_whole = yield from _string(text)
    if name is None:
        return None
    text.is_call |= name in sink.tools if is_whole else any(tool.startswith(name) for tool in sink.tools)
    return name if is_whole and name in sink.tools else None


def _string(text: TextStream) -> Reading[tuple[str | None, bool]]:
    """Reads the next JSON string. Returns the string, or None if something else is next, and whether it is complete."""
    if (yield from text.peek()) != '"':
        return None, False
    parts: list[str] = []
    is_whole = yield from text.take_json(parts.append)
    try:
        return msgspec.json.decode("".join(parts) + ("" if is_whole else '"'), type=str), is_whole
    except ValueError:
        return None, False


def _argument_text(value: str) -> str | None:
    """The arguments in a JSON value, which may be a string that contains JSON. None if they are not an object."""
    try:
        decoded = msgspec.json.decode(value)
        if isinstance(decoded, str):
            value, decoded = decoded, msgspec.json.decode(decoded)
    except (ValueError, RecursionError):
        return None
    if decoded is None:
        return "{}"
    return value if isinstance(decoded, dict) else None


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


_DEEPSEEK_TAGS = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
STYLES: Mapping[StyleName, CallStyle] = {
    style.name: style
    for style in (
        CallStyle(
            name="hermes",
            read=_hermes,
            tags=("<tool_call>", "</tool_call>"),
            layout=CallLayout("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", tag="<tool_call>"),
        ),
        CallStyle(
            name="llama3_json",
            read=_llama3_json,
            tags=("<|python_tag|>",),
            layout=CallLayout("", "; ", "", arguments_key="parameters"),
        ),
        CallStyle(
            name="mistral",
            read=_mistral,
            tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            new_id=_mistral_id,
            shown_id=_as_mistral_id,
            layout=CallLayout("[TOOL_CALLS][", ", ", "]", tag="[TOOL_CALLS]"),
        ),
        CallStyle(name="json", read=_plain_json, layout=CallLayout("[", ", ", "]")),
        CallStyle(name="deepseek_v3", read=_deepseek_v3, tags=tuple(f"<｜tool▁{tag}｜>" for tag in _DEEPSEEK_TAGS)),
        CallStyle(
            name="harmony",
            read=harmony.read_messages,
            tags=harmony.TAGS,
            layout=CallLayout("", "", "", head=harmony.CALL),
        ),
        CallStyle(name="qwen3_coder", read=_qwen3_coder, tags=("<tool_call>", "</tool_call>")),
    )
}


def detect_calls(template: str) -> StyleName | None:
    """The format that a chat template shows to the model. None if it shows none, or one that has no parser here."""
    if harmony.ANALYSIS in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3"
    if "<function=" in template:
        # Llama 3.1's other format has JSON inside a function tag.
        return "qwen3_coder" if "<parameter=" in template else None
    if "<tool_call>" in template:
        # GLM uses this tag for another format, with keys and values in tags.
        return None if "<arg_key>" in template else "hermes"
    return "llama3_json" if '"parameters": dictionary of argument name and its value' in template else None

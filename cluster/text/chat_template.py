"""The model's chat template: Jinja in a sandbox, with limits of time and size that a request cannot change.

This module decides what a template may do, and finds out which variables it reads. `conversation` makes the messages.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.errors import CheckpointError, ConfigError

RENDER_TIMEOUT_S = 5.0
MAX_RENDERED_CHARS = 32 << 20
_TICKS = 64  # calls between two reads of the clock
_OURS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Variables that requests set by separate fields, or cannot set."""


def template_sources(path: Path) -> str | dict[str, str] | None:
    """The chat template, or several by name, from the directory of a model or tokenizer. None if the directory has
    none. The tokenizer's own loader finds the same templates, but this function needs no tokenizer.

    Raises:
        CheckpointError: a file has the wrong form.
    """
    try:
        if (file := path / "chat_template.jinja").is_file():
            return file.read_text("utf-8")
        if not (file := path / "tokenizer_config.json").is_file():
            return None
        found = json.loads(file.read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if isinstance(found, list):
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    return found if isinstance(found, str) else None


def read_template(path: str) -> str:
    """Reads the file `server.chat_template`. Raises ConfigError if it cannot be read, or is not Jinja."""
    try:
        source = Path(path).expanduser().read_text("utf-8")
        ChatTemplate(source, {})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.chat_template={path} cannot be read ({error}); name a Jinja file") from error
    except TemplateError as error:
        raise ConfigError(f"server.chat_template={path} is not Jinja; correct it: {error}") from None
    return source


class TemplateLimitError(TemplateError):
    """A template took too long or wrote too many characters."""


class ChatTemplate:
    """One model's chat template, or several by name. Any thread may call `render`."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        """Args:
            sources: the template, or templates by name: `default`, and optionally `tool_use` and `rag`.
            special_tokens: variables such as `bos_token`.

        Raises:
            jinja2.TemplateSyntaxError: a template is not Jinja.
        """
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.source = "\n".join(named.values())
        """The text of all templates, in which `formats` looks for the formats of calls and reasoning."""
        self._environment = _Sandbox()
        self._templates = {name: self._environment.from_string(source) for name, source in named.items()}
        self._special_tokens = dict(special_tokens)
        self._reads = frozenset().union(
            *(find_undeclared_variables(self._environment.parse(source)) for source in named.values())
        ) - frozenset(self._environment.globals)

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of this name, which may then change the prompt."""
        return name in self._reads

    def takes(self, name: str) -> bool:
        """Whether a request may set the variable in `chat_template_kwargs`: the template reads it, and no separate
        field sets it."""
        return self.reads(name) and name not in _OURS and name not in self._special_tokens

    def shows_system(self) -> bool:
        """Whether the template shows a system message. Some templates refuse it, and others drop it."""
        mark = secrets.token_hex(16)
        try:
            text = self.render([{"role": "system", "content": mark}, {"role": "user", "content": "x"}])
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return False
        return mark in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders the prompt's text. Blocks for as long as the template takes.

        Args:
            variables: further variables, only those that `takes` accepts.
            continue_final_message: cut the text after the last message's content.

        Raises:
            jinja2.TemplateError: the template refuses the messages (with `raise_exception`), or exceeds a limit.
            TypeError, ValueError, LookupError, AttributeError: the template cannot handle such messages.
        """
        mark = ""
        if continue_final_message:
            mark = f"<{secrets.token_hex(16)}>"
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}]
        template = self._templates.get(self._name(tools, documents)) or next(iter(self._templates.values()))
        self._environment.start_clock(RENDER_TIMEOUT_S)
        text = []
        size = 0
        for piece in template.generate(
            **self._special_tokens,
            **(variables or {}),
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
        ):
            self._environment.tick()
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise TemplateLimitError(f"it wrote more than {MAX_RENDERED_CHARS} characters")
            text.append(piece)
        rendered = "".join(text)
        if not continue_final_message:
            return rendered
        end = rendered.rfind(mark)
        if end < 0:
            raise TemplateError("it does not show the final message, which is to be continued")
        return rendered[:end]

    def _name(self, tools: object, documents: object) -> str:
        if tools and "tool_use" in self._templates:
            return "tool_use"
        return "rag" if documents and "rag" in self._templates else "default"


class _Clock(threading.local):
    """The time limit of the template that this thread renders."""

    ticks = 0
    timeout_s = math.inf
    deadline = math.inf


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a clock. It is checked whenever a template calls, reads an attribute or writes."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        # Jinja's own filter escapes for HTML, but models are trained on plain JSON.
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self._clock = _Clock()

    def start_clock(self, timeout_s: float) -> None:
        """Gives the template of this thread `timeout_s` seconds from now on."""
        self._clock.ticks = 0
        self._clock.timeout_s = timeout_s
        self._clock.deadline = time.monotonic() + timeout_s

    def tick(self) -> None:
        """Raises TemplateLimitError if this thread's time is used up."""
        clock = self._clock
        clock.ticks += 1
        if clock.ticks % _TICKS == 0 and time.monotonic() > clock.deadline:
            raise TemplateLimitError(f"it took more than {clock.timeout_s:g} s")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.tick()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call(context, obj, *args, **kwargs)


class _Generation(Extension):
    """Parses `{% generation %}`, with which templates mark what a model is trained to write. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as a mutable set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

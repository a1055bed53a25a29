"""The format of gpt-oss, in which an answer is a list of messages. A message's channel says whom it is for.

    <|channel|>analysis<|message|>The user asks for …<|end|><|start|>assistant<|channel|>final<|message|>It is …
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}

OpenAI describes the format in "Harmony response format". Messages on `analysis` are reasoning. A message to a function
is a call, and ends the answer. Every other message is content, on `commentary` as well as on `final`.
"""

from __future__ import annotations

import re

from cluster.text.tools.sink import Sink
from cluster.text.tools.text_stream import Reading, TextStream

START, CHANNEL, CONSTRAIN, MESSAGE, END = TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""The tags within an answer, which are special tokens. Another special token ends an answer."""
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"
"""The text between two messages of an answer. The prompt also ends with this text."""
CALL = f"{CHANNEL}commentary to=functions.{{}} {CONSTRAIN}json{MESSAGE}"
"""The head of a call, a format string for the tool's name."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def read_messages(text: TextStream, sink: Sink) -> Reading[None]:
    """Parses the messages of an answer, or the messages after the first one. The message that the prompt has begun has
    no head."""
    has_content = False
    while (yield from text.peek()):
        head: list[str] = []
        has_head = (yield from text.skip(START)) or (yield from text.skip(CHANNEL))
        if has_head and not (yield from text.take_until((MESSAGE,), head.append)):
            return  # a head that is cut off is not shown
        recipient = _RECIPIENT.search(words := "".join(head))
        if recipient is not None and recipient[1] in sink.tools:
            # The recipient may also come before the channel.
            sink.start_call(recipient[1])
            yield from text.take_json(sink.arguments, stop_at="<")
            yield from text.take_until((END,), lambda _: None)
        elif words.rpartition(CHANNEL)[2].startswith("analysis"):
            yield from text.take_until((END,), sink.reasoning)
            sink.end_reasoning()
        else:
            if has_content:
                sink.content("\n\n")
            has_content = True
            yield from text.take_until((END,), sink.content)

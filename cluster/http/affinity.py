"""Which requests begin alike, told from the first bytes of their bodies: what a proxy can know before it routes.

The turns of a conversation begin with the same messages, up to the first one of the user's; other prompts are alike
when their first few kilobytes are. Looked for in the text of the JSON, not in its structure: the body is not whole yet.
"""

from __future__ import annotations

import hashlib
import json
import re

PEEKED_BYTES = 16 << 10
"""How much of a body is looked at."""
_MAX_CHARS = 4096  # a thousand tokens: what a wrong guess lets another replica compute again
_PROMPT = re.compile(r'"(?:messages|prompt|input|text|input_ids)"\s*:\s*')
_MESSAGES = re.compile(r"\[\s*(?={)")
_SEPARATOR = re.compile(r"\s*,\s*")
_decode = json.JSONDecoder().raw_decode


def beginning_key(body: bytes, client: bytes = b"") -> str | None:
    """A name that requests share whose prompts begin alike; None when `body` shows no prompt.

    Args:
        body: the first `PEEKED_BYTES` of a request's body, or all of it.
        client: who asks: clients share no cached prefixes.
    """
    text = body[:PEEKED_BYTES].decode("utf-8", "replace")
    found = _PROMPT.search(text)
    if found is None:
        return None
    start = found.end()
    beginning = text[start : min(_first_turn_end(text, start), start + _MAX_CHARS)]
    return hashlib.blake2b(client + b"\0" + beginning.encode(), digest_size=16).hexdigest()


def _first_turn_end(text: str, start: int) -> int:
    """Where the prompt's first turn ends: the first message of the user, or the prompt that is no list of messages."""
    try:
        opened = _MESSAGES.match(text, start)
        if opened is None:
            return _decode(text, start)[1]
        position = opened.end()
        while True:
            message, position = _decode(text, position)
            separator = _SEPARATOR.match(text, position)
            if message.get("role") == "user" or separator is None:
                return position
            position = separator.end()
    except (ValueError, AttributeError, RecursionError):  # it is longer than what is there, or no list of messages
        return len(text)

"""Finds the replica that a request had better go to, from its path and the first bytes of its body: what a proxy can
know before it routes.

A stored response lies in the replica that made it, which its id names. The turns of a conversation begin with the same
messages, up to the first one of the user's; other prompts are alike when their first few kilobytes are. Looked for in
the text of the JSON, not in its structure: the body is not whole yet.
"""

from __future__ import annotations

import hashlib
import json
import re

PEEKED_BYTES = 16 << 10
"""How much of a body is looked at."""
REPLICA_SESSION = "replica-"
"""A session of this and a replica's id is that replica's, however busy it is."""
_MAX_CHARS = 4096  # a thousand tokens: what a wrong guess lets another replica compute again
_KEPT_PATH = re.compile(r"/v1/responses/resp_([a-z0-9]{1,32})_")
_KEPT_BODY = re.compile(rb'"previous_response_id"\s*:\s*"resp_([a-z0-9]{1,32})_')
_PROMPT = re.compile(r'"(?:messages|prompt|input|text|input_ids)"\s*:\s*')
_MESSAGES = re.compile(r"\[\s*(?={)")
_SEPARATOR = re.compile(r"\s*,\s*")
_decode = json.JSONDecoder().raw_decode


def response_prefix(replica: str) -> str:
    """The prefix of the ids of responses that `replica` keeps; empty: it is the only one."""
    return f"resp_{replica}_" if replica else "resp_"


def keeping_replica(path: str, body: bytes) -> str | None:
    """The replica that keeps the response of which a request speaks; None when it speaks of none.

    Args:
        body: the first `PEEKED_BYTES` of it, or all.
    """
    if (in_path := _KEPT_PATH.search(path)) is not None:
        return in_path[1]
    in_body = _KEPT_BODY.search(body)
    return None if in_body is None else in_body[1].decode()


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
    """The end of the prompt's first turn: the first message of the user, or the prompt that is no list of messages."""
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

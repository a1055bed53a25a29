"""Which format a model writes tool calls in, by the chat template that teaches it."""

from __future__ import annotations

from cluster.text.tools.styles import StyleName


def detect_calls(template: str) -> StyleName | None:
    """The format that `template` shows to the model; None when it shows none, or one that has no reader here."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3"
    if "<function=" in template:
        # Llama 3.1's other format has the function tag with JSON in it.
        return "qwen3_coder" if "<parameter=" in template else None
    if "<tool_call>" in template:
        # GLM uses the tag for a format of its own: keys and values in tags.
        return None if "<arg_key>" in template else "hermes"
    if '"parameters": dictionary of argument name and its value' in template:
        return "llama3_json"
    return None

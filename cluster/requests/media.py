"""Images and files in a request, of which this server's models read none."""

_KINDS = {"input_image": "image", "input_file": "file", "image": "image"}


def placeholder(part: object) -> str | None:
    """The text that the model sees in place of a part of a message. None if the part is no image or file."""
    kind = _KINDS.get(str(part.get("type"))) if isinstance(part, dict) else None
    return None if kind is None else f"[{kind} omitted: this model reads text only]"

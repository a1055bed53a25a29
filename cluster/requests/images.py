"""What a request contains and the model is not shown as it is: images, files, and what this server does not know."""

from __future__ import annotations

from cluster.requests.shapes import Other
from configs.errors import RequestError
from configs.schema import ServerConfig

_MEDIA = {"document": "document", "file": "file", "image": "image", "image_url": "image", "input_audio": "audio"}
_MEDIA |= {"audio_url": "audio", "input_file": "file", "input_image": "image", "video_url": "video"}


def placeholder(part: object) -> str | None:
    """The text that the model is shown in place of a part of a message. None if the part is no medium."""
    medium = _MEDIA.get(str(part.get("type"))) if isinstance(part, dict) else None
    return None if medium is None else f"[{medium} omitted: this model reads text only]"


class LeftOut:
    """Reads the parts of one request that are no text, and collects what the model is not shown."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self.names: dict[str, None] = {}
        """What is left out or replaced, for the header `x-ignored-fields`, such as `messages.image`."""
        self.loaded: set[str] = set()
        """Names of tools that `tool_reference` blocks load."""

    def text(self, part: Other, path: str) -> list[str]:
        """The text that the model is shown in place of the part of a message at `path`. Empty if it is left out. Raises
        RequestError for a part that the settings refuse."""
        given = part.model_extra or {}
        if part.type == "tool_reference" and isinstance(tool := given.get("tool_name"), str):
            self.loaded.add(tool)
            return [f"The tool {tool} is available now."]
        source = given.get("source")  # a search result has an address here
        if texts := _texts(source if isinstance(source, dict) else given.get("content")):
            return texts
        if shown := self.medium(part.type, "messages", path):
            return [shown]
        self.unknown(f"messages.{part.type}", path)
        return []

    def medium(self, kind: str, field: str, path: str) -> str | None:
        """The `placeholder` of a part of type `kind`, at `path` within `field`. Raises RequestError if the settings
        refuse it."""
        if (medium := _MEDIA.get(kind)) is None:
            return None
        if self._server.images == "refuse":
            # Claude Code takes an image out of the conversation if it reads the words "Could not process image".
            message = f"Could not process {medium} {path}: this model reads text only. Leave it out."
            raise RequestError(message, code="unsupported_parameter", param=path)
        self.names[f"{field}.{kind}"] = None
        return placeholder({"type": kind})

    def unknown(self, name: str, path: str) -> None:
        """Leaves out the part or tool at `path`. Raises RequestError if `server.strict_fields` is set."""
        if self._server.strict_fields:
            raise RequestError(f"{path} is not supported; leave it out.", code="unsupported_parameter", param=path)
        self.names[name] = None


def _texts(content: object) -> list[str]:
    """The texts in a part of an unknown type, such as a document of plain text or a search result."""
    if isinstance(content, dict):
        content = content.get("data" if content.get("type") == "text" else "content")
    if isinstance(content, list):
        return [it["text"] for it in content if isinstance(it, dict) and isinstance(it.get("text"), str)]
    return [content] if isinstance(content, str) else []

"""What a request contains and the model is not shown as it is: images, files, and what this server does not know."""

from __future__ import annotations

from cluster.requests.shapes import Other
from configs.errors import RequestError
from configs.schema import ServerConfig

_MEDIA = {"document": "document", "file": "file", "image": "image", "image_url": "image", "input_audio": "audio"}
_MEDIA |= {"audio_url": "audio", "input_file": "file", "input_image": "image", "video_url": "video"}


def _medium(part: object) -> str | None:
    return _MEDIA.get(str(part.get("type"))) if isinstance(part, dict) else None


def placeholder(part: object) -> str | None:
    """The text that the model is shown in place of a part of a message. None if the part is no medium."""
    medium = _medium(part)
    return None if medium is None else f"[{medium} omitted: this model reads text only]"


def check_media(part: object, path: str, server: ServerConfig) -> None:
    """Raises RequestError if the part at `path` is a medium and `server.images` refuses it."""
    if server.images == "refuse" and (medium := _medium(part)) is not None:
        # Claude Code takes an image out of the conversation if it reads the words "Could not process image".
        message = f"Could not process {medium} {path}: this model reads text only. Leave it out."
        raise RequestError(message, code="unsupported_parameter", param=path)


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
        given, name = part.model_extra or {}, f"messages.{part.type}"
        if part.type == "tool_reference" and isinstance(tool := given.get("tool_name"), str):
            self.loaded.add(tool)
            return [f"The tool {tool} is available now."]
        source = given.get("source")  # a search result has an address here
        if texts := _texts(source if isinstance(source, dict) else given.get("content")):
            return texts
        of_type = {"type": part.type}
        if (shown := placeholder(of_type)) is None:
            self.unknown(name, path)
            return []
        check_media(of_type, path, self._server)
        self.names[name] = None
        return [shown]

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

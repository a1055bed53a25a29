"""From texts and chats to token ids."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cluster.text.conversation import Conversation
from cluster.text.formats import ModelFormats
from cluster.text.rendering import check, render
from cluster.text.tokenizer import Tokenizer
from configs.errors import OverloadedError

_NUM_RENDERERS = 4
_MAX_RENDERING = 1024  # chats in the hands of the renderers and before them


class PromptEncoder:
    """Encodes for one model; chats in threads of its own."""

    def __init__(self, tokenizer: Tokenizer, formats: ModelFormats) -> None:
        self._tokenizer = tokenizer
        self._formats = formats
        self._renderers = ThreadPoolExecutor(_NUM_RENDERERS, thread_name_prefix="chat-template")
        self._num_rendering = 0

    def close(self) -> None:
        """Takes no more chats."""
        self._renderers.shutdown(wait=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Blocks for as long as it takes, 1 to 2 ms for 4 kB; from any thread."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._with_one_bos(ids) if add_special_tokens else ids

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of the chat template's text, with one BOS however often the template writes it; the event loop goes
        on meanwhile.

        Raises:
            RequestError: there is no template, it cannot show all of this, or it refuses these messages.
            OverloadedError: too many templates wait to be rendered.
        """
        template, formats = self._tokenizer.template, self._formats
        check(conversation, template, formats)
        if self._num_rendering >= _MAX_RENDERING:
            raise OverloadedError("Too many chats are being prepared; try again later.")

        def encode() -> list[int]:
            text = render(conversation, template, formats)
            return self._tokenizer.encode(text, add_special_tokens=conversation.add_special_tokens)

        self._num_rendering += 1
        try:
            # Never on the event loop: how long a template takes is not known before.
            ids = await asyncio.get_running_loop().run_in_executor(self._renderers, encode)
        finally:
            self._num_rendering -= 1
        return self._with_one_bos(ids)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """A second BOS worsens answers and shows nowhere: text that begins with one gets no other."""
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

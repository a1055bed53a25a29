"""Writes answers of /v1/completions: the chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from cluster.messages.engine import FinishReason, TokenLogprobs
from cluster.openai.echo import Echo, prompt_top_logprobs
from cluster.openai.openai_request import CompletionRequest
from cluster.openai.openai_writer import REASONS, OpenAIWriter, top_logprobs
from cluster.openai.wire import Completion, CompletionChoice, CompletionLogprobs
from cluster.requests.engine_client import WholePromptLogprobs
from cluster.requests.generation import Delta
from cluster.requests.job import Run
from cluster.requests.json_parts import finite, json_parts, long_list
from cluster.requests.served_model import ServedModel


class CompletionWriter(OpenAIWriter):
    """Writes answers of /v1/completions."""

    _chunk = Completion

    def __init__(
        self, run: Run, request: CompletionRequest, model: ServedModel, echoes: Sequence[Echo] | None = None
    ) -> None:
        """`echoes` has the text of each prompt, which the answers begin with. None without echo."""
        super().__init__(run, request, model)
        self._echoes = echoes
        self._begun: set[int] = set()  # choices that have streamed a chunk

    def events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                yield from self._first(delta)
            if self._text_only and delta.text:
                yield self._text_chunk(delta.index, delta.text)
            elif delta.text or self._has_tokens(delta):
                logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs, delta.text_offsets)
                ids = self._token_ids(delta.token_ids)
                yield self._event([CompletionChoice(delta.index, delta.text, logprobs, None, token_ids=ids)])
            if delta.finish_reason is not None:
                reason = REASONS[delta.finish_reason]
                yield self._event([CompletionChoice(delta.index, "", None, reason, delta.stop_reason)])

    def whole(self) -> Iterator[bytes]:
        choices = long_list(self._choice(index) for index in range(self._job.num_outputs))
        return json_parts(self._headed(Completion, choices, self.run.usage()))

    def _choice(self, index: int) -> CompletionChoice:
        got = self._collected[index]
        whole = self._whole_prompt_logprobs(index)
        text = "".join(got.text)
        if self._echoes is not None:
            text = self._echo(index).text + text
        return CompletionChoice(
            index,
            text,
            self._logprobs(index, got.token_ids, got.logprobs, got.text_offsets, whole),
            REASONS[got.finish_reason or FinishReason.ABORT],
            got.stop_reason,
            self._token_ids(got.token_ids),
            self._token_ids(self._job.prompt_of(index)),
            self._prompt_logprobs(index),
        )

    def _text_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text, None, None)

    def _first(self, delta: Delta) -> Iterator[bytes]:
        """Yields the chunk with the prompt, if the request asks for the prompt's text or ids."""
        if self._echoes is None and not self._shows_ids:
            return
        text, logprobs = "", None
        if self._echoes is not None:
            text = self._echo(delta.index).text
            if delta.prompt_logprobs is not None:
                logprobs = self._logprobs(delta.index, [], (), (), delta.prompt_logprobs)
        ids = self._token_ids(self._job.prompt_of(delta.index))
        yield from self._event_parts([CompletionChoice(delta.index, text, logprobs, None, prompt_token_ids=ids)])

    def _echo(self, index: int) -> Echo:
        assert self._echoes is not None, "asked for the text of a prompt that is not echoed"
        return self._echoes[index // self._job.num_choices]

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        rows: Sequence[TokenLogprobs],
        offsets: Sequence[int],
        whole: WholePromptLogprobs | None = None,
    ) -> CompletionLogprobs | None:
        """Log probabilities of the answer's tokens. With an echo and `whole`, those of the prompt come first."""
        k = self._num_logprobs
        if k < 0:
            return None
        sampling = self._job.sampling[0][0]
        names, own = map(self._name, token_ids), (finite(row.logprob) for row in rows)
        ranked = zip(token_ids, rows, strict=True)
        tops = (self._by_name(top_logprobs(sampling, row, token)) for token, row in ranked)
        before = 0 if self._echoes is None else len(self._echo(index).text)
        places = (before + offset for offset in offsets)
        if self._echoes is None or whole is None:
            return CompletionLogprobs(long_list(names), long_list(own), long_list(tops), long_list(places))
        prompt = self._job.prompt_of(index)
        return CompletionLogprobs(
            tokens=long_list(chain(map(self._name, prompt), names)),
            token_logprobs=long_list(chain([None], map(finite, whole.logprobs.tolist()), own)),
            top_logprobs=long_list(chain([None], map(self._by_name, prompt_top_logprobs(whole, prompt, k)), tops)),
            text_offset=long_list(chain(self._echo(index).offsets, places)),
        )

    def _by_name(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """`top` by the tokens' texts. If several tokens have one text (half characters), the likeliest is shown."""
        named: dict[str, float] = {}
        for id_, logprob in top:
            named.setdefault(self._name(id_), logprob)
        return named

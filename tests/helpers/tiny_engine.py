"""Everything between an HTTP body and a rank's tables, without Ray: the ingress, the coordinator's loop and a real
worker with a model of random weights, in milliseconds a request. The tokenizer knows more than the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.make_checkpoint import write_checkpoint
from cluster.engine.coordinator import Coordinator
from cluster.http.keys import KeyRing
from cluster.ranks.liveness import Liveness
from cluster.ranks.recovery import Recovery
from cluster.requests.engine_client import EngineClient
from cluster.requests.served_model import ServedModel
from cluster.scheduling.scheduler import Scheduler
from cluster.serve.ingress import create_app
from cluster.structured.guides import RequestGuides
from cluster.text.tokenizer import Tokenizer
from configs.errors import DeadlineError
from configs.schema import GenerationDefaults, ServerConfig
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.helpers.fake_engine import LIMITS
from tests.helpers.fake_ranks import FakeRanks
from tests.helpers.local_group import PAGE_SIZE, LocalGroup

MODEL = "tiny"
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", " the", "lock", "lockstep")
"""Tokens of their own. The model has embeddings for the first two."""
PAD = "[PAD]"
"""A special token that the model has no embedding for."""
VOCAB_SIZE = len(SPECIALS) + 256 + 7  # not a multiple of 32, the bits of a mask's word
MAX_MODEL_LEN = 64
TEMPLATE = """\
{#- Calls are <tool_call>{"name": ..., "arguments": ...}</tool_call>. #}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{{ message.tool_calls or "" }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>a
{% endif %}"""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def make_tokenizer(words: Sequence[str] = WORDS, added: Sequence[str] = (PAD,)) -> Tokenizer:
    """Byte-level BPE: the four of SPECIALS, 256 bytes, what it takes to put `words` together, then `added`. The last of
    these is the BOS.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIALS, *alphabet]
    merges = []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        [(letters, _)] = byte_level.pre_tokenize_str(word)
        for end in range(2, len(letters) + 1):
            if letters[:end] not in pieces:
                merges.append((letters[: end - 1], letters[end - 1]))
                pieces.append(letters[:end])
    rust = RustTokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, merges))
    rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r" ?\w+|\s+|."), "isolated"), byte_level])
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*SPECIALS, *added)])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token=[*SPECIALS[:1], *added][-1], eos_token=SPECIALS[1])
    return Tokenizer(fast, chat_template=TEMPLATE)


class _Ranks(FakeRanks):
    """The threads of a LocalGroup."""

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(StepCost.of(ShardPlan.create(group.model, 1), 4))
        self._group = group

    def send(self, frame: bytes, timeout_s: float) -> None:
        for frames in self._group.frames:
            frames.put(frame)

    def recv(self, timeout_s: float) -> bytes:
        try:
            result = self._group.results.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError("no result") from None
        if isinstance(result, BaseException):
            raise result
        return result


@dataclass
class TinyEngine:
    """A running one."""

    model: ServedModel
    coordinator: Coordinator
    _http: httpx.AsyncClient
    _loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer, once it is whole."""
        return self.send(path, body).result(60)

    def send(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Future[httpx.Response]:
        """The answer, when it is whole."""
        return asyncio.run_coroutine_threadsafe(self._http.post(path, json=body, headers=headers), self._loop)

    def check(self) -> None:
        """Raises unless the engine serves, and holds nothing of requests that have ended."""
        assert self.coordinator.failure is None, self.coordinator.failure
        deadline = time.monotonic() + 20
        # The coordinator may learn of an abort only after its client has the answer.
        while self.coordinator.inspect(lambda it: it.has_work or it.stats().num_owned_pages > 0):
            assert time.monotonic() < deadline, "requests, or their pages, were left behind"
            time.sleep(0.001)
        self.coordinator.inspect(lambda scheduler: scheduler.check_integrity())


def write_tiny_checkpoint(folder: Path) -> None:
    """Of random weights, in an empty directory."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    write_checkpoint(folder, folder)


@contextlib.contextmanager
def tiny_engine(
    folder: Path, *, keys: KeyRing | None = None, max_model_len: int = MAX_MODEL_LEN, **changes: Any
) -> Iterator[TinyEngine]:
    """An engine of one rank on threads of this process.

    Args:
        folder: an empty directory, for the checkpoint.
        keys: of its clients; None: none are asked for.
        changes: of SchedulerLimits.
    """
    write_tiny_checkpoint(folder)
    num_pages = changes.get("num_pages", LIMITS.num_pages)
    group = LocalGroup(folder, 1, num_pages=num_pages, max_model_len=max_model_len)
    limits = replace(
        LIMITS,
        page_size=PAGE_SIZE,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_num_queued_requests=2000,
        max_num_queued_tokens=200_000,
        eos_token_ids=group.model.eos_token_ids,
        max_item_tokens=28,
        **{"max_num_batched_tokens": 64, "prefill_chunk_size": 32} | changes,
    )
    tokenizer = make_tokenizer()
    coordinators: list[Coordinator] = []
    ranks: Any = _Ranks(group)
    guides = RequestGuides(VOCAB_SIZE, group.model.eos_token_ids, lambda: coordinators[0].wake())
    guides.set_tokenizer(tokenizer.to_json())
    coordinator = Coordinator(
        Scheduler(limits, make_guide=guides.make),
        ranks,
        step_timeout_s=60.0,
        recovery=Recovery(0),
        liveness=Liveness(),
    )
    coordinators.append(coordinator)
    started: Future[TinyEngine] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        engine = await EngineClient.connect(coordinator.address)
        model = ServedModel(
            engine,
            tokenizer,
            model_name=MODEL,
            max_model_len=max_model_len,
            server=ServerConfig(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=group.model.eos_token_ids,
            defaults=GenerationDefaults(max_new_tokens=8),
            max_item_tokens=limits.max_item_tokens,
        )
        await model.warm_up()
        transport = httpx.ASGITransport(create_app(model, keys=keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
            started.set_result(TinyEngine(model, coordinator, http, asyncio.get_running_loop()))
            await stop.wait()
        await model.close()
        await engine.close()

    def serve_or_say() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    with ThreadPoolExecutor(1) as loop:
        stepping = loop.submit(coordinator.run)
        serving = threading.Thread(target=serve_or_say, daemon=True)
        serving.start()
        try:
            running = started.result(60)
            yield running
            running._loop.call_soon_threadsafe(stop.set)
            serving.join(30)
        finally:
            coordinator.close()
            guides.close()
        stepping.result(30)
    group.close()

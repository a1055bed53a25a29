"""The user's settings: plain, frozen data. `args` of the Ray Serve config file is an `EngineConfig`.

`configs.resolve` decides `auto` values (None for numbers) once, into a new object. tests/settings.txt pins the list of
settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from configs.attention import BACKENDS
from configs.checkpoint import is_local

_T = TypeVar("_T")


def resolved(value: _T | None) -> _T:
    """Returns a setting that `configs.resolve` has decided if it was None."""
    assert value is not None, "the setting is used before configs.resolve has decided it"
    return value


# Maximum number of drafts per step. With more, a GPU is no longer bound by reading weights, and a step takes longer
# than the drafts save.
_MAX_DRAFTS = 128

if TYPE_CHECKING:
    AttentionBackendName = str
else:
    AttentionBackendName = Literal[("auto", *BACKENDS)]


class _Section(BaseModel):
    # Values must have the right type in YAML: `tensor_parallel_size: true` must not mean 1.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class AttentionConfig(_Section):
    """The backends that compute attention. docs/reference/attention.md lists what each backend can do."""

    backend: AttentionBackendName = "auto"
    """auto: the fastest measured backend that serves the model, or without a measurement fa3 on Hopper GPUs, triton on
    other or unknown GPUs and for float32, and cpu on CPUs, which needs a C compiler. The log says why a faster backend
    is not used. flashinfer needs its package, and nvcc, on every node. flash_mla needs sglang-kernel, and pages of 64
    tokens."""
    prefill_backend: AttentionBackendName | None = None
    """Backend for steps in which some request has several input tokens. None: `attention.backend`."""
    decode_backend: AttentionBackendName | None = None
    """Backend for steps in which every request has one input token. None: `attention.backend`."""


class KVCacheConfig(_Section):
    """The KV pool of each rank."""

    dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Dtype of keys and values. auto: the activations' dtype. fp8_e4m3: one byte per element, with the checkpoint's
    scale factors for each layer, or 1. docs/guides/scale.md says what it costs."""
    page_size: int = Field(16, ge=1, le=256)
    """Tokens per page, a power of two. The prefix cache shares whole pages only."""
    num_tokens: int | None = Field(None, ge=1)
    """Tokens that the pool holds, equal on every rank. None: all that fit in `memory_bytes`."""
    memory_bytes: int | None = Field(None, ge=1)
    """Bytes of a rank's KV pool, with the cached states of recurrent layers. None: `memory_fraction` of the memory that
    is free after loading."""
    memory_fraction: float | None = Field(None, gt=0.0, le=1.0)
    """Share of a rank's free memory that its KV pool takes, with the cached states, if `num_tokens` and `memory_bytes`
    are None. Weights, activations, CUDA graphs and the states of running requests are allocated before. None: 0.9 on
    CUDA, and 0.3 on CPU, where other processes use the same memory."""
    typical_tokens: int = Field(4096, ge=1)
    """Tokens of a typical sequence, prompt and answer. It decides the size of the window pool, the separate pool for
    layers with a sliding window: half the value doubles that pool and shrinks the other one. Models without such layers
    ignore it."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests, and reuse them for prompts with the same beginning."""


class SchedulerConfig(_Section):
    """How requests are admitted and batched."""

    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Requests that run at once; others wait. None: 256 on CUDA, 64 on CPU."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in one step. Each decoding request needs one, and prompt chunks share all others. All
    requests wait for the end of a step: a smaller value gives earlier first tokens when many prompts arrive together
    and shorter gaps between tokens, but if it is too small, prompts wait behind decoding requests. None: 512 on CPU; on
    CUDA 2048 to 8192, the number that an H200 computes in 45 ms (2048 for a model with 8 billion parameters), and at
    least twice `max_num_seqs`."""
    prefill_chunk_size: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens of one request in one step. None: `max_num_batched_tokens`. Larger values have no
    effect."""
    max_num_queued_requests: int = Field(1024, ge=1)
    """Number of waiting sequences above which new requests are refused with 503. The sequences of one HTTP request
    (prompts times `n`) are accepted or refused together. If nothing waits, they are always accepted. While a client has
    less than its share of the queue, its requests are accepted up to twice this number."""
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    """Number of waiting prompt tokens above which new requests are refused with 503. If nothing waits, one request of
    any length is accepted."""
    steps_in_flight: int = Field(2, ge=1, le=2)
    """Steps that are launched before the tokens of the first one are read. 1 is for debugging."""


class SpeculationConfig(_Section):
    """Speculative decoding: drafts of the next tokens, which a step verifies at once. With `numerics: exact` the
    answers keep every bit; otherwise they change no more than with another batch."""

    method: Literal["none", "ngram", "eagle3", "mtp"] = "none"
    """ngram: drafts the tokens that followed the last tokens earlier in the prompt or answer. eagle3: drafts with a
    one-layer head that was trained for the model and reads its hidden states. mtp: drafts with the multi-token
    prediction layer of DeepSeek-V3 or GLM 4.5 checkpoints. A step takes as many drafts as save time, judged by the
    request's acceptance rate and the measured step times; often that is none. With eagle3 and mtp, the head makes every
    step longer, and each draft needs one more pass of the head."""
    model: str | None = None
    """Directory or Hugging Face id of the EAGLE-3 head, in safetensors. With `load_format: dummy` its weights are
    random too."""
    num_speculative_tokens: int = Field(7, ge=1, le=7)
    """Maximum number of drafts per request and step."""
    prompt_lookup_min: int = Field(2, ge=1, le=16)
    """ngram drafts only if at least this number of last tokens occurred before. Of several occurrences, the one with
    the longest match is used; matches of four tokens (or this number, if it is larger) count as equal."""

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts per request and step. 0 without speculation."""
        return 0 if self.method == "none" else self.num_speculative_tokens

    @property
    def is_by_ranks(self) -> bool:
        """Whether the ranks make the drafts, instead of the coordinator."""
        return self.method in ("eagle3", "mtp")

    def max_sampled(self, max_num_seqs: int) -> int:
        """Maximum number of tokens that a step samples: one per request and one after each draft."""
        return max_num_seqs + min(max_num_seqs * self.num_drafts, _MAX_DRAFTS)


NO_SPECULATION = SpeculationConfig()


class ParallelConfig(_Section):
    """How the ranks of a group communicate, and how long they wait."""

    all_reduce: Literal["auto", "gloo", "nccl", "shared_memory", "symmetric_memory"] = "auto"
    """Implementation of the all-reduces. auto: symmetric_memory on CUDA and shared_memory on CPU for ranks on one node;
    nccl and gloo for ranks on several nodes. nccl also where a node's GPUs cannot read each other's memory."""
    threads_per_rank: int | None = Field(None, ge=1)
    """CPU threads of one rank's kernels. None: the node's cores divided by its ranks, at least 1."""
    spin_us: int | None = Field(None, ge=0)
    """Microseconds that a CPU rank spins, yielding its core, while it waits for the other ranks on its node. Then it
    sleeps. A rank that waits for the next step spins for at most 50. None: 1000 if the node has a core for every rank,
    else 0."""
    init_timeout_s: float = Field(600.0, gt=0)
    """Seconds for starting the ranks and loading the weights."""
    step_timeout_s: float = Field(120.0, gt=0)
    """Seconds for one step, including its all-reduces. A group that takes longer counts as hung."""


class RecoveryConfig(_Section):
    """What happens when a rank dies or hangs. The group replaces the rank, and its requests go on. If that is not
    possible, the requests end with an error and Ray Serve replaces the replica."""

    max_rebuilds: int = Field(3, ge=0)
    """Maximum number of rebuilds of one group in ten minutes without a sampled token in between. After that, the
    replica is replaced. 0: the first failure ends the group."""
    min_ranks: int | None = Field(None, ge=1)
    """Fewest ranks with which the group may go on if a device is lost. A device counts as lost when two new processes
    in its rank's place have failed by themselves. None: the group fails instead."""
    warm_spares: int | None = Field(None, ge=0, le=8)
    """Spare processes, with all modules loaded, that replace a dead rank. A spare saves most of a rebuild's time. None:
    one on GPUs, which holds a context and the model's kernels on one GPU (about 0.5 GiB); none on CPU. Each spare takes
    about 220 MiB of memory and seconds of a core at its start, which slows streams on machines with few cores."""
    stall_timeout_s: float = Field(0.5, gt=0)
    """Seconds for which a process may be stopped (SIGSTOP) before it is killed. A stopped rank is replaced; a stopped
    coordinator or replica ends the replica. The length of steps does not matter here. A process under a debugger does
    not count as stopped."""
    hang_timeout_s: float = Field(1.0, gt=0)
    """Seconds that a step may run beyond three times the slowest similar step before its ranks count as hung. The first
    steps are compared with ten times the time that the device's measured speed implies. Time taken by other programs
    and by compiling kernels does not count."""


class PlacementConfig(_Section):
    """Resources that one replica requests from the Ray cluster."""

    cpus_per_rank: float | None = Field(None, ge=0)
    """Ray CPUs per rank. None: 1 on GPUs, 0.1 on CPU, where sharing cores only makes ranks slower."""
    cpus_for_engine: float | None = Field(None, ge=0)
    """Ray CPUs of the bundle with HTTP server and coordinator. None: 1 on GPUs, 0.1 on CPU."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    """Ray placement strategy of a group. STRICT_PACK: all ranks on one node, as NVLink needs."""


class SamplingValues(BaseModel):
    """Sampling values of a request. The operator and the model's makers may set defaults. To add a field, declare it
    here, in `SamplingParams` and in the ranks' `PARAMS_DTYPE`, under one name."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    """0: always the likeliest token. None, here and below: the default of the operator or the model's makers, or no
    effect."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Sample only from the likeliest tokens that together have this probability."""
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    """Sample only from this number of likeliest tokens. 0 and -1 turn it off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    """Sample only from tokens with at least this share of the likeliest token's probability."""
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time it occurs in the answer."""
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Subtracted from the logit of each token that occurs in the answer."""
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    """Values above 1 discourage repetition. The bounds keep every logit finite in float32."""


class GenerationDefaults(SamplingValues, _Section):
    """Values for requests that omit them. None: no effect."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of a chat's answer."""
    skip_special_tokens: bool | None = None


class ServerConfig(_Section):
    """The HTTP endpoint. Ray Serve's `http_options` set host and port."""

    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Maximum size of a request body in bytes; a larger body gets 413."""
    max_n: int = Field(128, ge=1)
    """Maximum `n` of one request; a larger `n` is refused."""
    max_logprobs: int = Field(20, ge=0)
    """Maximum `top_logprobs` of one request; a larger number is refused."""
    max_stop: int = Field(16, ge=0, le=32)
    """Maximum number of stop strings of one request; more are refused."""
    strict_fields: bool = False
    """Refuse requests with unknown fields, and suggest the nearest name. If false, unknown fields are ignored and
    listed in the header `x-ignored-fields`."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """Seconds that one request may take; after that it gets 504."""
    shutdown_timeout_s: float = Field(20.0, ge=0)
    """Seconds for which a stopping replica lets running requests finish. The remaining ones end with an error that asks
    the client to retry. A second interrupt of `cluster serve` skips the wait."""
    api_keys: str | Literal[False] | None = None
    """A file of API keys, one per line: `id:sha256[:role[:requests a minute[:requests at once]]]`. Roles are user,
    admin and metrics. `:tokens=100000` (tokens a minute) and `:priority=-10..10` (the range of `priority` that counts
    against other clients) may follow. `python -m cluster key ID` makes a line. The file is read again when it changes.
    None: no keys, and only requests from this machine are answered. false: no keys, and all requests are answered."""
    host_names: list[str] = Field(default_factory=list)
    """Host names under which clients may call a server without keys; other names get 403. This keeps web pages from
    reading answers through a DNS name that points at this machine. Always accepted: localhost and loopback addresses;
    with `api_keys: false` also every IP address and the machine's own name. A server with keys accepts all names."""
    generation_config: Annotated[
        Annotated[Literal["auto", "off"], Tag("<word>")] | Annotated[GenerationDefaults, Tag("<values>")],
        Discriminator(lambda given: "<word>" if isinstance(given, str) else "<values>"),
    ] = "auto"
    """Sampling values of requests that omit them. auto: the model's generation_config.json. off: no defaults. An object
    such as {temperature: 0.7}: these values, and the model's for all others."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's chat template."""
    images: Literal["placeholder", "refuse"] = "placeholder"
    """What happens to images, documents, files and audio in a request; models read text only. placeholder: the model is
    shown a short text in their place, and the header `x-ignored-fields` names them. refuse: the request gets 400."""
    special_tokens_in_text: bool = False
    """Whether the characters of a special token, such as `<|im_end|>`, become that token inside the text of a chat:
    messages, tools, documents. false: only the chat template writes special tokens, so a user's text cannot end its
    turn and begin a system turn. Prompts that are not chats are always encoded as they are."""
    tool_template: Literal["auto", "generic", "off"] = "auto"
    """How tools, calls and results are shown to the model. auto: by its chat template if that shows all three in a
    known format, else generic. generic: as text in the system message, with calls in `<tool_call>` and results as user
    messages, as docs/guides/api.md describes. off: by the chat template; what the template does not show is refused."""
    tool_call_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "json", "deepseek_v3", "qwen3_coder", "harmony"
    ] = "auto"
    """The format in which the model writes tool calls. auto: the format that its chat template or the generic form
    shows. none: calls stay in the text."""
    reasoning_parser: Literal["auto", "none", "think", "mistral", "harmony"] = "auto"
    """The tags around the model's reasoning, which is separated from the answer: think is `<think>`, mistral is
    `[THINK]`, harmony is gpt-oss's channels. auto: the tags in its chat template. none: reasoning stays in the text."""


class ObservabilityConfig(_Section):
    """Logs, metrics and traces. They contain figures and names, never the text of a request."""

    log_format: Literal["console", "json"] = "console"
    """Format of log lines, which go to standard error of each process."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that receives spans over HTTP, such as http://collector:4318/v1/traces. It
    needs opentelemetry-exporter-otlp-proto-http. None: spans are made only if the process has a tracer provider."""


class EngineConfig(_Section):
    """One serving job: `applications[].args` of the Ray Serve config file."""

    model: str
    """A local directory, or a Hugging Face id. `~` is expanded."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: load the weights of `model`. dummy: use random weights of its shape and `revision`, equal on every run and
    for every number of ranks; a local directory only needs config.json."""
    served_model_name: str | list[str] | None = None
    """The model name that clients use, or a list of names. Answers have the first. A `*` in a later name stands for any
    characters: `[qwen3-8b, claude-*]` also serves requests for `claude-haiku-4-5`. None: derived from `model`."""
    tokenizer: str | None = None
    """A directory with a tokenizer, or a Hugging Face id. None: the model's own."""
    revision: str | None = None
    """Commit or tag of the model's repository on the Hub. A `tokenizer` in another repository is read at its default
    branch; name a directory to pin it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if the cluster has GPUs, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations, and of KV unless `kv_cache.dtype` says otherwise. auto: the checkpoint's on
    cuda, float32 on cpu."""
    quantization: Literal["auto", "none", "fp8"] = "auto"
    """fp8: on cuda, weights of linear layers and experts are in FP8 (e4m3), from the checkpoint or quantised while they
    are read, with a scale per 128 x 128 block. This halves the bytes that a step reads. With `numerics: fast`,
    activations are rounded to FP8 for these products too. On cpu, weights get the same values in `dtype`. none: all
    weights are in `dtype`. auto: what the checkpoint has with `numerics: fast`, else `dtype`; `dtype` also for FP8 on
    GPUs of compute capability below 8.9."""
    numerics: Literal["auto", "fast", "exact"] = "auto"
    """exact: no bit of a logit depends on the number of ranks, other requests, chunks, prefix hits or preemption; what
    cannot be exact is refused. fast: the fastest kernels. auto: exact on cpu, where it is no slower, if the model and
    the settings allow it; fast on cuda, where exact takes longer for large batches."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks of one group: any number from 1 to the model's query heads."""
    num_replicas: int = Field(1, ge=1)
    """Number of groups. Each serves by itself, and Ray Serve balances requests between them."""
    autoscaling_config: dict[str, Any] | None = None
    """Changes the number of groups with the load, instead of `num_replicas`: Ray Serve's section of this name
    (`min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s` and more). Lockstep's policy is used unless
    it names another one; `policy: {policy_kwargs: {...}}` sets its targets (`cluster.serve.autoscaling:LoadPolicy`)."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt plus answer, in tokens. None: the model's limit, or what the KV pool holds if that is less."""
    attention: AttentionConfig = AttentionConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = NO_SPECULATION
    parallel: ParallelConfig = ParallelConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    placement: PlacementConfig = PlacementConfig()
    server: ServerConfig = ServerConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def model_names(self) -> list[str]:
        """The names in `served_model_name`. Empty if it is None."""
        names = self.served_model_name
        return [names] if isinstance(names, str) else list(names or ())

    @property
    def kv_dtype(self) -> str:
        """Dtype of keys and values, once `dtype` is resolved."""
        return self.dtype if self.kv_cache.dtype == "auto" else self.kv_cache.dtype

    @property
    def is_exact(self) -> bool:
        """Whether `numerics`, once resolved, is exact."""
        return self.numerics == "exact"

    @property
    def is_local_model(self) -> bool:
        """Whether `model` is a path on this machine and not a Hub id."""
        return is_local(self.model)

    @property
    def has_local_weights(self) -> bool:
        """Whether the weights are on this machine: neither random, nor downloaded from the Hub by the ranks."""
        return self.is_local_model and self.load_format != "dummy"

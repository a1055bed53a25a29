"""The settings that a user may give: plain, frozen data. `args` of the Ray Serve config file is an `EngineConfig`.

Values of `auto` (None where a number is meant) are decided once by `configs.resolve`, into a new object.
Growth is visible: tests pin the list of settings in `tests/settings.txt`, at most 63.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from configs.checkpoint import is_local

_T = TypeVar("_T")


def resolved(value: _T | None) -> _T:
    """A setting whose None `configs.resolve` has replaced."""
    assert value is not None, "the setting is used before configs.resolve has decided it"
    return value


# More in one step take a GPU as much longer as they may save: it is no longer busy with reading weights alone.
_MAX_DRAFTS = 128

AttentionBackendName = Literal["auto", "fa3", "triton", "flashinfer", "cpu", "torch_native"]


class _Section(BaseModel):
    # Strict: a YAML file has types of its own, and `tensor_parallel_size: true` must not mean 1.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class AttentionConfig(_Section):
    """The backends that compute attention. docs/reference/attention.md has what each backend can do."""

    backend: AttentionBackendName = "auto"
    """auto: on Hopper GPUs fa3, and triton for steps that decode alone; on other GPUs, and in float32, triton; on CPU
    cpu, which needs a C compiler. What a backend cannot do for the model is said, and the next one is taken.
    flashinfer, an extra that every node must have, is taken where it is named."""
    prefill_backend: AttentionBackendName | None = None
    """For steps with more than one token of some request. None: `attention.backend`."""
    decode_backend: AttentionBackendName | None = None
    """For steps with one token of each request. None: `attention.backend`."""


class KVCacheConfig(_Section):
    """The KV pool of each rank."""

    dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Type of keys and values. auto: that of the activations. fp8_e4m3: one byte each, with the factors that the
    checkpoint has for each layer, else 1; docs/guides/scale.md has what it costs."""
    page_size: int = Field(16, ge=1, le=256)
    """Tokens per page; a power of two. Only whole pages are shared by the prefix cache."""
    num_tokens: int | None = Field(None, ge=1)
    """Tokens the pool holds, the same on every rank. None: as many as `memory_bytes` holds."""
    memory_bytes: int | None = Field(None, ge=1)
    """Bytes a rank may spend on its KV pool. None: `memory_fraction` of what is free after loading."""
    memory_fraction: float | None = Field(None, gt=0.0, le=1.0)
    """Share of the memory that loading, activations and CUDA graphs leave to a rank, which its KV pool takes when the
    two above are None. None: 0.9 on CUDA; 0.3 on CPU, where the node's other processes live on the rest."""
    typical_tokens: int = Field(4096, ge=1)
    """Tokens of a usual sequence, prompt and answer, by which layers with a sliding window get a pool of their own:
    with half of it that pool has twice the places, and all others have fewer pages. Other models have none."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests and reuse them for prompts that begin alike."""


class SchedulerConfig(_Section):
    """How requests are admitted and batched."""

    max_num_seqs: int | None = Field(None, ge=1, le=4096)
    """Requests that run at once; the rest wait. None: 256 on CUDA, 64 on CPU."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Token budget of one step: every running decode takes one, prefill chunks share the rest. Everybody waits for the
    end of a step: with fewer tokens, many prompts that come at once have their first tokens sooner, and the longest
    time between two tokens is shorter; with too few, prompts wait for the sake of running answers. None: 512 on CPU; on
    CUDA 2048 to 8192, as many as an H200 computes in 45 ms, which is 2048 of a model with 8 billion parameters; at
    least twice `max_num_seqs`."""
    prefill_chunk_size: int | None = Field(None, ge=1)
    """Most prompt tokens one request may prefill in one step. None: `max_num_batched_tokens`, above which no more has
    an effect."""
    max_num_queued_requests: int = Field(1024, ge=1)
    """Waiting sequences above which new requests are refused with 503. Those of one HTTP request (prompts times `n`)
    are taken or refused together; when nothing waits they are taken, however many they are. A client with less than its
    share of the places may use as many again."""
    max_num_queued_tokens: int = Field(1 << 20, ge=1)
    """Waiting prompt tokens above which new requests are refused with 503; when nothing waits one is taken, however
    long it is."""
    steps_in_flight: int = Field(2, ge=1, le=2)
    """Steps launched before the first one's tokens are read. 1 is for debugging."""


class SpeculationConfig(_Section):
    """Drafts of the tokens to come, which a step verifies at once. They change no answer: with `numerics: exact` not
    one bit, otherwise as little as the batch does."""

    method: Literal["none", "ngram", "eagle3", "mtp"] = "none"
    """ngram: what followed the last tokens where prompt or answer had them before. A step takes as many drafts as are
    worth their time, by how often the request's drafts were right and by what steps take; often that is none. eagle3:
    what a head of one layer predicts, which was trained for the model and reads states of its layers. It takes its
    part of every step, and a pass for each draft where drafts are worth it. mtp: the same with the layer for
    predicting several tokens at once that checkpoints of DeepSeek-V3 and GLM 4.5 bring."""
    model: str | None = None
    """Directory or Hugging Face id of the EAGLE-3 head, in safetensors. With `load_format: dummy` its weights are
    random, too."""
    num_speculative_tokens: int = Field(7, ge=1, le=7)
    """Most drafts of one request in a step."""
    prompt_lookup_min: int = Field(2, ge=1, le=16)
    """Fewest last tokens that must have come before, for ngram. Of several places the one with the most is taken, of
    four or so many."""

    @property
    def num_drafts(self) -> int:
        """Most drafts of one request in a step; 0 without speculation."""
        return 0 if self.method == "none" else self.num_speculative_tokens

    @property
    def is_by_ranks(self) -> bool:
        """Whether the ranks make the drafts."""
        return self.method in ("eagle3", "mtp")

    def max_sampled(self, max_num_seqs: int) -> int:
        """Most tokens that a step samples: one of each request, and one behind each draft."""
        return max_num_seqs + min(max_num_seqs * self.num_drafts, _MAX_DRAFTS)


NO_SPECULATION = SpeculationConfig()


class ParallelConfig(_Section):
    """How the ranks of one group talk, and how long each wait may take."""

    all_reduce: Literal["auto", "gloo", "nccl", "shared_memory", "symmetric_memory"] = "auto"
    """Strategy of the all-reduces. auto: for the ranks of one node symmetric_memory on CUDA and shared_memory on CPU,
    for those of several nccl and gloo."""
    threads_per_rank: int | None = Field(None, ge=1)
    """CPU threads of one rank's kernels. None: cores of the node divided by the ranks on it, at least 1."""
    spin_us: int | None = Field(None, ge=0)
    """Microseconds a CPU rank spins for the others of its node before it sleeps, yielding its core meanwhile; a reader
    of steps 50 at most. None: 1000 when the node has a core for every rank on it, else 0."""
    init_timeout_s: float = Field(600.0, gt=0)
    """Deadline for starting the ranks and loading the weights."""
    step_timeout_s: float = Field(120.0, gt=0)
    """Deadline for one step, collectives included. Past it the group counts as hung."""


class RecoveryConfig(_Section):
    """Recovery when a rank dies or stops. The group is rebuilt around the ranks that are left, and its requests go on;
    where it is not, they end with an error and Ray Serve replaces the replica."""

    max_rebuilds: int = Field(3, ge=0)
    """Most rebuilds of one group in ten minutes; past them it is replaced. 0: the first failure ends it."""
    min_ranks: int | None = Field(None, ge=1)
    """Fewest ranks that the group goes on with where a device is gone for good, which it is when two new processes in
    its rank's place have failed by themselves. None: the group fails then."""
    warm_spares: int | None = Field(None, ge=0, le=8)
    """Processes that wait, all modules loaded, to take the place of a rank that dies, which saves most of a rebuild's
    time. auto: on GPUs one, which has a context and the model's kernels on one of them, about 0.5 GiB; on CPU none.
    Each takes about 220 MiB of memory, and its start seconds of a core: on CPU with few, the streams notice."""
    stall_timeout_s: float = Field(0.5, gt=0)
    """How long a process may be stopped (SIGSTOP) before it is ended: a rank, or the coordinator or replica, which end
    the whole replica. Such a process does nothing however long a step takes, so this need not be longer than one; under
    a debugger it does not count as stopped."""
    hang_timeout_s: float = Field(1.0, gt=0)
    """How much longer than three times the slowest step like it a step may run before the ranks count as hung; the
    first ones are compared with ten times what the device was measured to allow. Time that other programs take from the
    ranks does not count, nor does that in which a kernel is compiled."""


class PlacementConfig(_Section):
    """Resources that one replica asks of the Ray cluster."""

    cpus_per_rank: float | None = Field(None, ge=0)
    """Ray CPUs of a rank's bundle. None: 1 on GPUs, 0.1 on CPU, where ranks share cores at the price of speed only."""
    cpus_for_engine: float | None = Field(None, ge=0)
    """Ray CPUs of the bundle that holds HTTP and coordinator. None: 1 on GPUs, 0.1 on CPU."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    """Ray placement strategy of a group. STRICT_PACK: one node, always what NVLink wants."""


class SamplingValues(BaseModel):
    """How tokens are drawn: what a request may say, and what the operator or the model's makers may say for requests
    that do not. A new field is declared here, in `SamplingParams` and in the ranks' `PARAMS_DTYPE`, by one name."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    """0: the likeliest token. None, here and below: what the model's makers or the operator set, else neutral."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Only of the likeliest tokens that have this probability together."""
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    """0 and -1 both turn it off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    """Only of tokens with at least this share of the likeliest one's probability."""
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Taken from a token's logit for each time the answer has it."""
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Taken from the logit of each token the answer has."""
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    """Above 1 against repetition. The bounds keep every logit finite in float32."""


class GenerationDefaults(SamplingValues, _Section):
    """Values for requests that name none. None: the neutral value."""

    max_new_tokens: int | None = Field(None, ge=1)
    """Most tokens of a chat's answer."""
    skip_special_tokens: bool | None = None


class ServerConfig(_Section):
    """The HTTP endpoint. Host and port are Ray Serve's `http_options`."""

    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Largest request body; above it 413."""
    max_n: int = Field(128, ge=1)
    """Largest `n` of one request."""
    max_logprobs: int = Field(20, ge=0)
    """Largest `top_logprobs`."""
    max_stop: int = Field(16, ge=0, le=32)
    """Most stop strings of one request."""
    strict_fields: bool = False
    """Refuse requests with fields nobody knows, with the nearest name. Else they are ignored and the header
    `x-ignored-fields` names them."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """Deadline of one request; past it 504."""
    shutdown_timeout_s: float = Field(20.0, ge=0)
    """How long a stopping replica lets running requests finish; those left end with an error that says to try again.
    A second interrupt of `cluster serve` does not wait."""
    api_keys: str | Literal[False] | None = None
    """A file of API keys, a line each: `id:sha256[:role[:requests a minute[:requests at once]]]`, with the roles user,
    admin and metrics; `:tokens=100000` (tokens a minute) and `:priority=-10..10` (priorities that count against other
    clients) may follow. `python -m cluster key ID` makes a line. The file is read again when it changes. None: no keys,
    and only this machine is answered. false: no keys, and whoever reaches the port is answered."""
    host_names: list[str] = Field(default_factory=list)
    """Names by which clients may call a server without keys; requests to other names get 403, so that no web page can
    read its answers by pointing a DNS name of its own at this machine. Always accepted: localhost and loopback
    addresses; with `api_keys: false` also every IP address and the machine's own name. With keys nothing is refused."""
    generation_config: Annotated[
        Annotated[Literal["auto", "off"], Tag("<word>")] | Annotated[GenerationDefaults, Tag("<values>")],
        Discriminator(lambda given: "<word>" if isinstance(given, str) else "<values>"),
    ] = "auto"
    """Sampling values of requests that name none. auto: those of the model's generation_config.json. off: neutral ones.
    An object such as {temperature: 0.7}: these over the model's."""
    chat_template: str | None = None
    """A Jinja file used in place of the model's own chat template."""
    special_tokens_in_text: bool = False
    """Whether the characters of a special token, such as `<|im_end|>`, become that token where they stand in the text
    of a chat: messages, tools, documents. false: only the chat template writes special tokens, so that no user's text
    can end its turn and begin one of the system. Prompts that are no chats are encoded as they come."""
    tool_template: Literal["auto", "generic", "off"] = "auto"
    """How the model is shown tools, calls and their results. auto: its chat template where that shows all three in a
    format that is known, else generic. generic: text in the system message, calls in `<tool_call>` and results as user
    messages, as docs/guides/api.md has them. off: the chat template alone; what it does not show is refused."""
    tool_call_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "json", "deepseek_v3", "qwen3_coder", "harmony"
    ] = "auto"
    """Format in which the model writes tool calls. auto: the one its chat template shows, or that of the generic
    form. none: calls are left in the text."""
    reasoning_parser: Literal["auto", "none", "think", "mistral", "harmony"] = "auto"
    """Tags around the model's thinking, which is kept out of the answer's content: think is `<think>`, mistral is
    `[THINK]`, harmony gpt-oss's channels. auto: those its chat template knows. none: thinking is left in the text."""


class ObservabilityConfig(_Section):
    """Logs, metrics and traces. They carry figures and names, never the text of a request."""

    log_format: Literal["console", "json"] = "console"
    """Form of the log's lines, on the standard error of each process."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes spans over HTTP, e.g. http://collector:4318/v1/traces; needs
    opentelemetry-exporter-otlp-proto-http. None: spans are made only if the process has a tracer provider."""


class EngineConfig(_Section):
    """One serving job: `applications[].args` of the Ray Serve config file."""

    model: str
    """A local directory, or a Hugging Face id. `~` is expanded."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: the weights of `model`. dummy: random ones of its shape and `revision`, the same on every run and for every
    number of ranks; of a directory only config.json is needed."""
    served_model_name: str | None = None
    """Name clients use. None: derived from `model`."""
    tokenizer: str | None = None
    """A directory with a tokenizer, or a Hugging Face id. None: the model's own."""
    revision: str | None = None
    """Commit or tag of the model's repository on the Hub. A `tokenizer` of another repository is that of its default
    branch: name a directory to pin it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the cluster has GPUs, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and, unless `kv_cache.dtype` says otherwise, KV. auto: the checkpoint's on cuda,
    float32 on cpu."""
    quantization: Literal["auto", "fp8"] = "auto"
    """fp8: weights of linear layers and experts are kept in FP8 (e4m3) on cuda, as the checkpoint has them or made so
    while they are read, with a scale for each 128 x 128 of them, which halves what a step reads; with `numerics: fast`
    activations are rounded to FP8 as well for products with them. On cpu the weights have the same values in `dtype`.
    auto: fp8 for a checkpoint in FP8 with `numerics: fast`, else `dtype`."""
    numerics: Literal["auto", "fast", "exact"] = "auto"
    """exact: not one bit of a logit depends on the number of ranks, on what else runs, on chunks, prefix hits or
    preemption; what cannot be so is refused. fast: whatever is fastest. auto: exact on CPU, where it is no slower, if
    all parts of the model and the settings allow it; fast on cuda, where large batches take longer."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks of one group. Any number from 1 to the model's query heads."""
    num_replicas: int = Field(1, ge=1)
    """Groups. Each serves on its own; Ray Serve balances between them."""
    autoscaling_config: dict[str, Any] | None = None
    """Scales the number of groups with the load, in place of `num_replicas`: Ray Serve's section of this name
    (`min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s` and more). Its policy is ours unless it
    names another; `policy: {policy_kwargs: {...}}` sets its targets (`cluster.serve.autoscaling:LoadPolicy`)."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt plus completion. None: the model's own, or what the KV pool holds if that is less."""
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
    def kv_dtype(self) -> str:
        """Type of keys and values, once `dtype` is resolved."""
        return self.dtype if self.kv_cache.dtype == "auto" else self.kv_cache.dtype

    @property
    def is_exact(self) -> bool:
        """Whether `numerics`, once resolved, is exact."""
        return self.numerics == "exact"

    @property
    def is_local_model(self) -> bool:
        """Whether `model` names files of this machine and not of the Hub."""
        return is_local(self.model)

    @property
    def has_local_weights(self) -> bool:
        """Whether there are weights on this machine: not random ones, and none that the ranks fetch from the Hub."""
        return self.is_local_model and self.load_format != "dummy"

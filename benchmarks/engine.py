"""One config's engine, measured in one run without HTTP: decode, a workload, prefill, and the floor under decode.

    python -m benchmarks.engine CONFIG [--set KEY=VALUE ...] [--skip PART,...] [--json OUT] [--vllm]

Prompts are random token ids, submitted through the same client as HTTP's. Parts:
  decode    ms per step with 1, 16, 64, 256 requests decoding: the time of 160 new tokens less that of 32, over 128,
            median of rounds
  workload  output tokens per second of 256 requests at once, 100-1024 tokens in and out, seed 0
  prefill   prompt tokens per second of 16 prompts of 2048, one new token each, median of rounds
  ttft      ms to the one new token of a prompt of 16, 128, 512 and 2048 tokens, median of 10: on an idle engine, and
            while 60 other requests decode
  floor     bytes a decode step must read over the measured copy bandwidth of the device's memory
Each is warmed up with other prompts of its shape. The JSON is written after every part. On CPU take smaller ones, e.g.
--batches 1,4 --beside 0,4 --new-tokens 4,12 --requests 8 --lengths 8,32 --prefill 2x64.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from benchmarks import bandwidth, engine_report
from benchmarks.report import Report, circumstances
from cluster.engine.engine_spec import EngineSpec
from cluster.messages.engine import FinishReason, SamplingParams
from cluster.requests.engine_client import RequestStream, wait_ready
from cluster.serve.placement import NodeResources, check_fits, group_bundles, uses_gpus
from cluster.serve.running_engine import RunningEngine, describe
from cluster.serve.session import cluster_address, ray_session
from configs.checkpoint import model_name
from configs.errors import ConfigError, EngineError, LockstepError
from configs.kv_pages import dtype_bytes
from configs.load import load_app_config
from configs.schema import EngineConfig
from configs.weight_dtypes import PLAIN, WeightDtypes, weight_dtypes
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.helpers.streams import next_chunk

PARTS = ("decode", "workload", "prefill", "ttft", "floor")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.6},
    "default": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}
"""How tokens are drawn: `plain` as vLLM was measured, `default` as Qwen3's own generation_config.json says."""
_NUM_TTFT_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a measurement. Defaults are those of the published figures that `benchmarks/peers.json` holds."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    """Requests decoding at once."""
    prompt_tokens: int = 128
    """Prompt of each request of the decode part."""
    new_tokens: tuple[int, int] = (32, 160)
    """The two lengths whose times are subtracted."""
    requests: int = 256
    """Requests of the workload."""
    lengths: tuple[int, int] = (100, 1024)
    """Least and most tokens of a workload request, in and out."""
    prefill: tuple[int, int] = (16, 2048)
    """(prompts, tokens of each)."""
    ttft: tuple[int, ...] = (16, 128, 512, 2048)
    """Prompt tokens of single requests."""
    beside: tuple[int, ...] = (0, 60)
    """Requests that decode meanwhile, with prompts of `prompt_tokens`."""
    rounds: int = 3
    sampling: tuple[str, ...] = ("greedy",)
    """Names in SAMPLING: the first is that of every part, the others are compared with it in the decode part."""
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.new_tokens[0] >= self.new_tokens[1]:
            raise ConfigError(f"--new-tokens {self.new_tokens}: the first must be less than the second")
        if unknown := set(self.sampling) - set(SAMPLING):
            raise ConfigError(f"--sampling {','.join(unknown)}: there are {', '.join(SAMPLING)}")
        if unknown := set(self.skip) - set(PARTS):
            raise ConfigError(f"--skip {','.join(unknown)}: the parts are {', '.join(PARTS)}")

    @property
    def mean_context(self) -> int:
        """Tokens a row has in the KV pool in the mean step of the decode part."""
        return self.prompt_tokens + sum(self.new_tokens) // 2


def workload(requests: int, lengths: tuple[int, int], vocab_size: int) -> tuple[list[bytes], list[int]]:
    """(prompts as int32 token ids, new tokens of each), the same at every call.

    Drawn as the peers' figures were: Python's generator with seed 0; for each prompt its length, then ids from 0 to
    10,000; then all numbers of new tokens. 256 requests of 100 to 1024 come to 142,827 tokens in and 133,966 out.
    """
    generator = random.Random(0)
    ids = [[generator.randint(0, 10_000) for _ in range(generator.randint(*lengths))] for _ in range(requests)]
    new_tokens = [generator.randint(*lengths) for _ in range(requests)]
    return [(np.array(prompt, "<i4") % vocab_size).tobytes() for prompt in ids], new_tokens


def step_bytes(
    plan: ShardPlan,
    element_bytes: int,
    batch: int,
    context: int,
    kv_element_bytes: int | None = None,
    *,
    dtypes: WeightDtypes = PLAIN,
) -> list[float]:
    """Bytes each rank must read in a decode step of `batch` rows with `context` tokens each; arguments as StepCost."""
    starts, lens = np.full(batch, context - 1, np.int32), np.ones(batch, np.int32)
    ranks = range(plan.tp_size)
    costs = (StepCost.of(plan, element_bytes, [it], kv_element_bytes=kv_element_bytes, dtypes=dtypes) for it in ranks)
    return [cost.step(starts, lens, batch)[1] for cost in costs]


class Driver:
    """Submits requests to one engine and times them until the last has ended."""

    def __init__(self, engine: RunningEngine, sampling: str) -> None:
        self.engine = engine
        self.max_model_len = engine.facts.max_model_len
        self.kv_tokens = engine.facts.num_pages * engine.spec.config.kv_cache.page_size
        self.sampling = sampling
        """A name in SAMPLING."""
        self._random = np.random.default_rng(1)

    def prompts(self, count: int, tokens: int) -> list[bytes]:
        """`count` prompts of random ids that no earlier call gave, so that the prefix cache holds none of them."""
        ids = self._random.integers(0, self.engine.spec.model.vocab_size, (count, tokens), np.int32)
        return [row.tobytes() for row in ids]

    def submit(self, prompts: Sequence[bytes], new_tokens: Sequence[int]) -> list[RequestStream]:
        """Submits one request for each prompt, none of which ends before it has all its new tokens."""
        streams: list[RequestStream] = []
        for seed, (prompt, limit) in enumerate(zip(prompts, new_tokens, strict=True)):
            sampling = SamplingParams(max_tokens=limit, seed=seed, ignore_eos=True, **SAMPLING[self.sampling])
            streams += self.engine.client.submit([prompt], [[sampling]])
        return streams

    async def seconds(self, prompts: Sequence[bytes], new_tokens: Sequence[int]) -> float:
        """Seconds from the first request's start to the last one's end. Raises EngineError when a request fails."""
        began = time.perf_counter()
        streams = self.submit(prompts, new_tokens)
        received = 0
        while streams:
            # One wake-up a step for all of them: a task for each would make this process the bottleneck.
            await wait_ready(streams)
            for stream in streams:
                if stream.ready:
                    received += _num_tokens(stream)
            streams = [stream for stream in streams if not stream.done]
        elapsed = time.perf_counter() - began
        if received != sum(new_tokens):
            raise EngineError(f"{sum(new_tokens)} tokens were asked for and {received} came")
        return elapsed

    def misfit(self, num_tokens: int, batch: int = 1) -> str | None:
        """Why `batch` requests of `num_tokens` tokens, prompt and answer, cannot run at once; None if they can."""
        if num_tokens > self.max_model_len:
            return f"{num_tokens} tokens exceed max_model_len={self.max_model_len}"
        page_size = self.engine.spec.config.kv_cache.page_size
        needed = batch * -(-num_tokens // page_size) * page_size
        if needed > self.kv_tokens:
            return f"{needed} tokens exceed the KV pool's {self.kv_tokens}; raise kv_cache.memory_fraction"
        return None

    async def status(self) -> dict[str, Any]:
        """The coordinator's figures."""
        answer: dict[str, Any] = await self.engine.coordinator.status.remote()
        return answer


def _num_tokens(stream: RequestStream) -> int:
    chunk = stream.take()
    if chunk.finished is not None and chunk.finished.reason is not FinishReason.LENGTH:
        raise EngineError(f"a request ended with {chunk.finished.reason}: {chunk.finished.error}")
    return len(chunk.token_ids)


async def measure_decode(driver: Driver, options: Options, batch: int) -> dict[str, Any]:
    """Milliseconds of one step in which `batch` requests decode, by the first of `options.sampling` and by each of the
    others."""
    row = await _measure_decode(driver, options, batch)
    for name in options.sampling[1:]:
        if "ms" in row:
            driver.sampling = name
            other = await _measure_decode(driver, options, batch)
            row.setdefault("others_ms", {})[name] = other.get("ms")
    driver.sampling = options.sampling[0]
    return row


async def _measure_decode(driver: Driver, options: Options, batch: int) -> dict[str, Any]:
    short, long = options.new_tokens
    if (reason := driver.misfit(options.prompt_tokens + long, batch)) is not None:
        return {"batch": batch, "skipped": reason}

    async def seconds(new_tokens: int) -> float:
        return await driver.seconds(driver.prompts(batch, options.prompt_tokens), [new_tokens] * batch)

    await seconds(short)
    rounds = []
    for _ in range(options.rounds):
        # Prefill and admission are in both, and cancel out.
        less, more = await seconds(short), await seconds(long)
        rounds.append(1e3 * (more - less) / (long - short))
    ms = statistics.median(rounds)
    if ms <= 0:
        return {"batch": batch, "skipped": f"{long} new tokens took no longer than {short}; measure more of them"}
    return {
        "batch": batch,
        "ms": round(ms, 4),
        "tok_s": round(batch / ms * 1e3, 1),
        "rounds_ms": [round(milliseconds, 4) for milliseconds in rounds],
    }


async def measure_workload(driver: Driver, options: Options) -> dict[str, Any]:
    """Output tokens per second of many requests of mixed lengths, submitted at once; one round."""
    prompts, new_tokens = workload(options.requests, options.lengths, driver.engine.spec.model.vocab_size)
    totals = {
        "requests": options.requests,
        "input_tokens": sum(len(prompt) // 4 for prompt in prompts),
        "output_tokens": sum(new_tokens),
    }
    if (reason := driver.misfit(2 * options.lengths[1])) is not None:
        return {**totals, "skipped": reason}
    warm_up = min(options.requests, 64)
    await driver.seconds(driver.prompts(warm_up, options.lengths[0]), [min(32, options.lengths[0])] * warm_up)
    before = await driver.status()
    seconds = await driver.seconds(prompts, new_tokens)
    after = await driver.status()
    counted = {key: after[key] - before[key] for key in ("num_steps", "total_preemptions")}
    return {**totals, "s": round(seconds, 3), "tok_s": round(sum(new_tokens) / seconds, 1), **counted}


async def measure_prefill(driver: Driver, options: Options) -> dict[str, Any]:
    """Prompt tokens per second of equal prompts submitted at once, one new token each."""
    count, tokens = options.prefill
    shape = {"prompts": count, "tokens": tokens}
    if (reason := driver.misfit(tokens + 1)) is not None:
        return {**shape, "skipped": reason}
    rounds = [await driver.seconds(driver.prompts(count, tokens), [1] * count) for _ in range(options.rounds + 1)]
    rates = [count * tokens / seconds for seconds in rounds[1:]]  # the first warms up
    return {**shape, "tok_s": round(statistics.median(rates), 1), "rounds_tok_s": [round(r, 1) for r in rates]}


async def measure_ttft(driver: Driver, options: Options, tokens: int, beside: int) -> dict[str, Any]:
    """Milliseconds from the submission of one request of so many tokens to its first token."""
    row = {"tokens": tokens, "beside": beside}
    if (reason := driver.misfit(tokens + 1)) is not None:
        return {**row, "skipped": reason}
    endless = driver.max_model_len - options.prompt_tokens
    others = driver.submit(driver.prompts(beside, options.prompt_tokens), [endless] * beside)
    try:
        for stream in others:
            await next_chunk(stream)
        runs = [1e3 * await driver.seconds(driver.prompts(1, tokens), [1]) for _ in range(_NUM_TTFT_RUNS + 1)]
        if any(stream.take().finished is not None for stream in others):
            return {**row, "skipped": f"the other requests reached max_model_len={driver.max_model_len}"}
    finally:
        for stream in others:
            stream.abort()
    rest = runs[1:]  # the first warms up
    return {**row, "ms": round(statistics.median(rest), 2), "most_ms": round(max(rest), 2)}


async def prepared(engine: RunningEngine) -> None:
    """Returns once the last CUDA graph is captured: until then, figures would be of other steps."""
    while (await engine.coordinator.status.remote())["is_preparing"]:  # noqa: ASYNC110 -- it is another process
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def started_engine(spec: EngineSpec, *, gpus: bool) -> AsyncIterator[tuple[RunningEngine, float]]:
    """(a running engine, the seconds its start took), in the Ray cluster that this process has joined."""
    bundles = group_bundles(spec.config, gpus=gpus)
    check_fits(spec.config, bundles, NodeResources.from_ray(ray.nodes()))
    group = placement_group(bundles, strategy=spec.config.placement.strategy)
    try:
        began = time.perf_counter()
        engine = await RunningEngine.start(spec, group, "benchmark")
        try:
            start_s = time.perf_counter() - began
            await prepared(engine)
            yield engine, start_s
        finally:
            await engine.close()
    finally:
        remove_placement_group(group)


async def benchmark(config: EngineConfig, options: Options, report: Report, *, vllm: bool = False) -> None:
    """Measures every part that is not skipped into `report`, and prints each as it is known.

    Args:
        vllm: compare with vLLM's figures for this model and tensor_parallel_size, where there are any.

    Raises:
        LockstepError: a setting does not allow the run, or the engine failed. Parts measured by then are in `report`.
    """
    gpus = uses_gpus(config, NodeResources.from_ray(ray.nodes()))
    spec = describe(config, gpus=gpus)
    limit = spec.config.scheduler.max_num_seqs
    assert limit is not None, "max_num_seqs is resolved by describe"
    for part, most in (("decode", max(options.batches)), ("ttft", max(options.beside) + 1)):
        if part not in options.skip and most > limit:
            raise ConfigError(
                f"scheduler.max_num_seqs={limit} is less than the {most} requests of the part {part}; raise it with "
                "--set, or choose smaller --batches or --beside"
            )
    if "floor" not in options.skip:
        copied = await asyncio.to_thread(bandwidth.measure_apart, "cuda" if gpus else "cpu")
        report.add(copy_bandwidth_gb_s=copied)
        print(f"copy bandwidth {copied:,.0f} GB/s", flush=True)
    name = model_name(config.model).rpartition("/")[2]
    peer = engine_report.find_peer(name, config.tensor_parallel_size) if vllm else None
    report.add(model=name, tensor_parallel_size=config.tensor_parallel_size, options=asdict(options), peer=peer)
    async with started_engine(spec, gpus=gpus) as (engine, start_s):
        driver = Driver(engine, options.sampling[0])
        report.add(
            engine=spec.config.model_dump(),
            start_s=round(start_s, 2),
            load_s=round(max(load.seconds for load in engine.facts.loads), 2),
            first_token_s=round(await driver.seconds(driver.prompts(1, 1), [1]), 3),
            kv_tokens=driver.kv_tokens,
            max_model_len=driver.max_model_len,
        )
        print(engine_report.start_line(report.figures), flush=True)
        await _measure_parts(driver, options, report, one_memory=not gpus)


async def _measure_parts(driver: Driver, options: Options, report: Report, *, one_memory: bool) -> None:
    """`one_memory`: the ranks share one, and its bandwidth."""
    spec, copied = driver.engine.spec, report.figures.get("copy_bandwidth_gb_s")
    if "decode" not in options.skip:
        plan = ShardPlan.create(spec.model, spec.config.tensor_parallel_size, exact=spec.config.is_exact)
        rows: list[dict[str, Any]] = []
        for batch in options.batches:
            row = await measure_decode(driver, options, batch)
            if copied is not None and "ms" in row:
                item_bytes = [dtype_bytes(it) for it in (spec.config.dtype, spec.config.kv_dtype)]
                shape, dtypes = (batch, options.mean_context), weight_dtypes(spec.config, spec.model)
                needed = step_bytes(plan, item_bytes[0], *shape, item_bytes[1], dtypes=dtypes)
                floor_ms = (sum(needed) if one_memory else max(needed)) / copied / 1e6
                row |= {"floor_ms": round(floor_ms, 4), "of_floor": round(floor_ms / row["ms"], 4)}
            rows.append(row)
            report.add(decode=rows)
            print(engine_report.decode_line(row), flush=True)
    if "prefill" not in options.skip:
        report.add(prefill=await measure_prefill(driver, options))
        print(engine_report.prefill_line(report.figures["prefill"]), flush=True)
    if "ttft" not in options.skip:
        prompts = [(beside, tokens) for beside in options.beside for tokens in options.ttft]
        report.add(ttft=[await measure_ttft(driver, options, tokens, beside) for beside, tokens in prompts])
        print("\n".join(engine_report.ttft_lines(report.figures["ttft"])), flush=True)
    if "workload" not in options.skip:
        report.add(workload=await measure_workload(driver, options))
        print(engine_report.workload_line(report.figures["workload"]), flush=True)
    report.add(status=await driver.status())


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(separator: str) -> Any:
    def parse(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(separator))

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `run` reads."""
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--commit", help="of the code measured, where the checkout has no git directory")
    parser.add_argument("--address", help="of a Ray cluster to join; default: one is started")


def run(
    name: str,
    args: argparse.Namespace,
    report: Report,
    measure: Callable[[EngineConfig, Report], Coroutine[Any, Any, None]],
) -> None:
    """Has the benchmark `name` measure the config of `args` into `report`, in a Ray cluster; ends the process where a
    setting does not allow it or the engine fails."""
    try:
        config = load_app_config(args.config, args.overrides).engine
        report.add(benchmark=name, config=str(args.config), overrides=args.overrides, **circumstances(args.commit))
        cpus = sum(bundle["CPU"] for bundle in group_bundles(config, gpus=config.device == "cuda"))
        with ray_session(cluster_address(args.address or "local"), min_cpus=cpus):
            asyncio.run(measure(config, report))
    except LockstepError as error:
        raise SystemExit(f"error: {error}") from None


def main() -> None:
    defaults = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--batches", type=_numbers(","), default=defaults.batches, metavar="N,...")
    parser.add_argument("--prompt-tokens", type=int, default=defaults.prompt_tokens)
    parser.add_argument("--new-tokens", type=_numbers(","), default=defaults.new_tokens, metavar="SHORT,LONG")
    parser.add_argument("--requests", type=int, default=defaults.requests)
    parser.add_argument("--lengths", type=_numbers(","), default=defaults.lengths, metavar="LEAST,MOST")
    parser.add_argument("--prefill", type=_numbers("x"), default=defaults.prefill, metavar="PROMPTSxTOKENS")
    parser.add_argument("--ttft", type=_numbers(","), default=defaults.ttft, metavar="TOKENS,...")
    parser.add_argument("--beside", type=_numbers(","), default=defaults.beside, metavar="N,...")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--sampling", type=_names, default=defaults.sampling, metavar="|".join(SAMPLING) + ",...")
    parser.add_argument("--skip", type=_names, default=(), metavar=",".join(PARTS))
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM's figures in benchmarks/peers.json")
    args = parser.parse_args()
    report = Report(args.json)
    try:
        options = Options(**{key: value for key, value in vars(args).items() if key in asdict(defaults)})
        run("engine", args, report, lambda config, report: benchmark(config, options, report, vllm=args.vllm))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        print("\n" + engine_report.render(report.figures))


if __name__ == "__main__":
    main()

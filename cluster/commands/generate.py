"""`python -m cluster generate`: one group, one prompt, no HTTP and no Ray Serve, but the same engine as for serving."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.engine.preflight import read_tokenizer
from cluster.serve.placement import NodeResources, check_fits, group_bundles, uses_gpus
from cluster.serve.running_engine import RunningEngine, describe
from cluster.serve.session import cluster_address, ray_session
from configs.load import load_app_config
from configs.schema import EngineConfig


def generate_text(
    file: Path, overrides: list[str], prompt: str, sampling: Mapping[str, Any], *, chat: bool, address: str | None
) -> None:
    """Prints the continuation of `prompt` as it is generated. `sampling` has the arguments of ServedModel.stream_text.
    Raises ConfigError, RequestError, EngineError."""
    config = load_app_config(file, overrides).engine
    cpus = sum(bundle["CPU"] for bundle in group_bundles(config, gpus=False))
    # Ray prints its messages on standard output, which must contain only the text.
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), ray_session(cluster_address(address), min_cpus=cpus):
        asyncio.run(_generate(config, prompt, sampling, chat, out))


async def _generate(config: EngineConfig, prompt: str, sampling: Mapping[str, Any], chat: bool, out: TextIO) -> None:
    nodes = NodeResources.from_ray(ray.nodes())
    gpus = uses_gpus(config, nodes)
    bundles = group_bundles(config, gpus=gpus)
    check_fits(config, bundles, nodes)
    group = placement_group(bundles, strategy=config.placement.strategy)
    try:
        spec = describe(config, gpus=gpus)
        tokenizer = read_tokenizer(spec.config, spec.model, spec.tokenizer_path)
        engine = await RunningEngine.start(spec, group, "generate")
        try:
            model = await engine.open_model(tokenizer)
            async with contextlib.aclosing(model.stream_text(prompt, chat=chat, **sampling)) as pieces:
                async for piece in pieces:
                    out.write(piece)
                    out.flush()
            out.write("\n")
        finally:
            await engine.close()
    finally:
        remove_placement_group(group)

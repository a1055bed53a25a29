"""The command line. Each command imports heavy modules only when it runs, so that --help is quick."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.errors import ConfigError, LockstepError

app = typer.Typer(
    help="Lockstep serves one LLM on any number of GPUs as one worker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="A Ray Serve config file, e.g. configs/smollm2-135m.yaml.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of `args`, e.g. tensor_parallel_size=3."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to join; `local` starts one. Default: RAY_ADDRESS, else one on this machine, else local."
    ),
]


@app.callback()
def _configure(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every log line.")] = False) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@app.command()
def serve(
    file: ConfigFile,
    overrides: Set = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave once the endpoint is ready; the app stays.")] = False,
    address: Address = None,
) -> None:
    """Serve the model of FILE until interrupted."""
    # Read when Ray is imported. Otherwise a SIGTERM while Ray starts would wait half a minute for an idle node.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    # Before the imports, which take a second even on a host that has just started many processes
    began = time.monotonic()
    from cluster.commands.serve import ServingJob

    with _friendly_errors():
        ServingJob.create(file, overrides or [], address, began).run(detach=detach)


@app.command()
def check(
    file: ConfigFile,
    overrides: Set = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPUs (h200), or memory of one (80GiB): shows which sizes fit.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="Show every setting, its value and where it comes from.")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show the model's layers, their tensors and how they are cut.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="The file that the app runs with: shows what FILE changes, and each change's effect."),
    ] = None,
) -> None:
    """Validate FILE and show the plan and the memory arithmetic; starts nothing."""
    from cluster.commands.fit import parse_gpu
    from cluster.commands.report import print_changes, print_plan
    from cluster.engine.preflight import check_checkpoint, check_tokenizer
    from configs.load import load_app_config

    with _friendly_errors():
        app_config = load_app_config(file, overrides or [])
        gpu_memory_bytes, card = (None, None) if gpu is None else parse_gpu(gpu)
        print_plan(app_config, gpu_memory_bytes=gpu_memory_bytes, card=card, settings=settings, layers=layers)
        # `check_tokenizer` needs none for random weights
        check_checkpoint(app_config.engine, serves_text=False)
        check_tokenizer(app_config.engine)
        if against is not None:
            print_changes(load_app_config(against), app_config)


@app.command()
def generate(
    file: ConfigFile,
    prompt: Annotated[str, typer.Option(help="Text to continue, or the user's message with --chat.")],
    overrides: Set = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling. Default: a random one.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    address: Address = None,
) -> None:
    """Generate from one prompt, without HTTP and without Ray Serve."""
    from cluster.commands.generate import generate_text

    with _friendly_errors():
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        generate_text(file, overrides or [], prompt, sampling, chat=chat, address=address)


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="Base URL of an OpenAI endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Model name; default: the endpoint's first.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="Default: the endpoint's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. Default: the endpoint's limit.")
    ] = None,
) -> None:
    """Talk to an endpoint; an empty line or Ctrl-D ends the chat. Its API key is read from OPENAI_API_KEY."""
    from cluster.commands.chat import run_chat

    with _friendly_errors():
        run_chat(url, model, temperature=temperature, max_tokens=max_tokens)


@app.command()
def key(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Name of the key's owner, shown in logs.")],
    role: Annotated[str, typer.Option(help="user, admin or metrics.")] = "user",
) -> None:
    """Make an API key, and the line for the file that `server.api_keys` names."""
    from cluster.http.keys import new_key, parse_role

    with _friendly_errors():
        secret, line = new_key(id_, parse_role(role))
    typer.echo(f"key, shown once: {secret}", err=True)
    typer.echo(line)


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="Base URL of any OpenAI endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Model name; default: the endpoint's first.")] = None,
    clients: Annotated[str, typer.Option(help="Number of concurrent clients of each level.")] = "1,16,64",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a level; default: two for each client, at least 8.")
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to which the figures are written too.")] = None,
) -> None:
    """Measure an endpoint under load: TTFT, time per token, throughput. Its API key is read from OPENAI_API_KEY."""
    from cluster.commands.bench.command import run_bench

    with _friendly_errors():
        good = run_bench(
            url,
            model=model,
            clients=_counts(clients),
            requests=requests,
            input_tokens=input_len,
            output_tokens=output_len,
            json_path=json_file,
        )
    if not good:
        raise typer.Exit(1)


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="Base URL of a Lockstep endpoint.")] = "http://127.0.0.1:8000/v1",
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Show what an endpoint is doing. Its API key is read from OPENAI_API_KEY."""
    from cluster.commands.status import print_status

    with _friendly_errors():
        print_status(url, as_json=as_json)


AppUrl = Annotated[str, typer.Argument(help="Base URL of the app. OPENAI_API_KEY must have an admin key.")]
_APP = "http://127.0.0.1:8000/v1"


@app.command()
def resize(
    size: Annotated[int, typer.Argument(min=1, help="Ranks of each replica: its `tensor_parallel_size`.")],
    url: AppUrl = _APP,
) -> None:
    """Change the number of ranks of a serving app; its requests wait meanwhile and then continue."""
    _operate(url, "/v1/admin/resize", {"tensor_parallel_size": size})


@app.command()
def weights(
    model: Annotated[str, typer.Argument(help="Directory or Hugging Face id of a checkpoint of the same shape.")],
    url: AppUrl = _APP,
    revision: Annotated[str | None, typer.Option(help="Commit or tag of the repository on the Hub.")] = None,
    running: Annotated[str, typer.Option(help="continue, finish or recompute running requests.")] = "continue",
) -> None:
    """Change a serving app to other weights; all replicas change, or none."""
    _operate(url, "/v1/admin/weights", {"model": model, "revision": revision, "running": running})


@app.command()
def sleep(url: AppUrl = _APP) -> None:
    """Free the devices of a serving app, while its requests wait."""
    _operate(url, "/sleep")


@app.command()
def wake(url: AppUrl = _APP) -> None:
    """Take the devices back after `sleep`, and continue with the requests."""
    _operate(url, "/wake_up")


def _operate(url: str, path: str, body: dict[str, Any] | None = None) -> None:
    from cluster.commands.operate import operate

    with _friendly_errors():
        operate(url, path, body)


@app.command()
def schema() -> None:
    """Print the JSON Schema of config files, as in configs/schema.json; for editors."""
    from configs.json_schema import config_file_schema

    typer.echo(json.dumps(config_file_schema(), indent=2))


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the endpoint, as in docs/openapi.json."""
    from cluster.openapi import build_document
    from cluster.version import VERSION

    typer.echo(json.dumps(build_document(VERSION), indent=1))


class Shell(StrEnum):
    """Shells that `completion` supports."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="Shell of the script.")]) -> None:
    """Print a shell's completion script for the `lockstep` command; installs nothing."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it does not say it exports it

    typer.echo(get_completion_script(prog_name="lockstep", complete_var="_LOCKSTEP_COMPLETE", shell=shell.value))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--clients={text}: give counts of at least 1, e.g. 1,16,64")
    return counts


@contextlib.contextmanager
def _friendly_errors() -> Iterator[None]:
    """Shows a LockstepError as one red line and exits with code 2. Other errors are shown as tracebacks."""
    try:
        yield
    except LockstepError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()

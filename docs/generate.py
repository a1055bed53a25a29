"""Writes docs/reference from the code, and docs/measured.md, docs/decode.svg and the README's figures from results.

A test compares the files with what this writes.

python docs/generate.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import measured  # noqa: E402 -- docs/measured.py

from cluster.commands.cli import app  # noqa: E402 -- the checkout is not installed
from cluster.observability.telemetry import Telemetry  # noqa: E402
from cluster.openai.openai_request import (  # noqa: E402
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from cluster.requests.fields import STYLING, UNSUPPORTED  # noqa: E402
from cluster.requests.sampling_fields import SamplingFields  # noqa: E402
from configs.attention import BACKENDS, BackendSpec, Feature, Phase  # noqa: E402
from configs.attention_times import LATENT, rank, read_times  # noqa: E402
from configs.cards import CARDS, COMPILED, LEAST, RAN, shown, support  # noqa: E402
from configs.schema import EngineConfig, SamplingValues  # noqa: E402

_STEPS: dict[Phase, str] = {"prefill": "with a prompt in them", "decode": "of decodes alone"}
_MADE = "<!-- made by docs/generate.py -->"
_GPUS, _END_OF_GPUS = "<!-- GPUs, made by docs/generate.py -->", "<!-- end of GPUs -->"


def pages() -> dict[str, str]:
    """Text of each file that is written, by its path from the root."""
    return {
        "docs/reference/settings.md": _settings(),
        "docs/reference/fields.md": _fields(),
        "docs/reference/commands.md": _commands(),
        "docs/reference/metrics.md": _metrics(),
        "docs/reference/attention.md": _attention(),
        "docs/measured.md": measured.measured(),
        "docs/decode.svg": measured.picture(),
        "README.md": _with_gpus(measured.readme((ROOT / "README.md").read_text())),
    }


def _with_gpus(text: str) -> str:
    """The README with the table of GPUs as it is in the code."""
    lines = [_GPUS, "| GPUs | compute capability | shared memory | |", "|---|---|---|---|"]
    for capability in sorted(COMPILED, key=lambda it: (it not in RAN, it)):
        names = dict.fromkeys(it.name for it in CARDS.values() if it.compute_capability == capability)
        shared = f"{COMPILED[capability] >> 10} KiB"
        lines.append(f"| {', '.join(names)} | {shown(capability)} | {shared} | {support(capability)} |")
    lines += [f"| others | from {shown(LEAST)} on | | {support((99, 0))} |", f"| older | | | {support((0, 0))} |", ""]
    before, _, rest = text.partition(_GPUS)
    return before + "\n".join(lines) + _END_OF_GPUS + rest.partition(_END_OF_GPUS)[2]


def _attention() -> str:
    lines = [
        _MADE,
        "# Attention backends",
        "",
        "What `attention.backend`, `attention.prefill_backend` and `attention.decode_backend` take, and what it can. "
        "What one cannot serve is refused before anything starts, but for what only some builds of its package have. "
        "Each yes is held by a small model against transformers, in pages of 16 tokens and more and of one: in "
        "`tests/whole/test_attention_models.py`, and those of exact numerics in `tests/whole/test_exact.py` and, on "
        "GPUs, `tests/gpu/test_gpu_engine.py`.",
        "",
        "`auto` takes the first that has it all in every build and is installed (FlashInfer with `nvcc`, which "
        "compiles its kernels), in the order of their times, which `benchmarks.attention --times` wrote into "
        "`configs/attention_times.csv`. GPUs and numbers of heads that were "
        "not measured have the order of the nearest that were; keys in FP8, exact numerics and CPUs, which were not, "
        "that of this table's columns without `flashinfer` and `flash_mla`. `flash_mla` has not run on a GPU yet.",
        "",
        "| steps | order, and times as long as the first's |",
        "|---|---|",
        *(f"| {what} | {_order(phase, latent_heads)} |" for what, phase, latent_heads in _kinds_of_steps()),
        "",
        "| | " + " | ".join(f"`{name}`" for name in BACKENDS) + " |",
        "|---" * (len(BACKENDS) + 1) + "|",
    ]
    rows: dict[str, Callable[[BackendSpec], str]] = {
        "what it is": lambda spec: spec.what,
        "devices": _devices,
        "dtypes": lambda spec: ", ".join(sorted(spec.dtypes)),
        "tokens of a page": lambda spec: str(spec.page_size or "any power of two" + _at_most(spec.max_page_size)),
        "elements of a head": _head_dims,
        **{str(feature): functools.partial(_yes, feature) for feature in Feature},
        "bidirectional prefix": functools.partial(_yes, Feature.MASK),
    }
    lines += [f"| {what} | " + " | ".join(map(cell, BACKENDS.values())) + " |" for what, cell in rows.items()]
    lines += ["", _BIDIRECTIONAL]
    return "\n".join(lines) + "\n"


_BIDIRECTIONAL = (
    "A bidirectional prefix is a mask over new tokens that shows all of them to each. One step computes it whole. No "
    "served family has one; `tests/whole/test_attention_models.py` tests it as `both ways`."
)


def _kinds_of_steps() -> Iterator[tuple[str, Phase, int | None]]:
    latents = sorted({it.num_q_heads for it in read_times() if it.kv_heads == LATENT})
    for latent_heads in (None, *latents):
        for phase, what in _STEPS.items():
            yield f"{what}{'' if latent_heads is None else f', {latent_heads} latent heads'}", phase, latent_heads


def _order(phase: Phase, latent_heads: int | None) -> str:
    us = rank(is_decode=phase == "decode", capability=None, latent_heads=latent_heads).us
    first = min(us.values())
    return ", ".join(f"`{name}`" + (f" {it / first:.2f}" if it > first else "") for name, it in us.items())


def _devices(spec: BackendSpec) -> str:
    if spec.device != "cuda":
        return "any" if spec.device is None else "CPUs"
    if spec.min_compute_capability > (0, 0):
        return "GPUs of compute capability {}.{} or later".format(*spec.min_compute_capability)
    if spec.compute_capabilities is None:
        return "NVIDIA GPUs"
    return "GPUs of compute capability " + " or ".join(f"{major}.{minor}" for major, minor in spec.compute_capabilities)


def _head_dims(spec: BackendSpec) -> str:
    if spec.only is Feature.LATENT:
        return "only latents"
    if spec.head_dims is not None:
        return ", ".join(map(str, sorted(spec.head_dims)))
    return "any number" + _at_most(spec.max_head_dim)


def _at_most(limit: int | None) -> str:
    return "" if limit is None else f" up to {limit}"


def _yes(feature: Feature, spec: BackendSpec) -> str:
    if feature not in spec.features:
        return "refused" + (f": {spec.lacks[feature]}" if feature in spec.lacks else "")
    said = ["in some builds" if feature in spec.by_build else "yes"]
    if (first := spec.first_capability.get(feature)) is not None:
        said.append("from compute capability {}.{}".format(*first))
    if feature is Feature.CHUNK and spec.whole_chunks:
        said.append("of whole pages")
    if feature is Feature.LATENT and spec.latent_sizes is not None:
        said.append(f"of {spec.latent_sizes}")
    said += [f"not for {other}" for one, other in spec.apart if one is feature]
    return ", ".join(said)


def _settings() -> str:
    lines = [
        _MADE,
        "# Settings",
        "",
        "`args` of the config file; `--set a.b=value` on the command line. `python -m cluster check FILE --settings` "
        "shows the values of a file and where they come from.",
    ]
    for section, doc, fields in _sections(EngineConfig, ""):
        lines += ["", f"## {section or 'The job'}", "", doc, "", "| setting | type | default | |", "|---|---|---|---|"]
        lines += [_row(f"{section}.{name}" if section else name, field) for name, field in fields]
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, list[tuple[str, FieldInfo]]]]:
    plain, nested = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested.append((f"{prefix}.{name}".lstrip("."), kind))
        else:
            plain.append((name, field))
    yield prefix, " ".join((model.__doc__ or "").split()), plain
    for name, kind in nested:
        yield from _sections(kind, name)


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
    bounds = [_bound(item) for item in field.metadata]
    kind = _kind(field.annotation) + "".join(f", {bound}" for bound in bounds if bound)
    text = " ".join((field.description or "").split())
    return f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |"


def _plain(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _kind(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    if text.startswith("Literal["):
        return ", ".join(f"`{part.strip()}`" for part in text[8:-1].replace("'", "").split(","))
    return text.replace(" | None", " or null")


def _bound(item: Any) -> str:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if (value := getattr(item, name, None)) is not None:
            return f"{sign} {value}"
    return ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _fields() -> str:
    lines = [
        _MADE,
        "# Fields of a request",
        "",
        "Of `/v1/chat/completions` and `/v1/completions`. Null is the default of each. The types of those that hold "
        "objects are in [openapi.json](../openapi.json).",
    ]
    for title, kind in (
        ("Both routes: how tokens are drawn", SamplingValues),
        ("Both routes: more of sampling, and where a text ends", SamplingFields),
        ("Both routes: the request", GenerationRequest),
        ("Chat", ChatRequest),
        ("Completions", CompletionRequest),
    ):
        lines += ["", f"## {title}", "", "| field | | |", "|---|---|---|"]
        lines += [_field(name, kind.model_fields[name]) for name in kind.__annotations__ if name in kind.model_fields]
    lines += ["", "## Accepted, without effect", "", _names(WITHOUT_EFFECT)]
    lines += ["", "## Ignored, and named in `x-ignored-fields`", "", _names(STYLING)]
    lines += ["", "## Refused unless they ask for nothing", "", _names(UNSUPPORTED)]
    return "\n".join(lines) + "\n"


def _field(name: str, field: FieldInfo) -> str:
    # Bounds that only say what an integer holds are no help.
    notes = [_shape(field.annotation), *(bound for item in field.metadata if len(bound := _bound(item)) < 9)]
    text = " ".join((field.description or "").split())
    return f"| `{name}` | {_cell(', '.join(note for note in notes if note))} | {_cell(text)} |"


def _shape(annotation: Any) -> str:
    """A type without what checks it, and without null, which every field that need not be there takes."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_shape(each) for each in inner if each is not type(None)))
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(map(_shape, inner))}]"
    return _kind(annotation)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _commands() -> str:
    lines = [_MADE, "# Commands", "", "`python -m cluster COMMAND`, or `lockstep COMMAND` where it is installed."]
    group: Any = typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):
        arguments = [it for it in command.params if it.param_type_name == "argument"]
        options = [it for it in command.params if it.param_type_name == "option"]
        places = [(it.metavar or it.name).upper() for it in arguments]
        usage = " ".join([name, *(at if it.required else f"[{at}]" for at, it in zip(places, arguments, strict=True))])
        lines += ["", f"## {name}", "", f"`{usage}`", "", " ".join((command.help or "").split())]
        if options:
            lines += ["", "| option | default | |", "|---|---|---|"]
        for option in options:
            default = "" if option.default in (None, False) or callable(option.default) else f"`{option.default}`"
            names = ", ".join(f"`{it}`" for it in option.opts)
            lines.append(f"| {names} | {default} | {_cell(' '.join((option.help or '').split()))} |")
    return "\n".join(lines) + "\n"


def _metrics() -> str:
    lines = [
        _MADE,
        "# Metrics",
        "",
        "At `/metrics`, and through Ray with `ray_` before the name. Each has the labels `model_name`, `application`, "
        "`deployment` and `replica`.",
        "",
        "| metric | kind | labels of its own | |",
        "|---|---|---|---|",
    ]
    for metric in Telemetry().metrics.declared:
        [family] = metric.collect()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        lines.append(f"| `{name}` | {family.type} | {labels} | {_cell(family.documentation)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    for name, text in pages().items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()

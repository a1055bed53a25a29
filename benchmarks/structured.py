"""The cost of structured output: a grammar's check at the ingress, a refusal, and a token's mask in the coordinator.

    python -m benchmarks.structured TOKENIZER

No model: tokens are drawn at random from the masks. TOKENIZER is a directory. Times are as the event
loop and the step loop see them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import circumstances
from cluster.structured.checker import GrammarChecker
from cluster.structured.checker_messages import Setup
from cluster.structured.guides import GrammarGuide, RequestGuides
from cluster.structured.spec import GrammarKind, GrammarSpec, schema_grammar, text_grammar
from cluster.text.tokenizer import Tokenizer
from configs.errors import OverloadedError, RequestError
from tests.helpers.schemas import SchemaMaker
from worker.protocol import UInt32Array

_GUIDES = (1, 16, 64)
_STEPS = 100


def _spec(schema: Any) -> GrammarSpec:
    return schema_grammar(schema, "json_schema")


def _hostile(i: int) -> list[tuple[str, GrammarSpec]]:
    """Each is another one for each `i`, so that none is known."""
    text = rf"start: X{i}" "\n" rf"X{i}: /(.|\n)*a.{{20}}/ & /(.|\n)*b.{{19}}/ & ~/(.|\n)*c.{{18}}/"
    nested: dict[str, Any] = {"title": str(i)}
    for _ in range(200):
        nested = {"items": nested}
    names = {"properties": {f"p{i}_{j}": {"type": "string"} for j in range(4000)}}
    return [
        ("multipleOf of a prime", _spec({"type": "integer", "multipleOf": 999_983, "title": str(i)})),
        ("intersection of regexes", text_grammar(GrammarKind.GRAMMAR, text, "ebnf")),
        ("4000 properties", _spec(names)),
        ("20000 enum values", _spec({"enum": list(range(i, 20_000 + i))})),
        ("nested 200 deep", _spec(nested)),
        ("recursion without an end", _spec({"$ref": "#", "title": str(i)})),
    ]


def _ms(times: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_ms": round(1e3 * p50, 3), "p99_ms": round(1e3 * p99, 3), "max_ms": round(1e3 * max(times), 3)}


async def _check_figures(setup: Setup) -> tuple[dict[str, Any], list[str]]:
    """Figures, and the grammars of the schemas that passed."""
    checker = GrammarChecker(lambda: setup)

    async def timed(spec: GrammarSpec) -> tuple[float, str | None]:
        began = time.perf_counter()
        try:
            grammar: str | None = await checker.check(spec)
        except OverloadedError:
            grammar = "later"
        except RequestError:
            grammar = None
        return time.perf_counter() - began, grammar

    figures: dict[str, Any] = {"first_check_with_start_s": round((await timed(_spec({})))[0], 3)}
    specs = [_spec(SchemaMaker(seed).schema()) for seed in range(300)]
    checked = [await timed(spec) for spec in specs]
    figures["schema"] = _ms([seconds for seconds, _ in checked])
    figures["known_schema"] = _ms([(await timed(spec))[0] for spec in specs])
    refusals: dict[str, list[float]] = {}
    for i in range(20):
        for name, spec in _hostile(i):
            seconds, grammar = await timed(spec)
            assert grammar is None, f"{name} was not refused"
            refusals.setdefault(name, []).append(seconds)
    figures["refusal"] = {name: _ms(times) for name, times in refusals.items()}
    attack = asyncio.gather(
        *(timed(_spec({"type": "integer", "multipleOf": 999_983, "title": f"attack {i}"})) for i in range(100))
    )
    beside, gaps = [], []
    for seed in range(1000, 1100):
        beside.append((await timed(_spec(SchemaMaker(seed).schema())))[0])
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - began - 0.001)
        if attack.done():
            break
    figures["schema_beside_100_slow_ones"] = _ms(beside)
    figures["event_loop_delay_meanwhile"] = _ms(gaps)
    await attack
    await checker.close()
    return figures, [grammar for _, grammar in checked if grammar is not None]


class _Answers:
    """Guides driven as the step loop does it, by tokens drawn at random."""

    def __init__(self, guides: RequestGuides, woken: threading.Event) -> None:
        self._guides = guides
        self._woken = woken
        self._random = np.random.default_rng(0)

    def waits(self, grammars: Callable[[int], str], num_guides: int) -> list[float]:
        """Seconds of each step that were waited for the masks of all answers, where ended ones begin anew.

        The masks of those that got their tokens first are computed while the others get theirs.
        """
        live: list[GrammarGuide] = [self._guides.open(grammars(i)) for i in range(num_guides)]
        opened = num_guides
        times: list[float] = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            masks: dict[int, UInt32Array | None] = {}
            while len(masks) < num_guides:
                for i, guide in enumerate(live):
                    if i not in masks and ((mask := guide.poll()) is not None or guide.is_finished):
                        masks[i] = mask
                if len(masks) < num_guides:
                    self._woken.wait(1.0)
                    self._woken.clear()
            times.append(time.perf_counter() - began)
            for i, mask in masks.items():
                if mask is None:
                    live[i].close()
                    live[i] = self._guides.open(grammars(opened))
                    opened += 1
                else:
                    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                    live[i].accept([int(self._random.choice(allowed))])
        for guide in live:
            guide.close()
        return times


def main(tokenizer_path: str) -> None:
    """Prints the figures as JSON."""
    tokenizer = Tokenizer.load(Path(tokenizer_path))
    assert tokenizer.eos_token_id is not None, "a model without an end of sequence is of no use here"
    setup = Setup(tokenizer.to_json(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    figures, grammars = asyncio.run(_check_figures(setup))
    woken = threading.Event()
    guides = RequestGuides(setup.vocab_size, setup.eos_token_ids, woken.set)
    guides.set_tokenizer(setup.tokenizer)
    answers = _Answers(guides, woken)
    answers.waits(lambda i: grammars[i % len(grammars)], 1)
    for num_guides in _GUIDES:
        times = answers.waits(lambda i: grammars[i % len(grammars)], num_guides)
        figures[f"masks_of_{num_guides}_answers"] = _ms(times)
    guides.close()
    report = {**circumstances(), "vocab_size": tokenizer.vocab_size, **figures}
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])

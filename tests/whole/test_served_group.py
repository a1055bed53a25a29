"""What tests and the chaos benchmark compare of streams: not how tokens share chunks, and the pause that they wait."""

from __future__ import annotations

import json
import weakref
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from benchmarks.chaos import Chaos, drawn, first_difference
from tests.helpers.served_group import Streamed


def _streamed(*chunks: list[tuple[str, float]]) -> Streamed:
    streamed = Streamed()
    for tokens in chunks:
        logprobs: dict[str, Any] = {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": [{token: logprob, "other": -9.0} for token, logprob in tokens],
        }
        text = "".join(token for token, _ in tokens)
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": logprobs}
        streamed.take("data: " + json.dumps({"choices": [choice]}))
    return streamed


def test_an_answer_is_the_same_however_its_tokens_share_chunks() -> None:
    one, two = ("a", -1.0), ("b", -2.0)
    assert _streamed([one], [two]).answer == _streamed([one, two]).answer
    assert first_difference(_streamed([one], [two]), _streamed([one, two])) is None


def test_where_two_answers_part_is_found() -> None:
    one = _streamed([("a", -1.0)], [("b", -2.0)])
    found = first_difference(one, _streamed([("a", -1.0)], [("b", -2.5)]))
    parts = {"expected": "[-2.0, -2.0, -9.0]", "got": "[-2.5, -2.5, -9.0]"}
    assert found == {"what": "logprobs", "at": 3, "lengths": [6, 6], **parts}
    assert first_difference(one, _streamed([("a", -1.0)])) is not None


@pytest.mark.parametrize(
    ("start_s", "stop_s", "pause"),
    [(10.0, 15.0, 8.0), (12.0, 13.0, 8.0), (1.5, 2.5, 1.0), (0.5, 2.0, None), (19, 20, None)],
)
def test_a_pause_is_the_longest_between_two_chunks(start_s: float, stop_s: float, pause: float | None) -> None:
    streamed = Streamed()
    streamed.times = [1.0, 2.0, 3.0, 10.5, 18.5, 19.5]
    assert streamed.pause_between(start_s, stop_s) == pause


def test_streams_that_ended_do_not_pile_up_in_the_process_whose_memory_is_noted() -> None:
    group: Any = None
    chaos = Chaos(group, [])
    chaos.struck = [("SIGKILL", 10.0, 15.0), ("SIGSTOP", 19.0, 20.0)]
    streamed = Streamed(times=[1.0, 2.0, 10.5, 18.5, 19.5], error="cut")
    kept = weakref.ref(streamed)
    chaos.count(streamed)
    del streamed
    assert kept() is None
    assert (chaos.num_ended, chaos.num_failed, chaos.pauses) == (
        1,
        1,
        {"SIGKILL": [8.5], "SIGSTOP": [], "two ranks": []},
    )


def test_what_was_held_is_drawn_on_axes_that_begin_at_zero() -> None:
    svg = drawn({"at_s": [0.0, 5.0, 20.0], "MiB": [100.0, 100.0, 200.0], "files": [0.0, 0.0, 0.0]})
    figures = {str(group[0].text): group[2].get("points") for group in ET.fromstring(svg) if len(group)}
    assert figures == {
        "MiB: 100 to 200": "0.0,50.0 60.0,50.0 240.0,0.0",
        "files: 0 to 0": "0.0,100.0 60.0,100.0 240.0,100.0",
    }

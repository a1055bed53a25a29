"""Bad requests: every route tells a client what is wrong, and where, and the engine sees nothing of it."""

from __future__ import annotations

import pytest

from tests.helpers.refusals import ROUTES, answered_otherwise, broken_and_taken
from tests.helpers.scripted_engine import Run, Stack


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_bad_request_is_told_its_field(run: Run, path: str, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        wrong = await answered_otherwise(stack, path, stream=stream)
        assert not wrong, "\n".join(wrong)

    run(scenario)


@pytest.mark.parametrize("path", ROUTES)
def test_what_the_table_calls_a_good_request_is_answered(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json=ROUTES[path][0].good)
        assert reply.status_code == 200, reply.text

    run(scenario)


def test_a_body_that_is_no_json_object_is_refused_everywhere(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        wrong = await broken_and_taken(stack)
        assert not wrong, "\n".join(wrong)

    run(scenario)

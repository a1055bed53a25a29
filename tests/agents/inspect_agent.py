"""inspect evaluates a question about the weather with a tool.

python inspect_agent.py BASE_URL MODEL
"""

import json
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, tool
from weather import QUESTION
from weather import get_weather as weather_of


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return weather_of(city)

    return execute


def main(base_url: str, name: str) -> list[str]:
    model = get_model(f"openai-api/lockstep/{name}", base_url=base_url, api_key="none")
    task = Task(
        dataset=[Sample(input=QUESTION)],
        solver=[system_message("Be brief."), use_tools(get_weather()), generate(tool_calls="loop")],
    )
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(task, model=model, log_dir=logs, display="none", max_retries=0)
        if log.status != "success":
            raise SystemExit(f"the evaluation failed: {log.error}")
        return [log.samples[0].output.completion]  # read from the log's file


print(json.dumps(main(*sys.argv[1:])))

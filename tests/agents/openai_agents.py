"""OpenAI's Agents SDK asks about the weather: over chat completions and over responses, whole and streamed.

python openai_agents.py BASE_URL MODEL
"""

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from weather import QUESTION, get_weather


async def main(base_url: str, name: str) -> list[str]:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    finals = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=name, openai_client=client)
        agent = Agent(name="Weather", instructions="Be brief.", model=model, tools=[function_tool(get_weather)])
        finals.append((await Runner.run(agent, QUESTION)).final_output)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        finals.append(streamed.final_output)
    return finals


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))

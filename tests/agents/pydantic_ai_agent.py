"""pydantic-ai asks about the weather, whole and streamed.

python pydantic_ai_agent.py BASE_URL MODEL
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterable

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import QUESTION, get_weather


async def main(base_url: str, name: str) -> list[str]:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    agent = Agent(model, instructions="Be brief.", tools=[get_weather])

    async def follow(_: object, events: AsyncIterable[object]) -> None:
        async for _event in events:
            pass

    whole = await agent.run(QUESTION)
    streamed = await agent.run(QUESTION, event_stream_handler=follow)
    return [whole.output, streamed.output]


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))

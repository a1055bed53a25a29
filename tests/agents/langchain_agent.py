"""LangChain's ChatOpenAI with bind_tools asks about the weather, whole and streamed, in a loop by hand.

python langchain_agent.py BASE_URL MODEL
"""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import QUESTION, get_weather


def main(base_url: str, name: str) -> list[str]:
    weather = tool(get_weather)
    model = ChatOpenAI(model=name, base_url=base_url, api_key="none", max_retries=0).bind_tools([weather])
    finals = []
    for streamed in (False, True):
        messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
        while True:
            if streamed:
                first, *rest = model.stream(messages)
                answer = first
                for chunk in rest:
                    answer += chunk
            else:
                answer = model.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            messages += [ToolMessage(weather.invoke(it["args"]), tool_call_id=it["id"]) for it in answer.tool_calls]
        finals.append(answer.text)
    return finals


print(json.dumps(main(*sys.argv[1:])))

"""The loop of an agent on OpenAI's chat completions, as its documentation has it."""

import json

from calculator import MODEL, QUESTION, SCHEMA, STREAM, SYSTEM, THANKS, TOOLS
from openai import OpenAI

client = OpenAI()
tools = [
    {"type": "function", "function": {"name": name, "description": tool.__doc__, "parameters": SCHEMA}}
    for name, tool in TOOLS.items()
]
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def completion():
    if not STREAM:
        return client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=tools, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


for _ in range(8):
    answer = completion()
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    if message.tool_calls:
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    elif messages[-2]["role"] == "tool":
        messages.append({"role": "user", "content": [{"type": "text", "text": THANKS}]})
    else:
        print(message.content)
        break

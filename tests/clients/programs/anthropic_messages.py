"""The loop of an agent on Anthropic's messages, with cache markers that move and thinking that is sent back."""

from anthropic import Anthropic
from calculator import MODEL, QUESTION, SCHEMA, STREAM, SYSTEM, THANKS, TOOLS

client = Anthropic()
tools = [{"name": name, "description": tool.__doc__, "input_schema": SCHEMA} for name, tool in TOOLS.items()]
messages = [{"role": "user", "content": QUESTION}]
marker = {"cache_control": {"type": "ephemeral"}}
fields = {
    "model": MODEL,
    "max_tokens": 16000,
    "system": [{"type": "text", "text": SYSTEM, **marker}],
    "tools": tools,
    "messages": messages,
}


def message():
    if not STREAM:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


thanked = False
assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 0
for _ in range(8):
    answer = message()
    assert answer.usage.input_tokens > 0
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if calls:
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": TOOLS[call.name](**call.input)} for call in calls
        ]
        results[-1] |= {"is_error": False, **marker}
        messages.append({"role": "user", "content": results})
    elif thanked:
        print(answer.content[-1].text)
        break
    else:
        messages.append({"role": "user", "content": [{"type": "text", "text": THANKS}]})
        thanked = True

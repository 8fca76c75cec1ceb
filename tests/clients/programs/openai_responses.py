"""The loop of an agent on OpenAI's responses: the whole history with every request, or `previous_response_id` (`--previous`)."""

import json
import sys

from calculator import MODEL, QUESTION, SCHEMA, STREAM, SYSTEM, THANKS, TOOLS
from openai import OpenAI

client = OpenAI()
tools = [
    {"type": "function", "name": name, "description": tool.__doc__, "parameters": SCHEMA, "strict": False}
    for name, tool in TOOLS.items()
]
previous = "--previous" in sys.argv
history = [{"role": "user", "content": QUESTION}]
fields = {"model": MODEL, "instructions": SYSTEM, "tools": tools}
if not previous:
    fields |= {"store": False, "include": ["reasoning.encrypted_content"]}


def response():
    if not STREAM:
        return client.responses.create(input=history, **fields)
    with client.responses.stream(input=history, **fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


thanked = False
for _ in range(8):
    answer = response()
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0
    if previous:
        history, fields["previous_response_id"] = [], answer.id
    else:
        history += [item.model_dump(exclude_none=True) for item in answer.output]
    calls = [item for item in answer.output if item.type == "function_call"]
    for call in calls:
        result = TOOLS[call.name](**json.loads(call.arguments))
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    if not calls and thanked:
        print(answer.output_text)
        break
    if not calls:
        history.append({"role": "user", "content": [{"type": "input_text", "text": THANKS}]})
        thanked = True

"""What the SDKs raise: one line per API with the class of the error, its status and its code."""

import anthropic
import openai
from calculator import MODEL, QUESTION

messages = [{"role": "user", "content": QUESTION}]
fields = {"model": MODEL, "messages": messages}
calls = {
    "chat": lambda: openai.OpenAI().chat.completions.create(**fields),
    "chat stream": lambda: list(openai.OpenAI().chat.completions.create(**fields, stream=True)),
    "responses": lambda: openai.OpenAI().responses.create(model=MODEL, input=QUESTION),
    "messages": lambda: anthropic.Anthropic().messages.create(**fields, max_tokens=100),
    "messages stream": lambda: list(anthropic.Anthropic().messages.create(**fields, max_tokens=100, stream=True)),
}
for name, call in calls.items():
    try:
        call()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        body = error.body if isinstance(error.body, dict) else {}
        print(
            f"{name}: {type(error).__name__} {error.status_code} {body.get('code') or body.get('error', {}).get('type')}"
        )

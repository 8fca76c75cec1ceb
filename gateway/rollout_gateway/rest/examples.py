"""Bodies that work as they stand, save for the addresses, for the OpenAPI description."""

from typing import Any, Final

_QUESTION: Final = {"role": "user", "content": "Please calculate 5 plus 3, and then multiply the result by 2."}

START_EXAMPLES: Final[dict[str, Any]] = {
    "http": {
        "summary": "A trainer that speaks HTTP and counts masks",
        "value": {
            "rollout_id": "step-7/prompt-3/0",
            "request_id": "step-7/prompt-3/0",
            "group_id": "step-7/prompt-3",
            "messages": [_QUESTION],
            "completions": {"url": "http://localhost:9001", "bearer": "TRAINER_KEY"},
            "sampling": {"temperature": 0.7, "max_tokens": 512, "logprobs": True},
            "limits": {"turns": 8, "generated_tokens": 8192, "seconds": 300},
            "tokenizer": {"name": "Qwen/Qwen3-8B"},
            "metadata": {"ground_truth": "16"},
            "labels": {"run": "first"},
        },
    },
    "least": {
        "summary": "As little as will do, for a trainer without masks",
        "value": {"messages": [_QUESTION], "completions": {"url": "http://localhost:9001", "dialect": "http_plain"}},
    },
}
CANCEL_EXAMPLES: Final[dict[str, Any]] = {
    "group": {"summary": "All of a group", "value": {"group_id": "step-7/prompt-3", "reason": "one was good enough"}},
    "waiting": {"summary": "All that wait", "value": {"states": ["queued"]}},
    "all": {"summary": "All of yours", "value": {"all": True}},
}
CANCEL_ONE_EXAMPLES: Final[dict[str, Any]] = {
    "reason": {"summary": "With a reason", "value": {"reason": "not needed any more"}}
}

#!/bin/sh
# OpenCode: a title, a task with a command and a sub-agent, and another question in the same session.
set -eu
cat >opencode.json <<'END'
{
  "model": "rollout/rollout",
  "small_model": "rollout/rollout",
  "autoupdate": false,
  "share": "disabled",
  "provider": {
    "rollout": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {
        "rollout": {"name": "rollout", "reasoning": true, "tool_call": true, "limit": {"context": 100000, "output": 8000}}
      }
    }
  }
}
END
opencode run 'Count the doors and the windows.' </dev/null
opencode run --continue 'Is that all?' </dev/null

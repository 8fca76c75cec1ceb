#!/bin/sh
# Codex: a task with two commands at the same time, and another question in the same session.
set -eu
export CODEX_API_KEY="$OPENAI_API_KEY"
agent() {
    codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model rollout \
        --config "openai_base_url=\"$OPENAI_BASE_URL\"" "$@" </dev/null
}
agent 'Count the doors and the windows.'
agent resume --last 'Is that all?'

#!/bin/sh
# Claude Code: a task with a command and two sub-agents at the same time, a compaction, and another question.
set -eu
export IS_SANDBOX=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
agent() { claude --print --permission-mode bypassPermissions --model rollout "$@" </dev/null; }
agent 'Count the doors and the windows.'
agent --continue /compact
agent --continue 'Is that all?'

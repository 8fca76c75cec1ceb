#!/bin/sh
# An agent in shell: three turns over two APIs and both base URLs. Its first request gives up after a second and is sent again.
set -eu
chat() { # SECONDS BASE MESSAGES
    curl --silent --show-error --fail --max-time "$1" "$2/chat/completions" --header "authorization: Bearer $OPENAI_API_KEY" \
        --header 'content-type: application/json' --data "{\"model\": \"rollout\", \"messages\": [$3]}"
}
messages() { # MESSAGES
    curl --silent --show-error --fail --max-time 60 "$BASE/v1/messages" --header "x-api-key: $ANTHROPIC_API_KEY" \
        --header 'content-type: application/json' --header 'anthropic-version: 2023-06-01' \
        --data "{\"model\": \"rollout\", \"max_tokens\": 100, \"messages\": [$1]}"
}
user() { printf '{"role": "user", "content": "%s"}' "$1"; }
assistant() { printf '{"role": "assistant", "content": "%s"}' "$1"; }
text() { sed -n 's/.*"\(text\|content\)": *"\([^"]*\)".*/\2/p'; }

history=$(user 'Count.')
if chat 1 "$BASE/v1" "$history" 2>/dev/null; then
    echo 'the first request was to be cut off'
    exit 1
fi
answer=$(chat 60 "$BASE/v1" "$history" | text)
echo "$answer"
history="$history, $(assistant "$answer"), $(user 'Go on.')"
answer=$(messages "$history" | text)
echo "$answer"
history="$history, $(assistant "$answer"), $(user 'Go on.')"
chat 60 "$BASE" "$history" | text

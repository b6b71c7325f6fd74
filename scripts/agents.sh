#!/bin/sh
# Installs the coding agents of tests/agents from npm: sh scripts/agents.sh FOLDER
# The versions are those whose traffic tests/agents/recorded holds; LATEST=1 takes the newest ones instead.
set -eu
folder=$1
if ! command -v npm >/dev/null; then
  echo 'The agents come from npm; install Node.js with npm and run make again.' >&2
  exit 1
fi

install() { # name of its folder, package, version
  mkdir -p "$folder/$1"
  npm install --prefix "$folder/$1" --no-audit --no-fund --loglevel error "$2@$3" >/dev/null
}

newest() { # or this version
  if [ -n "${LATEST:-}" ]; then echo latest; else echo "$1"; fi
}

# pi and Claude Code need a newer Node.js than many systems have.
install node node 22.23.3
PATH="$(cd "$folder" && pwd)/node/node_modules/.bin:$PATH"
install codex @openai/codex "$(newest 0.171.0)"
install claude @anthropic-ai/claude-code "$(newest 2.1.332)"
install opencode opencode-ai "$(newest 1.18.33)"
install pi @earendil-works/pi-coding-agent "$(newest 1.6.0)"

#!/bin/sh
# Creates the virtual environment $1 with a Python >= 3.11, or fails with one sentence.
set -eu
venv=$1
python=$(sh scripts/python.sh)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Creating $venv with $("$python" --version) ..."
if ! "$python" -m venv --clear "$venv" >"$log" 2>&1; then
  cat "$log" >&2
  rm -rf "$venv"
  echo "$python could not create a virtual environment; on Debian and Ubuntu install python3-venv and run make again." >&2
  exit 1
fi

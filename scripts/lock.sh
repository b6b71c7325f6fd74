#!/bin/sh
# Resolves requirements/*.lock with uv, from a scratch environment, for every platform at once.
# Locks hold names, exact versions, markers and hashes; never an index or a host: those belong to the machine.
# Pass UPGRADE=1 to take newer versions than the ones locked now.
set -eu
python=$(sh scripts/python.sh)
scratch=build/lock-venv
"$python" -m venv --clear "$scratch"
"$scratch/bin/python" -m pip install --quiet --disable-pip-version-check uv

export UV_CUSTOM_COMPILE_COMMAND='make lock'
compile() {
  output=$1
  shift
  "$scratch/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
    --no-emit-index-url --no-emit-find-links ${UPGRADE:+--upgrade} --output-file "requirements/$output.lock" "$@"
}

# dev first: the other locks are held to its versions, so that one venv can hold several of them.
compile dev pyproject.toml requirements/build.in --extra cpu --extra dev --extra otel
for extra in cpu cuda12 cuda13; do
  compile "serve-$extra" pyproject.toml requirements/build.in --extra "$extra" --constraint requirements/dev.lock
done
compile kernels requirements/kernels.in --constraint requirements/dev.lock

if grep -n '://' requirements/*.lock; then
  echo 'A lock names an address; nothing of this machine may land in it.' >&2
  exit 1
fi
echo 'Wrote requirements/*.lock.'

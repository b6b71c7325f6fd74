#!/bin/sh
# Prints the name of a Python >= 3.11, or fails with one sentence. $PYTHON, if set, is the only candidate.
set -eu
for python in ${PYTHON:-python3.13 python3.12 python3.11 python3.14 python3 python}; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    echo "$python"
    exit 0
  fi
done
if [ -n "${PYTHON:-}" ]; then
  echo "mantou needs Python 3.11 or newer and $PYTHON is not; name another one with PYTHON=..." >&2
else
  echo 'mantou needs Python 3.11 or newer and none was found; install one (or name it with PYTHON=/path/to/python3) and run make again.' >&2
fi
exit 1

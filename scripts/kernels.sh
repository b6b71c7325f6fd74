#!/bin/sh
# Builds the optional C++ kernels in kernels/ into the virtual environment $1 and leaves the stamp $2.
# Never fails: without them mantou runs on plain MLX, and this says why in one sentence.
# A failed build leaves the stamp too, so that it is not tried at every start; `make kernels` tries again.
set -eu
venv=$1
stamp=$2
plain='mantou will run on plain MLX, which is slower on a CPU'

[ -f kernels/pyproject.toml ] || exit 0
[ "${MANTOU_CPU_KERNELS:-1}" != 0 ] || exit 0
[ "$(uname -s)" = Linux ] || exit 0 # elsewhere MLX computes on the GPU

if [ -f "$stamp" ] && [ -z "$(find kernels requirements/kernels.lock -type f -newer "$stamp" -not -path '*/build/*' -print | head -n 1)" ]; then
  exit 0
fi
if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
  echo "No C++ compiler was found, so the CPU kernels are not built; $plain (install g++ and run make again to change that)."
  exit 0
fi

mkdir -p build
log=build/kernels.log
echo 'Building the CPU kernels (once, about a minute) ...'
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
if PATH="$PWD/$venv/bin:$PATH" && export PATH &&
  { $pip --require-hashes -r requirements/kernels.lock && $pip --no-deps --no-build-isolation --no-index ./kernels; } >"$log" 2>&1; then
  echo 'The CPU kernels are built.'
else
  echo "The CPU kernels could not be built (see $log); $plain."
fi
touch "$stamp"

#!/bin/sh
# Builds the C++ kernels with the address and undefined-behaviour sanitizers beside the usual build, and runs their tests
# on them with the environment $1, in $2 processes. Where they cannot be built it says so and passes, as `make` does
# without kernels, unless MANTOU_REQUIRE_KERNELS=1.
set -eu
venv=$1
compiler=${CXX:-c++}
log=build/sanitize.log
mkdir -p build

skip() {
  echo "The kernels are not tested with sanitizers: $1."
  [ "${MANTOU_REQUIRE_KERNELS:-0}" != 1 ] || exit 1
  exit 0
}

[ "$(uname -s)" = Linux ] || skip 'that needs Linux'
[ "${MANTOU_CPU_KERNELS:-1}" != 0 ] || skip 'MANTOU_CPU_KERNELS=0'
command -v "$compiler" >/dev/null 2>&1 || skip 'no C++ compiler was found'
# With gcc these are paths; of a library that it has not it prints the bare name.
asan=$("$compiler" -print-file-name=libasan.so)
stdcxx=$("$compiler" -print-file-name=libstdc++.so.6)
[ -e "$asan" ] && [ -e "$stdcxx" ] || skip "$compiler has no libasan.so (install libasan, or use g++)"
"$venv/bin/python" -c 'import scikit_build_core, nanobind' 2>/dev/null || skip "the kernels' build tools are not installed (make kernels)"

echo 'Building the CPU kernels with sanitizers ...'
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
  --no-index --upgrade --target build/sanitized -C build-dir=build/sanitize -C cmake.define.MANTOU_SANITIZE=ON ./kernels \
  >"$log" 2>&1 || { tail -n 40 "$log"; echo "The sanitizer build failed (see $log)."; exit 1; }

# Leaks are not looked for: the interpreter and MLX keep what they allocate until the process ends. A sanitizer writes its
# report to the process's own stderr and ends it, so pytest must leave that alone (--capture=sys).
PYTHONPATH="$PWD/build/sanitized" LD_PRELOAD="$asan $stdcxx" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  exec "$venv/bin/python" -m pytest -q -n "${2:-2}" -p no:cacheprovider --capture=sys tests/kernels \
  --ignore tests/kernels/test_install.py --ignore tests/kernels/test_compose.py

#!/bin/sh
# Builds the kernels' inner loops without MLX and checks them against plain loops.
# usage: native_kernels.sh emulated|neon FOLDER. "neon" needs g++-aarch64-linux-gnu and qemu-user-static.
set -eu
what=$1 out=$2
root=$(cd "$(dirname "$0")/.." && pwd)
source=$root/kernels/src driver=$root/tests/kernels/native
flags="-std=c++20 -O1 -ffp-contract=off -fno-math-errno -fno-trapping-math -I$source"
common="$source/packed.cpp $source/pool.cpp $source/sizes.cpp"
mkdir -p "$out"
case $what in
emulated)
  ${CXX:-c++} $flags -mavx2 -mfma -mf16c -DMANTOU_AMX_EMULATED "$driver/blocks.cpp" "$driver/isa_emulated.cpp" $common \
    -o "$out/emulated" -pthread -w
  "$out/emulated" ;;
neon)
  compiler=${NEON_CXX:-aarch64-linux-gnu-g++}
  for tool in "$compiler" qemu-aarch64-static; do
    command -v "$tool" >/dev/null || { echo "NEON kernels not run: $tool is missing (g++-aarch64-linux-gnu, qemu-user-static)"; exit 3; }
  done
  "$compiler" $flags -O2 -march=armv8.2-a+dotprod+fp16 -Wall -static "$driver/blocks.cpp" "$source/isa_neon.cpp" \
    "$source/dispatch.cpp" "$source/amx.cpp" $common -o "$out/neon" -pthread
  qemu-aarch64-static "$out/neon" ;;
*) echo "usage: $0 emulated|neon FOLDER"; exit 2 ;;
esac

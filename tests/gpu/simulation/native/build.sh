#!/usr/bin/env bash
# Build the simulated driver, runtime and operators into a folder, for the CUDA build of torch of an interpreter.
# usage: build.sh python folder     needs g++; CUDA's headers come from CUDA_HOME, /usr/local/cuda or torch's wheels
set -euo pipefail
python=$(realpath -s "$1") out=$2
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")"
torch=$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parent)')
headers=${CUDA_HOME:-/usr/local/cuda}/include
[ -f "$headers/cuda.h" ] || headers=$(dirname "$(find "$torch/../nvidia" -name cuda.h | head -n 1)")
compile="g++ -std=c++20 -fPIC -fvisibility=hidden -shared -Wall -Wextra -isystem $headers"

driver="settings.cpp races.cpp memory.cpp memory_api.cpp host_memory.cpp streams.cpp stream_api.cpp capture.cpp copies.cpp context_api.cpp"
$compile -O2 -g1 $driver -o "$out/libcuda.so.1" -Wl,-soname,libcuda.so.1 -Wl,-z,defs -ldl -lpthread
$compile -O1 -g1 runtime.cpp -o "$out/libcudart.so.13" \
    -Wl,-soname,libcudart.so.13 -Wl,--version-script=runtime.map -L"$out" -l:libcuda.so.1 -ldl
$compile -O1 -g0 -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" operators.cpp -o "$out/liboperators.so" \
    -L"$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -L"$out" -l:libcuda.so.1

# torch calls this at the end of its import, so that child processes are simulated too
info=$out/simulated_cuda-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: simulated-cuda\nVersion: 0\n' > "$info/METADATA"
printf '[torch.backends]\nsimulated_cuda = gpu.simulation.operators:install\n' > "$info/entry_points.txt"

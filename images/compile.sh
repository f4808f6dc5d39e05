#!/usr/bin/env bash
# Builds vLLM's extension modules from the patched tree: compile.sh SOURCE BUILD OUT.
# SOURCE has the tree in 'vllm' and, in 'deps', the projects that its cmake would fetch, one folder
# each: nothing is fetched here. OUT gets the modules below 'vllm', as a wheel has them; with TARGETS
# set, only those targets of ninja are built and OUT gets what they made.
set -euo pipefail

source=$1 build=$2 out=$3 version=${PYTHON:?}
if [ -r /run/secrets/sccache ]; then
    set -a # SCCACHE_*, and what its backend reads
    # shellcheck disable=SC1091
    . /run/secrets/sccache
    set +a
fi
export CUDA_HOME=$CUDA_PREFIX TORCH_CUDA_ARCH_LIST=$ARCHITECTURES
export PATH=/opt/vllm/bin:$CUDA_PREFIX/bin:$PATH
for dependency in "$source"/deps/*/; do
    name=$(basename "$dependency")
    case "$name" in
    cutlass) export VLLM_CUTLASS_SRC_DIR=$dependency ;;
    *) export "${name^^}_SRC_DIR=$dependency" ;; # FLASH_MLA, QUTLASS, DEEPGEMM …
    esac
done

mkdir -p "$build" "$out"
cp -R "$source/vllm/." "$build/tree/"
python=/opt/vllm/bin/python site=/opt/vllm/lib/python$version/site-packages
libraries="-isystem $site/nvidia/cu13/include" # headers of cuBLAS and others, which torch brings
nvrtc=$(find "$site/nvidia" -name 'libnvrtc.so.*') # torch's own: the toolkit's wheels have none
torch=$($python -c 'import torch; print(torch.utils.cmake_prefix_path)')
launch=()
for language in C CXX CUDA; do
    launch+=("-DCMAKE_${language}_COMPILER_LAUNCHER=/opt/vllm/bin/sccache")
done
cmake -S "$build/tree" -B "$build/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DVLLM_TARGET_DEVICE=cuda -DVLLM_PYTHON_EXECUTABLE=$python -DCMAKE_PREFIX_PATH="$torch" \
    -DCMAKE_CXX_FLAGS="$libraries" -DCMAKE_CUDA_FLAGS="$libraries" \
    -DVLLM_PYTHON_PATH="$site" -DCUDA_nvrtc_LIBRARY="$nvrtc" \
    -DCMAKE_CUDA_COMPILER="$CUDA_HOME/bin/nvcc" -DFETCHCONTENT_FULLY_DISCONNECTED=ON \
    "${launch[@]}"
if [ -n "${TARGETS:-}" ]; then
    # shellcheck disable=SC2086
    ninja -C "$build/cmake" -j "${MAX_JOBS:-2}" $TARGETS
    for target in $TARGETS; do
        install -D -m 644 "$build/cmake/$target" "$out/$target"
    done
else
    ninja -C "$build/cmake" -j "${MAX_JOBS:-$(nproc)}"
    cmake --install "$build/cmake" --prefix "$out"
fi
sccache --show-stats

#!/usr/bin/env bash
# Installs exactly the wheels of /wheels: 'install.sh packages' into the environment, 'install.sh
# toolkit PREFIX' CUDA's compiler and headers below a prefix of their own. No index, no resolver.
set -euo pipefail

pip=(/opt/installer/bin/python -I -m pip --no-cache-dir --disable-pip-version-check)
options=(--quiet --no-index --find-links=/wheels --no-deps --require-hashes --no-compile
    --root-user-action=ignore --requirement=/wheels/requirements.txt)

if ! grep -q '==' /wheels/requirements.txt; then
    exit 0 # nothing of this kind is in the image
fi
case "$1" in
packages)
    "${pip[@]}" --python /opt/vllm/bin/python install "${options[@]}"
    ;;
toolkit)
    "${pip[@]}" install "${options[@]}" --target "$2/wheels"
    # What wheels lack: lib64, names without a version
    home=$(dirname "$(dirname "$(find "$2/wheels" -path '*/bin/nvcc')")")
    ln -s "lib" "$home/lib64"
    for part in "$home"/*; do
        ln -s "${part#"$2/"}" "$2/$(basename "$part")"
    done
    for library in "$home"/lib/lib*.so.*; do
        ln -sf "$(basename "$library")" "${library%%.so.*}.so"
    done
    mkdir -p "$home/lib/stubs"
    if command -v cc >/dev/null; then
        # To link against; the driver's own comes with the container runtime
        printf '' | cc -shared -x c -o "$home/lib/stubs/libcuda.so" -Wl,-soname,libcuda.so.1 -
    fi
    ;;
esac

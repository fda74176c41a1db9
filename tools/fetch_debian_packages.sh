#!/usr/bin/env bash
# Brings what the build needs from Debian: Highway's headers, GoogleTest, Google Benchmark, and for a system Python its headers and venv.
# Installed where that is allowed; else the C++ packages are unpacked into .deps. On a system without apt nothing happens, and CMake downloads
# what it does not find.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

packages=()
need() {  # need HEADER PACKAGE
  [ -e "/usr/include/$1" ] || [ -e ".deps/usr/include/$1" ] || packages+=("$2")
}
need hwy/highway.h libhwy-dev
need gtest/gtest.h libgtest-dev
need benchmark/benchmark.h libbenchmark-dev
system=()
"$python" -c 'import ensurepip' 2>/dev/null || system+=(python3-venv)
"$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || system+=(python3-dev)

if [ ${#packages[@]} -eq 0 ] && [ ${#system[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  [ ${#system[@]} -eq 0 ] || echo "make: $python lacks ${system[*]}; install what they stand for on this system" >&2
  exit 0
fi
if [ "$(id -u)" = 0 ]; then
  apt-get update -qq && apt-get install -y -qq "${packages[@]}" "${system[@]}" >/dev/null
elif sudo -n true 2>/dev/null; then
  sudo apt-get update -qq && sudo apt-get install -y -qq "${packages[@]}" "${system[@]}" >/dev/null
else
  [ ${#system[@]} -eq 0 ] || echo "make: $python lacks ${system[*]}; install them as root (apt-get install ${system[*]})" >&2
  if [ ${#packages[@]} -gt 0 ]; then
    mkdir -p .deps/archives
    if (cd .deps/archives && apt-get download -qq "${packages[@]}"); then
      for archive in .deps/archives/*.deb; do dpkg-deb -x "$archive" .deps; done
    else
      echo "make: apt-get cannot download ${packages[*]} here; CMake will try by itself" >&2
    fi
  fi
fi

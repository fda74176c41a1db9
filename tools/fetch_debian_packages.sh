#!/usr/bin/env bash
# Brings Highway's headers, GoogleTest and Google Benchmark: installed where that is allowed, else unpacked into .deps. On a system without
# apt nothing happens, and CMake downloads what it does not find.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(libhwy-dev libgtest-dev libbenchmark-dev)
missing() {
  local header
  for header in hwy/highway.h gtest/gtest.h benchmark/benchmark.h; do
    [ -e "/usr/include/$header" ] || [ -e ".deps/usr/include/$header" ] || return 0
  done
  return 1
}

if ! missing || ! command -v apt-get >/dev/null; then exit 0; fi
if [ "$(id -u)" = 0 ]; then
  apt-get update -qq && apt-get install -y -qq "${packages[@]}" >/dev/null
elif sudo -n true 2>/dev/null; then
  sudo apt-get update -qq && sudo apt-get install -y -qq "${packages[@]}" >/dev/null
else
  mkdir -p .deps/archives
  (cd .deps/archives && apt-get download "${packages[@]}" libhwy1 libbenchmark1debian libgtest-dev)
  for archive in .deps/archives/*.deb; do dpkg-deb -x "$archive" .deps; done
fi

# Google Benchmark: the system's package (or .deps, where tools/fetch_debian_packages.sh unpacks)
# first, else downloaded.
list(APPEND CMAKE_PREFIX_PATH "${PROJECT_SOURCE_DIR}/.deps/usr")
find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  include(FetchContent)
  message(STATUS "Google Benchmark is not on this system: downloading it")
  set(BENCHMARK_ENABLE_TESTING OFF CACHE BOOL "" FORCE)
  set(BENCHMARK_ENABLE_INSTALL OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(benchmark
    URL https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz)
  FetchContent_MakeAvailable(benchmark)
endif()

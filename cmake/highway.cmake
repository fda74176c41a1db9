# Highway, headers only: the target segki_highway carries the include directory and nothing is
# linked. Looked for in SEGKI_HIGHWAY_INCLUDE_DIR (cache or environment variable), on the system, in
# .deps (where tools/fetch_debian_packages.sh unpacks), and at last downloaded.
find_path(SEGKI_HIGHWAY_HEADERS hwy/highway.h
  HINTS "${SEGKI_HIGHWAY_INCLUDE_DIR}"
  PATHS "${PROJECT_SOURCE_DIR}/.deps/usr/include"
  DOC "Directory that holds hwy/highway.h")

if(NOT SEGKI_HIGHWAY_HEADERS)
  include(FetchContent)
  message(STATUS "Highway's headers are not on this system: downloading them")
  FetchContent_Declare(highway
    URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
    URL_HASH SHA256=7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
  # Only the sources are wanted, its build is not: hence not FetchContent_MakeAvailable.
  FetchContent_GetProperties(highway)
  if(NOT highway_POPULATED)
    if(POLICY CMP0169)
      cmake_policy(SET CMP0169 OLD)
    endif()
    FetchContent_Populate(highway)
  endif()
  set(SEGKI_HIGHWAY_HEADERS "${highway_SOURCE_DIR}" CACHE PATH
      "Directory that holds hwy/highway.h" FORCE)
endif()

add_library(segki_highway INTERFACE)
target_include_directories(segki_highway SYSTEM INTERFACE "${SEGKI_HIGHWAY_HEADERS}")

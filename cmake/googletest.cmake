# GoogleTest: the system's package (or .deps, where tools/fetch_debian_packages.sh unpacks) first,
# else downloaded.
list(APPEND CMAKE_PREFIX_PATH "${PROJECT_SOURCE_DIR}/.deps/usr")
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  include(FetchContent)
  message(STATUS "GoogleTest is not on this system: downloading it")
  set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(googletest
    URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
    URL_HASH SHA256=8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7)
  FetchContent_MakeAvailable(googletest)
endif()

# `cmake --install`: the library, its headers, and the CMake package `segki` with segki::segki.
include(CMakePackageConfigHelpers)

set(SEGKI_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/segki)

install(TARGETS segki EXPORT segkiTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY cpp/include/segki DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT segkiTargets NAMESPACE segki:: DESTINATION ${SEGKI_PACKAGE_DIR})

configure_package_config_file(cmake/segkiConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/segkiConfig.cmake
  INSTALL_DESTINATION ${SEGKI_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/segkiConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/segkiConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/segkiConfigVersion.cmake
  DESTINATION ${SEGKI_PACKAGE_DIR})

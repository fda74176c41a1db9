# The module segki._segki with libsegki.so beside it, as the wheel holds them.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_segki NB_STATIC
  cpp/src/python/bind_core.cc
  cpp/src/python/bind_ops.cc
  cpp/src/python/bind_runtime.cc
  cpp/src/python/module.cc
)
segki_target(_segki)
target_include_directories(_segki PRIVATE ${PROJECT_SOURCE_DIR}/cpp/src)
target_link_libraries(_segki PRIVATE segki::segki)

# No version in the file name: a wheel holds no symbolic links.
set_property(TARGET segki PROPERTY SOVERSION)
foreach(target segki _segki)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)
endforeach()

install(TARGETS segki _segki LIBRARY DESTINATION segki)

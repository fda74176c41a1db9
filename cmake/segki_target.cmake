# What every target of segki has in common: language, visibility, flags. Nothing is set globally.
function(segki_target name)
  target_compile_features(${name} PUBLIC cxx_std_20)
  set_target_properties(${name} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  # A product may only be fused with a sum where a kernel says so: rounding points are part of the
  # contract.
  target_compile_options(${name} PRIVATE
    -Wall -Wextra -ffp-contract=off $<$<CONFIG:Release>:-O3>)
  if(SEGKI_WARNINGS_AS_ERRORS)
    target_compile_options(${name} PRIVATE -Werror)
  endif()
  if(SEGKI_SANITIZE)
    target_compile_options(${name} PRIVATE
      -fsanitize=${SEGKI_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${SEGKI_SANITIZE})
  endif()
endfunction()

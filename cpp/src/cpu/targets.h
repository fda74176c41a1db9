// Which instruction sets the kernels are compiled for. Include before any Highway header.
//
// Highway's headers are used without its library: no symbol of it may stay undefined, so its debug
// assertions are off and the choice at run time is made in backend.cc.
#pragma once

#define HWY_IS_DEBUG_BUILD 0

#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__) || defined(_M_IX86)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#else
// Sizeless vectors cannot be elements of the register tiles.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

#include "hwy/detect_targets.h"

// The variant of a function for one instruction set, null where it was not compiled. Use in the
// HWY_ONCE part of a kernel's file, beside the functions' HWY_NAMESPACEs.
#define SEGKI_CPU_VARIANT(set, function)                                      \
  ((set) == ::segki::cpu::InstructionSet::kAvx512 ? HWY_CHOOSE_AVX3(function) \
   : (set) == ::segki::cpu::InstructionSet::kAvx2 ? HWY_CHOOSE_AVX2(function) \
                                                  : HWY_CHOOSE_FALLBACK(function))

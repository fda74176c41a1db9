// The pieces of the nanobind module `_segki`. Converts and forwards; no logic lives here.
#pragma once

#include <nanobind/nanobind.h>

namespace segki::python {

void bind_core(nanobind::module_& module);
void bind_ops(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);

}  // namespace segki::python

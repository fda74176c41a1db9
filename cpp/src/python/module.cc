#include <nanobind/nanobind.h>

#include "python/bindings.h"

NB_MODULE(_segki, module) {
  module.doc() = "Native ops, step program and decode loop of segki.";
  segki::python::bind_core(module);
  segki::python::bind_ops(module);
  segki::python::bind_runtime(module);
}

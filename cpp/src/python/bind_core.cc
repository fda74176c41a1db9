#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>

#include "python/bindings.h"
#include "segki/backend.h"
#include "segki/bandwidth.h"
#include "segki/error.h"
#include "segki/huge_pages.h"
#include "segki/parallel.h"
#include "segki/tensor.h"
#include "segki/version.h"

namespace nb = nanobind;

namespace segki::python {
namespace {

void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.code() == ErrorCode::kInvalidArgument) type = PyExc_ValueError;
    if (error.code() == ErrorCode::kOutOfMemory) type = PyExc_MemoryError;
    PyErr_SetString(type, error.what());
  }
}

// Sizes and strides as torch gives them.
void init_view(TensorView* view, std::uintptr_t address, DType dtype,
               const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride) {
  if (shape.size() != stride.size() || shape.size() > kMaxRank) {
    throw Error(ErrorCode::kInvalidArgument, "View: given " + std::to_string(shape.size()) +
                                                 " sizes and " + std::to_string(stride.size()) +
                                                 " strides, accepted as many of both, up to 4");
  }
  new (view) TensorView();
  view->data = reinterpret_cast<void*>(address);  // NOLINT: addresses cross from Python as integers
  view->dtype = dtype;
  view->rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    view->shape[d] = shape[d];
    view->stride[d] = stride[d];
  }
}

}  // namespace

void bind_core(nb::module_& module) {
  nb::register_exception_translator(translate_error, nullptr);
  module.attr("__version__") = SEGKI_VERSION_STRING;

  nb::enum_<DType>(module, "DType")
      .value("f32", DType::kF32)
      .value("bf16", DType::kBF16)
      .value("f16", DType::kF16)
      .value("i32", DType::kI32)
      .value("i64", DType::kI64)
      .value("u8", DType::kU8);

  nb::class_<TensorView>(module, "View",
                         "Address, dtype, shape and strides (in elements) of a tensor.")
      .def(nb::init<>())
      .def("__init__", init_view, nb::arg("address"), nb::arg("dtype"), nb::arg("shape"),
           nb::arg("stride"))
      .def(
          "bind",
          [](TensorView& view, std::uintptr_t address, std::int64_t rows) {
            view.data = reinterpret_cast<void*>(address);  // NOLINT
            view.shape[0] = rows;
          },
          nb::arg("address"), nb::arg("rows"),
          "Other memory and another first size, all else kept.")
      .def_prop_ro(
          "address",
          [](const TensorView& view) { return reinterpret_cast<std::uintptr_t>(view.data); })
      .def_prop_ro("shape",
                   [](const TensorView& view) {
                     return std::vector<std::int64_t>(view.shape, view.shape + view.rank);
                   })
      .def_prop_ro("stride",
                   [](const TensorView& view) {
                     return std::vector<std::int64_t>(view.stride, view.stride + view.rank);
                   })
      .def_ro("dtype", &TensorView::dtype);

  nb::class_<Backend>(module, "Backend")
      .def_prop_ro("name", &Backend::name)
      .def_prop_ro("instruction_set", [](const Backend& backend) {
        return std::string(backend.table().instruction_set);
      });
  module.def("backend", &backend, nb::arg("name"));
  module.def("load_backend", &load_backend, nb::arg("path"));
  module.def("backend_names", &backend_names);
  module.def("cpu_backend", &cpu_backend, nb::arg("instruction_set"));
  module.def("cpu_instruction_sets", &cpu_instruction_sets);
  module.def("set_threads", &set_default_threads, nb::arg("threads"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("threads", [] { return default_parallel().parts; });
  module.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads"),
             nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
             "Bytes a second that `threads` threads read from a buffer of `bytes`.");
  module.def(
      "use_huge_pages",
      [](std::uintptr_t address, std::size_t bytes) {
        return use_huge_pages(reinterpret_cast<const void*>(address), bytes);
      },
      nb::arg("address"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>(),
      "Back memory with huge pages in place; returns how many bytes lie in them then.");
}

}  // namespace segki::python

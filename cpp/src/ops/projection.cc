#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const ProjectionArgs& args) {
  const ops::Checker checker("projection");
  constexpr const char* kWeights[] = {"weight[0]", "weight[1]", "weight[2]", "weight[3]"};
  constexpr const char* kBiases[] = {"bias[0]", "bias[1]", "bias[2]", "bias[3]"};
  constexpr const char* kOuts[] = {"out[0]", "out[1]", "out[2]", "out[3]"};
  checker.number("count", args.count, 1, 4);
  ops::Dim rows{"rows"}, inputs{"K"};
  checker.shape("x", args.x, {&rows, &inputs});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  for (int i = 0; i < args.count; ++i) {
    ops::Dim outputs{"N"};
    // An f32 output beside half-precision inputs: its weight may be f32, too.
    const bool wide = args.out[i].present() && args.out[i].dtype == DType::kF32;
    const DType weight_dtype = wide && args.weight[i].dtype == DType::kF32 ? DType::kF32 : dtype;
    if (args.transposed != 0) {
      checker.shape(kWeights[i], args.weight[i], {&inputs, &outputs}, weight_dtype);
    } else {
      checker.shape(kWeights[i], args.weight[i], {&outputs, &inputs}, weight_dtype);
    }
    checker.dense(kWeights[i], args.weight[i]);
    checker.optional(kBiases[i], args.bias[i], {&outputs}, weight_dtype);
    checker.shape(kOuts[i], args.out[i], {&rows, &outputs}, wide ? DType::kF32 : dtype);
    if (wide && dtype != DType::kF32) {
      if (args.activation != Activation::kNone) {
        checker.refuse("activation", "is given", "none with an output in f32");
      }
      checker.absent("residual", args.residual, "with an output in f32");
    }
    checker.writable(kOuts[i], args.out[i]);
    checker.distinct(kOuts[i], args.out[i], "x", args.x);
    for (int j = 0; j < i; ++j) {
      checker.distinct(kOuts[i], args.out[i], kOuts[j], args.out[j]);
    }
  }
  checker.number("activation", static_cast<std::int32_t>(args.activation), 0,
                 static_cast<std::int32_t>(Activation::kRelu2));
  if (args.residual.present()) {
    if (args.count != 1) {
      checker.absent("residual", args.residual, "unless count is 1");
    }
    ops::Dim outputs{"N", args.out[0].shape[1]};
    checker.shape("residual", args.residual, {&rows, &outputs}, dtype);
    checker.finite("residual_scale", args.residual_scale);
    checker.finite("branch_scale", args.branch_scale);
  }
}

void projection(const Backend& backend, const ProjectionArgs& args, const RunOptions& options) {
  check(args);
  std::size_t bytes = 0;
  for (int i = 0; i < args.count; ++i) {
    bytes += ops::bytes_of(args.weight[i]);
  }
  ops::run(backend, args, options, bytes);
}

}  // namespace segki

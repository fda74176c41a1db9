// Uses an installed segki: an op, an error, a backend's name.
#include <segki/segki.h>

#include <cmath>
#include <cstdio>

int main() {
  float x[4] = {1.0F, 2.0F, 3.0F, 4.0F};
  float y[4] = {};
  segki::NormArgs args;
  args.x = segki::dense_view(x, segki::DType::kF32, 1, 4);
  args.out = segki::dense_view(y, segki::DType::kF32, 1, 4);
  args.norm.kind = segki::NormKind::kRms;
  segki::norm(segki::backend("cpu"), args);
  if (std::fabs(y[3] - 4.0F / std::sqrt(7.5F)) > 1e-6F) return 1;
  try {
    segki::backend("none");
    return 2;
  } catch (const segki::Error& error) {
    if (error.code() != segki::ErrorCode::kBackend) return 3;
  }
  std::printf("segki %s, %s\n", SEGKI_VERSION_STRING, segki::cpu_instruction_sets()[0].c_str());
  return 0;
}

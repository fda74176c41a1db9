#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const ExpertGatedProjectionArgs& args) { (void)args; }

void expert_gated_projection(const Backend& backend, const ExpertGatedProjectionArgs& args,
                             const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 0);
}

}  // namespace segki

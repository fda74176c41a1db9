#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const ExpertProjectionArgs& args) { (void)args; }

void expert_projection(const Backend& backend, const ExpertProjectionArgs& args,
                       const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 0);
}

}  // namespace segki

#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const RouterArgs& args) { (void)args; }

void route_experts(const Backend& backend, const RouterArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 0);
}

}  // namespace segki

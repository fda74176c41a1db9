#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const GatedDeltaPrefillArgs& args) { (void)args; }

void gated_delta_prefill(const Backend& backend, const GatedDeltaPrefillArgs& args,
                         const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 0);
}

}  // namespace segki

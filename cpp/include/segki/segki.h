// All of segki.
#pragma once

#include "segki/backend.h"
#include "segki/decode_loop.h"
#include "segki/error.h"
#include "segki/hybrid_cache.h"
#include "segki/ops.h"
#include "segki/parallel.h"
#include "segki/step_program.h"
#include "segki/stop.h"
#include "segki/tensor.h"
#include "segki/version.h"

// Times every op on every instruction set over the cases of the tests and over the shapes of real
// models, each as a step program of one op on the default pool. `bytes_per_second` is over the
// weights (attention: over the keys and values), which is what decoding is bound by.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "op_cases.h"
#include "op_cases_rows.h"
#include "segki/segki.h"

namespace segki {
namespace {

constexpr std::uint64_t kSeed = 1;

template <typename Args>
void time_op(benchmark::State& state, const Backend& backend, const Args& args,
             std::int64_t bytes) {
  StepProgramBuilder builder(backend);
  StepProgram program = builder.add(args).finish();
  for ([[maybe_unused]] const auto _ : state) program.run();
  if (bytes > 0) state.SetBytesProcessed(state.iterations() * bytes);
}

std::int64_t weight_bytes(const testing::MatmulProblem& problem) {
  std::int64_t bytes = 0;
  for (const testing::Buffer& weight : problem.weight) {
    bytes += weight.rows() * weight.columns() * static_cast<std::int64_t>(weight.element());
  }
  return bytes;
}

std::int64_t key_value_bytes(const AttentionArgs& args) {
  std::int64_t keys = 0;
  for (std::int64_t r = 0; r < args.q.shape[0]; ++r) {
    keys += test::reference::row_value(args.lengths, r) + 1 - test::reference::first_key(args, r);
  }
  return keys * args.k_cache.shape[1] * (args.k_cache.shape[3] + args.v_cache.shape[3]) *
         static_cast<std::int64_t>(size_of(args.k_cache.dtype));
}

template <typename Args>
std::int64_t bytes_of(const Args&) {
  return 0;
}
std::int64_t bytes_of(const AttentionArgs& args) { return key_value_bytes(args); }

// The problem is made when its benchmark runs, so that few are in memory at a time.
void add_matmul(const std::string& set, const std::string& op, const testing::MatmulCase& c,
                testing::MatmulProblem (*make)(testing::MatmulCase, std::uint64_t),
                void (*time)(benchmark::State&, const Backend&, testing::MatmulProblem&)) {
  benchmark::RegisterBenchmark((op + "/" + set + "/" + c.name()).c_str(),
                               [=](benchmark::State& state) {
                                 testing::MatmulProblem problem = make(c, kSeed);
                                 time(state, cpu_backend(set), problem);
                               })
      ->UseRealTime();
}

void add_projection(const std::string& set, const testing::MatmulCase& c) {
  add_matmul(
      set, "projection", c,
      [](testing::MatmulCase of, std::uint64_t seed) {
        return testing::MatmulProblem(std::move(of), seed);
      },
      [](benchmark::State& state, const Backend& backend, testing::MatmulProblem& problem) {
        time_op(state, backend, problem.projection(), weight_bytes(problem));
      });
}

void add_gated_projection(const std::string& set, const testing::MatmulCase& c) {
  add_matmul(set, "gated_projection", c, &testing::MatmulProblem::gated,
             [](benchmark::State& state, const Backend& backend, testing::MatmulProblem& problem) {
               time_op(state, backend, problem.gated_projection(), weight_bytes(problem));
             });
}

void add_lm_head(const std::string& set, const testing::MatmulCase& c) {
  add_matmul(set, "lm_head", c, &testing::MatmulProblem::head,
             [](benchmark::State& state, const Backend& backend, testing::MatmulProblem& problem) {
               time_op(state, backend, problem.lm_head(), weight_bytes(problem));
             });
}

// The matrix products of a step of SmolLM2-135M.
void add_model_shapes(const std::string& set, DType dtype) {
  for (const std::int64_t rows : {1, 8, 64}) {
    add_projection(set, {.rows = rows, .k = 576, .columns = {576, 192, 192}, .dtype = dtype});
    add_projection(set, {.rows = rows,
                         .k = 576,
                         .columns = {576},
                         .dtype = dtype,
                         .residual = true,
                         .in_place = true});
    add_projection(set, {.rows = rows,
                         .k = 1536,
                         .columns = {576},
                         .dtype = dtype,
                         .residual = true,
                         .in_place = true});
    add_gated_projection(set, {.rows = rows,
                               .k = 576,
                               .columns = {1536},
                               .dtype = dtype,
                               .activation = Activation::kSilu});
    add_lm_head(set, {.rows = rows, .k = 576, .columns = {49152}, .dtype = dtype});
  }
}

template <typename Case>
void add_rows(const std::string& set, DType dtype, const Case& c) {
  test::Rng naming(kSeed);
  const std::string name = test::make_problem(c, dtype, naming)->name;
  benchmark::RegisterBenchmark((name + "/" + set + "/" + name_of(dtype)).c_str(),
                               [=](benchmark::State& state) {
                                 test::Rng random(kSeed);
                                 const auto problem = test::make_problem(c, dtype, random);
                                 time_op(state, cpu_backend(set), problem->args,
                                         bytes_of(problem->args));
                               })
      ->UseRealTime();
}

void add_argmax(const std::string& set, std::int64_t rows, std::int64_t vocabulary) {
  const std::string name = "argmax " + std::to_string(rows) + "x" + std::to_string(vocabulary);
  benchmark::RegisterBenchmark((name + "/" + set).c_str(), [=](benchmark::State& state) {
    std::mt19937_64 random(kSeed);
    testing::Buffer logits(DType::kF32, rows, vocabulary);
    logits.fill(random, 3.0);
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(rows));
    std::vector<float> log_prob(static_cast<std::size_t>(rows));
    ArgmaxArgs args;
    args.logits = logits.view();
    args.tokens = dense_view(tokens.data(), DType::kI64, rows);
    args.log_prob = dense_view(log_prob.data(), DType::kF32, rows);
    time_op(state, cpu_backend(set), args, 0);
  })->UseRealTime();
}

// What a step costs beside its kernels: ops so small that only the barriers between them count.
void time_step_overhead(benchmark::State& state) {
  const auto ops = static_cast<int>(state.range(0));
  float x = 1.0F;
  float y = 0.0F;
  NormArgs args;
  args.x = dense_view(&x, DType::kF32, 1, 1);
  args.out = dense_view(&y, DType::kF32, 1, 1);
  args.norm.kind = NormKind::kRms;
  args.norm.eps = 1.0F;
  StepProgramBuilder builder(backend("cpu"));
  for (int i = 0; i < ops; ++i) builder.add(args);
  StepProgram program = builder.finish();
  for ([[maybe_unused]] const auto _ : state) program.run();
  state.SetItemsProcessed(state.iterations() * ops);
}

// What the decode loop costs a step, with a replay that does nothing but count.
void time_decode_loop(benchmark::State& state) {
  constexpr std::int32_t kSteps = 1024;
  constexpr std::int64_t kRows = 8;
  std::vector<std::int64_t> next(kRows);
  std::vector<std::int64_t> history(kRows * kSteps);
  std::vector<std::int32_t> counts(kRows);
  std::vector<std::int32_t> generated(kRows);
  std::vector<std::int32_t> finished(kRows);
  DecodeState views;
  views.next = dense_view(next.data(), DType::kI64, kRows);
  views.lengths = views.positions = dense_view(counts.data(), DType::kI32, kRows);
  views.generated = dense_view(generated.data(), DType::kI32, kRows);
  views.finished = dense_view(finished.data(), DType::kI32, kRows);
  views.history = dense_view(history.data(), DType::kI64, kRows, kSteps);
  StopRule rule;
  rule.max_new_tokens = kSteps;
  const auto replay = [&generated] {
    for (auto& count : generated) ++count;
  };
  DecodeLoop loop(replay, views, rule);
  for ([[maybe_unused]] const auto _ : state) {
    std::fill(generated.begin(), generated.end(), 0);
    benchmark::DoNotOptimize(loop.run());
  }
  state.SetItemsProcessed(state.iterations() * kSteps);
}

void add_all() {
  for (const std::string& set : cpu_instruction_sets()) {
    for (const DType dtype : testing::float_dtypes()) {
      add_model_shapes(set, dtype);
      for (const auto& c : testing::projection_cases(dtype)) add_projection(set, c);
      for (const auto& c : testing::gated_projection_cases(dtype)) add_gated_projection(set, c);
      for (const auto& c : testing::lm_head_cases(dtype)) add_lm_head(set, c);
      for (const auto& c : test::norm_cases()) {
        if (c.kind != NormKind::kNone) add_rows(set, dtype, c);
      }
      for (const auto& c : test::sum_norm_cases()) add_rows(set, dtype, c);
      for (const auto& c : test::embedding_cases()) add_rows(set, dtype, c);
      for (const auto& c : test::rope_cases()) add_rows(set, dtype, c);
      for (const auto& c : test::attention_cases()) add_rows(set, dtype, c);
    }
    for (const std::int64_t rows : {1, 8, 64}) add_argmax(set, rows, 49152);
  }
  benchmark::RegisterBenchmark("step_overhead", time_step_overhead)
      ->Arg(1)
      ->Arg(300)
      ->UseRealTime();
  benchmark::RegisterBenchmark("decode_loop", time_decode_loop)->UseRealTime();
}

}  // namespace
}  // namespace segki

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  segki::add_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

// An op that tells what reaches it through csrc/binding/boxed.h, for tests/test_schema.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "binding/boxed.h"

namespace {

using flash::binding::Arguments;
using flash::binding::Boxed;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  double scale;
  int64_t left;
  OptionalTensor slopes;
  std::optional<int64_t> bound;
  bool flag;
};

void parse(Arguments& from, Options& options) {
  from.read(options.scale);
  from.read(options.left);
  from.read(options.slopes);
  from.read(options.bound);
  from.read(options.flag);
}

// x, and what was given: scale, left, the number of slopes or -1, the bound or -1, the flag, and whether there is y.
std::tuple<Tensor, Tensor> describe(const Tensor& x, const OptionalTensor& y, Options& options) {
  const Tensor found = torch::stable::new_empty(x, {6}, torch::headeronly::ScalarType::Double);
  double* values = static_cast<double*>(found.mutable_data_ptr());
  values[0] = options.scale;
  values[1] = static_cast<double>(options.left);
  values[2] = options.slopes ? static_cast<double>(options.slopes->numel()) : -1;
  values[3] = static_cast<double>(options.bound.value_or(-1));
  values[4] = options.flag;
  values[5] = y.has_value();
  return {x, found};
}

Tensor count(const Tensor& x, Options& options) {
  return torch::stable::new_zeros(x, {options.left}, torch::headeronly::ScalarType::Double);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(boxed_probe, CPU, m) {
  m.impl("describe", Boxed<&describe>::call);
  m.impl("describe_few", Boxed<&describe, /*kMayEndEarly=*/true>::call);
  m.impl("count", Boxed<&count>::call);
  m.impl("too_few", Boxed<&count>::call);
  m.impl("too_many", Boxed<&count>::call);
}

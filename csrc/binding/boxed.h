// Functions whose last argument is a struct of options, as boxed kernels of PyTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <tuple>
#include <type_traits>

namespace flash::binding {

// The arguments of a call from the dispatcher, read one after the other in the order of the schema.
class Arguments {
 public:
  // may_end_early: whether the schema may lack the last ones, which are then None, 0 or false.
  Arguments(StableIValue* values, uint64_t count, bool may_end_early)
      : next_(values), end_(values + count), may_end_early_(may_end_early) {}

  template <typename T>
  T next() {
    if (may_end_early_ && next_ == end_) return T{};
    STD_TORCH_CHECK(next_ < end_, "the op's schema has fewer arguments than its kernel");
    return torch::stable::detail::to<T>(*next_++);
  }

  template <typename T>
  void read(T& value) {
    value = next<T>();
  }

  void check_all_read() const { STD_TORCH_CHECK(next_ == end_, "the op's schema has more arguments than its kernel"); }

 private:
  StableIValue* next_;
  StableIValue* end_;
  bool may_end_early_;
};

// Returns the next argument. A struct of options has as many arguments as `parse(Arguments&, T&)` reads, a function
// beside the struct.
template <typename T>
T parsed(Arguments& from) {
  if constexpr (requires(T options) { parse(from, options); }) {
    T options{};
    parse(from, options);
    return options;
  } else {
    return from.next<T>();
  }
}

// Does what TORCH_BOX(function) does, for a function that may also take structs of options. With kMayEndEarly also for
// an op that lacks the last of them.
template <auto* kFunction, bool kMayEndEarly = false>
struct Boxed;

template <typename Result, typename... Parameters, Result (*kFunction)(Parameters...), bool kMayEndEarly>
struct Boxed<kFunction, kMayEndEarly> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t /*num_results*/) {
    Arguments from(stack, num_arguments, kMayEndEarly);
    std::tuple<std::remove_cvref_t<Parameters>...> arguments{parsed<std::remove_cvref_t<Parameters>>(from)...};
    from.check_all_read();
    if constexpr (std::is_void_v<Result>) {
      std::apply(kFunction, arguments);
    } else {
      put(stack, std::apply(kFunction, arguments));
    }
  }

 private:
  template <typename... T>
  static void put(StableIValue* stack, const std::tuple<T...>& results) {
    std::apply([&](const T&... each) { ((*stack++ = torch::stable::detail::from(each)), ...); }, results);
  }
  template <typename T>
  static void put(StableIValue* stack, const T& result) {
    *stack = torch::stable::detail::from(result);
  }
};

}  // namespace flash::binding

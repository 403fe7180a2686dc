// Settings that users make in the environment.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

namespace flash {

// Whether a variable switches something on: it is set, and neither empty nor "0" nor "false".
inline bool is_switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr) return false;
  std::string text(value);
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return !text.empty() && text != "0" && text != "false";
}

}  // namespace flash

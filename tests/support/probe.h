// How functions that tests call by ctypes return texts.
#pragma once

#include <exception>
#include <string>

namespace flash {

inline const char* keep(const std::string& text) {
  static thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

// The text of what fn throws; null if nothing.
template <typename Fn>
const char* error_of(Fn&& fn) {
  try {
    fn();
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error.what());
  }
}

}  // namespace flash

#pragma once

#include <atomic>

namespace flash::ptx {

inline int arrive(int* counter) { return std::atomic_ref<int>(*counter).fetch_add(1); }
inline void fence_async_global() {}
inline void wait_semaphore(const int* semaphore, int value) {
  emulator::wait_until([&] { return std::atomic_ref<int>(*const_cast<int*>(semaphore)).load() >= value; },
                       "a semaphore");
}
inline void release_semaphore(int* semaphore) { std::atomic_ref<int>(*semaphore).fetch_add(1); }
inline void launch_dependents() {}
inline void wait_for_dependency() {}

}  // namespace flash::ptx

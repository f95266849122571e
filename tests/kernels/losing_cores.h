// For a build of the native kernels in which the threads of a crew lose their cores, the one that hears
// the bell too.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

inline void may_lose_core() {
    static std::atomic<uint32_t> threads{0};
    static thread_local uint32_t state = 2654435761u * ++threads;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    if (state % 64) return;
    // mostly shorter than a job, now and then than many of them
    const uint32_t us = state / 64 % 16 ? state / 1024 % 500 : state / 1024 % 12000;
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}

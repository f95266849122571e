// Threads of their own for work that comes many times a second: between two jobs they spin, and after
// a millisecond without one they sleep. A job does not wait for a thread that has not woken up yet.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "team.h"

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int64_t SPIN_NS = 1000000, POLITE_NS = 200000;  // from POLITE_NS on other threads get the core

// Waits for `ready()` for at most SPIN_NS. Returns whether it is.
template <class Ready> bool spin_until(Ready ready) {
    const int64_t begin = now_ns();
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            cpu_relax();
        }
        const int64_t spent = now_ns() - begin;
        if (spent > SPIN_NS) return ready();
        if (spent > POLITE_NS) sched_yield();
    }
}

class Crew {
  public:
    // `size` threads work on a job, the one that calls `run` included.
    explicit Crew(int size) : phases_(MOST_PHASES), size_(size) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this] { work(); });
    }
    ~Crew() {
        stop_ = true;
        rouse();
        for (std::thread& thread : threads_) thread.join();
    }

    // Runs body(team) on all threads that are awake; it calls share at most MOST_PHASES times. Its work
    // is done on return; until `settle` the last threads may still look at the body.
    template <class Body> void run(Body& body) {
        settle();
        for (Phase& phase : phases_) phase.next = 0, phase.done = 0;
        call_ = [](void* data, Team& team) { (*static_cast<Body*>(data))(team); };
        data_ = &body;
        job_.fetch_add(1);  // odd: open
        if (asleep_.load()) notify();
        Team team(phases_.data(), size_);
        body(team);
        job_.fetch_add(1);
    }

    void settle() {
        while (inside_.load(std::memory_order_acquire)) cpu_relax();
    }

    // Work will come soon.
    void rouse() {
        ++roused_;
        if (asleep_.load()) notify();
    }

  private:
    static constexpr int64_t MOST_PHASES = 8;

    void notify() {
        std::lock_guard<std::mutex> lock(mutex_);
        awake_.notify_all();
    }

    void work() {
        for (uint32_t done = 0; !stop_;) {
            const auto open = [&] { return stop_ || (job_.load(std::memory_order_acquire) != done && (job_ & 1)); };
            const uint32_t roused = roused_;
            if (!spin_until(open)) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                awake_.wait(lock, [&] { return open() || roused_ != roused; });
                --asleep_;
                continue;
            }
            const uint32_t job = job_;
            ++inside_;
            if (!stop_ && (job & 1) && job_ == job) {  // still open: the body stays until nobody is inside
                Team team(phases_.data(), size_);
                call_(data_, team);
            }
            --inside_;
            done = job;
        }
    }

    std::vector<Phase> phases_;
    const int size_;
    void (*call_)(void*, Team&) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0}, roused_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable awake_;
    std::vector<std::thread> threads_;
};

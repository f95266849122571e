// Threads of their own for work that comes many times a second: between two jobs they spin, and after
// a millisecond without one they sleep. A job does not wait for a thread that has not woken up yet.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "team.h"

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int64_t SPIN_NS = 1000000, POLITE_NS = 200000;  // from POLITE_NS on other threads get the core

// Waits for `ready()` for at most SPIN_NS. Returns whether it is. `idle()`, which returns whether it did
// anything, is called meanwhile.
template <class Ready, class Idle> bool spin_until(Ready ready, Idle idle) {
    const int64_t begin = now_ns();
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            if (!idle()) cpu_relax();
        }
        const int64_t spent = now_ns() - begin;
        if (spent > SPIN_NS) return ready();
        if (spent > POLITE_NS) sched_yield();
    }
}

// The last job in which somebody took a part.
struct alignas(64) Claim {
    std::atomic<uint32_t> job{0};
    bool take(uint32_t number) { return job.load(std::memory_order_relaxed) != number && job.exchange(number) != number; }
};

// One thread of a crew in a job.
class CrewTeam : public Team {
  public:
    CrewTeam(Phase* phases, Claim* claims, uint32_t job, int size, int index) : Team(phases, size), claims_(claims), job_(job), index_(index) {}
    int index() const { return index_; }

    // A phase of two halves. The first has a part for every thread, own(thread), which others take only
    // if it never comes; the second, rest(begin, end) over [0, count), goes to whoever is free, in long
    // chunks first and short ones at the end. Returns when all of it is taken.
    template <class Own, class Rest> void take_own(Own own, int64_t count, Rest rest) {
        Phase& phase = *phase_++;
        Claim* const claims = claims_;
        claims_ += size();
        const int64_t chunks = int64_t(size()) * (LEVELS - 1);
        int64_t done = 0;
        const auto begin = [&](int thread) {
            if (!claims[thread].take(job_)) return;
            own(thread);
            ++done;
        };
        begin(index_);
        const auto start = [&](int64_t chunk) { return int64_t((2.0 * part_before(chunk + size(), size()) - 1.0) * double(count)); };
        for (int64_t chunk; (chunk = phase.next.fetch_add(1, std::memory_order_relaxed)) < chunks; ++done)
            if (start(chunk) < start(chunk + 1)) rest(start(chunk), start(chunk + 1));
        for (int thread = 0; thread < size(); ++thread) begin(thread);
        finish(phase, done);
    }
    // Until it is finished; `idle` as in `share`.
    template <class Idle> void wait_taken(Idle idle) { wait(phase_[-1], int64_t(size()) * LEVELS, idle); }

  private:
    Claim* claims_;
    const uint32_t job_;
    const int index_;
};

class Crew {
  public:
    // `size` threads work on a job, the one that calls `run` included. `idle(thread)`, which returns
    // whether it did anything, is what the others do until the next.
    Crew(int size, std::function<bool(int)> idle) : phases_(MOST_PHASES), claims_(MOST_PHASES * size), size_(size), idle_(std::move(idle)) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { work(i); });
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
        call_ = [](void* data, CrewTeam& team) { (*static_cast<Body*>(data))(team); };
        data_ = &body;
        const uint32_t job = job_.fetch_add(1) + 1;  // odd: open
        if (asleep_.load()) notify();
        CrewTeam team(phases_.data(), claims_.data(), job, size_, 0);
        body(team);
        job_.fetch_add(1);
    }

    void settle() {
        while (inside_.load()) cpu_relax();
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

    void work(int index) {
        for (uint32_t done = 0; !stop_;) {
            const auto open = [&] { return stop_ || (job_.load(std::memory_order_acquire) != done && (job_ & 1)); };
            const uint32_t roused = roused_;
            if (!spin_until(open, [&] { return idle_(index); })) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                awake_.wait(lock, [&] { return open() || roused_ != roused; });
                --asleep_;
                continue;
            }
            const uint32_t job = job_;
            ++inside_;
            if (!stop_ && (job & 1) && job_ == job) {  // still open: the body stays until nobody is inside
                CrewTeam team(phases_.data(), claims_.data(), job, size_, index);
                call_(data_, team);
            }
            --inside_;
            done = job;
        }
    }

    std::vector<Phase> phases_;
    std::vector<Claim> claims_;
    const int size_;
    const std::function<bool(int)> idle_;
    void (*call_)(void*, CrewTeam&) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0}, roused_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable awake_;
    std::vector<std::thread> threads_;
};

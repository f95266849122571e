// Threads of their own for work that comes many times a second: between two jobs they spin, and after
// a millisecond without one they sleep. A job does not wait for a thread that has not woken up yet, nor
// for one that lost its core: the others do its part again, and it may still be inside an old job while
// the next ones run, as long as these have other spaces. Who calls `run` must have its core.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "team.h"

// Where a thread that loses its core is late for others: a test's header makes it lose it.
#ifdef CT_LOSING_CORES
#include CT_LOSING_CORES
#else
inline void may_lose_core() {}
#endif

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

// The last job in which somebody took a thread's parts.
struct alignas(64) Claim {
    std::atomic<uint64_t> job{0};
    bool take(uint64_t number) { return job.load(std::memory_order_relaxed) != number && job.exchange(number) != number; }
};
using Done = std::atomic<uint64_t>;  // the last job in which a part was done

// Who waits longer for others than this, and than half of the time since it began with that phase, does
// their parts again.
constexpr int64_t LATE_NS = 50000;
constexpr int64_t MOST_PHASES = 4;

// What the threads of a job share. Another job gets it when nobody is inside.
struct JobSpace {
    JobSpace(int64_t threads, int64_t most_parts)
        : phases(MOST_PHASES), claims(MOST_PHASES * threads), done(MOST_PHASES * threads * (most_parts + LEVELS)) {}
    std::vector<Phase> phases;
    std::vector<Claim> claims;
    std::vector<Done> done;
    void (*call)(void*, class CrewTeam&) = nullptr;
    void* data = nullptr;
    alignas(64) std::atomic<int> inside{0};
    alignas(64) std::atomic<int64_t> repeated{0};  // parts done again, of all jobs
};

// One thread of a crew in a job.
class CrewTeam : public Team {
  public:
    // `open`: the job that runs now, this one or a later one
    CrewTeam(JobSpace& space, const std::atomic<uint64_t>& open, uint64_t job, int size, int index)
        : Team(space.phases.data(), size), space_(space), open_(open), claims_(space.claims.data()), done_(space.done.data()), job_(job), index_(index) {}
    int index() const { return index_; }

    // A phase of two halves. The first has `parts` parts for every thread, own(thread, part), which
    // others take only if it never comes; the second, rest(begin, end) over [0, count), goes to whoever
    // is free, in long chunks first and short ones at the end. Both may be called again for what a
    // thread that lost its core has begun: until the job is done they write the same values to the same
    // places. Returns when all of it is done, or taken if it does not `wait`, or when the job is over.
    // `idle()`, which returns whether it did anything, is called while it waits for others.
    template <class Own, class Rest, class Idle>
    void work(int64_t parts, Own own, int64_t count, Rest rest, bool wait, Idle idle) {
        const int64_t begin = now_ns();
        Phase& phase = *phase_++;
        Claim* const claims = claims_;
        Done* const done = done_;
        const int64_t threads = size(), chunks = count ? threads * (LEVELS - 1) : 0;
        claims_ += threads, done_ += threads * (parts + LEVELS - 1);
        const auto own_part = [&](int64_t thread, int64_t part) {
            own(thread, part);
            may_lose_core();
            done[thread * parts + part].store(job_, std::memory_order_release);
        };
        const auto start = [&](int64_t chunk) { return int64_t((2.0 * part_before(chunk + threads, threads) - 1.0) * double(count)); };
        const auto chunk_of_rest = [&](int64_t chunk) {
            if (start(chunk) < start(chunk + 1)) rest(start(chunk), start(chunk + 1));
            done[threads * parts + chunk].store(job_, std::memory_order_release);
        };
        int64_t finished = 0;
        const auto take = [&](int64_t thread) {
            if (!claims[thread].take(job_)) return;
            for (int64_t part = 0; part < parts; ++part)  // others did them while this thread had no core
                if (done[thread * parts + part].load(std::memory_order_acquire) != job_) own_part(thread, part);
            ++finished;
        };
        take(index_);
        if (chunks)
            for (int64_t chunk; (chunk = phase.next.fetch_add(1, std::memory_order_relaxed)) < chunks; ++finished) chunk_of_rest(chunk);
        finish(phase, finished);  // before it looks at what all others took: they wait for this
        finished = 0;
        for (int64_t thread = 0; thread < threads; ++thread) take(thread);
        finish(phase, finished);
        if (!wait || wait_for(phase, threads + chunks, begin, idle)) return;
        // Somebody is late. Who come here begin at different parts.
        const auto missing = [&](int64_t at) { return done[at].load(std::memory_order_acquire) != job_ && ++finished; };
        finished = 0;
        for (int64_t thread = 0; thread < threads; ++thread)
            for (int64_t i = 0; i < parts; ++i)
                if (const int64_t part = (i + index_) % parts; missing(thread * parts + part)) own_part(thread, part);
        for (int64_t i = 0; i < chunks; ++i)
            if (const int64_t chunk = (i + index_) % chunks; missing(threads * parts + chunk)) chunk_of_rest(chunk);
        space_.repeated.fetch_add(finished, std::memory_order_relaxed);
    }

  private:
    // Whether all of a phase that began then was done in time, or the job is over.
    template <class Idle> bool wait_for(const Phase& phase, int64_t count, int64_t begin, Idle idle) const {
        const int64_t own_end = now_ns(), late = own_end + std::max(LATE_NS, (own_end - begin) / 2);
        for (int looks = 1; phase.done.load(std::memory_order_acquire) < count; ++looks) {
            if (open_.load(std::memory_order_relaxed) != job_) return true;
            if (looks % 16 == 0 && now_ns() > late) return false;
            if (!idle()) cpu_relax();
        }
        return true;
    }

    JobSpace& space_;
    const std::atomic<uint64_t>& open_;
    Claim* claims_;
    Done* done_;
    const uint64_t job_;
    const int index_;
};

class Crew {
  public:
    // `size` threads work on a job, the one that calls `run` included; a phase of it has at most
    // `most_parts` parts for each. As many jobs as `spaces` may have threads inside. `idle(thread)`,
    // which returns whether it did anything, is what the others do until the next.
    Crew(int size, int64_t spaces, int64_t most_parts, std::function<bool(int)> idle) : size_(size), idle_(std::move(idle)) {
        for (int64_t i = 0; i < spaces; ++i) spaces_.emplace_back(size, most_parts);
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { work(i); });
    }
    ~Crew() {
        stop_ = true;
        rouse();
        for (std::thread& thread : threads_) thread.join();
    }

    // Runs body(team) on all threads that are awake, with at most MOST_PHASES phases. Its work is done
    // on return; until its space is settled the last threads may still be inside.
    template <class Body> void run(int64_t space_index, Body& body) {
        settle(space_index);
        JobSpace& space = spaces_[space_index];
        for (Phase& phase : space.phases) phase.next = 0, phase.done = 0;
        space.call = [](void* data, CrewTeam& team) { (*static_cast<Body*>(data))(team); };
        space.data = &body;
        const uint64_t job = 2 * (++jobs_ * spaces_.size() + space_index) + 1;  // odd: open
        job_ = job;
        if (asleep_.load()) notify();
        CrewTeam team(space, job_, job, size_, 0);
        body(team);
        job_ = job + 1;
    }

    // Until nobody is inside the last job of this space.
    void settle(int64_t space) {
        for (int looks = 0; spaces_[space].inside.load(); ++looks) {
            if (looks < 2048) cpu_relax();
            else sched_yield();  // whoever is inside may need this core
        }
    }

    // Parts that were done again because a thread was late.
    int64_t repeated() const {
        int64_t all = 0;
        for (const JobSpace& space : spaces_) all += space.repeated.load(std::memory_order_relaxed);
        return all;
    }

    // Work will come soon.
    void rouse() {
        ++roused_;
        if (asleep_.load()) notify();
    }

  private:
    void notify() {
        std::lock_guard<std::mutex> lock(mutex_);
        awake_.notify_all();
    }

    void work(int index) {
        for (uint64_t done = 0; !stop_;) {
            const auto open = [&] { return stop_ || (job_.load(std::memory_order_acquire) != done && (job_ & 1)); };
            const uint32_t roused = roused_;
            if (!spin_until(open, [&] { return idle_(index); })) {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                awake_.wait(lock, [&] { return open() || roused_ != roused; });
                --asleep_;
                continue;
            }
            const uint64_t job = job_;
            JobSpace& space = spaces_[(job >> 1) % spaces_.size()];
            ++space.inside;
            may_lose_core();
            if (!stop_ && (job & 1) && job_ == job) {  // still open: the space stays until nobody is inside
                CrewTeam team(space, job_, job, size_, index);
                space.call(space.data, team);
            }
            --space.inside;
            done = job;
        }
    }

    const int size_;
    const std::function<bool(int)> idle_;
    std::deque<JobSpace> spaces_;
    uint64_t jobs_ = 0;
    alignas(64) std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<uint32_t> roused_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable awake_;
    std::vector<std::thread> threads_;
};

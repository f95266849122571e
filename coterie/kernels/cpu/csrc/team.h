// Threads of one native call. They come from the OpenMP runtime that torch already uses, so that the
// two never compete. A call is a sequence of phases. A phase ends when its work is done, not when all
// threads have reached its end: a thread that lost its core delays the others only if it has work.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "types.h"

extern "C" {  // provided by the process's OpenMP runtime (libgomp, or libomp's compatible entry)
void GOMP_parallel(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_num_threads();
}

// Each in a cache line of its own: those who wait for the end do not slow those who take tasks.
struct Phase {
    alignas(64) std::atomic<int64_t> next{0};  // first task that is not taken
    alignas(64) std::atomic<int64_t> done{0};  // tasks finished
    std::atomic<bool> refused{false};          // of a call's first phase: memory, to one of its threads
};

// What an entry point returns.
enum Status : int32_t { DONE, NO_MEMORY, NOT_FINITE, NOT_HELD };

// memory.cpp: whether call(data) came to its end; not if memory was refused to it.
bool has_run(void (*call)(void*), void* data);
template <class Call> int32_t status_of(Call call) {
    return has_run([](void* data) { (*static_cast<Call*>(data))(); }, &call) ? DONE : NO_MEMORY;
}
[[noreturn]] void refuse();  // ends the innermost has_run

// A phase cut into threads * LEVELS chunks, of which each level has half of what is left: long chunks
// first, short ones at the end. Returns the part of the work before chunk `index`.
constexpr int LEVELS = 4;
inline double part_before(int64_t index, int64_t threads) {
    const int64_t level = index / threads;
    if (level >= LEVELS) return 1.0;
    const double left = 1.0 / double(1 << level), size = level == LEVELS - 1 ? left : left / 2;
    return 1.0 - left + size * double(index % threads) / double(threads);
}

class Team {
  public:
    Team(Phase* phases, int size) : phase_(phases), refused_(phases->refused), size_(size) {}
    int size() const { return size_; }

    // Calls run(begin, end) over [0, count) in chunks of `grain`; returns when all are finished, or
    // memory was refused to a thread and the call has failed.
    template <class Run> void share(int64_t count, int64_t grain, Run run) {
        Phase& phase = *phase_++;
        int64_t own = 0;
        for (;;) {
            const int64_t begin = phase.next.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            const int64_t end = begin + grain < count ? begin + grain : count;
            run(begin, end);
            own += end - begin;
        }
        finish(phase, own);
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < count && !refused_.load(std::memory_order_relaxed);) {
            if (++spins < 2048) cpu_relax();
            else sched_yield();  // another thread has lost its core and still has work
        }
    }

  protected:
    // once, because many threads that write to one line wait for each other
    static void finish(Phase& phase, int64_t own) {
        if (own) phase.done.fetch_add(own, std::memory_order_release);
    }

    Phase* phase_;

  private:
    const std::atomic<bool>& refused_;
    int size_;
};

// Runs body(team) on `threads` threads (the calling one included); it calls share at most `phases`
// times. Refuses if memory was refused on any of them.
template <class Body> void run_team(int threads, int64_t phases, Body& body) {
    struct Job {
        Body* body;
        std::vector<Phase> phases;
    } job{&body, std::vector<Phase>(phases)};
    const auto entry = [](void* data) {
        Job* job = static_cast<Job*>(data);
        const auto run = [job] {
            Team team(job->phases.data(), omp_get_num_threads());
            (*job->body)(team);
        };
        if (status_of(run) != DONE) job->phases[0].refused = true;
    };
    if (threads <= 1) {
        Team team(job.phases.data(), 1);
        body(team);
        return;
    }
    GOMP_parallel(entry, &job, static_cast<unsigned>(threads), 0);
    if (job.phases[0].refused) refuse();
}

// Scratch that grows and is kept: 64-byte aligned, contents undefined after `need`. Empty if memory
// for it is refused.
class Buffer {
  public:
    ~Buffer() { free(data_); }
    template <class T> T* need(int64_t count) {
        const size_t bytes = round_up(count * sizeof(T) + 64, 4096);
        if (bytes > size_) {
            free(data_);
            size_ = 0;
            data_ = aligned_alloc(4096, bytes);
            if (!data_) refuse();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }
    template <class T> T* at() const { return static_cast<T*>(data_); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

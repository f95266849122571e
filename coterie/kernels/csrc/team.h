// Threads of one native call: they come from the OpenMP runtime that torch already uses, so that
// the two never compete; inside the call they meet at spin barriers and share work by counters.
#pragma once
#include <sched.h>

#include <atomic>
#include <cstdlib>

#include "types.h"

extern "C" {  // provided by the process's OpenMP runtime (libgomp, or libomp's compatible entry)
void GOMP_parallel(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

constexpr int COUNTERS = 8;

struct Shared {
    alignas(128) std::atomic<int> arrived{0};
    alignas(128) std::atomic<int> generation{0};
    struct alignas(128) Counter {
        std::atomic<int64_t> next{0};
    } counters[COUNTERS];
};

class Team {
  public:
    Team(Shared& shared, int id, int size) : shared_(shared), id_(id), size_(size) {}
    int id() const { return id_; }
    int size() const { return size_; }

    void barrier() {
        if (size_ == 1) return;
        const int seen = shared_.generation.load(std::memory_order_acquire);
        if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            shared_.arrived.store(0, std::memory_order_relaxed);
            shared_.generation.store(seen + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; shared_.generation.load(std::memory_order_acquire) == seen; ++spins) {
            if (spins < 4096) cpu_relax();
            else sched_yield();  // a teammate has lost its core
        }
    }

    // Calls run(begin, end) over [0, count) in chunks of `grain`; ends with a barrier.
    template <class Run> void share(int64_t count, int64_t grain, Run run) {
        // A counter is cleared four shares before its next use: everyone has left it by then.
        auto& mine = shared_.counters[phase_ % COUNTERS].next;
        if (id_ == 0) shared_.counters[(phase_ + 4) % COUNTERS].next.store(0, std::memory_order_relaxed);
        ++phase_;
        for (;;) {
            const int64_t begin = mine.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            run(begin, begin + grain < count ? begin + grain : count);
        }
        barrier();
    }

  private:
    Shared& shared_;
    int id_, size_;
    unsigned phase_ = 0;
};

// Runs body(team) on `threads` threads (the calling one included).
template <class Body> void run_team(int threads, Body& body) {
    struct Job {
        Body* body;
        Shared shared;
    } job{&body, {}};
    auto entry = [](void* data) {
        Job* job = static_cast<Job*>(data);
        Team team(job->shared, omp_get_thread_num(), omp_get_num_threads());
        (*job->body)(team);
    };
    if (threads <= 1) {
        Team team(job.shared, 0, 1);
        body(team);
        return;
    }
    GOMP_parallel(entry, &job, static_cast<unsigned>(threads), 0);
}

// Scratch that grows and is kept: 64-byte aligned, contents undefined after `need`.
class Buffer {
  public:
    ~Buffer() { free(data_); }
    template <class T> T* need(int64_t count) {
        const size_t bytes = round_up(count * sizeof(T) + 64, 4096);
        if (bytes > size_) {
            free(data_);
            data_ = aligned_alloc(4096, bytes);
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }
    template <class T> T* at() const { return static_cast<T*>(data_); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// The CPU's side of a step on a device. The device writes a job to memory that both see and then its
// number (`rung`); threads of this module compute it and write the answer with that number in it. Then
// the number itself is written (`answered`), for the host.
#include "crew.h"
#include "share.h"

struct ShareSetup {
    const ShareLayer* layers;
    int64_t num_layers, max_rows, max_pairs, threads;
    // a job of at most so many rows and pairs has the space of its number, any other has all of them
    int64_t spaces, space_rows, space_pairs;
    const std::atomic<uint32_t>* rung;
    std::atomic<uint32_t>* answered;
    const volatile int32_t* job;  // layer, rows, pairs
    const SharePair* pairs;
    const float* x;
    uint64_t* out;  // [spaces][space_rows][hidden], or [max_rows][hidden]
    const volatile ShareHint* hint;
};

namespace {

constexpr int64_t NAP_NS = 200000, LONG_NAP_NS = 50000000;
constexpr int64_t QUIET_NS = 1000000000;  // without a job or a wake-up: naps become long

class Coordinator {
  public:
    explicit Coordinator(const ShareSetup& setup)
        : setup_(setup), layers_(setup.layers, setup.layers + setup.num_layers),
          hints_(layers_.data(), setup.num_layers, setup.threads),
          crew_(int(setup.threads), setup.spaces + 1, setup.max_pairs, [this](int thread) { return read_ahead(thread); }) {
        for (const ShareLayer& layer : layers_) hidden_ = std::max<int64_t>(hidden_, layer.hidden);
        const auto add = [&](int64_t rows, int64_t pairs) { runs_.emplace_back(layers_.data(), setup.num_layers, rows, pairs); };
        for (int64_t i = 0; i < setup.spaces; ++i) add(setup.space_rows, setup.space_pairs);
        add(setup.max_rows, setup.max_pairs);
        thread_ = std::thread([this] { loop(); });
    }
    ~Coordinator() {
        stop_ = true;
        wake();
        thread_.join();
    }

    // A step begins that may ring.
    void wake() {
        ++woken_;
        if (napping_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            call_.notify_all();
        }
        crew_.rouse();
    }

    void pause(bool paused) { paused_ = paused; }

    void read(int64_t* out) const {
        out[0] = jobs_, out[1] = bytes_, out[2] = busy_ns_, out[3] = naps_, out[4] = refused_, out[5] = hinted_, out[6] = crew_.repeated();
    }

  private:
    void loop() {
        uint32_t last = setup_.answered->load();
        int64_t heard = now_ns();  // of the last job or wake-up
        while (!stop_) {
            const uint32_t woken = woken_;
            const auto rings = [&] { return stop_ || (!paused_ && setup_.rung->load(std::memory_order_acquire) != last); };
            if (spin_until(rings, [&] { return read_ahead(0); })) {
                if (stop_) return;
                last = setup_.rung->load(std::memory_order_acquire);
                answer(last);
                heard = now_ns();
                continue;
            }
            // Steps are launched ahead: one may ring long after its wake-up, so look again meanwhile.
            while (!stop_ && woken_ == woken && !rings()) nap(woken, now_ns() - heard < QUIET_NS ? NAP_NS : LONG_NAP_NS);
            heard = now_ns();
        }
    }

    bool read_ahead(int thread) { return hints_.read_ahead(*setup_.hint, thread); }

    void nap(uint32_t woken, int64_t ns) {
        ++naps_;
        std::unique_lock<std::mutex> lock(mutex_);
        ++napping_;
        call_.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return stop_ || woken_ != woken; });
        --napping_;
    }

    void answer(uint32_t number) {
        const int64_t begin = now_ns();
        const int32_t layer = setup_.job[0], rows = setup_.job[1], pairs = setup_.job[2];
        const int64_t most_pairs = rows <= setup_.space_rows ? setup_.space_pairs : setup_.max_pairs;
        if (layer < 0 || layer >= setup_.num_layers || rows < 1 || rows > setup_.max_rows || pairs < 0 || pairs > most_pairs) {
            ++refused_;  // overwritten while this thread did not run: nobody waits for the answer
            return;
        }
        // the last space is that of all
        const int64_t all = setup_.spaces, space = rows <= setup_.space_rows ? number % all : all;
        for (int64_t i = 0; i <= all; ++i)
            if (i == space || i == all || space == all) crew_.settle(i);
        ShareRun& run = runs_[space];
        uint64_t* const out = setup_.out + (space < all ? space * setup_.space_rows * hidden_ : 0);
        const int64_t bytes = run.prepare({&layers_[layer], setup_.pairs, pairs, rows, setup_.x, out, number});
        run.each_expert([&](int32_t expert) { hinted_ += hints_.named(&layers_[layer], expert); });
        hints_.begin(&layers_[layer]);
        crew_.run(space, run);
        ++jobs_, bytes_ += bytes, busy_ns_ += now_ns() - begin;
        setup_.answered->store(number, std::memory_order_release);  // who sees it sees the counts
    }

    const ShareSetup setup_;
    const std::vector<ShareLayer> layers_;
    int64_t hidden_ = 0;
    std::deque<ShareRun> runs_;  // by space
    ShareHints hints_;
    std::atomic<int64_t> jobs_{0}, bytes_{0}, busy_ns_{0}, naps_{0}, refused_{0}, hinted_{0};
    Crew crew_;  // its threads look at all of the above
    std::atomic<uint32_t> woken_{0};
    std::atomic<int> napping_{0};
    std::atomic<bool> stop_{false}, paused_{false};
    std::mutex mutex_;
    std::condition_variable call_;
    std::thread thread_;
};

}  // namespace

extern "C" {

// null: memory was refused
void* ct_share_open(const ShareSetup* setup) {
    void* opened = nullptr;
    status_of([&] { opened = new Coordinator(*setup); });
    return opened;
}
void ct_share_wake(void* share) { static_cast<Coordinator*>(share)->wake(); }
void ct_share_pause(void* share, int32_t paused) { static_cast<Coordinator*>(share)->pause(paused != 0); }
void ct_share_read(void* share, int64_t* out) { static_cast<Coordinator*>(share)->read(out); }
void ct_share_close(void* share) { delete static_cast<Coordinator*>(share); }

}  // extern "C"

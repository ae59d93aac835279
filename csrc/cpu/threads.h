// A small pool of threads that share out the indices of a job one by one.
//
// The caller works too. A worker that is late (its core is taken by another process) finds the job
// closed and nobody waits for it; only a worker that has taken an index is waited for. Waiting is a
// short spin, then the kernel: a busy neighbour costs a time slice, never a livelock.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace phloem {

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    int size() const { return (int)workers_.size() + 1; }

    // f(index, thread) for every index below n; thread < size(). f must not throw.
    template <class F> void run(int64_t n, const F &f) {
        if (n <= 1 || workers_.empty()) {
            for (int64_t i = 0; i < n; ++i) f(i, 0);
            return;
        }
        run_job(n, [](const void *arg, int64_t i, int t) { (*(const F *)arg)(i, t); }, &f);
    }

    // f(group, index, thread) for every index below n of every group below size(). A thread starts
    // with the group of its own number, then helps the others: what it had in its cache after one
    // run it finds there in the next.
    template <class F> void run_groups(int64_t n, const F &f) {
        const int groups = size();
        for (Counter &counter : counters_) counter.next.store(0, std::memory_order_relaxed);
        run(groups, [&](int64_t, int thread) {
            for (int g = thread; g < thread + groups; ++g) {
                std::atomic<int64_t> &next = counters_[g % groups].next;
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
                    f((int64_t)(g % groups), i, thread);
            }
        });
    }

private:
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    };
    using Function = void (*)(const void *arg, int64_t index, int thread);

    void run_job(int64_t n, Function function, const void *arg);
    void work(int thread);
    void take_indices(int thread);
    uint32_t wait_for_job(uint32_t seen);

    // A job's fields change only while `state_` is closed with nobody inside.
    Function function_ = nullptr;
    const void *arg_ = nullptr;
    int64_t count_ = 0;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> state_{0};  // bit 0: open; the rest: 2 * workers inside
    alignas(64) std::atomic<uint32_t> epoch_{0};  // grows with every job; what idle workers watch
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
    std::vector<Counter> counters_;  // of run_groups
    std::vector<std::thread> workers_;
};

}  // namespace phloem

#include "threads.h"

#include <chrono>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace phloem {
namespace {

// Long enough to bridge the gap between two phases of a layer, and the caller's way from one
// layer's call to the next; short against a scheduler's time slice.
constexpr std::chrono::microseconds kSpin{50};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

template <class Done> bool spin_until(const Done &done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
        if (std::chrono::steady_clock::now() >= end) return done();
    }
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
    static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is 32 bits");
    syscall(SYS_futex, (uint32_t *)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, (uint32_t *)&word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
#else
std::mutex park_mutex;
std::condition_variable park_changed;
void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
    std::unique_lock<std::mutex> lock(park_mutex);
    if (word.load() == value) park_changed.wait_for(lock, std::chrono::milliseconds(50));
}
void wake(std::atomic<uint32_t> &) {
    std::lock_guard<std::mutex> lock(park_mutex);
    park_changed.notify_all();
}
#endif

}  // namespace

ThreadPool::ThreadPool(int num_threads) : counters_(num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    wake(epoch_);
    for (std::thread &worker : workers_) worker.join();
}

void ThreadPool::take_indices(int thread) {
    for (;;) {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) return;
        function_(arg_, i, thread);
    }
}

uint32_t ThreadPool::wait_for_job(uint32_t seen) {
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (spin_until(changed)) return epoch_.load();
    sleepers_.fetch_add(1);  // before the last look at epoch_: run_job looks in the other order
    while (!changed()) sleep_while(epoch_, seen);
    sleepers_.fetch_sub(1);
    return epoch_.load();
}

void ThreadPool::work(int thread) {
    for (uint32_t seen = 0; !stop_.load();) {
        seen = wait_for_job(seen);
        uint32_t state = state_.load();
        while (state & 1) {
            if (!state_.compare_exchange_weak(state, state + 2)) continue;
            take_indices(thread);
            // `caller_sleeps_` is set before the caller's last look at state_.
            if (state_.fetch_sub(2) == 2 && caller_sleeps_.load()) wake(state_);
            break;
        }
    }
}

void ThreadPool::run_job(int64_t n, Function function, const void *arg) {
    function_ = function;
    arg_ = arg;
    count_ = n;
    next_.store(0, std::memory_order_relaxed);
    state_.store(1);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) wake(epoch_);
    take_indices(0);
    state_.fetch_and(~1u);
    if (spin_until([&] { return state_.load(std::memory_order_acquire) == 0; })) return;
    caller_sleeps_.store(true);
    for (uint32_t state; (state = state_.load()) != 0;) sleep_while(state_, state);
    caller_sleeps_.store(false);
}

}  // namespace phloem

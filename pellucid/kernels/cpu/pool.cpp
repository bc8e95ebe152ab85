#include "pool.h"

#include <pthread.h>

#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pellucid {

namespace {

// Long enough to bridge the host's work between two kernels, short enough to leave an idle machine alone.
constexpr int SPINS = 4000;
constexpr int FIELD = 32;
constexpr uint64_t MASK = (uint64_t{1} << FIELD) - 1;

static inline bool has_chunk(uint64_t state) { return (state & MASK) < state >> FIELD; }

static inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// Never destroyed: at exit its workers may still look at it. They don't follow a fork: the child gets its own pool.
Pool& Pool::instance() {
  static Pool* pool = new Pool;
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  return *pool;
}

// Takes and does chunks while there are any; false when there was none.
bool Pool::take_chunks() {
  bool any = false;
  while (has_chunk(state_.load(std::memory_order_relaxed))) {
    // By now it may be another job's word: what was taken is told by the value, not by the look before.
    const uint64_t taken = state_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_chunk(taken)) break;
    call_.load(std::memory_order_relaxed)(job_.load(std::memory_order_relaxed), taken & MASK);
    done_.fetch_add(1, std::memory_order_release);
    any = true;
  }
  return any;
}

void Pool::work(int index) {
  while (true) {
    // Beyond the number that is wanted now, sleep until it changes.
    for (int wanted = wanted_.load(); index >= wanted; wanted = wanted_.load()) wanted_.wait(wanted);
    for (int idle = 0; idle < SPINS && index < wanted_.load(std::memory_order_relaxed); ++idle) {
      if (take_chunks()) idle = 0;
      relax();
    }
    // Announce the sleep, then look once more: a job published since is either seen here or moves the ticket.
    const uint32_t ticket = wake_.load();
    sleeping_.fetch_add(1);
    if (!has_chunk(state_.load())) wake_.wait(ticket);
    sleeping_.fetch_sub(1);
  }
}

// Starts workers up to `wanted`, or as many as the system gives: a job needs none but its caller.
void Pool::start_workers(int wanted) {
  try {
    for (; workers_ < std::min(wanted, most_workers_); ++workers_) std::thread(&Pool::work, this, workers_).detach();
  } catch (const std::system_error&) {
    most_workers_ = workers_;
  }
}

void Pool::run_job(int threads, int64_t chunks, Call call, const void* job) {
  std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  if (!lock) {
    // Another engine of this process is at it: alone is quicker than in turns.
    for (int64_t i = 0; i < chunks; ++i) call(job, i);
    return;
  }
  start_workers(threads - 1);
  if (wanted_.load() != threads - 1) {
    wanted_.store(threads - 1);
    wanted_.notify_all();
  }
  done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  job_.store(job, std::memory_order_relaxed);
  state_.store((uint64_t)chunks << FIELD);
  if (sleeping_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  take_chunks();
  while (done_.load(std::memory_order_acquire) < chunks) relax();
}

}  // namespace pellucid

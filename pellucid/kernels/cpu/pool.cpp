#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pellucid {

namespace {

// Long enough to bridge the host's work between two kernels, short enough to leave an idle machine alone.
constexpr int SPINS = 4000;
constexpr int FIELD = 20;
constexpr uint64_t MASK = (uint64_t{1} << FIELD) - 1;

static inline bool has_chunk(uint64_t state) { return (state & MASK) < ((state >> FIELD) & MASK); }

static inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool& Pool::instance() {
  static Pool pool;
  return pool;
}

Pool::~Pool() {
  stop_ = true;
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
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
  while (!stop_) {
    for (int idle = 0; idle < SPINS && !stop_.load(std::memory_order_relaxed); ++idle) {
      if (index < wanted_.load(std::memory_order_relaxed) && take_chunks()) idle = 0;
      relax();
    }
    // Announce the sleep, then look once more: a job published since is either seen here or moves the ticket.
    const uint32_t ticket = wake_.load();
    sleeping_.fetch_add(1);
    if (!stop_ && !(index < wanted_.load() && has_chunk(state_.load()))) wake_.wait(ticket);
    sleeping_.fetch_sub(1);
  }
}

void Pool::run_job(int threads, int64_t chunks, Call call, const void* job) {
  std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
  if (!lock) {
    // Another engine of this process is at it: alone is quicker than in turns.
    for (int64_t i = 0; i < chunks; ++i) call(job, i);
    return;
  }
  while ((int)workers_.size() < threads - 1) workers_.emplace_back(&Pool::work, this, (int)workers_.size());
  wanted_.store(threads - 1, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  job_.store(job, std::memory_order_relaxed);
  const uint64_t number = (state_.load() >> (2 * FIELD)) + 1;
  state_.store(number << (2 * FIELD) | (uint64_t)chunks << FIELD);
  if (sleeping_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  take_chunks();
  while (done_.load(std::memory_order_acquire) < chunks) relax();
}

}  // namespace pellucid

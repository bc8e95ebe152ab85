// The thread pool of the CPU kernels.
//
// The calling thread works too, and waits only for chunks that somebody has begun: a worker that the system has put
// aside delays nobody. A machine that is busy with something else then costs its share, not a time slice a kernel
// (which is what a barrier over spinning threads costs).
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

namespace pellucid {

class Pool {
 public:
  // Calls task(begin, end) for consecutive ranges that cover [0, count), on up to `threads` threads, this one
  // included. Ranges hold at least `grain` items, and are several a thread so that a slow one can be helped.
  template <typename Task>
  static void run(int threads, int64_t count, int64_t grain, const Task& task) {
    const int64_t most = std::min(threads * CHUNKS_PER_THREAD, MAX_CHUNKS);
    const int64_t chunks = std::min(count / std::max<int64_t>(grain, 1), most);
    if (threads <= 1 || chunks <= 1) {
      if (count > 0) task(int64_t{0}, count);
      return;
    }
    const Job<Task> job{&task, count, chunks};
    instance().run_job(threads, chunks, &Job<Task>::call, &job);
  }

 private:
  static constexpr int64_t CHUNKS_PER_THREAD = 6, MAX_CHUNKS = 1 << 16;
  using Call = void (*)(const void*, int64_t);

  template <typename Task>
  struct Job {
    const Task* task;
    int64_t count, chunks;
    static void call(const void* job, int64_t i) {
      const Job& j = *static_cast<const Job*>(job);
      (*j.task)(j.count * i / j.chunks, j.count * (i + 1) / j.chunks);
    }
  };

  static Pool& instance();
  void run_job(int threads, int64_t chunks, Call call, const void* job);
  void start_workers(int wanted);
  [[noreturn]] void work(int index);
  bool take_chunks();

  // | chunks : 32 | next chunk : 32 |. They move as one word: whoever takes a chunk knows that it is real, and a job
  // can't end, nor its description change, before each taken chunk is done.
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> job_{nullptr};
  std::atomic<int> wanted_{0};  // workers that this job may use
  std::atomic<int> sleeping_{0};
  std::atomic<uint32_t> wake_{0};
  std::mutex busy_;
  // Under busy_:
  int workers_ = 0;
  int most_workers_ = std::numeric_limits<int>::max();
};

}  // namespace pellucid

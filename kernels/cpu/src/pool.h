// Threads that help the calling one through the phases of a step.
//
// A phase is a number of independent tasks; whoever has time takes the next one. The caller never waits for a helper
// to come, only for one that has taken a task: a helper that the operating system does not run costs nothing, and one
// whose core is wanted by another process leaves between two tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu_set.h"

// A task that reads less is not worth sharing: a few microseconds, as long as it takes to tell another core of it.
constexpr int64_t MIN_TASK_BYTES = 1 << 16;

// One core of the host, as all its workers see it (in memory that they share).
struct Core {
    std::atomic<uint64_t> homes;   // bit i: worker i has this core for itself, whenever it has work
    std::atomic<uint64_t> wanted;  // bit i: worker i, at home here, has work now
    std::atomic<uint64_t> urgent;  // bit i: somebody waits for each step of worker i; the same on all cores
    std::atomic<uint32_t> tenant;  // 1 + the worker that borrowed it, 0: nobody
    char apart[64 - 28];
};
static_assert(sizeof(Core) == 64, "a cache line each, and the layout that Python writes");

class Pool {
public:
    // cores: num_cores of them, which outlive the pool; worker: our bit in them;
    // borrows: whether we may use cores where others are at home while these have no work
    Pool(Core* cores, int num_cores, int worker, bool borrows);
    ~Pool();

    // From now on the thread that claims and begins, and the helpers, may be bound to the cores that they stand for.
    // Threads that it starts later are bound where it is.
    void allow_binding() { may_bind_ = true; }
    // A step follows soon: our home cores are wanted.
    void claim();
    // A step begins: our home cores are wanted, and helpers wake up.
    void begin();
    // There is no next step yet: others may use our home cores.
    void rest();

    // Run task(0) … task(num_tasks - 1), in any order, on the caller and the helpers; return when all are done.
    template <class Task>
    void run(int num_tasks, const Task& task) {
        if (num_tasks <= 1 || num_cores_ == 1) {
            for (int i = 0; i < num_tasks; i++) task(i);
            return;
        }
        run_phase(num_tasks, [](const void* context, int i) { (*static_cast<const Task*>(context))(i); }, &task);
    }

    // Whether another worker has work that our cores could help with, and that is not as urgent as ours.
    bool others_want() const;

    int num_threads() const { return num_cores_; }
    // Tasks that others than the caller have run, ever: shows whether lending works.
    uint64_t num_helped() const { return num_helped_.load(std::memory_order_relaxed); }

private:
    typedef void (*Call)(const void* context, int index);

    bool is_at_home_alone(int core) const;
    void bind_caller(int core);
    void run_phase(int num_tasks, Call call, const void* context);
    void await_helpers(int num_tasks);
    bool take();
    void help(int core);
    bool may_use(int core);
    void leave(int core);
    void sleep(int core, uint32_t until, std::atomic<int>& num_asleep, int64_t at_most_ns);

    Core* cores_;
    int num_cores_;
    uint64_t bit_;
    uint32_t tenant_;
    bool borrows_;
    std::atomic<int> own_{0};  // the core that the caller stands for, its first home: no helper runs there
    CpuSet cpus_;                          // of the process; core i is the i-th, where there are as many
    bool may_bind_ = false;
    int caller_bound_to_ = -1;             // a core, or -1: all
    std::atomic<bool> binds_helpers_{false};
    int64_t alone_until_ns_ = 0;  // the caller runs phases without helpers until then
    std::vector<std::thread> helpers_;

    // The phase under way. ticket: its number in the upper half, the next task in the lower; NO_TASK between phases,
    // also before the first one: a helper must never take a task of a phase that is still being written.
    static constexpr uint32_t NO_TASK = 0x7fffffff;
    alignas(64) std::atomic<uint64_t> ticket_{NO_TASK};
    std::atomic<int> num_tasks_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};  // steps begun
    std::atomic<uint32_t> parked_{0};
    std::atomic<bool> is_resting_{true};
    std::atomic<int> num_idle_{0}, num_away_{0};  // helpers that sleep, since there is no work; since they must
    std::atomic<bool> is_closing_{false};
    std::atomic<uint64_t> num_helped_{0};
};

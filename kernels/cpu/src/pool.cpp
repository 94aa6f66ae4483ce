#include "pool.h"

#include <algorithm>

#include "futex.h"

namespace {

// How long a helper looks for work before it sleeps until there is some: longer than the gap between two steps.
constexpr int64_t SPIN_NS = 1'000'000;
// How often one that must stay away in the middle of a step looks whether it may come back.
constexpr int64_t AWAY_NS = 500'000;
// How often the helper of the core where the caller runs looks whether that has changed.
constexpr int64_t PARKED_NS = 100'000'000;

// A wait for a helper that means that others need its core for long, not just the gateway for a moment. The caller then
// works alone for as long as it waited: on a crowded machine a step loses half, not a time slice in every phase.
constexpr int64_t STALL_NS = 2'000'000;

}  // namespace

Pool::Pool(Core* cores, int num_cores, int worker, bool borrows)
    : cores_(cores),
      num_cores_(num_cores),
      bit_(uint64_t(1) << worker),
      tenant_(uint32_t(worker) + 1),
      borrows_(borrows) {
    // One for every core, since homes may change; that of the caller's own core sleeps.
    if (num_cores > 1)
        for (int core = 0; core < num_cores; core++) helpers_.emplace_back([this, core] { help(core); });
}

Pool::~Pool() {
    is_closing_ = true;
    epoch_.fetch_add(1);
    wake_all(epoch_, Among::Threads);
    parked_.store(1);
    wake_all(parked_, Among::Threads);
    for (auto& helper : helpers_) helper.join();
    rest();
}

void Pool::claim() {
    int own = -1;
    for (int core = 0; core < num_cores_; core++) {
        if (!(cores_[core].homes.load(std::memory_order_relaxed) & bit_)) continue;
        if (own < 0) own = core;
        if (!(cores_[core].wanted.load(std::memory_order_relaxed) & bit_)) cores_[core].wanted.fetch_or(bit_);
    }
    own_.store(std::max(own, 0), std::memory_order_relaxed);
    // A worker that wakes up on another's core puts that one's step off, and leaves its own to whoever borrowed it.
    bool binds = may_bind_ && cpus_.size() == num_cores_ && own >= 0 && is_at_home_alone(own);
    binds_helpers_.store(binds, std::memory_order_relaxed);
    bind_caller(binds ? own : -1);
}

// Whether there are other workers, but none at home here.
bool Pool::is_at_home_alone(int core) const {
    uint64_t all = 0;
    for (int i = 0; i < num_cores_; i++) all |= cores_[i].homes.load(std::memory_order_relaxed);
    return all != bit_ && cores_[core].homes.load(std::memory_order_relaxed) == bit_;
}

void Pool::bind_caller(int core) {
    if (core == caller_bound_to_) return;
    cpus_.bind(core);
    caller_bound_to_ = core;
}

void Pool::begin() {
    claim();
    is_resting_.store(false);
    epoch_.fetch_add(1);
    if (num_idle_.load() + num_away_.load() > 0) wake_all(epoch_, Among::Threads);
}

void Pool::rest() {
    is_resting_.store(true);
    for (int core = 0; core < num_cores_; core++) {
        if (cores_[core].wanted.load(std::memory_order_relaxed) & bit_) cores_[core].wanted.fetch_and(~bit_);
    }
}

void Pool::run_phase(int num_tasks, Call call, const void* context) {
    if (alone_until_ns_) {
        for (int i = 0; i < num_tasks; i++) call(context, i);
        if (now_ns() > alone_until_ns_) alone_until_ns_ = 0;
        return;
    }
    num_done_.store(0, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_release);
    call_.store(call, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    uint32_t phase = uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(uint64_t(phase) << 32, std::memory_order_release);
    if (num_idle_.load() > 0) wake_all(epoch_, Among::Threads);
    while (take()) {
    }
    await_helpers(num_tasks);
    // Helpers that look now see no task left: the next phase has another number.
    ticket_.store(uint64_t(phase) << 32 | NO_TASK, std::memory_order_release);
}

void Pool::await_helpers(int num_tasks) {
    int64_t waiting_since = 0;
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_tasks; spins++) {
        if (spins < 1000) {
            relax();
        } else {
            if (waiting_since == 0) waiting_since = now_ns();
            std::this_thread::yield();  // whoever has the last task may need this very core
        }
    }
    if (!waiting_since) return;
    // No task takes this long: its helper was put off its core, and would be again if it were asked again at once.
    int64_t now = now_ns(), waited = now - waiting_since;
    if (waited > STALL_NS) alone_until_ns_ = now + waited;
}

// Run one task of the phase under way. Returns false when there is none left.
bool Pool::take() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    // These are of the ticket's phase only if it has not changed since, which the exchange proves.
    int num_tasks = num_tasks_.load(std::memory_order_acquire);
    Call call = call_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    uint32_t phase = uint32_t(ticket >> 32);
    do {
        if (uint32_t(ticket >> 32) != phase || int(uint32_t(ticket)) >= num_tasks) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
    call(context, int(uint32_t(ticket)));
    num_done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
}

bool Pool::others_want() const {
    for (int core = 0; core < num_cores_; core++) {
        uint64_t patient = ~(cores_[core].urgent.load(std::memory_order_relaxed) | bit_);
        if (cores_[core].wanted.load(std::memory_order_relaxed) & patient) return true;
    }
    return false;
}

bool Pool::may_use(int core) {
    Core& at = cores_[core];
    if (at.homes.load(std::memory_order_relaxed) & bit_) return true;
    if (!borrows_ || at.wanted.load(std::memory_order_relaxed)) {
        leave(core);
        return false;
    }
    uint32_t tenant = at.tenant.load(std::memory_order_relaxed);
    return tenant == tenant_ || (tenant == 0 && at.tenant.compare_exchange_strong(tenant, tenant_));
}

void Pool::leave(int core) {
    uint32_t tenant = tenant_;
    cores_[core].tenant.compare_exchange_strong(tenant, 0);
}

// until: the step that it waits for is another one than this; num_asleep: where it is counted meanwhile.
void Pool::sleep(int core, uint32_t until, std::atomic<int>& num_asleep, int64_t at_most_ns) {
    leave(core);
    num_asleep.fetch_add(1);
    if (!is_closing_) wait_while(epoch_, until, at_most_ns, Among::Threads);
    num_asleep.fetch_sub(1);
}

void Pool::help(int core) {
    uint32_t epoch = epoch_.load();
    int64_t last_task = now_ns();
    bool is_bound = false;
    while (!is_closing_) {
        if (is_bound != binds_helpers_.load(std::memory_order_relaxed)) {
            is_bound = !is_bound;
            cpus_.bind(is_bound ? core : -1);
        }
        if (core == own_.load(std::memory_order_relaxed)) {
            wait_while(parked_, 0, PARKED_NS, Among::Threads);
        } else if (is_resting_.load(std::memory_order_relaxed) && epoch_.load() == epoch &&
                   (now_ns() - last_task > SPIN_NS || !may_use(core))) {
            sleep(core, epoch, num_idle_, 0);
            last_task = now_ns();
        } else if (!may_use(core)) {
            epoch = epoch_.load();
            sleep(core, epoch, num_away_, AWAY_NS);
            last_task = now_ns();
        } else if (epoch_.load(std::memory_order_relaxed) == epoch && now_ns() - last_task > SPIN_NS) {
            sleep(core, epoch, num_idle_, 0);
            last_task = now_ns();
        } else if (take()) {
            num_helped_.fetch_add(1, std::memory_order_relaxed);
            last_task = now_ns();
            epoch = epoch_.load(std::memory_order_relaxed);
        } else if (uint32_t now = epoch_.load(std::memory_order_relaxed); now != epoch) {
            epoch = now;
            last_task = now_ns();
        } else {
            relax();
        }
    }
    leave(core);
}

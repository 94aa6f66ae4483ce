// The CPUs that a thread may run on.
#pragma once

#include <sched.h>

class CpuSet {
public:
    // Those of the calling thread; none if there are more than the system's set has room for.
    CpuSet() {
        if (sched_getaffinity(0, sizeof(cpus_), &cpus_) != 0) CPU_ZERO(&cpus_);
    }

    int size() const { return CPU_COUNT(&cpus_); }

    // Let the calling thread run on the index-th of them only; index -1: on all. Whoever may not, stays where it is.
    void bind(int index) const {
        cpu_set_t only = cpus_;
        for (int cpu = 0, left = index; index >= 0 && cpu < CPU_SETSIZE; cpu++) {
            if (CPU_ISSET(cpu, &cpus_) && left-- != 0) CPU_CLR(cpu, &only);
        }
        sched_setaffinity(0, sizeof(only), &only);
    }

private:
    cpu_set_t cpus_;
};

// Waiting: for a moment by looking again, for longer by a sleep until a word changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

// Who shares the word: the threads of this process, or whoever maps its memory.
enum class Among { Threads = FUTEX_PRIVATE_FLAG, Processes = 0 };

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// May return at any time; at_most_ns: 0 is for ever.
inline void wait_while(std::atomic<uint32_t>& word, uint32_t value, int64_t at_most_ns, Among among) {
    timespec timeout{at_most_ns / 1'000'000'000, at_most_ns % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT | int(among), value, at_most_ns ? &timeout : nullptr, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>& word, Among among) {
    syscall(SYS_futex, &word, FUTEX_WAKE | int(among), INT_MAX, nullptr, nullptr, 0);
}

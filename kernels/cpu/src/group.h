// Collectives of processes of one host, over memory that they share: see kernels/cpu/group.py.
//
// Each rank has two halves of memory that it writes and the others read, in turn. What is exchanged is cut into chunks
// that fit a half; for each, a rank fills its half, arrives, and waits until all have arrived. That is one barrier a
// chunk, and enough: a half is filled again two chunks later, after its rank has passed the barrier between the two, at
// which all others arrived only after they had read the half.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "futex.h"
#include "vec.h"

// One rank as the others see it.
struct GroupRank {
    alignas(64) std::atomic<uint32_t> arrived;  // chunks of it that are in its halves, ever; it wraps
    std::atomic<uint32_t> num_waiting;          // ranks that sleep until `arrived` changes
    alignas(64) std::atomic<uint64_t> beat_ns;  // Python's alone
};
static_assert(sizeof(GroupRank) == 128, "two cache lines, and the layout that Python has");

// What Python passes; library.py has the same fields in the same order.
struct Group {
    std::atomic<uint32_t>* is_aborted;
    GroupRank* ranks;    // [size]
    char* halves;        // [size, 2, half_bytes]
    int64_t half_bytes;  // a multiple of a cache line
    int32_t rank, size;
    int32_t spin_ns;  // how long to look for a rank before sleeping until it comes
};

// How long a rank sleeps before it looks whether the group was aborted.
constexpr int64_t ABORT_LOOK_NS = 50'000'000;

inline bool has_arrived(const Group& group, int rank, uint32_t chunk) {
    return int32_t(group.ranks[rank].arrived.load(std::memory_order_acquire) - chunk) >= 0;
}

inline void arrive(Group& group, uint32_t chunk) {
    GroupRank& own = group.ranks[group.rank];
    // Both in one order for all: a rank that is not counted yet sees the new value instead of falling asleep.
    own.arrived.store(chunk);
    if (own.num_waiting.load()) wake_all(own.arrived, Among::Processes);
}

// Whether the rank arrived, and not the end of the time to spin.
inline bool spin_until_arrived(const Group& group, int rank, uint32_t chunk) {
    for (int64_t until = now_ns() + group.spin_ns; now_ns() < until;) {
        for (int spins = 0; spins < 16; spins++) {
            if (has_arrived(group, rank, chunk)) return true;
            relax();
        }
    }
    return false;
}

// Returns false when the group is aborted.
inline bool await_rank(Group& group, int rank, uint32_t chunk) {
    if (has_arrived(group, rank, chunk)) return true;
    if (group.spin_ns && spin_until_arrived(group, rank, chunk)) return true;
    GroupRank& awaited = group.ranks[rank];
    while (!group.is_aborted->load(std::memory_order_relaxed)) {
        awaited.num_waiting.fetch_add(1);
        uint32_t seen = awaited.arrived.load();
        if (int32_t(seen - chunk) < 0) wait_while(awaited.arrived, seen, ABORT_LOOK_NS, Among::Processes);
        awaited.num_waiting.fetch_sub(1);
        if (has_arrived(group, rank, chunk)) return true;
    }
    return false;
}

// The half of each rank in which a chunk lies.
struct Parts {
    char* first;
    int64_t rank_bytes;

    float* operator[](int rank) const { return (float*)(first + rank * rank_bytes); }
};

// Exchange a chunk: fill(half) writes our part, take(parts) reads those of all. Returns false when the group is
// aborted.
template <class Fill, class Take>
bool exchange(Group& group, const Fill& fill, const Take& take) {
    if (group.is_aborted->load(std::memory_order_relaxed)) return false;
    const uint32_t chunk = group.ranks[group.rank].arrived.load(std::memory_order_relaxed) + 1;
    const Parts parts{group.halves + chunk % 2 * group.half_bytes, 2 * group.half_bytes};
    fill(parts[group.rank]);
    arrive(group, chunk);
    for (int rank = 0; rank < group.size; rank++)
        if (!await_rank(group, rank, chunk)) return false;
    take(parts);
    return true;
}

// In order of ranks: all of them get the same bits.
inline void add_parts(const Parts& parts, int size, float* out, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        f32x16 sum = load<f32x16>(parts[0] + i);
        for (int rank = 1; rank < size; rank++) sum += load<f32x16>(parts[rank] + i);
        store(out + i, sum);
    }
    for (; i < count; i++) {
        float sum = parts[0][i];
        for (int rank = 1; rank < size; rank++) sum += parts[rank][i];
        out[i] = sum;
    }
}

// x, [count], becomes the sum over the ranks. Returns false when the group is aborted: x is then neither.
inline bool all_reduce(Group& group, float* x, int64_t count) {
    const int64_t most = group.half_bytes / int64_t(sizeof(float));
    for (int64_t begin = 0; begin < count; begin += most) {
        const int64_t size = std::min(most, count - begin);
        auto fill = [&](float* half) { std::memcpy(half, x + begin, size * sizeof(float)); };
        auto take = [&](const Parts& parts) { add_parts(parts, group.size, x + begin, size); };
        if (!exchange(group, fill, take)) return false;
    }
    return true;
}

// Values begin … end - 1 of a matrix of so many columns, to its place in one whose rows are `stride` values apart.
inline void copy_values(const float* values, int64_t begin, int64_t end, int64_t columns, float* out, int64_t stride) {
    while (begin < end) {
        const int64_t column = begin % columns, count = std::min(end - begin, columns - column);
        std::memcpy(out + begin / columns * stride + column, values, count * sizeof(float));
        values += count;
        begin += count;
    }
}

// x: [num_rows, num_columns[rank]];  out, of rank 0: [num_rows, sum of num_columns]. Returns false when the group is
// aborted.
inline bool gather(Group& group, const float* x, int64_t num_rows, const int64_t* num_columns, float* out) {
    const int64_t most = group.half_bytes / int64_t(sizeof(float)), own = num_rows * num_columns[group.rank];
    const int64_t largest = num_rows * *std::max_element(num_columns, num_columns + group.size);
    const int64_t stride = std::accumulate(num_columns, num_columns + group.size, int64_t(0));
    for (int64_t begin = 0; begin < largest; begin += most) {
        auto end = [&](int64_t count) { return std::min(begin + most, count); };
        auto fill = [&](float* half) {
            if (group.rank != 0 && begin < own) std::memcpy(half, x + begin, (end(own) - begin) * sizeof(float));
        };
        auto take = [&](const Parts& parts) {
            if (group.rank != 0) return;
            float* to = out;
            for (int rank = 0; rank < group.size; to += num_columns[rank++]) {
                const float* values = rank == 0 ? x + begin : parts[rank];
                copy_values(values, begin, end(num_rows * num_columns[rank]), num_columns[rank], to, stride);
            }
        };
        if (!exchange(group, fill, take)) return false;
    }
    return true;
}

// What a step is given, and what all blocks do with it: memory to work in, and rows of hidden states.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <new>

#include "linear.h"

// What Python passes; ops.py has the same fields in the same order.
struct Norm {
    const float* weight;
    int64_t size;
    float eps;
};

// One row a token: decode rows first, one a sequence, then the prefill rows.
struct Batch {
    int32_t num_tokens, num_decode, num_prefill;  // rows; of those decode's; sequences of prefill
    const int64_t* positions;                     // [num_tokens]
    const int64_t* slots;                         // [num_tokens]
    const int32_t* decode_tables;                 // [num_decode, decode_stride]
    const int32_t* decode_lens;                   // [num_decode]
    const int32_t* prefill_tables;                // [num_prefill, prefill_stride]
    const int32_t* prefill_lens;                  // [num_prefill]
    const int32_t* cu_seqlens;                    // [num_prefill + 1]
    int64_t decode_stride, prefill_stride;
};

struct AttentionBlock {
    Norm norm;
    Linear qkv, out;
    const float* cos_sin;  // [max_positions, head_dim]
    int32_t num_heads, num_kv_heads, head_dim;
    float scale;
};

struct MlpBlock {
    Norm norm;
    Linear gate_up, down;
};

// Scratch memory of a worker, grown on demand, in huge pages where the system has them.
class Workspace {
public:
    ~Workspace() {
        for (auto& part : parts_) munmap(part.data, part.size);
    }

    template <class T>
    T* get(int part, int64_t count) {
        size_t size = (count * sizeof(T) + HUGE - 1) / HUGE * HUGE;
        Part& at = parts_[part];
        if (at.size < size) {
            if (at.data) munmap(at.data, at.size);
            at.data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            at.size = at.data == MAP_FAILED ? 0 : size;
            if (at.data == MAP_FAILED) {
                at.data = nullptr;
                throw std::bad_alloc();
            }
            madvise(at.data, size, MADV_HUGEPAGE);
        }
        return static_cast<T*>(at.data);
    }

private:
    static constexpr size_t HUGE = 1 << 21;
    struct Part {
        void* data = nullptr;
        size_t size = 0;
    };
    Part parts_[8];
};

// What blocks spend the caller's time on; library.py has the same in the same order.
enum class Phase { Norm, Qkv, RopeAndCache, Attention, Out, GateUp, Down, AllReduce, Head };

// Adds the time since the last phase's end to the phase that ends. While nobody measures it is a comparison.
class Laps {
public:
    explicit Laps(uint64_t* phase_ns) : phase_ns_(phase_ns), last_ns_(phase_ns ? now_ns() : 0) {}

    void end(Phase phase) {
        if (!phase_ns_) return;
        uint64_t now = now_ns();
        phase_ns_[int(phase)] += now - last_ns_;
        last_ns_ = now;
    }

private:
    static uint64_t now_ns() {
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

    uint64_t* phase_ns_;
    uint64_t last_ns_;
};

struct Worker {
    Pool pool;
    Workspace workspace;
    uint64_t* phase_ns = nullptr;  // a sum for each Phase, of whoever measures
    Worker(Core* cores, int num_cores, int worker, bool borrows) : pool(cores, num_cores, worker, borrows) {}
};

enum Part { NORMED, QKV, Q, ATTENDED, GATED, PARTIAL };

// Rows that a task of row-wise work takes: some 10 us each.
constexpr int ROWS_A_TASK = 16;

template <class Task>
void run_rows(Pool& pool, int num_rows, const Task& task) {
    int num_tasks = (num_rows + ROWS_A_TASK - 1) / ROWS_A_TASK;
    pool.run(num_tasks, [&](int index) {
        int end = std::min(num_rows, (index + 1) * ROWS_A_TASK);
        for (int row = index * ROWS_A_TASK; row < end; row++) task(row);
    });
}

// Zeros from the end of each row's `size` values to `padded` of them.
template <class T>
void pad_rows(T* rows, int count, int64_t size, int64_t padded, int64_t stride) {
    if (padded == size) return;
    for (int row = 0; row < count; row++)
        std::memset((void*)(rows + row * stride + size), 0, (padded - size) * sizeof(T));
}

// residual += x; out = weight * residual / rms(residual), padded with zeros.
template <class T>
void add_and_normalise(const Norm& norm, const float* x, float* residual, T* out, int64_t padded) {
    int64_t n = norm.size, i = 0;
    f32x16 squares{};
    float rest = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x16 value = load<f32x16>(residual + i);
        if (x) store(residual + i, value += load<f32x16>(x + i));
        squares += value * value;
    }
    for (; i < n; i++) {
        if (x) residual[i] += x[i];
        rest += residual[i] * residual[i];
    }
    float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(n) + norm.eps);
    for (i = 0; i + LANES <= n; i += LANES)
        Words<T>::store_row(out + i, load<f32x16>(norm.weight + i) * (load<f32x16>(residual + i) * scale));
    for (; i < n; i++) out[i] = from_float<T>(norm.weight[i] * (residual[i] * scale));
    std::memset((void*)(out + n), 0, (padded - n) * sizeof(T));
}

template <class T>
Rows normalise(Worker& worker, const Norm& norm, const float* x, float* residual, int count, int64_t padded) {
    const int64_t stride = row_stride<T>(padded);
    T* out = worker.workspace.get<T>(NORMED, count * stride);
    run_rows(worker.pool, count, [&](int row) {
        const float* added = x ? x + row * norm.size : nullptr;
        add_and_normalise(norm, added, residual + row * norm.size, out + row * stride, padded);
    });
    return {(const uint32_t*)out, stride / Words<T>::PAIR, count};
}

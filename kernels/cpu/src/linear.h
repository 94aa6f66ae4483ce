// x @ weight.T for packed weights of every format, as tasks of a pool.
//
// A panel is 16 output columns: [in / PAIR][16] words, so a row of words meets one broadcast word of x. AMX reads the
// same rows as its tiles. Columns past the last one are zero.
#pragma once

#include <algorithm>
#include <bit>
#include <optional>

#include "pool.h"
#include "vec.h"

enum Format : int32_t { PLAIN = 0, INT8 = 1, INT4 = 2 };

// What Python lays out; see ops.py.
struct Linear {
    const uint32_t* panels;
    const float* bias;       // [out] or null
    int64_t in, out;
    int32_t format;

    int num_panels() const { return int((out + LANES - 1) / LANES); }
};

// Rows of x as words.
struct Rows {
    const uint32_t* words;
    int64_t stride;  // words from one row to the next
    int count;
    const uint32_t* row(int index) const { return words + index * stride; }
};

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Values of type T from one row to the next: an odd number of cache lines. With a power of two, or a large part of one,
// rows would share a few sets of the first cache.
template <class T>
int64_t row_stride(int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return (round_up(size, LINE) / LINE | 1) * LINE;
}

// Rows of x that are multiplied by a panel before the next one is: as many as half of a second cache of 2 MB holds,
// since panels come from memory once for all of them.
constexpr int MAX_BLOCK_ROWS = 512;
constexpr int64_t BLOCK_BYTES = 800 << 10;
inline int rows_a_block(int64_t row_bytes) {
    return int(std::clamp<int64_t>(BLOCK_BYTES / row_bytes / 32 * 32, 32, MAX_BLOCK_ROWS));
}

// How far ahead of its use a weight is fetched, into the second cache: 2 KB. For one row, 18.2 GB/s of 256 MB on one
// core of a Xeon 6 (2026-12); 17.7 at half of it, 16.6 at twice.
constexpr int64_t AHEAD_WORDS = 512;

template <class T, int MR, int NP>
inline void multiply(const Rows& x, int row, const uint32_t* panel, int64_t panel_words, int64_t k_words,
                     f32x16 (&acc)[MR][NP]) {
    for (auto& line : acc)
        for (auto& value : line) value = f32x16{};
    const uint32_t* rows[MR];
    for (int r = 0; r < MR; r++) rows[r] = x.row(row + r);
    for (int64_t k = 0; k < k_words; k++) {
        u32x16 w[NP];
        for (int p = 0; p < NP; p++) {
            const uint32_t* at = panel + p * panel_words + k * LANES;
            w[p] = load<u32x16>(at);
            __builtin_prefetch(at + AHEAD_WORDS, 0, 2);
        }
        for (int r = 0; r < MR; r++) {
            u32x16 broadcast = splat_word(rows[r][k]);
            for (int p = 0; p < NP; p++) acc[r][p] = Words<T>::dot(acc[r][p], w[p], broadcast);
        }
    }
}

// One row by one panel, a single stream of memory: sums are kept apart by input, as many as hide a product's latency.
template <class T>
inline f32x16 multiply_stream(const uint32_t* x, const uint32_t* panel, int64_t k_words) {
    constexpr int SUMS = fitting(8, 1);
    f32x16 acc[SUMS] = {};
    int64_t k = 0;
    for (; k + SUMS <= k_words; k += SUMS)
        for (int i = 0; i < SUMS; i++) {
            const uint32_t* at = panel + (k + i) * LANES;
            __builtin_prefetch(at + AHEAD_WORDS, 0, 2);
            acc[i] = Words<T>::dot(acc[i], load<u32x16>(at), splat_word(x[k + i]));
        }
    for (; k < k_words; k++) acc[0] = Words<T>::dot(acc[0], load<u32x16>(panel + k * LANES), splat_word(x[k]));
    for (int count = SUMS / 2; count > 0; count /= 2)
        for (int i = 0; i < count; i++) acc[i] += acc[i + count];
    return acc[0];
}

#include "quantised.h"

// Where results go. emit(row, panel, values): values of NP neighbouring panels; NP is even where Pairs says so.
// fetch(row, panel): the lines that they go to; a store that misses the caches would be waited for.
struct StoreFloat {
    static constexpr bool PAIRS = false;
    float* out;
    const Linear& linear;

    template <int NP>
    void fetch(int row, int panel) const {
        for (int p = 0; p < NP; p++) __builtin_prefetch(out + row * linear.out + (panel + p) * LANES, 1);
    }

    template <int NP>
    void emit(int row, int panel, const f32x16 (&values)[NP]) const {
        for (int p = 0; p < NP; p++) {
            int64_t column = int64_t(panel + p) * LANES;
            int64_t count = std::min<int64_t>(LANES, linear.out - column);
            f32x16 value = values[p];
            if (linear.bias) value += load_some(linear.bias + column, count);
            float* to = out + row * linear.out + column;
            if (count == LANES)
                store(to, value);
            else
                std::memcpy(to, &value, count * sizeof(float));
        }
    }

    static f32x16 load_some(const float* from, int64_t count) {
        f32x16 value{};
        std::memcpy(&value, from, count * sizeof(float));
        return value;
    }
};

// silu<T>(gate) * up, of panels that alternate between the two.
template <class T>
struct StoreGated {
    static constexpr bool PAIRS = true;
    T* out;
    int64_t stride;  // values from one row to the next, a multiple of 16: the rest of the last panel is zero
    const Linear& linear;

    template <int NP>
    void fetch(int row, int panel) const {
        __builtin_prefetch(out + row * stride + int64_t(panel) / 2 * LANES, 1);
    }

    template <int NP>
    void emit(int row, int panel, const f32x16 (&values)[NP]) const {
        static_assert(NP % 2 == 0, "gate and up come together");
        for (int p = 0; p < NP; p += 2) {
            int64_t column = int64_t(panel + p) / 2 * LANES;
            f32x16 gate = values[p], up = values[p + 1];
            if (linear.bias) {
                gate += load<f32x16>(linear.bias + (panel + p) * LANES);
                up += load<f32x16>(linear.bias + (panel + p + 1) * LANES);
            }
            Words<T>::store_row(out + row * stride + column, silu<T>(gate) * up);
        }
    }
};

#ifdef __AMX_BF16__
#include "linear_amx.h"
#else
constexpr bool HAS_AMX = false;
template <class T, class Store>
void multiply_tiles(const Rows&, int, int, const uint32_t*, int64_t, int64_t, int, int, const Store&) {}
#endif

template <class T, int NP, class Store>
inline void multiply_rows(const Rows& x, int first_row, int end_row, const uint32_t* panels, int64_t panel_words,
                          int64_t k_words, int panel, const Store& store) {
    auto block = [&]<int MR>(int row) {
        f32x16 acc[MR][NP];
        for (int r = 0; r < MR; r++) store.template fetch<NP>(row + r, panel);
        multiply<T, MR, NP>(x, row, panels, panel_words, k_words, acc);
        for (int r = 0; r < MR; r++) store.template emit<NP>(row + r, panel, acc[r]);
    };
    constexpr int MR = std::clamp(MAX_SUMS / NP, 1, NP >= 4 ? 4 : NP == 2 ? 10 : 12);
    int row = first_row;
    for (; row + MR <= end_row; row += MR) block.template operator()<MR>(row);
    if constexpr (MR > 4)
        for (; row + 4 <= end_row; row += 4) block.template operator()<4>(row);
    if constexpr (MR > 2)
        for (; row + 2 <= end_row; row += 2) block.template operator()<2>(row);
    for (; row < end_row; row++) block.template operator()<1>(row);
}

// Panels [panel, end) for rows [first_row, end_row); words of `panels` begin at `panel`.
template <class T, class Store>
void multiply_panels(const Rows& x, int first_row, int end_row, const uint32_t* panels, int64_t k_words, int panel,
                     int end, const Store& store) {
    int64_t panel_words = k_words * LANES;
    auto at = [&](int p) { return panels + (p - panel) * panel_words; };
    int num_rows = end_row - first_row, p = panel;
    if (HAS_AMX && Words<T>::PAIR == 2 && num_rows >= 4 && k_words % 16 == 0) {
        multiply_tiles<T>(x, first_row, end_row, panels, panel_words, k_words, panel, end, store);
        return;
    }
    if (Words<T>::PAIR == 2 && num_rows == 1) {  // fp32 adds in one order, however many rows there are
        constexpr int NP = Store::PAIRS ? 2 : 1;
        for (; p < end; p += NP) {
            f32x16 values[NP];
            for (int i = 0; i < NP; i++) values[i] = multiply_stream<T>(x.row(first_row), at(p + i), k_words);
            store.template emit<NP>(first_row, p, values);
        }
        return;
    }
    if (MAX_SUMS >= 16 && num_rows <= 4)
        for (; p + 4 <= end; p += 4)
            multiply_rows<T, 4>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
    for (; p + 2 <= end; p += 2) multiply_rows<T, 2>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
    if constexpr (!Store::PAIRS)
        for (; p < end; p++) multiply_rows<T, 1>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
}

// Up to this many rows, products with the integers beat expanding panels first. In bytes, on one core of an EPYC 9004
// (2026-12), 576 inputs and 3,072 outputs: 8 rows 266 and 361 us in int8, 234 and 298 in int4; 16 rows 514 and 533, 393
// and 463; 24 rows 683 and 647, 614 and 574. With AMX, and in fp32, as measured with the latter on a Xeon 6.
#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
constexpr int MAX_FEW_ROWS = 16;
#else
constexpr int MAX_FEW_ROWS = 4;
#endif

template <Format F, int NP, class Store>
inline void multiply_few(const FewRows& x, const Linear& linear, int panel, const Store& store) {
    auto block = [&]<int MR>(int row) {
        f32x16 acc[MR][NP];
        if constexpr (MR == 1 || MR * NP > MAX_SUMS) {  // one stream of memory after the other
            for (int p = 0; p < NP; p++) {
                f32x16 one[MR][1];
                multiply_integers<F>(x, row, panel_at<F>(linear, panel + p), one);
                for (int r = 0; r < MR; r++) acc[r][p] = one[r][0];
            }
        } else {
            multiply_integers<F>(x, row, panel_at<F>(linear, panel), acc);
        }
        for (int r = 0; r < MR; r++) store.template emit<NP>(row + r, panel, acc[r]);
    };
    int row = 0;
    for (; row + 4 <= x.count; row += 4) block.template operator()<4>(row);
    switch (x.count - row) {
        case 1: return block.template operator()<1>(row);
        case 2: return block.template operator()<2>(row);
        case 3: return block.template operator()<3>(row);
    }
}

template <Format F, class Store>
void multiply_quantised_panels(const Rows& x, const std::optional<FewRows>& few, const Linear& linear, int first_row,
                               int end_row, int panel, int end, const Store& store) {
    if (few) {
        int p = panel;
        for (; p + 2 <= end; p += 2) multiply_few<F, 2>(*few, linear, p, store);
        if constexpr (!Store::PAIRS)
            for (; p < end; p++) multiply_few<F, 1>(*few, linear, p, store);
        return;
    }
    int64_t k_words = linear.in / 2;
    static thread_local std::vector<uint32_t> buffer;
    buffer.resize(2 * k_words * LANES + LANES);
    uint32_t* words = (uint32_t*)(((uintptr_t)buffer.data() + 63) & ~uintptr_t(63));
    for (int p = panel; p < end; p += 2) {
        int count = std::min(2, end - p);
        expand<F>(panel_at<F>(linear, p), count * linear.in / GROUP, words);
        multiply_panels<bf16>(x, first_row, end_row, words, k_words, p, p + count, store);
    }
}

// T: what x and plain weights are. Tasks are blocks of rows times runs of panels, some 20 to 100 us each.
template <class T, class Store>
void multiply_all(Pool& pool, const Rows& x, const Linear& linear, const Store& store) {
    const int block_rows = rows_a_block(linear.in * sizeof(T));
    const int num_panels = linear.num_panels(), num_row_blocks = (x.count + block_rows - 1) / block_rows;
    int64_t panel_bytes = linear.in * LANES * sizeof(T) * (x.count + 15) / 16;
    int least = int((MIN_TASK_BYTES + panel_bytes - 1) / panel_bytes + 7) / 8 * 8;
    int spread = std::clamp(num_panels / (8 * pool.num_threads()) / 8 * 8, 8, 64);
    int per_task = x.count <= 32 ? std::max(least, spread) : 8;
    int num_runs = (num_panels + per_task - 1) / per_task;
    std::optional<FewRows> few;
    if (linear.format != PLAIN && x.count <= MAX_FEW_ROWS)
        few = linear.format == INT8 ? FewRows::of<INT8>(x, linear.in) : FewRows::of<INT4>(x, linear.in);
    pool.run(num_row_blocks * num_runs, [&](int task) {
        int panel = task % num_runs * per_task, end = std::min(num_panels, panel + per_task);
        int row = task / num_runs * block_rows, end_row = std::min(x.count, row + block_rows);
        int64_t k_words = linear.in / Words<T>::PAIR;
        if (linear.format == PLAIN) {
            const uint32_t* panels = linear.panels + panel * k_words * LANES;
            multiply_panels<T>(x, row, end_row, panels, k_words, panel, end, store);
        } else if constexpr (Words<T>::PAIR == 2) {
            if (linear.format == INT8)
                multiply_quantised_panels<INT8>(x, few, linear, row, end_row, panel, end, store);
            else
                multiply_quantised_panels<INT4>(x, few, linear, row, end_row, panel, end, store);
        }
    });
}

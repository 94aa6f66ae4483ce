// x @ weight.T for packed weights of every format, as tasks of a pool.
//
// A panel is 16 output columns: [in / PAIR][16] words, so a row of words meets one broadcast word of x. AMX reads the
// same rows as its tiles. Columns past the last one are zero.
#pragma once

#include <algorithm>

#include "pool.h"
#include "vec.h"

enum Format : int32_t { PLAIN = 0, INT8 = 1, INT4 = 2 };
constexpr int GROUP = 32;  // inputs that share a scale

// What Python lays out; see ops.py.
struct Linear {
    const uint32_t* panels;
    const uint16_t* scales;  // fp16 [num_panels][in / GROUP][2: scale, offset][16]; null for PLAIN
    const float* bias;       // [out] or null
    int64_t in, out;
    int32_t format;

    int num_panels() const { return int((out + LANES - 1) / LANES); }
    int64_t num_groups() const { return in / GROUP; }
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
    constexpr int SUMS = 8;
    f32x16 acc[SUMS] = {};
    int64_t k = 0;
    for (; k + SUMS <= k_words; k += SUMS)
        for (int i = 0; i < SUMS; i++) {
            const uint32_t* at = panel + (k + i) * LANES;
            __builtin_prefetch(at + AHEAD_WORDS, 0, 2);
            acc[i] = Words<T>::dot(acc[i], load<u32x16>(at), splat_word(x[k + i]));
        }
    for (; k < k_words; k++) acc[0] = Words<T>::dot(acc[0], load<u32x16>(panel + k * LANES), splat_word(x[k]));
    return ((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7]));
}

inline f32x16 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    f32x16 value;
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)));
    std::memcpy(&value, &low, 32);
    std::memcpy((char*)&value + 32, &high, 32);
    return value;
#else
    f32x16 value;
    for (int i = 0; i < LANES; i++) value[i] = float(load<_Float16>(from + i));
    return value;
#endif
}

// Four bits a weight: rows of 16 words, a word a column with 8 consecutive inputs; the lower halves of the words have
// the even ones. 0x4300 is 128 as bf16, whose last mantissa bit is worth 1: or-ing in q makes exactly 128 + q.
inline u32x16 nibble_pair(u32x16 packed, int pair) { return (packed >> (4 * pair) & 0x000f000fu) | 0x43004300u; }

constexpr int NIBBLE_ROWS = 4;  // rows of words that a group of 32 inputs takes in one plane
template <Format F>
constexpr int PLANES = F == INT8 ? 2 : 1;  // int8 is a plane of lower and one of upper nibbles
template <Format F>
constexpr int64_t GROUP_WORDS = PLANES<F> * NIBBLE_ROWS * LANES;

// The same for few rows and quantised weights: products with the integers, scaled once a group.
// sums: [rows][num_groups], of each group's inputs in x
template <Format F, int MR, int NP>
inline void multiply_quantised(const Rows& x, int row, const float* sums, const Linear& linear, int panel,
                               f32x16 (&acc)[MR][NP]) {
    int64_t num_groups = linear.num_groups();
    for (auto& line : acc)
        for (auto& value : line) value = f32x16{};
    const uint32_t* rows[MR];
    for (int r = 0; r < MR; r++) rows[r] = x.row(row + r);
    for (int64_t g = 0; g < num_groups; g++) {
        f32x16 part[PLANES<F>][MR][NP] = {};
        for (int i = 0; i < NIBBLE_ROWS; i++) {
            u32x16 packed[PLANES<F>][NP];
            for (int plane = 0; plane < PLANES<F>; plane++)
                for (int p = 0; p < NP; p++) {
                    const uint32_t* at = linear.panels + ((panel + p) * num_groups + g) * GROUP_WORDS<F> +
                                         (plane * NIBBLE_ROWS + i) * LANES;
                    packed[plane][p] = load<u32x16>(at);
                    __builtin_prefetch(at + 16 * LANES);
                }
            for (int j = 0; j < 4; j++)
                for (int r = 0; r < MR; r++) {
                    u32x16 broadcast = splat_word(rows[r][g * (GROUP / 2) + i * 4 + j]);
                    for (int plane = 0; plane < PLANES<F>; plane++)
                        for (int p = 0; p < NP; p++)
                            part[plane][r][p] =
                                Words<bf16>::dot(part[plane][r][p], nibble_pair(packed[plane][p], j), broadcast);
                }
        }
        for (int p = 0; p < NP; p++) {
            const uint16_t* scales = linear.scales + ((panel + p) * num_groups + g) * 2 * LANES;
            f32x16 scale = load_half(scales), offset = load_half(scales + LANES);
            // Each nibble came as 128 + q.
            f32x16 shift = offset - scale * (F == INT8 ? 128.0f * 17 : 128.0f);
            for (int r = 0; r < MR; r++) {
                f32x16 products = F == INT8 ? part[0][r][p] + part[PLANES<F> - 1][r][p] * 16.0f : part[0][r][p];
                acc[r][p] += scale * products + shift * sums[(row + r) * num_groups + g];
            }
        }
    }
}

// Quantised panels as bf16 words, for many rows: [num_panels][in / 2][16].
template <Format F>
void expand(const Linear& linear, int panel, int num_panels, uint32_t* to) {
    int64_t num_groups = linear.num_groups();
    for (int p = panel; p < panel + num_panels; p++)
        for (int64_t g = 0; g < num_groups; g++) {
            const uint32_t* from = linear.panels + (p * num_groups + g) * GROUP_WORDS<F>;
            const uint16_t* scales = linear.scales + (p * num_groups + g) * 2 * LANES;
            f32x16 scale = load_half(scales), offset = load_half(scales + LANES);
            for (int i = 0; i < NIBBLE_ROWS; i++)
                for (int j = 0; j < 4; j++, to += LANES) {
                    u32x16 q = load<u32x16>(from + i * LANES) >> (4 * j);
                    u32x16 low = q & 15u, high = q >> 16 & 15u;
                    if (F == INT8) {
                        u32x16 upper = load<u32x16>(from + (NIBBLE_ROWS + i) * LANES) >> (4 * j);
                        low |= (upper & 15u) << 4;
                        high |= (upper >> 16 & 15u) << 4;
                    }
                    f32x16 first = __builtin_convertvector((i32x16)low, f32x16) * scale + offset;
                    f32x16 second = __builtin_convertvector((i32x16)high, f32x16) * scale + offset;
                    store(to, round_to_bf16(first) | round_to_bf16(second) << 16);
                }
        }
}

// Where results go. emit(row, panel, values): values of NP neighbouring panels; NP is even where Pairs says so.
struct StoreFloat {
    static constexpr bool PAIRS = false;
    float* out;
    const Linear& linear;

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
        multiply<T, MR, NP>(x, row, panels, panel_words, k_words, acc);
        for (int r = 0; r < MR; r++) store.template emit<NP>(row + r, panel, acc[r]);
    };
    constexpr int MR = NP >= 4 ? 4 : NP == 2 ? 10 : 12;
    int row = first_row;
    for (; row + MR <= end_row; row += MR) block.template operator()<MR>(row);
    for (; MR > 4 && row + 4 <= end_row; row += 4) block.template operator()<4>(row);
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
    if (num_rows <= 4)
        for (; p + 4 <= end; p += 4)
            multiply_rows<T, 4>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
    for (; p + 2 <= end; p += 2) multiply_rows<T, 2>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
    if constexpr (!Store::PAIRS)
        for (; p < end; p++) multiply_rows<T, 1>(x, first_row, end_row, at(p), panel_words, k_words, p, store);
}

template <Format F, int NP, class Store>
inline void multiply_few(const Rows& x, const float* sums, const Linear& linear, int panel, const Store& store) {
    auto block = [&]<int MR>(int row) {
        f32x16 acc[MR][NP];
        multiply_quantised<F, MR, NP>(x, row, sums, linear, panel, acc);
        for (int r = 0; r < MR; r++) store.template emit<NP>(row + r, panel, acc[r]);
    };
    int row = 0;
    for (; row + 2 <= x.count; row += 2) block.template operator()<2>(row);
    for (; row < x.count; row++) block.template operator()<1>(row);
}

// Up to this many rows, products with the integers beat expanding panels first.
constexpr int MAX_FEW_ROWS = 4;

template <Format F, class Store>
void multiply_quantised_panels(const Rows& x, const float* sums, const Linear& linear, int first_row, int end_row,
                               int panel, int end, const Store& store) {
    if (sums) {
        int p = panel;
        if (F == INT4 && x.count == 1)  // as many sums at a time as hide the latency of a product
            for (; p + 8 <= end; p += 8) multiply_few<F, 8>(x, sums, linear, p, store);
        for (; p + 4 <= end; p += 4) multiply_few<F, 4>(x, sums, linear, p, store);
        for (; p + 2 <= end; p += 2) multiply_few<F, 2>(x, sums, linear, p, store);
        if constexpr (!Store::PAIRS)
            for (; p < end; p++) multiply_few<F, 1>(x, sums, linear, p, store);
        return;
    }
    int64_t k_words = linear.in / 2;
    static thread_local std::vector<uint32_t> buffer;
    buffer.resize(2 * k_words * LANES + LANES);
    uint32_t* words = (uint32_t*)(((uintptr_t)buffer.data() + 63) & ~uintptr_t(63));
    for (int p = panel; p < end; p += 2) {
        int count = std::min(2, end - p);
        expand<F>(linear, p, count, words);
        multiply_panels<bf16>(x, first_row, end_row, words, k_words, p, p + count, store);
    }
}

inline std::vector<float> sum_groups(const Rows& x, int64_t num_groups) {
    std::vector<float> sums(x.count * num_groups);
    for (int r = 0; r < x.count; r++)
        for (int64_t g = 0; g < num_groups; g++) {
            u32x16 words = load<u32x16>(x.row(r) + g * (GROUP / 2));
            sums[r * num_groups + g] = sum(low_half(words) + high_half(words));
        }
    return sums;
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
    std::vector<float> sums;
    if (linear.format != PLAIN && x.count <= MAX_FEW_ROWS) sums = sum_groups(x, linear.num_groups());
    const float* few = sums.empty() ? nullptr : sums.data();
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

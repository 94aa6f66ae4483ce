// Attention of a few query rows over one head's paged keys and values, with an online softmax.
//
// In a block, a head's keys are [head_dim / PAIR][block_size] words and its values [block_size / PAIR][head_dim] words:
// one vector is 16 keys of one pair of dimensions, or 16 dimensions of one pair of keys.
// Source: FlashAttention-2 (2023), Flash-Decoding (2023).
#pragma once

#include <algorithm>
#include <limits>

#include "vec.h"

constexpr int MAX_ROWS = 8;       // query rows that share a pass over the keys
constexpr int SCORE_ROWS = fitting(8, 1), VALUE_ROWS = fitting(4, 1);  // of these, that have their sums in registers
constexpr int TILE_KEYS = 128;    // keys between two corrections of the running maximum
constexpr int MAX_HEAD_DIM = 256;

// One layer of the cache: where one head's keys, and its values, of a block are. Strides and offset are bytes.
struct Cache {
    char* data;
    int64_t block_stride, head_stride, values_offset;  // the last one from keys to values
    int32_t num_kv_heads, block_size, head_dim;

    const uint32_t* keys(int block, int head) const {
        return (const uint32_t*)(data + block * block_stride + head * head_stride);
    }
    const uint32_t* values(int block, int head) const {
        return (const uint32_t*)(data + block * block_stride + head * head_stride + values_offset);
    }

    // From a position on, within its block.
    const uint32_t* keys_at(const int32_t* table, int head, int position) const {
        return keys(table[position / block_size], head) + position % block_size;
    }
    template <int PAIR>
    const uint32_t* values_at(const int32_t* table, int head, int position) const {
        return values(table[position / block_size], head) + position % block_size / PAIR * head_dim;
    }
};

// Query rows: words of each, keys that it may see, and its running result. Scores and maxima are logarithms to base 2.
struct QueryRows {
    const uint32_t* q[MAX_ROWS];
    int limits[MAX_ROWS];
    float* out[MAX_ROWS];  // [head_dim], not yet divided by the sum
    float max[MAX_ROWS];
    f32x16 sum[MAX_ROWS];  // one sum a lane: added up at the end
};

// Products of R rows with N vectors of 16 keys, from `key` of the tile on: enough sums to hide a product's latency.
// What lies a tile ahead is fetched meanwhile: a head's part of a block is too short for the machine to do it alone.
template <class T, int R, int N>
inline void score_keys(const QueryRows& rows, int row, const Cache& cache, const int32_t* table, int head, int start,
                       int key, int end, float (*scores)[TILE_KEYS]) {
    const int64_t d_words = cache.head_dim / Words<T>::PAIR;
    const uint32_t *k[N], *next[N];
    for (int n = 0; n < N; n++) {
        int position = start + key + n * LANES;
        k[n] = cache.keys_at(table, head, position);
        next[n] = cache.keys_at(table, head, std::min(position + TILE_KEYS, end - 1));
    }
    f32x16 acc[N][R];
    for (auto& line : acc)
        for (auto& value : line) value = f32x16{};
    for (int64_t d = 0; d < d_words; d++) {
        u32x16 words[N];
        for (int n = 0; n < N; n++) {
            words[n] = load<u32x16>(k[n] + d * cache.block_size);
            __builtin_prefetch(next[n] + d * cache.block_size);
        }
        for (int r = 0; r < R; r++) {
            u32x16 broadcast = splat_word(rows.q[row + r][d]);
            for (int n = 0; n < N; n++) acc[n][r] = Words<T>::dot(acc[n][r], words[n], broadcast);
        }
    }
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) store(scores[row + r] + key + n * LANES, acc[n][r]);
}

// end: of the keys that are looked at.
template <class T, int R>
inline void score_tile(const QueryRows& rows, int row, const Cache& cache, const int32_t* table, int head, int start,
                       int end, float (*scores)[TILE_KEYS]) {
    constexpr int N = fitting(R <= 4 ? 4 : 2, R);
    int key = 0;
    for (; key < TILE_KEYS && start + key + (N - 1) * LANES < end; key += N * LANES)
        score_keys<T, R, N>(rows, row, cache, table, head, start, key, end, scores);
    for (; key < TILE_KEYS && start + key < end; key += LANES)
        score_keys<T, R, 1>(rows, row, cache, table, head, start, key, end, scores);
}

// Hide the products of keys that a row may not see.
inline void mask_scores(float* scores, int start, int count, int limit) {
    const i32x16 lanes = lane_numbers();
    const f32x16 minus_infinity = splat(-std::numeric_limits<float>::infinity());
    for (int key = std::max(0, limit - start) / LANES * LANES; key < count; key += LANES) {
        i32x16 is_seen = lanes + (start + key) < limit;
        store(scores + key, select(is_seen, load<f32x16>(scores + key), minus_infinity));
    }
}

// Weights of a row's products, of so many vectors that the compiler knows and unrolls; see `weigh`.
template <class T, int N>
inline float weigh_vectors(float& running_max, f32x16& running_sum, float scale, const float* scores, T* weights) {
    f32x16 most = load<f32x16>(scores);
    for (int v = 1; v < N; v++) most = max(load<f32x16>(scores + v * LANES), most);
    const float old_max = running_max, new_max = std::max(old_max, max_of(most) * scale);
    f32x16 sum = running_sum;  // kept in a register: stores of weights might change it, for all that the compiler knows
    float correction = 1.0f;
    if (new_max != old_max) {
        correction = exp2_negative<float>(splat(old_max - new_max))[0];
        sum *= correction;
        running_max = new_max;
    }
    auto weight_of = [&](int v) { return exp2_negative<T>(load<f32x16>(scores + v * LANES) * scale - new_max); };
    int v = 0;
    for (; v + 2 <= N; v += 2) {
        f32x16 first = weight_of(v), second = weight_of(v + 1);
        sum += first + second;
        Words<T>::store_two(weights + v * LANES, first, second);
    }
    if (v < N) {
        f32x16 last = weight_of(v);
        sum += last;
        Words<T>::store_row(weights + v * LANES, last);
    }
    running_sum = sum;
    return correction;
}

// Turn a row's products into weights of type T, correct its running maximum and sum. Returns the factor for its output.
template <class T>
inline float weigh(float& running_max, f32x16& running_sum, int limit, int start, int count, float scale, float* scores,
                   T* weights) {
    const int num_vectors = (count + LANES - 1) / LANES;
    if (start + num_vectors * LANES > limit) mask_scores(scores, start, num_vectors * LANES, limit);
    switch (num_vectors) {
        case 1: return weigh_vectors<T, 1>(running_max, running_sum, scale, scores, weights);
        case 2: return weigh_vectors<T, 2>(running_max, running_sum, scale, scores, weights);
        case 3: return weigh_vectors<T, 3>(running_max, running_sum, scale, scores, weights);
        case 4: return weigh_vectors<T, 4>(running_max, running_sum, scale, scores, weights);
        case 5: return weigh_vectors<T, 5>(running_max, running_sum, scale, scores, weights);
        case 6: return weigh_vectors<T, 6>(running_max, running_sum, scale, scores, weights);
        case 7: return weigh_vectors<T, 7>(running_max, running_sum, scale, scores, weights);
        default: return weigh_vectors<T, TILE_KEYS / LANES>(running_max, running_sum, scale, scores, weights);
    }
}

// out[r] = out[r] * corrections[r] + weights[r] @ values, for R rows and C vectors of dimensions.
template <class T, int R, int C>
inline void add_values(QueryRows& rows, int row, const Cache& cache, const int32_t* table, int head, int start,
                       int end, int dim, const float* corrections, T (*weights)[TILE_KEYS]) {
    constexpr int PAIR = Words<T>::PAIR;
    f32x16 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = load<f32x16>(rows.out[row + r] + dim + c * LANES) * corrections[row + r];
    for (int key = 0; key < TILE_KEYS && start + key < end; key += LANES) {
        const uint32_t* v = cache.values_at<PAIR>(table, head, start + key) + dim;
        const uint32_t* next = cache.values_at<PAIR>(table, head, std::min(start + key + TILE_KEYS, end - 1)) + dim;
        auto add_pair = [&](int pair, uint32_t mask) {
            u32x16 words[C];
            for (int c = 0; c < C; c++) {
                words[c] = load<u32x16>(v + pair * cache.head_dim + c * LANES) & mask;
                __builtin_prefetch(next + pair * cache.head_dim + c * LANES);
            }
            for (int r = 0; r < R; r++) {
                u32x16 weight = splat_word(load<uint32_t>(weights[row + r] + key + pair * PAIR));
                for (int c = 0; c < C; c++) acc[r][c] = Words<T>::dot(acc[r][c], words[c], weight);
            }
        };
        int count = std::min(LANES, end - start - key), pair = 0;
        for (; pair < count / PAIR; pair++) add_pair(pair, 0xffffffffu);
        // What lies behind the last key may be anything, and zero times NaN is NaN.
        if (count % PAIR) add_pair(pair, 0x0000ffffu);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(rows.out[row + r] + dim + c * LANES, acc[r][c]);
}

template <class T, int R>
inline void add_values_all(QueryRows& rows, int row, const Cache& cache, const int32_t* table, int head, int start,
                           int end, const float* corrections, T (*weights)[TILE_KEYS]) {
    constexpr int C = fitting(4, R);
    int dim = 0;
    for (; dim + C * LANES <= cache.head_dim; dim += C * LANES)
        add_values<T, R, C>(rows, row, cache, table, head, start, end, dim, corrections, weights);
    for (; dim < cache.head_dim; dim += LANES)
        add_values<T, R, 1>(rows, row, cache, table, head, start, end, dim, corrections, weights);
}

// Let R rows see keys [begin, end) of one sequence; scale includes the logarithm's base. Each row sees at least one key
// of the first tile.
// head_dim is a multiple of 16, begin one of TILE_KEYS, block_size one of 16.
template <class T, int R>
void attend(QueryRows& rows, const Cache& cache, const int32_t* table, int head, int begin, int end, float scale) {
    alignas(64) float scores[R][TILE_KEYS];
    alignas(64) T weights[R][TILE_KEYS];
    float corrections[R];
    for (int r = 0; r < R; r++) {
        rows.max[r] = -std::numeric_limits<float>::infinity();
        rows.sum[r] = f32x16{};
        std::memset(rows.out[r], 0, cache.head_dim * sizeof(float));
    }
    for (int start = begin; start < end; start += TILE_KEYS) {
        int count = std::min(TILE_KEYS, end - start);
        for (int r = 0; r + SCORE_ROWS <= R; r += SCORE_ROWS)
            score_tile<T, SCORE_ROWS>(rows, r, cache, table, head, start, end, scores);
        if constexpr (R % SCORE_ROWS > 0)
            score_tile<T, R % SCORE_ROWS>(rows, R - R % SCORE_ROWS, cache, table, head, start, end, scores);
        for (int r = 0; r < R; r++)
            corrections[r] =
                weigh<T>(rows.max[r], rows.sum[r], rows.limits[r], start, count, scale, scores[r], weights[r]);
        for (int r = 0; r + VALUE_ROWS <= R; r += VALUE_ROWS)
            add_values_all<T, VALUE_ROWS>(rows, r, cache, table, head, start, end, corrections, weights);
        if constexpr (R % VALUE_ROWS > 0)
            add_values_all<T, R % VALUE_ROWS>(rows, R - R % VALUE_ROWS, cache, table, head, start, end, corrections,
                                              weights);
    }
}

template <class T>
void attend(QueryRows& rows, int num_rows, const Cache& cache, const int32_t* table, int head, int begin, int end,
            float scale) {
    switch (num_rows) {
        case 1: return attend<T, 1>(rows, cache, table, head, begin, end, scale);
        case 2: return attend<T, 2>(rows, cache, table, head, begin, end, scale);
        case 3: return attend<T, 3>(rows, cache, table, head, begin, end, scale);
        case 4: return attend<T, 4>(rows, cache, table, head, begin, end, scale);
        case 5: return attend<T, 5>(rows, cache, table, head, begin, end, scale);
        case 6: return attend<T, 6>(rows, cache, table, head, begin, end, scale);
        case 7: return attend<T, 7>(rows, cache, table, head, begin, end, scale);
        default: return attend<T, 8>(rows, cache, table, head, begin, end, scale);
    }
}

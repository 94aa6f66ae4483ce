// The same attention for 16 query rows of prompts at a time, both products in AMX tiles. bf16 only.
// Included by blocks.cpp where the compiler has AMX.
#pragma once

#include "attention.h"

constexpr int TILE_ROWS = 16;
constexpr int MAX_ROW_GROUPS = 4;  // that go over the keys together: a tile of keys comes from the second cache once

// A group of query rows side by side, the last one of which sees most; see QueryRows.
struct TileRows {
    alignas(64) bf16 q[TILE_ROWS * MAX_HEAD_DIM];     // [16][head_dim]
    alignas(64) float out[TILE_ROWS * MAX_HEAD_DIM];  // [16][head_dim]
    int limits[TILE_ROWS];
    float max[TILE_ROWS];
    f32x16 sum[TILE_ROWS];
};

// Tiles 0-3: sums of four neighbouring pieces; 4: queries; 5: 16 keys of 32 dimensions; 6: weights of 16 keys;
// 7: 16 dimensions of 16 values.
inline void configure_attention_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
    } config;
    _tile_loadconfig(&config);
}

// scores[16][TILE_KEYS] of keys [start, start + TILE_KEYS), four vectors of them at a time; blocks that begin past
// `end` are not looked at.
inline void score_tile(const TileRows& rows, const Cache& cache, const int32_t* table, int head, int start, int end,
                       float (*scores)[TILE_KEYS]) {
    const int64_t key_stride = cache.block_size * 4;
    for (int first = 0; first < TILE_KEYS && start + first < end; first += 4 * LANES) {
        const uint32_t* keys[4];
        for (int i = 0; i < 4; i++) {
            int position = start + first + i * LANES;
            keys[i] = cache.keys_at(table, head, position < end ? position : start);
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < cache.head_dim / 2; d += 16) {
            _tile_loadd(4, rows.q + d * 2, cache.head_dim * 2);
            _tile_loadd(5, keys[0] + d * cache.block_size, key_stride);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, keys[1] + d * cache.block_size, key_stride);
            _tile_dpbf16ps(1, 4, 5);
            _tile_loadd(5, keys[2] + d * cache.block_size, key_stride);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, keys[3] + d * cache.block_size, key_stride);
            _tile_dpbf16ps(3, 4, 5);
        }
        float* to = scores[0] + first;
        _tile_stored(0, to, TILE_KEYS * 4);
        _tile_stored(1, to + LANES, TILE_KEYS * 4);
        _tile_stored(2, to + 2 * LANES, TILE_KEYS * 4);
        _tile_stored(3, to + 3 * LANES, TILE_KEYS * 4);
    }
}

// out += weights @ values of `count` keys, 64 dimensions at a time.
inline void add_values(TileRows& rows, const Cache& cache, const int32_t* table, int head, int start, int count,
                       const bf16 (*weights)[TILE_KEYS], uint32_t* scratch) {
    const int64_t stride = cache.head_dim * 4;
    const uint32_t* values[TILE_KEYS / LANES];
    for (int i = 0; i * LANES < count; i++) {
        values[i] = cache.values_at<2>(table, head, start + i * LANES);
        int num_keys = count - i * LANES;
        if (num_keys < LANES) {  // what lies behind the last key may be anything, and zero times NaN is NaN
            std::memset(scratch, 0, 8 * stride);
            std::memcpy(scratch, values[i], num_keys / 2 * stride);
            if (num_keys % 2)
                for (int d = 0; d < cache.head_dim; d++)
                    scratch[num_keys / 2 * cache.head_dim + d] =
                        values[i][num_keys / 2 * cache.head_dim + d] & 0x0000ffffu;
            values[i] = scratch;
        }
    }
    for (int dim = 0; dim < cache.head_dim; dim += 4 * LANES) {
        float* out = rows.out + dim;
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + LANES, stride);
        _tile_loadd(2, out + 2 * LANES, stride);
        _tile_loadd(3, out + 3 * LANES, stride);
        for (int i = 0; i * LANES < count; i++) {
            const uint32_t* v = values[i] + dim;
            _tile_loadd(6, weights[0] + i * LANES, TILE_KEYS * 2);
            _tile_loadd(7, v, stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, v + LANES, stride);
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, v + 2 * LANES, stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, v + 3 * LANES, stride);
            _tile_dpbf16ps(3, 6, 7);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + LANES, stride);
        _tile_stored(2, out + 2 * LANES, stride);
        _tile_stored(3, out + 3 * LANES, stride);
    }
}

// Let groups of 16 rows see keys of one sequence from the first one on. head_dim is a multiple of 64.
inline void attend(TileRows* groups, int num_groups, const Cache& cache, const int32_t* table, int head, float scale) {
    alignas(64) float scores[TILE_ROWS][TILE_KEYS];
    alignas(64) bf16 weights[TILE_ROWS][TILE_KEYS];
    alignas(64) uint32_t scratch[8 * MAX_HEAD_DIM];
    for (TileRows* rows = groups; rows < groups + num_groups; rows++) {
        for (int r = 0; r < TILE_ROWS; r++) {
            rows->max[r] = -std::numeric_limits<float>::infinity();
            rows->sum[r] = f32x16{};
        }
        std::memset(rows->out, 0, TILE_ROWS * cache.head_dim * sizeof(float));
    }
    for (int start = 0; start < groups[num_groups - 1].limits[TILE_ROWS - 1]; start += TILE_KEYS)
        for (TileRows* rows = groups; rows < groups + num_groups; rows++) {
            const int end = rows->limits[TILE_ROWS - 1], count = std::min(TILE_KEYS, end - start);
            if (count <= 0) continue;
            score_tile(*rows, cache, table, head, start, end, scores);
            for (int r = 0; r < TILE_ROWS; r++) {
                float correction = weigh<bf16>(rows->max[r], rows->sum[r], rows->limits[r], start, count, scale,
                                               scores[r], weights[r]);
                if (correction == 1.0f) continue;
                float* out = rows->out + r * cache.head_dim;
                for (int d = 0; d < cache.head_dim; d += LANES) store(out + d, load<f32x16>(out + d) * correction);
            }
            add_values(*rows, cache, table, head, start, count, weights, scratch);
        }
}

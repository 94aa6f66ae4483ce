// The half of a decoder layer that looks back: norm, queries, keys and values, rotation, attention, output.
#pragma once

#include "attention.h"
#include "step.h"
#ifdef __AMX_BF16__
#include "attention_amx.h"
#endif

// Dimension i turns with i + head_dim / 2.
template <class T>
void rotate(const float* x, const float* cos_sin, int half, T* out) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        f32x16 a = load<f32x16>(x + i), b = load<f32x16>(x + half + i);
        f32x16 c = load<f32x16>(cos_sin + i), s = load<f32x16>(cos_sin + half + i);
        Words<T>::store_row(out + i, a * c - b * s);
        Words<T>::store_row(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        out[i] = from_float<T>(a * c - b * s);
        out[half + i] = from_float<T>(b * c + a * s);
    }
}

template <class T>
void write_slot(const Cache& cache, int64_t slot, int head, const T* k, const T* v) {
    constexpr int PAIR = Words<T>::PAIR;
    int block = int(slot / cache.block_size), offset = int(slot % cache.block_size);
    uint32_t* keys = (uint32_t*)cache.keys(block, head) + offset;
    for (int d = 0; d < cache.head_dim / PAIR; d++) keys[d * cache.block_size] = load<uint32_t>(k + d * PAIR);
    T* values = (T*)((uint32_t*)cache.values(block, head) + offset / PAIR * cache.head_dim) + offset % PAIR;
    for (int d = 0; d < cache.head_dim; d++) values[d * PAIR] = v[d];
}

// Rotate queries into q, keys into the cache.
template <class T>
void rope_and_cache(Worker& worker, const AttentionBlock& block, const Batch& batch, const Cache& cache,
                    const float* qkv, T* q) {
    const int dim = block.head_dim, half = dim / 2;
    run_rows(worker.pool, batch.num_tokens, [&](int row) {
        const float* from = qkv + row * block.qkv.out;
        const float* cos_sin = block.cos_sin + batch.positions[row] * dim;
        for (int head = 0; head < block.num_heads; head++)
            rotate(from + head * dim, cos_sin, half, q + (int64_t(row) * block.num_heads + head) * dim);
        alignas(64) T k[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
        for (int head = 0; head < block.num_kv_heads; head++) {
            const float* key = from + (block.num_heads + head) * dim;
            const float* value = key + block.num_kv_heads * dim;
            rotate(key, cos_sin, half, k);
            for (int d = 0; d < dim; d++) v[d] = from_float<T>(value[d]);
            write_slot(cache, batch.slots[row], head, k, v);
        }
    });
}

template <class T>
void finish_rows(const QueryRows& rows, int num_rows, int dim, T* const* to) {
    for (int r = 0; r < num_rows; r++) {
        float factor = 1.0f / sum(rows.sum[r]);
        for (int d = 0; d < dim; d += LANES) Words<T>::store_row(to[r] + d, load<f32x16>(rows.out[r] + d) * factor);
    }
}

// A piece of a decode row's keys, for up to MAX_ROWS heads of one group.
struct Piece {
    int row, kv_head, first_head, num_heads, begin, end;
    int64_t partial;  // where its results lie while others have the rest; -1: it has all keys
};

constexpr int MIN_SPLIT_KEYS = 256;

// Split over keys only where rows and heads alone do not keep everybody busy. In fp32 never: there a row's result is
// the same to the bit in every batch, so that a request that is resumed goes on as it would have.
template <class T>
std::vector<Piece> cut_decode(const Pool& pool, const AttentionBlock& block, const Batch& batch,
                              int64_t& num_partials) {
    std::vector<Piece> pieces;
    int group = block.num_heads / block.num_kv_heads;
    int wanted = 4 * pool.num_threads(), whole = batch.num_decode * block.num_kv_heads;
    int most_splits = pool.num_threads() == 1 || sizeof(T) == 4 ? 1 : std::max(1, wanted / std::max(1, whole));
    num_partials = 0;
    for (int row = 0; row < batch.num_decode; row++) {
        int len = batch.decode_lens[row];
        int splits = std::clamp(len / MIN_SPLIT_KEYS, 1, most_splits);
        int size = int(round_up((len + splits - 1) / splits, TILE_KEYS));
        for (int kv_head = 0; kv_head < block.num_kv_heads; kv_head++)
            for (int first = 0; first < group; first += MAX_ROWS) {
                int count = std::min(MAX_ROWS, group - first);
                for (int begin = 0; begin < len; begin += size) {
                    bool is_whole = size >= len;
                    pieces.push_back({row, kv_head, kv_head * group + first, count, begin, std::min(len, begin + size),
                                      is_whole ? -1 : num_partials});
                    if (!is_whole) num_partials += count;
                }
            }
    }
    return pieces;
}

// Results of pieces that share their heads, merged by their running maxima.
template <class T>
void merge(const std::vector<Piece>& pieces, size_t first, size_t end, const float* partials, int dim, int num_heads,
           T* out) {
    int stride = dim + 2;
    for (int head = 0; head < pieces[first].num_heads; head++) {
        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for (size_t i = first; i < end; i++)
            most = std::max(most, partials[(pieces[i].partial + head) * stride + dim]);
        alignas(64) float sums[MAX_HEAD_DIM] = {};
        for (size_t i = first; i < end; i++) {
            const float* from = partials + (pieces[i].partial + head) * stride;
            float factor = std::exp2(from[dim] - most);
            total += factor * from[dim + 1];
            for (int d = 0; d < dim; d++) sums[d] += factor * from[d];
        }
        T* to = out + (int64_t(pieces[first].row) * num_heads + pieces[first].first_head + head) * dim;
        for (int d = 0; d < dim; d++) to[d] = from_float<T>(sums[d] / total);
    }
}

template <class T>
void attend_decode(Worker& worker, const AttentionBlock& block, const Batch& batch, const Cache& cache, const T* q,
                   T* out, int64_t out_stride) {
    const int dim = block.head_dim;
    int64_t num_partials;
    std::vector<Piece> pieces = cut_decode<T>(worker.pool, block, batch, num_partials);
    float* partials = worker.workspace.get<float>(PARTIAL, std::max<int64_t>(1, num_partials * (dim + 2)));
    auto attend_piece = [&](int index) {
        const Piece& piece = pieces[index];
        alignas(64) float sums[MAX_ROWS][MAX_HEAD_DIM];
        T* to[MAX_ROWS];
        QueryRows rows;
        for (int r = 0; r < piece.num_heads; r++) {
            int64_t at = (int64_t(piece.row) * block.num_heads + piece.first_head + r) * dim;
            rows.q[r] = (const uint32_t*)(q + at);
            rows.limits[r] = piece.end;
            rows.out[r] = sums[r];
            to[r] = out + piece.row * out_stride + (piece.first_head + r) * dim;
        }
        const int32_t* table = batch.decode_tables + piece.row * batch.decode_stride;
        attend<T>(rows, piece.num_heads, cache, table, piece.kv_head, piece.begin, piece.end, block.scale * LOG2_E);
        if (piece.partial < 0) return finish_rows(rows, piece.num_heads, dim, to);
        for (int r = 0; r < piece.num_heads; r++) {
            float* partial = partials + (piece.partial + r) * (dim + 2);
            std::memcpy(partial, sums[r], dim * sizeof(float));
            partial[dim] = rows.max[r];
            partial[dim + 1] = sum(rows.sum[r]);
        }
    };
    int64_t num_keys = 0;
    for (int row = 0; row < batch.num_decode; row++) num_keys += batch.decode_lens[row];
    if (num_keys * 2 * cache.num_kv_heads * dim * int64_t(sizeof(T)) < 2 * MIN_TASK_BYTES)
        for (int i = 0; i < int(pieces.size()); i++) attend_piece(i);
    else
        worker.pool.run(int(pieces.size()), attend_piece);
    for (size_t first = 0; first < pieces.size();) {
        size_t end = first + 1;
        while (end < pieces.size() && pieces[end].begin > 0) end++;
        if (pieces[first].partial >= 0)
            merge(pieces, first, end, partials, dim, block.num_heads, out);
        first = end;
    }
}

// Tokens of one sequence whose rows share a pass over one head's keys.
struct Tile {
    int sequence, first_token, num_tokens;
};

inline std::vector<Tile> cut_prefill(const Batch& batch, int tokens_a_tile) {
    std::vector<Tile> tiles;
    for (int s = 0; s < batch.num_prefill; s++)
        for (int token = batch.cu_seqlens[s]; token < batch.cu_seqlens[s + 1]; token += tokens_a_tile)
            tiles.push_back({s, token, std::min(tokens_a_tile, batch.cu_seqlens[s + 1] - token)});
    return tiles;
}

// What the tasks of prefill attention have in common.
template <class T>
struct Prefill {
    const AttentionBlock& block;
    const Batch& batch;
    const Cache& cache;
    const T* q;  // [num_tokens, num_heads, head_dim]
    T* out;
    int64_t out_stride;

    int dim() const { return block.head_dim; }
    int group() const { return block.num_heads / block.num_kv_heads; }
    const int32_t* table(const Tile& tile) const {
        return batch.prefill_tables + tile.sequence * batch.prefill_stride;
    }
    // Positions minus rows: the sequence's last query is at its context's end.
    int shift(const Tile& tile) const {
        return batch.prefill_lens[tile.sequence] - batch.cu_seqlens[tile.sequence + 1];
    }
    const T* query(int token, int head) const {
        return q + (int64_t(batch.num_decode + token) * block.num_heads + head) * dim();
    }
    T* result(int token, int head) const {
        return out + (batch.num_decode + token) * out_stride + int64_t(head) * dim();
    }
};

// Heads of one group in passes of up to MAX_ROWS rows, as many tokens as fit.
template <class T>
void attend_prefill_tile(const Prefill<T>& prefill, const Tile& tile, int kv_head) {
    const int group = prefill.group(), heads_a_pass = std::min(group, MAX_ROWS);
    const int tokens_a_pass = MAX_ROWS / heads_a_pass, end = tile.first_token + tile.num_tokens;
    const int shift = prefill.shift(tile);
    alignas(64) float sums[MAX_ROWS][MAX_HEAD_DIM];
    for (int token = tile.first_token; token < end; token += tokens_a_pass)
        for (int first = 0; first < group; first += heads_a_pass) {
            int num_heads = std::min(heads_a_pass, group - first), end_token = std::min(token + tokens_a_pass, end);
            QueryRows rows;
            T* to[MAX_ROWS];
            int num_rows = 0;
            for (int t = token; t < end_token; t++)
                for (int h = 0; h < num_heads; h++, num_rows++) {
                    int head = kv_head * group + first + h;
                    rows.q[num_rows] = (const uint32_t*)prefill.query(t, head);
                    rows.limits[num_rows] = t + shift + 1;
                    rows.out[num_rows] = sums[num_rows];
                    to[num_rows] = prefill.result(t, head);
                }
            attend<T>(rows, num_rows, prefill.cache, prefill.table(tile), kv_head, 0, end_token + shift,
                      prefill.block.scale * LOG2_E);
            finish_rows(rows, num_rows, prefill.dim(), to);
        }
}

#ifdef __AMX_BF16__
// The same in groups of TILE_ROWS rows; those that are missing in the last one repeat the row before.
inline void attend_prefill_amx(const Prefill<bf16>& prefill, const Tile& tile, int kv_head) {
    const int dim = prefill.dim(), group = prefill.group(), num_rows = tile.num_tokens * group;
    const int shift = prefill.shift(tile);
    TileRows groups[MAX_ROW_GROUPS];
    auto token_of = [&](int row) { return tile.first_token + row / group; };
    auto head_of = [&](int row) { return kv_head * group + row % group; };
    configure_attention_tiles();
    for (int first = 0; first < num_rows; first += MAX_ROW_GROUPS * TILE_ROWS) {
        const int end = std::min(num_rows, first + MAX_ROW_GROUPS * TILE_ROWS);
        const int num_groups = (end - first + TILE_ROWS - 1) / TILE_ROWS;
        for (int i = 0; i < num_groups * TILE_ROWS; i++) {
            const int row = std::min(first + i, num_rows - 1), r = i % TILE_ROWS;
            TileRows& rows = groups[i / TILE_ROWS];
            rows.limits[r] = token_of(row) + shift + 1;
            std::memcpy((void*)(rows.q + r * dim), prefill.query(token_of(row), head_of(row)), dim * sizeof(bf16));
        }
        attend(groups, num_groups, prefill.cache, prefill.table(tile), kv_head, prefill.block.scale * LOG2_E);
        for (int row = first; row < end; row++) {
            const TileRows& rows = groups[(row - first) / TILE_ROWS];
            const int r = (row - first) % TILE_ROWS;
            bf16* to = prefill.result(token_of(row), head_of(row));
            const float factor = 1.0f / sum(rows.sum[r]);
            for (int d = 0; d < dim; d += LANES)
                Words<bf16>::store_row(to + d, load<f32x16>(rows.out + r * dim + d) * factor);
        }
    }
    _tile_release();
}
#endif

template <class T>
void attend_prefill(Worker& worker, const Prefill<T>& prefill) {
    std::vector<Tile> tiles = cut_prefill(prefill.batch, 16);
    int num_tiles = int(tiles.size());
    worker.pool.run(num_tiles * prefill.block.num_kv_heads, [&](int task) {
        const Tile& tile = tiles[num_tiles - 1 - task % num_tiles];  // the last ones of a sequence take longest
        const int kv_head = task / num_tiles;
#ifdef __AMX_BF16__
        if constexpr (sizeof(T) == 2)
            if (prefill.dim() % 64 == 0) return attend_prefill_amx(prefill, tile, kv_head);
#endif
        attend_prefill_tile(prefill, tile, kv_head);
    });
}

template <class T>
void run_attention(Worker& worker, const AttentionBlock& block, const Batch& batch, const Cache& cache, const float* x,
                   float* residual, float* out) {
    const int count = batch.num_tokens;
    Laps laps(worker.phase_ns);
    Rows normed = normalise<T>(worker, block.norm, x, residual, count, block.qkv.in);
    laps.end(Phase::Norm);
    float* qkv = worker.workspace.get<float>(QKV, count * block.qkv.out);
    multiply_all<T>(worker.pool, normed, block.qkv, StoreFloat{qkv, block.qkv});
    laps.end(Phase::Qkv);
    const int64_t q_size = int64_t(block.num_heads) * block.head_dim, stride = row_stride<T>(block.out.in);
    T* q = worker.workspace.get<T>(Q, count * q_size);
    rope_and_cache(worker, block, batch, cache, qkv, q);
    laps.end(Phase::RopeAndCache);
    T* attended = worker.workspace.get<T>(ATTENDED, count * stride);
    pad_rows(attended, count, q_size, block.out.in, stride);
    if (batch.num_decode) attend_decode(worker, block, batch, cache, q, attended, stride);
    if (batch.num_prefill) attend_prefill(worker, Prefill<T>{block, batch, cache, q, attended, stride});
    laps.end(Phase::Attention);
    Rows rows{(const uint32_t*)attended, stride / Words<T>::PAIR, count};
    multiply_all<T>(worker.pool, rows, block.out, StoreFloat{out, block.out});
    laps.end(Phase::Out);
}

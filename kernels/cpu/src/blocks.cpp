// The two halves of a decoder layer, and the head: each one call from Python, in phases of tasks.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "linear.h"
#ifdef __AMX_BF16__
#include "attention_amx.h"
#endif

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

struct Worker {
    Pool pool;
    Workspace workspace;
    Worker(Core* cores, int num_cores, int worker, bool borrows) : pool(cores, num_cores, worker, borrows) {}
};

namespace {

enum Part { NORMED, QKV, Q, ATTENDED, GATED, PARTIAL };

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

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
    T* out = worker.workspace.get<T>(NORMED, count * padded);
    run_rows(worker.pool, count, [&](int row) {
        add_and_normalise(norm, x ? x + row * norm.size : nullptr, residual + row * norm.size, out + row * padded, padded);
    });
    return {(const uint32_t*)out, padded / Words<T>::PAIR, count};
}

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

// Split over keys only where rows and heads alone do not keep everybody busy.
std::vector<Piece> cut_decode(const Pool& pool, const AttentionBlock& block, const Batch& batch, int64_t& num_partials) {
    std::vector<Piece> pieces;
    int group = block.num_heads / block.num_kv_heads;
    int wanted = 4 * pool.num_threads(), whole = batch.num_decode * block.num_kv_heads;
    int most_splits = pool.num_threads() == 1 ? 1 : std::max(1, wanted / std::max(1, whole));
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
    std::vector<Piece> pieces = cut_decode(worker.pool, block, batch, num_partials);
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

std::vector<Tile> cut_prefill(const Batch& batch, int tokens_a_tile) {
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
// The same in passes of TILE_ROWS rows; those that are missing in the last one repeat the row before.
void attend_prefill_amx(const Prefill<bf16>& prefill, const Tile& tile, int kv_head) {
    const int dim = prefill.dim(), group = prefill.group(), num_rows = tile.num_tokens * group;
    const int shift = prefill.shift(tile);
    alignas(64) bf16 q[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float sums[TILE_ROWS * MAX_HEAD_DIM];
    configure_attention_tiles();
    for (int first = 0; first < num_rows; first += TILE_ROWS) {
        TileRows rows{q, {}, sums, {}, {}};
        for (int r = 0; r < TILE_ROWS; r++) {
            int row = std::min(first + r, num_rows - 1), token = tile.first_token + row / group;
            rows.limits[r] = token + shift + 1;
            std::memcpy((void*)(q + r * dim), prefill.query(token, kv_head * group + row % group), dim * sizeof(bf16));
        }
        attend(rows, prefill.cache, prefill.table(tile), kv_head, rows.limits[TILE_ROWS - 1],
               prefill.block.scale * LOG2_E);
        for (int row = first; row < std::min(num_rows, first + TILE_ROWS); row++) {
            bf16* to = prefill.result(tile.first_token + row / group, kv_head * group + row % group);
            const float* from = sums + (row - first) * dim;
            const float factor = 1.0f / sum(rows.sum[row - first]);
            for (int d = 0; d < dim; d += LANES) Words<bf16>::store_row(to + d, load<f32x16>(from + d) * factor);
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
    Rows normed = normalise<T>(worker, block.norm, x, residual, count, block.qkv.in);
    float* qkv = worker.workspace.get<float>(QKV, count * block.qkv.out);
    multiply_all<T>(worker.pool, normed, block.qkv, StoreFloat{qkv, block.qkv});
    const int64_t q_size = int64_t(block.num_heads) * block.head_dim, padded = block.out.in;
    T* q = worker.workspace.get<T>(Q, count * q_size);
    rope_and_cache(worker, block, batch, cache, qkv, q);
    T* attended = worker.workspace.get<T>(ATTENDED, count * padded);
    if (padded > q_size)
        for (int row = 0; row < count; row++)
            std::memset((void*)(attended + row * padded + q_size), 0, (padded - q_size) * sizeof(T));
    if (batch.num_decode) attend_decode(worker, block, batch, cache, q, attended, padded);
    if (batch.num_prefill) attend_prefill(worker, Prefill<T>{block, batch, cache, q, attended, padded});
    Rows rows{(const uint32_t*)attended, padded / Words<T>::PAIR, count};
    multiply_all<T>(worker.pool, rows, block.out, StoreFloat{out, block.out});
}

template <class T>
void run_mlp(Worker& worker, const MlpBlock& block, const float* x, float* residual, float* out, int count) {
    Rows normed = normalise<T>(worker, block.norm, x, residual, count, block.gate_up.in);
    T* gated = worker.workspace.get<T>(GATED, count * block.down.in);
    int64_t size = block.gate_up.out / 2;
    if (block.down.in > size)
        for (int row = 0; row < count; row++)
            std::memset((void*)(gated + row * block.down.in + size), 0, (block.down.in - size) * sizeof(T));
    multiply_all<T>(worker.pool, normed, block.gate_up, StoreGated<T>{gated, block.down.in, block.gate_up});
    Rows rows{(const uint32_t*)gated, block.down.in / Words<T>::PAIR, count};
    multiply_all<T>(worker.pool, rows, block.down, StoreFloat{out, block.down});
}

// The first largest value of a row; a NaN is larger than everything.
void find_largest(const float* row, int64_t size, float& largest, int64_t& index) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float lowest = -std::numeric_limits<float>::infinity();
    f32x16 most = splat(lowest);
    i32x16 where = lanes, is_nan{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        f32x16 value = load<f32x16>(row + i);
        i32x16 is_larger = value > most;
        most = is_larger ? value : most;
        where = is_larger ? lanes + int32_t(i) : where;
        is_nan |= value != value;
    }
    largest = row[0];
    index = 0;
    bool has_nan = largest != largest;
    for (int lane = 0; lane < LANES; lane++) {
        has_nan |= is_nan[lane] != 0;
        if (most[lane] > largest || (most[lane] == largest && where[lane] < index)) {
            largest = most[lane];
            index = where[lane];
        }
    }
    for (; i < size; i++) {
        has_nan |= row[i] != row[i];
        if (row[i] > largest) {
            largest = row[i];
            index = i;
        }
    }
    if (has_nan) largest = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

extern "C" {

// Whether the system lets this process use AMX: it asks once for all threads.
int baton_allows_amx() {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}

Worker* baton_worker(Core* cores, int num_cores, int worker, int borrows) {
    return new Worker(cores, num_cores, worker, borrows);
}
void baton_delete(Worker* worker) { delete worker; }
void baton_begin(Worker* worker) { worker->pool.begin(); }
void baton_rest(Worker* worker) { worker->pool.rest(); }
int baton_others_want(Worker* worker) { return worker->pool.others_want(); }
uint64_t baton_num_helped(Worker* worker) { return worker->pool.num_helped(); }

// maxima, indices: [num_rows]
void baton_argmax(Worker* worker, const float* logits, int num_rows, int64_t size, float* maxima, int64_t* indices) {
    worker->pool.run(num_rows, [&](int row) { find_largest(logits + row * size, size, maxima[row], indices[row]); });
}

void baton_attention_bf16(Worker* worker, const AttentionBlock* block, const Batch* batch, const Cache* cache,
                          const float* x, float* residual, float* out) {
    run_attention<bf16>(*worker, *block, *batch, *cache, x, residual, out);
}
void baton_attention_f32(Worker* worker, const AttentionBlock* block, const Batch* batch, const Cache* cache,
                         const float* x, float* residual, float* out) {
    run_attention<float>(*worker, *block, *batch, *cache, x, residual, out);
}
void baton_mlp_bf16(Worker* worker, const MlpBlock* block, const float* x, float* residual, float* out, int count) {
    run_mlp<bf16>(*worker, *block, x, residual, out, count);
}
void baton_mlp_f32(Worker* worker, const MlpBlock* block, const float* x, float* residual, float* out, int count) {
    run_mlp<float>(*worker, *block, x, residual, out, count);
}
void baton_norm_linear_bf16(Worker* worker, const Norm* norm, const Linear* linear, const float* x, float* residual,
                            float* out, int count) {
    Rows rows = normalise<bf16>(*worker, *norm, x, residual, count, linear->in);
    multiply_all<bf16>(worker->pool, rows, *linear, StoreFloat{out, *linear});
}
void baton_norm_linear_f32(Worker* worker, const Norm* norm, const Linear* linear, const float* x, float* residual,
                           float* out, int count) {
    Rows rows = normalise<float>(*worker, *norm, x, residual, count, linear->in);
    multiply_all<float>(worker->pool, rows, *linear, StoreFloat{out, *linear});
}
}

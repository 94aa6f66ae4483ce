// The two halves of a decoder layer, the head and the greedy choice: each one call from Python, in phases of tasks.
#include <sys/syscall.h>
#include <unistd.h>

#include "attention_block.h"
#include "group.h"

namespace {

template <class T>
void run_mlp(Worker& worker, const MlpBlock& block, const float* x, float* residual, float* out, int count) {
    Laps laps(worker.phase_ns);
    Rows normed = normalise<T>(worker, block.norm, x, residual, count, block.gate_up.in);
    laps.end(Phase::Norm);
    const int64_t stride = row_stride<T>(block.down.in);
    T* gated = worker.workspace.get<T>(GATED, count * stride);
    pad_rows(gated, count, block.gate_up.out / 2, block.down.in, stride);
    multiply_all<T>(worker.pool, normed, block.gate_up, StoreGated<T>{gated, stride, block.gate_up});
    laps.end(Phase::GateUp);
    Rows rows{(const uint32_t*)gated, stride / Words<T>::PAIR, count};
    multiply_all<T>(worker.pool, rows, block.down, StoreFloat{out, block.down});
    laps.end(Phase::Down);
}

// Returns false when the group is aborted.
bool add_up(Worker& worker, Group* group, float* x, int64_t count) {
    if (!group) return true;
    Laps laps(worker.phase_ns);
    bool is_whole = all_reduce(*group, x, count);
    laps.end(Phase::AllReduce);
    return is_whole;
}

// Layer after layer; residual: the embeddings; group: of the ranks that each have a part of every block, null where
// blocks are whole. Returns false when the group is aborted.
template <class T>
bool run_decoder(Worker& worker, int num_layers, const AttentionBlock* const* attention, const MlpBlock* const* mlp,
                 const Cache* const* caches, Group* group, const Batch& batch, float* residual, float* attended,
                 float* out) {
    const int64_t count = num_layers ? batch.num_tokens * attention[0]->norm.size : 0;
    for (int i = 0; i < num_layers; i++) {
        run_attention<T>(worker, *attention[i], batch, *caches[i], i ? out : nullptr, residual, attended);
        if (!add_up(worker, group, attended, count)) return false;
        run_mlp<T>(worker, *mlp[i], attended, residual, out, batch.num_tokens);
        if (!add_up(worker, group, out, count)) return false;
    }
    return true;
}

// Rows of a packed weight that is not quantised, size: without padding. out: [count, size]
template <class T>
void run_embedding(Worker& worker, const Linear& linear, const int64_t* token_ids, float* out, int count,
                   int64_t size) {
    constexpr int PAIR = Words<T>::PAIR;
    run_rows(worker.pool, count, [&](int row) {
        int64_t panel = token_ids[row] / LANES, lane = token_ids[row] % LANES;
        const T* from = (const T*)(linear.panels + panel * (linear.in / PAIR) * LANES + lane);
        for (int64_t i = 0; i < size; i++)
            out[row * size + i] = to_float(from[i / PAIR * PAIR * LANES + i % PAIR]);
    });
}

template <class T>
void run_head(Worker& worker, const Norm& norm, const Linear& linear, const float* x, float* residual, float* out,
              int count) {
    Laps laps(worker.phase_ns);
    Rows rows = normalise<T>(worker, norm, x, residual, count, linear.in);
    laps.end(Phase::Norm);
    multiply_all<T>(worker.pool, rows, linear, StoreFloat{out, linear});
    laps.end(Phase::Head);
}

// The first largest value of a row; a NaN is larger than everything.
void find_largest(const float* row, int64_t size, float& largest, int64_t& index) {
    const i32x16 lanes = lane_numbers();
    const float lowest = -std::numeric_limits<float>::infinity();
    f32x16 most = splat(lowest);
    i32x16 where = lanes, is_nan{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        f32x16 value = load<f32x16>(row + i);
        i32x16 is_larger = value > most;
        most = select(is_larger, value, most);
        where = select(is_larger, lanes + int32_t(i), where);
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
void baton_allow_binding(Worker* worker) { worker->pool.allow_binding(); }
void baton_claim(Worker* worker) { worker->pool.claim(); }
void baton_begin(Worker* worker) { worker->pool.begin(); }
void baton_rest(Worker* worker) { worker->pool.rest(); }
int baton_others_want(Worker* worker) { return worker->pool.others_want(); }
// phase_ns: zeros, one for each Phase, to be added to; null: nobody measures any more
void baton_time_phases(Worker* worker, uint64_t* phase_ns) { worker->phase_ns = phase_ns; }
uint64_t baton_num_helped(Worker* worker) { return worker->pool.num_helped(); }

// maxima, indices: [num_rows]
void baton_argmax(Worker* worker, const float* logits, int num_rows, int64_t size, float* maxima, int64_t* indices) {
    worker->pool.run(num_rows, [&](int row) { find_largest(logits + row * size, size, maxima[row], indices[row]); });
}

// Whether x became the sum, or all is in out; not so when the group is aborted. See group.h.
int baton_all_reduce(Group* group, float* x, int64_t count) { return all_reduce(*group, x, count); }
int baton_gather(Group* group, const float* x, int64_t num_rows, const int64_t* num_columns, float* out) {
    return gather(*group, x, num_rows, num_columns, out);
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
// Whether all layers were computed: not so when the group is aborted.
int baton_decoder_bf16(Worker* worker, int num_layers, const AttentionBlock* const* attention,
                       const MlpBlock* const* mlp, const Cache* const* caches, Group* group, const Batch* batch,
                       float* residual, float* attended, float* out) {
    return run_decoder<bf16>(*worker, num_layers, attention, mlp, caches, group, *batch, residual, attended, out);
}
int baton_decoder_f32(Worker* worker, int num_layers, const AttentionBlock* const* attention,
                      const MlpBlock* const* mlp, const Cache* const* caches, Group* group, const Batch* batch,
                      float* residual, float* attended, float* out) {
    return run_decoder<float>(*worker, num_layers, attention, mlp, caches, group, *batch, residual, attended, out);
}
void baton_embedding_bf16(Worker* worker, const Linear* linear, const int64_t* token_ids, float* out, int count,
                          int64_t size) {
    run_embedding<bf16>(*worker, *linear, token_ids, out, count, size);
}
void baton_embedding_f32(Worker* worker, const Linear* linear, const int64_t* token_ids, float* out, int count,
                         int64_t size) {
    run_embedding<float>(*worker, *linear, token_ids, out, count, size);
}
void baton_norm_linear_bf16(Worker* worker, const Norm* norm, const Linear* linear, const float* x, float* residual,
                            float* out, int count) {
    run_head<bf16>(*worker, *norm, *linear, x, residual, out, count);
}
void baton_norm_linear_f32(Worker* worker, const Norm* norm, const Linear* linear, const float* x, float* residual,
                           float* out, int count) {
    run_head<float>(*worker, *norm, *linear, x, residual, out, count);
}
}

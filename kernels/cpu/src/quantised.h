// Weights in 4 or 8 bits: integers, of which 32 inputs of a column share a scale and an offset.
//
// A panel is a stream of such groups of 16 columns: a row of 16 words with scales and offsets, in fp16, then BITS
// rows of integers, a word a column with 32 / BITS consecutive inputs. A word rotated right by 2 BITS a pair has the
// integers of the pair's inputs where a mantissa has its upper bits: or-ing in an exponent makes a power of two + q.
// Included by linear.h.
#pragma once

constexpr int GROUP = 32;  // inputs that share a scale

template <Format F>
constexpr int BITS = F == INT8 ? 8 : 4;
template <Format F>
constexpr int PAIRS = 16 / BITS<F>;  // of inputs in a word
template <Format F>
constexpr int64_t GROUP_WORDS = (1 + BITS<F>) * LANES;

// How far ahead of their use integers are fetched, in words. With AMX 8 KB: one sequence in int8 on two cores of a
// Xeon 6 (2026-12, products in fp32), medians of several runs on a machine that drifts: 5.2 to 6.4 ms a step, with half
// of it 5.6 to 6.6, with a quarter 7.1 to 7.8, with twice of it 5.4 to 5.8. Without AMX 1 KB: 576 inputs and 3,072
// outputs from memory on one core of an EPYC 9004 (2026-12, products of bytes) 72 and 79 us in int8, 39 and 39 in int4;
// 69 and 65, 74 and 77 with twice of it; 110 and 91, 40 and 45 with 8 KB; on two cores they differ by less than two
// runs do.
#ifdef __AMX_BF16__
constexpr int64_t INTEGERS_AHEAD = 2048;
#else
constexpr int64_t INTEGERS_AHEAD = 256;
#endif

// Where a pair's integers begin, and the power of two that they come with.
template <Format F>
constexpr int FIRST_BIT = F == INT8 ? 15 : 16;
template <Format F>
constexpr int SECOND_BIT = FIRST_BIT<F> - BITS<F>;
template <Format F>
constexpr float FIRST_BASE = float(1 << (23 - FIRST_BIT<F>));
template <Format F>
constexpr float SECOND_BASE = float(1 << (23 - SECOND_BIT<F>));

template <Format F>
inline const uint32_t* panel_at(const Linear& linear, int panel) {
    return linear.panels + panel * (linear.in / GROUP) * GROUP_WORDS<F>;
}

template <Format F>
inline u32x16 rotate_to_pair(u32x16 packed, int pair) {
    const int by = 2 * BITS<F> * pair;
    return by ? packed >> by | packed << (32 - by) : packed;
}

// FIRST_BASE + q of a pair's first input, SECOND_BASE + q of its second.
template <Format F>
inline f32x16 first_of_pair(u32x16 rotated) {
    constexpr uint32_t MASK = ((1u << BITS<F>) - 1) << FIRST_BIT<F>;
    return (f32x16)((rotated & MASK) | std::bit_cast<uint32_t>(FIRST_BASE<F>));
}
template <Format F>
inline f32x16 second_of_pair(u32x16 rotated) {
    constexpr uint32_t MASK = ((1u << BITS<F>) - 1) << SECOND_BIT<F>;
    return (f32x16)((rotated & MASK) | std::bit_cast<uint32_t>(SECOND_BASE<F>));
}

#ifdef __AVX512VNNI__

// Few rows of x as integers of 16 bits, which share a scale where weights do, in words of four inputs' upper and of
// their lower bytes: integers of weights are multiplied by bytes, and nothing is rounded by more than bf16 had rounded
// the largest of 32 inputs.
struct FewRows {
    static constexpr int WORDS = GROUP / 4;  // of a group
    static constexpr float LARGEST = 127 * 256;

    int64_t in;
    int count;
    std::vector<uint32_t> high, low;   // [count][in / GROUP][WORDS]: x = scale * (256 * high + low), both signed
    std::vector<float> scales, sums;   // [count][in / GROUP]

    template <Format F>
    static FewRows of(const Rows& x, int64_t in) {
        const int64_t num_groups = in / GROUP, count = x.count * num_groups;
        FewRows rows{in, x.count, std::vector<uint32_t>(count * WORDS), std::vector<uint32_t>(count * WORDS),
                     std::vector<float>(count), std::vector<float>(count)};
        for (int r = 0; r < x.count; r++)
            for (int64_t g = 0; g < num_groups; g++) rows.take<F>(x.row(r) + g * (GROUP / 2), r * num_groups + g);
        return rows;
    }

private:
    template <Format F>
    void take(const uint32_t* from, int64_t group) {
        u32x16 words = load<u32x16>(from);
        f32x16 even = low_half(words), odd = high_half(words);
        float most = max_of(max(max(even, -even), max(odd, -odd)));
        sums[group] = sum(even + odd);
        scales[group] = most / LARGEST;
        float factor = most > 0 ? LARGEST / most : 0;
        auto rounded = [&](f32x16 values) { return (u32x16)_mm512_cvtps_epi32((__m512)(values * factor)); };
        __m512i integers = (__m512i)((rounded(even) & 0xffffu) | rounded(odd) << 16);
        __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(integers, _mm512_set1_epi16(128)), 8);
        const __m256i order = order_of_bytes<F>();
        store(&low[group * WORDS], _mm256_shuffle_epi8(_mm512_cvtepi16_epi8(integers), order));
        store(&high[group * WORDS], _mm256_shuffle_epi8(_mm512_cvtepi16_epi8(upper), order));
    }

    // Whose integers lie in each byte, as `bytes_of` has them.
    template <Format F>
    static __m256i order_of_bytes() {
        return _mm256_broadcastsi128_si256(
            F == INT8 ? _mm_setr_epi8(2, 1, 0, 3, 6, 5, 4, 7, 10, 9, 8, 11, 14, 13, 12, 15)
                      : _mm_setr_epi8(4, 6, 0, 2, 7, 1, 3, 5, 12, 14, 8, 10, 15, 9, 11, 13));
    }
};

// The integers of four inputs, a byte each: of a word of 8 bits, or of a half of a word of 4.
template <Format F>
inline u32x16 bytes_of(u32x16 packed, int half) {
    if (F == INT8) return packed << 1 | packed >> 31;
    return (half ? packed >> 4 : packed) & 0x0f0f0f0fu;
}

// Adds the products of unsigned bytes with signed ones, four to a lane.
inline i32x16 add_products(i32x16 sums, u32x16 bytes, uint32_t signed_bytes) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(int(signed_bytes)));
}

// MR rows of x from `row` by neighbouring panels: sums of integers are exact, and scaled once a group.
template <Format F, int MR, int NP>
inline void multiply_integers(const FewRows& x, int row, const uint32_t* panel, f32x16 (&acc)[MR][NP]) {
    constexpr int WORDS = FewRows::WORDS, A_WORD = WORDS / BITS<F>;
    const int64_t num_groups = x.in / GROUP, first = row * num_groups;
    for (auto& line : acc)
        for (auto& value : line) value = f32x16{};
    for (int64_t g = 0; g < num_groups; g++) {
        i32x16 high[MR][NP] = {}, low[MR][NP] = {};
        const uint32_t* groups[NP];
        for (int p = 0; p < NP; p++) {
            groups[p] = panel + (p * num_groups + g) * GROUP_WORDS<F>;
            __builtin_prefetch(groups[p] + INTEGERS_AHEAD, 0, 2);
        }
#pragma GCC unroll 8
        for (int i = 0; i < BITS<F>; i++)
            for (int p = 0; p < NP; p++) {
                const uint32_t* at = groups[p] + (1 + i) * LANES;
                u32x16 packed = load<u32x16>(at);
                __builtin_prefetch(at + INTEGERS_AHEAD, 0, 2);
#pragma GCC unroll 2
                for (int half = 0; half < A_WORD; half++) {
                    u32x16 bytes = bytes_of<F>(packed, half);
                    for (int r = 0; r < MR; r++) {
                        int64_t word = (first + r * num_groups + g) * WORDS + i * A_WORD + half;
                        high[r][p] = add_products(high[r][p], bytes, x.high[word]);
                        low[r][p] = add_products(low[r][p], bytes, x.low[word]);
                    }
                }
            }
        for (int p = 0; p < NP; p++) {
            const uint16_t* scales = (const uint16_t*)groups[p];
            f32x16 scale = load_half(scales), offset = load_half(scales + LANES);
            for (int r = 0; r < MR; r++) {
                int64_t at = first + r * num_groups + g;
                f32x16 products = (f32x16)_mm512_cvtepi32_ps((__m512i)((high[r][p] << 8) + low[r][p]));
                acc[r][p] += scale * (products * x.scales[at]) + offset * x.sums[at];
            }
        }
    }
}

#else

// Few rows of x as fp32, and of each group of theirs the sum, and what its products have too much: the bases' part.
struct FewRows {
    int64_t in;
    int count;
    std::vector<float> values;         // [count][in]
    std::vector<float> sums, surplus;  // [count][in / GROUP]

    template <Format F>
    static FewRows of(const Rows& x, int64_t in) {
        const int64_t num_groups = in / GROUP;
        FewRows rows{in, x.count, std::vector<float>(x.count * in), std::vector<float>(x.count * num_groups),
                     std::vector<float>(x.count * num_groups)};
        for (int r = 0; r < x.count; r++)
            for (int64_t g = 0; g < num_groups; g++) {
                u32x16 words = load<u32x16>(x.row(r) + g * (GROUP / 2));
                float first = sum(low_half(words)), second = sum(high_half(words));
                rows.sums[r * num_groups + g] = first + second;
                rows.surplus[r * num_groups + g] = first * FIRST_BASE<F> + second * SECOND_BASE<F>;
                const bf16* from = (const bf16*)(x.row(r) + g * (GROUP / 2));
                for (int i = 0; i < GROUP; i++) rows.values[r * in + g * GROUP + i] = to_float(from[i]);
            }
        return rows;
    }
};

// MR rows of x from `row` by neighbouring panels: products with the integers in fp32, scaled once a group. A product of
// bf16 pairs takes as long as four of fp32 values (Xeon 6, 2026-12), and 8 bits would need two of them.
template <Format F, int MR, int NP>
inline void multiply_integers(const FewRows& x, int row, const uint32_t* panel, f32x16 (&acc)[MR][NP]) {
    constexpr int SUMS = fitting(4 / std::min(4, MR * NP), MR * NP);  // as many as hide the latency of a product
    const int64_t num_groups = x.in / GROUP;
    for (auto& line : acc)
        for (auto& value : line) value = f32x16{};
    const float *values = x.values.data() + row * x.in, *sums = x.sums.data() + row * num_groups;
    const float* surplus = x.surplus.data() + row * num_groups;
    for (int64_t g = 0; g < num_groups; g++) {
        const uint32_t* groups[NP];
        for (int p = 0; p < NP; p++) {
            groups[p] = panel + (p * num_groups + g) * GROUP_WORDS<F>;
            __builtin_prefetch(groups[p] + INTEGERS_AHEAD, 0, 2);
        }
        f32x16 parts[SUMS][MR][NP] = {};
        for (int r = 0; r < MR; r++)
            for (int p = 0; p < NP; p++) parts[0][r][p] = splat(-surplus[r * num_groups + g]);
#pragma GCC unroll 8
        for (int i = 0; i < BITS<F>; i++) {
            u32x16 packed[NP];
            for (int p = 0; p < NP; p++) {
                const uint32_t* at = groups[p] + (1 + i) * LANES;
                packed[p] = load<u32x16>(at);
                __builtin_prefetch(at + INTEGERS_AHEAD, 0, 2);
            }
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS<F>; j++) {
                const int k = (i * PAIRS<F> + j) * 2;
                f32x16 first[NP], second[NP];
                for (int p = 0; p < NP; p++) {
                    u32x16 rotated = rotate_to_pair<F>(packed[p], j);
                    first[p] = first_of_pair<F>(rotated);
                    second[p] = second_of_pair<F>(rotated);
                }
                for (int r = 0; r < MR; r++) {
                    const float* pair = values + r * x.in + g * GROUP + k;
                    for (int p = 0; p < NP; p++) parts[k % SUMS][r][p] += first[p] * pair[0];
                    for (int p = 0; p < NP; p++) parts[(k + 1) % SUMS][r][p] += second[p] * pair[1];
                }
            }
        }
        for (int p = 0; p < NP; p++) {
            const uint16_t* scales = (const uint16_t*)groups[p];
            f32x16 scale = load_half(scales), offset = load_half(scales + LANES);
            for (int r = 0; r < MR; r++) {
                f32x16 products = parts[0][r][p];
                for (int s = 1; s < SUMS; s++) products += parts[s][r][p];
                acc[r][p] += scale * products + offset * sums[r * num_groups + g];
            }
        }
    }
}

#endif

// Groups as bf16 words, for many rows: [num_groups][GROUP / 2][16].
template <Format F>
void expand(const uint32_t* group, int64_t num_groups, uint32_t* to) {
    for (int64_t g = 0; g < num_groups; g++, group += GROUP_WORDS<F>) {
        const uint16_t* scales = (const uint16_t*)group;
        f32x16 scale = load_half(scales), offset = load_half(scales + LANES);
        f32x16 first_offset = offset - scale * FIRST_BASE<F>, second_offset = offset - scale * SECOND_BASE<F>;
        __builtin_prefetch(group + INTEGERS_AHEAD, 0, 2);
#pragma GCC unroll 8
        for (int i = 1; i <= BITS<F>; i++) {
            u32x16 packed = load<u32x16>(group + i * LANES);
            __builtin_prefetch(group + i * LANES + INTEGERS_AHEAD, 0, 2);
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS<F>; j++, to += LANES) {
                u32x16 rotated = rotate_to_pair<F>(packed, j);
                f32x16 first = first_of_pair<F>(rotated) * scale + first_offset;
                f32x16 second = second_of_pair<F>(rotated) * scale + second_offset;
                // Rounded half up, which is cheaper than half to even.
                store(to, ((u32x16)first + 0x8000u) >> 16 | (((u32x16)second + 0x8000u) & 0xffff0000u));
            }
        }
    }
}

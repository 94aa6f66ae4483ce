// Vectors of sixteen 32-bit lanes.
//
// The compiler has them for every instruction set, but keeps in memory what is wider than a register. Without AVX-512
// a vector is therefore two halves, of two halves each where registers have four lanes, down to what fits a register.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif

// Vectors of sums that registers have room for, beside operands: AVX-512 and ARM have 32 registers, the others 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_SUMS = 24 * REGISTER_LANES / LANES;
#else
constexpr int MAX_SUMS = 12 * REGISTER_LANES / LANES;
#endif

// The largest power of two up to `wanted` of which `each` sums fit.
constexpr int fitting(int wanted, int each) {
    int count = 1;
    while (2 * count <= wanted && 2 * count * each <= MAX_SUMS) count *= 2;
    return count;
}

template <class E, int N>
struct Wide;
template <class E, int N>
struct Register {
    typedef E type __attribute__((vector_size(N * sizeof(E))));
};
template <class E, int N>
struct VectorOf {
    typedef Wide<E, N> type;
};
template <class E, int N>
    requires(N <= REGISTER_LANES)
struct VectorOf<E, N> {
    typedef typename Register<E, N>::type type;
};
template <class E, int N>
using Vector = typename VectorOf<E, N>::type;

template <class E, int N>
struct Wide {
    typedef Vector<E, N / 2> Half;
    Half low, high;

    Wide() = default;
    Wide(Half low, Half high) : low(low), high(high) {}
    Wide(E value) : low(Half{} + value), high(Half{} + value) {}

    template <class To>
    explicit operator Wide<To, N>() const {
        typedef Vector<To, N / 2> HalfOfTo;
        return {(HalfOfTo)low, (HalfOfTo)high};
    }
    E operator[](int lane) const { return lane < N / 2 ? low[lane] : high[lane - N / 2]; }

#define BATON_OPERATOR(op)                                                                               \
    friend Wide operator op(const Wide& a, const Wide& b) { return {a.low op b.low, a.high op b.high}; } \
    Wide& operator op##=(const Wide & other) { return *this = *this op other; }
    BATON_OPERATOR(+)
    BATON_OPERATOR(-)
    BATON_OPERATOR(*)
    BATON_OPERATOR(/)
    BATON_OPERATOR(&)
    BATON_OPERATOR(|)
#undef BATON_OPERATOR
    friend Wide operator<<(const Wide& a, int by) { return {a.low << by, a.high << by}; }
    friend Wide operator>>(const Wide& a, int by) { return {a.low >> by, a.high >> by}; }

    // In each lane -1 where it is so, otherwise 0.
    typedef Wide<int32_t, N> Mask;
    friend Mask operator<(const Wide& a, const Wide& b) { return {a.low < b.low, a.high < b.high}; }
    friend Mask operator>(const Wide& a, const Wide& b) { return {a.low > b.low, a.high > b.high}; }
    friend Mask operator!=(const Wide& a, const Wide& b) { return {a.low != b.low, a.high != b.high}; }
};

typedef Vector<float, LANES> f32x16;
typedef Vector<int32_t, LANES> i32x16;
typedef Vector<uint32_t, LANES> u32x16;

template <class V>
constexpr bool IS_WIDE = false;
template <class E, int N>
constexpr bool IS_WIDE<Wide<E, N>> = true;

template <class V>
inline V load(const void* from) {
    if constexpr (IS_WIDE<V>) {
        typedef typename V::Half Half;
        return {load<Half>(from), load<Half>((const char*)from + sizeof(Half))};
    } else {
        V value;
        __builtin_memcpy(&value, from, sizeof value);
        return value;
    }
}

template <class V>
inline void store(void* to, V value) {
    if constexpr (IS_WIDE<V>) {
        store(to, value.low);
        store((char*)to + sizeof value.low, value.high);
    } else {
        __builtin_memcpy(to, &value, sizeof value);
    }
}

// a where the mask is set, otherwise b.
template <class M, class V>
inline V select(M mask, V a, V b) {
    if constexpr (IS_WIDE<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

inline i32x16 lane_numbers() {
    alignas(64) static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32x16>(NUMBERS);
}

template <class V>
inline V max(V a, V b) {
    return select(a > b, a, b);
}

// Over all lanes.
template <class V>
inline float sum(V v) {
    if constexpr (IS_WIDE<V>) {
        return sum(v.low + v.high);
    } else {
#ifdef __AVX512F__
        return _mm512_reduce_add_ps((__m512)v);
#else
        float total = 0;
        for (int i = 0; i < REGISTER_LANES; i++) total += v[i];
        return total;
#endif
    }
}
template <class V>
inline float max_of(V v) {
    if constexpr (IS_WIDE<V>) {
        return max_of(max(v.low, v.high));
    } else {
#ifdef __AVX512F__
        return _mm512_reduce_max_ps((__m512)v);
#else
        float most = v[0];
        for (int i = 1; i < REGISTER_LANES; i++) most = v[i] > most ? v[i] : most;
        return most;
#endif
    }
}

// The lower halves of all lanes, side by side.
template <class V>
inline void store_low_halves(void* to, V words) {
    if constexpr (IS_WIDE<V>) {
        store_low_halves(to, words.low);
        store_low_halves((char*)to + sizeof words.low / 2, words.high);
    } else {
        store(to, __builtin_convertvector(words, typename Register<uint16_t, REGISTER_LANES>::type));
    }
}

// Sixteen fp16 values.
inline f32x16 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    auto eight = [&](int first) {
        return (f32x16::Half)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + first)));
    };
    return {eight(0), eight(8)};
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = float(load<_Float16>(from + i));
    return load<f32x16>(values);
#endif
}

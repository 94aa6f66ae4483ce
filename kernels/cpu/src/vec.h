// Arithmetic of sixteen lanes, of fp32 values and of words.
//
// A word is what one lane holds of an operand: one fp32 value, or a pair of bf16 values (the lower half first).
// Weights, keys and values lie in memory as rows of 16 words, so that one operand of a product is loaded as it is
// and the other one is a broadcast word; nothing is summed across lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

struct bf16 {
    uint16_t bits;
};

inline f32x16 splat(float value) { return f32x16{} + value; }
inline u32x16 splat_word(uint32_t value) { return u32x16{} + value; }

inline float to_float(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    return load<float>(&bits);
}
inline float to_float(float value) { return value; }

// Round to nearest even. NaN stays NaN: its mantissa keeps its highest bit.
inline bf16 to_bf16(float value) {
    uint32_t bits = load<uint32_t>(&value);
    if (value != value) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline u32x16 round_to_bf16(f32x16 value) {  // the bits of each, in the lower half of its lane
    u32x16 bits = (u32x16)value;
    u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    u32x16 quiet = bits >> 16 | 0x40;
    return select(value != value, quiet, rounded);
}

inline f32x16 low_half(u32x16 words) { return (f32x16)(words << 16); }
inline f32x16 high_half(u32x16 words) { return (f32x16)(words & 0xffff0000u); }

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, and about 0 below 2^-126: x = n + f, a polynomial in f, its exponent raised by n. To 2 ulp for fp32;
// for bf16 a cubic, fitted over half an octave each side, whose 1e-4 the rounding to bf16 (4e-3) hides.
template <class T>
inline f32x16 exp2_negative(f32x16 x) {
#ifdef __AVX512DQ__
    if (sizeof(T) == 2) {  // two instructions know what the rest of this function does by hand
        f32x16 f = (f32x16)_mm512_reduce_ps((__m512)x, 0), p = splat(0.05517159f);  // x less the nearest integer
        p = p * f + 0.24261112f;
        p = p * f + 0.693261f;
        p = p * f + 0.99992807f;
        return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
    }
#endif
    f32x16 clamped = max(x, splat(-126.0f));
    f32x16 shifted = clamped + 12582912.0f;  // 1.5 * 2^23 rounds to the nearest integer
    f32x16 f = clamped - (shifted - 12582912.0f);
    f32x16 p;
    if (sizeof(T) == 2) {
        p = splat(0.05517159f);
        p = p * f + 0.24261112f;
        p = p * f + 0.693261f;
        p = p * f + 0.99992807f;
    } else {
        f32x16 r = f * 0.693147181f;
        p = splat(1.3981999507e-3f);
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 0.5f;
        p = p * (r * r) + r + 1.0f;
    }
    return (f32x16)((u32x16)p + ((u32x16)shifted << 23));
}

// 1 / x for a result of type T: for bf16 14 bits are enough.
template <class T>
inline f32x16 reciprocal(f32x16 x) {
#ifdef __AVX512F__
    if (sizeof(T) == 2) return (f32x16)_mm512_rcp14_ps((__m512)x);
#endif
    return 1.0f / x;
}

template <class T>
inline f32x16 silu(f32x16 x) {
    f32x16 negative = (f32x16)((u32x16)x | 0x80000000u);
    f32x16 e = exp2_negative<T>(negative * LOG2_E);  // exp(-|x|): no overflow on either side
    f32x16 sigmoid = select(x < 0.0f, e, splat(1.0f)) * reciprocal<T>(e + 1.0f);
    return x * sigmoid;
}

// How values of type T lie in words. PAIR: values a word holds.
template <class T>
struct Words;

template <>
struct Words<float> {
    static constexpr int PAIR = 1;
    static f32x16 dot(f32x16 acc, u32x16 words, u32x16 broadcast) {
        return acc + (f32x16)words * (f32x16)broadcast;
    }
    static void store_row(float* to, f32x16 value) { store(to, value); }
    static void store_two(float* to, f32x16 first, f32x16 second) {
        store(to, first);
        store(to + LANES, second);
    }
    static uint32_t word(float first, float) { return load<uint32_t>(&first); }
};

template <>
struct Words<bf16> {
    static constexpr int PAIR = 2;
    static f32x16 dot(f32x16 acc, u32x16 words, u32x16 broadcast) {
#ifdef __AVX512BF16__
        return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)words, (__m512bh)broadcast);
#else
        acc = acc + high_half(words) * high_half(broadcast);
        return acc + low_half(words) * low_half(broadcast);
#endif
    }
    static void store_row(bf16* to, f32x16 value) {
#ifdef __AVX512BF16__
        store(to, _mm512_cvtneps_pbh((__m512)value));
#else
        store_low_halves(to, round_to_bf16(value));
#endif
    }
    // Two rows of 16, one behind the other: as fast as one of them.
    static void store_two(bf16* to, f32x16 first, f32x16 second) {
#ifdef __AVX512BF16__
        store(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
        store_row(to, first);
        store_row(to + LANES, second);
#endif
    }
    static uint32_t word(float first, float second) {
        return uint32_t(to_bf16(first).bits) | uint32_t(to_bf16(second).bits) << 16;
    }
};

template <class T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) { return value; }
template <>
inline bf16 from_float<bf16>(float value) { return to_bf16(value); }

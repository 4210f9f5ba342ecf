// Vectors of the width that this translation unit is compiled for: the only file with intrinsics.
// Everything is in an unnamed namespace, so that no copy for one CPU can be linked into another.
// Multiply-add is always explicit (contraction is off): every path adds in the same way.
#pragma once
#include <cstdint>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
#define REGARD_FUSED_MULTIPLY_ADD 1
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#define REGARD_INTRINSIC(NAME) _mm512_##NAME
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#define REGARD_INTRINSIC(NAME) _mm256_##NAME
#else
constexpr int kBytes = 16;
#define REGARD_INTRINSIC(NAME) _mm_##NAME
#endif

template <class T, class I, class U> struct Vectors {
    typedef T type __attribute__((vector_size(kBytes)));
    typedef T unaligned __attribute__((vector_size(kBytes), aligned(1), may_alias));
    typedef I bits __attribute__((vector_size(kBytes)));
    typedef U modular __attribute__((vector_size(kBytes)));
    typedef I integer;
};
template <class T> struct VectorOf;
template <> struct VectorOf<float> : Vectors<float, int32_t, uint32_t> {};
template <> struct VectorOf<double> : Vectors<double, int64_t, uint64_t> {};
template <class T> using Vec = typename VectorOf<T>::type;
template <class T> using Bits = typename VectorOf<T>::bits;
template <class T> using Modular = typename VectorOf<T>::modular;  // bits to add: may wrap around
template <class T> constexpr int kLanes = kBytes / int(sizeof(T));

#define REGARD_ALWAYS_INLINE __attribute__((always_inline)) inline
#define REGARD_INLINE static REGARD_ALWAYS_INLINE
#define REGARD_INLINED __attribute__((always_inline))  // after the parameters of a lambda
// For functions of lambdas of lambdas. GCC optimises what it must inline again at every level: a unit
// compiles a quarter faster, to the same loops, where the outermost function takes in all it calls.
#if defined(__clang__)
#define REGARD_NESTED REGARD_INLINE
#define REGARD_LAMBDA REGARD_INLINED
#define REGARD_OUTERMOST static __attribute__((noinline))
#else
#define REGARD_NESTED static inline
#define REGARD_LAMBDA
#define REGARD_OUTERMOST static __attribute__((noinline, flatten))
#endif

// Whether results of T that would be subnormal are 0 while one lives; operands keep their values. An Intel CPU
// takes 100 to 200 cycles over one instruction that makes such a number. In float64, which reaches far below
// every weight that counts, they are kept, and on arm64, whose switch takes operands for 0 too.
template <class T, bool Flushed> class TinyResults {
#if defined(__x86_64__)
  public:
    TinyResults() : before_(_mm_getcsr()) { set((before_ & ~kFlush) | (Flushed ? kFlush : 0)); }
    ~TinyResults() { set(before_); }

  private:
    static constexpr unsigned kFlush = 0x8000;
    const unsigned before_;
    void set(unsigned state) const {
        if (sizeof(T) == 4) _mm_setcsr(state);
    }
#else
  public:
    TinyResults() {}  // or a compiler would call it unused
#endif
};
template <class T> using FlushToZero = TinyResults<T, true>;
template <class T> using KeepSubnormals = TinyResults<T, false>;

template <class T> REGARD_INLINE Vec<T> load(const T* p) {
    return (Vec<T>)*(const typename VectorOf<T>::unaligned*)p;
}
template <class T> REGARD_INLINE void store(T* p, Vec<T> v) {
    *(typename VectorOf<T>::unaligned*)p = (typename VectorOf<T>::unaligned)v;
}
// Half a vector from each of two places.
template <class T> REGARD_INLINE Vec<T> load_halves(const char* low, const char* high) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low));
    return (Vec<T>)_mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i*)high), 1);
#else
    Vec<T> both;
    __builtin_memcpy(&both, low, kBytes / 2);
    __builtin_memcpy((char*)&both + kBytes / 2, high, kBytes / 2);
    return both;
#endif
}
template <class T> REGARD_INLINE Vec<T> all(T x) { return x - (Vec<T>){}; }

// a where the bits are set, else b.
template <class V, class B> REGARD_INLINE V select(B bits, V a, V b) {
    return (V)((bits & (B)a) | (~bits & (B)b));
}

// All bits of the lanes whose bit in a word is set, the lowest for the first.
template <class T> REGARD_INLINE Bits<T> lanes_of(uint64_t word) {
    typedef typename VectorOf<T>::integer Integer;
    Bits<T> own;
    for (int i = 0; i < kLanes<T>; i++) own[i] = Integer(1) << i;
    return Bits<T>(((Integer(word) - Bits<T>{}) & own) == own);
}
// Of 64 integers, the bits of those that are x, the first the lowest.
REGARD_INLINE uint64_t equal_bits(const int64_t* p, int64_t x) {
    constexpr int W = kLanes<double>;
    const Bits<double> wanted = x - Bits<double>{};
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += W) {
        const Bits<double> found = (Bits<double>)load((const double*)(p + i));
#if defined(__AVX512F__)
        bits |= uint64_t(_mm512_cmpeq_epi64_mask((__m512i)found, (__m512i)wanted)) << i;
#elif defined(__SSE2__)
        const Vec<double> same = (Vec<double>)(found == wanted);
        bits |= uint64_t(REGARD_INTRINSIC(movemask_pd)(same)) << i;
#else
        for (int lane = 0; lane < W; lane++) bits |= uint64_t(found[lane] == x) << (i + lane);
#endif
    }
    return bits;
}
// The same of 64 bytes that are not 0.
REGARD_INLINE uint64_t nonzero_bits(const char* p) {
#if defined(__AVX512F__)
    const __m512i x = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(x, x);
#elif defined(__SSE2__)
    typedef char Bytes __attribute__((vector_size(kBytes)));
    typedef long long Whole __attribute__((vector_size(kBytes)));
    uint64_t zeros = 0;
    for (int i = 0; i < 64; i += kBytes) {
        const Whole zero = (Whole)((Bytes)load((const float*)(p + i)) == Bytes{});
        zeros |= uint64_t(uint32_t(REGARD_INTRINSIC(movemask_epi8)(zero))) << i;
    }
    return ~zeros;
#else
    constexpr uint64_t ones = 0x0101010101010101, most = 0x7f * ones;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        uint64_t x;
        __builtin_memcpy(&x, p + 8 * i, 8);
        x = ((((x & most) + most) | x) >> 7) & ones;
        bits |= (x * 0x0102040810204080) >> 56 << 8 * i;  // each byte's 1 in a place of its own
    }
    return bits;
#endif
}

template <int... I> using Indices = std::integer_sequence<int, I...>;
template <class T> using LanesOf = std::make_integer_sequence<int, kLanes<T>>;

// The numbers of a vector as vectors of double, in order, and back.
template <int First, int... I> REGARD_INLINE Vec<double> wide_part(Vec<float> x, Indices<I...>) {
    return __builtin_convertvector(__builtin_shufflevector(x, x, (First + I)...), Vec<double>);
}
REGARD_INLINE void widen(Vec<double> x, Vec<double> (&to)[1]) { to[0] = x; }
REGARD_INLINE void widen(Vec<float> x, Vec<double> (&to)[2]) {
#if defined(__AVX512F__)  // GCC 12 converts a quarter at a time
    to[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    to[1] = _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0xee)));
#else
    to[0] = wide_part<0>(x, LanesOf<double>{});
    to[1] = wide_part<kLanes<double>>(x, LanesOf<double>{});
#endif
}
typedef float Few __attribute__((vector_size(kBytes / 2)));
template <int... I> REGARD_INLINE Vec<float> joined(Few low, Few high, Indices<I...>) {
    return __builtin_shufflevector(low, high, I...);
}
REGARD_INLINE Few narrow(Vec<double> x) { return __builtin_convertvector(x, Few); }

// Whether one of the numbers may be halfway between two of bfloat16.
REGARD_INLINE bool some_halfway(Vec<float> x) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_slli_epi32((__m512i)x, 16);
    return _mm512_cmpeq_epi32_mask(low, _mm512_set1_epi32(INT32_MIN)) != 0;
#else
    return true;  // to find out takes as long as it saves
#endif
}

// Whole vectors of zeros over n numbers.
template <class T> REGARD_INLINE void clear(T* p, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(p + i, Vec<T>{});
}

// a * b + c: fused where the CPU can, else product and sum, but the same on every path.
#if defined(__AVX512F__) || defined(__FMA__)
#define REGARD_FMA(SUFFIX, ARM) REGARD_INTRINSIC(fmadd_##SUFFIX)(a, b, c)
#elif defined(__aarch64__)
#define REGARD_FMA(SUFFIX, ARM) ARM(c, a, b)
#else
#define REGARD_FMA(SUFFIX, ARM) a* b + c
#endif
#define REGARD_FMA_OF(V, SUFFIX, ARM) \
    REGARD_INLINE V fma(V a, V b, V c) { return REGARD_FMA(SUFFIX, ARM); }
REGARD_FMA_OF(Vec<float>, ps, vfmaq_f32)
REGARD_FMA_OF(Vec<double>, pd, vfmaq_f64)

// Horner's rule, from the leading coefficient on.
template <class V, class... C> REGARD_INLINE V polynomial(V x, V p, C... coefficients) {
    return (..., (p = fma(p, x, all(coefficients))));
}

// The larger one; where one of them is NaN, the second argument.
#if defined(__SSE2__)
#define REGARD_LARGER(SUFFIX) REGARD_INTRINSIC(max_##SUFFIX)(a, b)
#else
#define REGARD_LARGER(SUFFIX) a > b ? a : b
#endif
REGARD_INLINE Vec<float> larger(Vec<float> a, Vec<float> b) { return REGARD_LARGER(ps); }
REGARD_INLINE Vec<double> larger(Vec<double> a, Vec<double> b) { return REGARD_LARGER(pd); }

// Reductions: the upper half onto the lower, then quarters, …: in a fixed order on every path.
template <int Width, class V, int... I> REGARD_INLINE V upper(V v, Indices<I...>) {
    return __builtin_shufflevector(v, v, (Width + I % Width)...);
}
template <class T, int Width, class F> REGARD_INLINE Vec<T> fold(Vec<T> v, F combine) {
    if constexpr (Width == 0) return v;
    else return fold<T, Width / 2>(combine(v, upper<Width>(v, LanesOf<T>{})), combine);
}
template <class T> REGARD_INLINE T sum_of(Vec<T> v) {
    return fold<T, kLanes<T> / 2>(v, [](Vec<T> a, Vec<T> b) { return a + b; })[0];
}
template <class T> REGARD_INLINE T largest_of(Vec<T> v) {
    return fold<T, kLanes<T> / 2>(v, [](Vec<T> a, Vec<T> b) { return larger(a, b); })[0];
}
// Whether a lane is NaN, as what compares true is; all others are 0.
template <class T> REGARD_INLINE bool any(Vec<T> x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    return sum_of<T>(x) != 0;
#endif
}
// Whether whole vectors of numbers are finite: x · 0 is NaN where x is not, and a sum keeps a NaN.
template <class T> REGARD_INLINE bool finite(const T* x, int64_t n) {
    constexpr int W = kLanes<T>, N = 4;  // additions that do not wait for each other
    Vec<T> rest[N] = {};
    int64_t i = 0;
    for (; i + N * W <= n; i += N * W)
        for (int part = 0; part < N; part++)
            rest[part] = fma(load(x + i + part * W), Vec<T>{}, rest[part]);
    for (; i < n; i += W) rest[0] = fma(load(x + i), Vec<T>{}, rest[0]);
    return !any<T>((rest[0] + rest[1]) + (rest[2] + rest[3]));
}

// 2^x for x <= 0, at most 1 ulp off, down through the subnormal numbers to 0; NaN stays NaN.
// Without scalef, the result is made 2^24 or 2^53 times too large and multiplied down: one rounding.
// What will be 0 is masked out, or underflows once, where that is flushed; what is multiplied down is
// never subnormal itself: such a lane takes some CPUs 200 cycles.
REGARD_INLINE Vec<float> exp2(Vec<float> x) {
#if defined(__AVX512F__)
    const __mmask16 there = _mm512_cmp_ps_mask(x, all(-150.0f), _CMP_NLT_UQ);  // NaN is
    const Vec<float> f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT);  // 0 of an infinity
    const Vec<float> whole = x - f;
#else
    x = larger(all(-150.0f),
               x);  // half of the least number, so 0; NaN, the second argument, passes
    const Vec<float> magic = all(12582912.0f + 24.0f);  // 1.5 * 2^23: rounds to an integer
    Vec<float> r = x + magic;
    Vec<float> f = x - (r - magic);
#endif
    Vec<float> p = polynomial(f, all(1.535336188319500e-4f), 1.339887440266574e-3f,
                              9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f);
#if defined(REGARD_FUSED_MULTIPLY_ADD)
    p = polynomial(f, p, 6.931472028550421e-1f, 1.0f);
#else
    // The linear term in two parts, the larger one exact: else its rounding alone costs half an ulp.
    const Vec<float> coarse = (f + all(3072.0f)) - all(3072.0f);  // a multiple of 2^-12
    const Vec<float> fine = p * f * f + ((f - coarse) * all(6.931472028550421e-1f) +
                                         coarse * all(-2.121721449579e-4f));
    p = (all(1.0f) + coarse * all(0.693359375f)) + fine;
#endif
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(there, p, whole);
#else
    Vec<float> scaled = (Vec<float>)(((Modular<float>)r << 23) + (Modular<float>)p);
    // Integer arithmetic alone could make a number of a NaN; f − f is 0, and NaN where x is.
    return fma(scaled, all(0x1p-24f), f - f);
#endif
}
REGARD_INLINE Vec<double> exp2(Vec<double> x) {
#if defined(__AVX512F__)
    const __mmask8 there = _mm512_cmp_pd_mask(x, all(-1075.0), _CMP_NLT_UQ);
    const Vec<double> f = _mm512_reduce_pd(x, _MM_FROUND_TO_NEAREST_INT);
    const Vec<double> whole = x - f;
#else
    x = larger(all(-1076.0), x);
    const Vec<double> magic = all(6755399441055744.0 + 53.0);  // 1.5 * 2^52
    Vec<double> r = x + magic;
    Vec<double> f = x - (r - magic);
#endif
    // 2^f = e^g with g = f ln 2 in two parts; Taylor to g^13 is below 2^-60 for |g| <= 0.347.
    Vec<double> g = f * all(0.69314718055994530942);
    Vec<double> rest = fma(f, all(0.69314718055994530942), -g);
    rest = fma(f, all(2.3190468138462996e-17), rest);
    Vec<double> p = polynomial(g, all(1.6059043836821613e-10), 2.08767569878681e-09,
                               2.505210838544172e-08, 2.755731922398589e-07, 2.7557319223985893e-06,
                               2.48015873015873e-05, 1.984126984126984e-04, 1.3888888888888889e-03,
                               8.333333333333333e-03, 4.1666666666666664e-02,
                               1.6666666666666666e-01, 0.5);
    p = fma(p * g, g, rest) + g;  // e^g - 1
    p = p + all(1.0);
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_pd(there, p, whole);
#else
    Vec<double> scaled = (Vec<double>)(((Modular<double>)r << 52) + (Modular<double>)p);
    return fma(scaled, all(0x1p-53), f - f);
#endif
}

#if defined(__AVX512BF16__)
// Pairs of bfloat16, the first in the lower half. The instructions round to nearest whatever the
// floating-point state says, and take and leave subnormal numbers as 0.
// sum + a₁·b₁, rounded, then + a₀·b₀, rounded.
REGARD_INLINE Vec<float> dot(Vec<float> sum, Bits<float> a, Bits<float> b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
// The numbers of two vectors, one after the other, as pairs.
REGARD_INLINE Bits<float> narrow_pairs(Vec<float> first, Vec<float> second) {
    return (Bits<float>)_mm512_cvtne2ps_pbh(second, first);
}
#endif

#if defined(__AVX512VNNI__)
// sum + a₀·b₀ + … + a₃·b₃ for four integers of 8 bits in each lane, those of a without a sign.
REGARD_INLINE Bits<float> dot_integers(Bits<float> sum, Bits<float> a, Bits<float> b) {
    return (Bits<float>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
constexpr int32_t kCellOffset = int32_t(0x80808080);  // to each of four integers
// The first n bytes, at most a vector, then 0; nothing else is read.
REGARD_INLINE Bits<float> load_bytes(const char* p, int64_t n) {
    if (n >= kBytes) return (Bits<float>)load((const float*)p);
    const __mmask64 there = n > 0 ? ~uint64_t(0) >> (kBytes - n) : 0;
    return (Bits<float>)_mm512_maskz_loadu_epi8(there, p);
}
REGARD_INLINE void store_bytes(void* p, Bits<float> x) { store((float*)p, (Vec<float>)x); }
// The lowest byte of each lane.
REGARD_INLINE void store_lowest(void* p, Bits<float> x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
}
// Rows of bytes become cells: lane 4i + c of vector n has the column 16i + 4n + c of all four.
REGARD_INLINE void weave_bytes(Bits<float> (&rows)[4]) {
    const __m512i a = (__m512i)rows[0], b = (__m512i)rows[1];
    const __m512i c = (__m512i)rows[2], d = (__m512i)rows[3];
    const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    const __m512i low2 = _mm512_unpacklo_epi8(c, d), high2 = _mm512_unpackhi_epi8(c, d);
    rows[0] = (Bits<float>)_mm512_unpacklo_epi16(low, low2);
    rows[1] = (Bits<float>)_mm512_unpackhi_epi16(low, low2);
    rows[2] = (Bits<float>)_mm512_unpacklo_epi16(high, high2);
    rows[3] = (Bits<float>)_mm512_unpackhi_epi16(high, high2);
}
REGARD_INLINE Bits<float> to_integers(Vec<float> x) { return (Bits<float>)_mm512_cvtps_epi32(x); }
// x · 2^power for a whole power; NaN where one of them is.
REGARD_INLINE Vec<float> times_power(Vec<float> x, float power) {
    return _mm512_scalef_ps(x, all(power));
}
#endif

// 2^x of one number x <= 0, by the same arithmetic as in vectors.
template <class T> REGARD_INLINE T exp2_of(T x) { return exp2(all(x))[0]; }

// Conversions between float32 and the half types.
REGARD_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
REGARD_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

REGARD_INLINE float from_half(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    // Shift the exponent and fraction into place, scale by 2^112: subnormals come out normal.
    const float size = float_of(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
    const uint32_t special = size >= 65536.0f ? 0x7f800000u : 0;
    return float_of(bits_of(size) | special | uint32_t(h & 0x8000) << 16);
#endif
}
REGARD_INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000, size = bits_of(x) & 0x7fffffff;
    if (size > 0x7f800000) return uint16_t(sign | 0x7e00 | ((size >> 13) & 0x1ff));
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);
    // A subnormal number: an addition rounds it.
    if (size < 0x38800000) return uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    const uint32_t rounded = size + 0xfff + ((size >> 13) & 1);
    return uint16_t(sign | ((rounded - 0x38000000) >> 13));
#endif
}
// A double as a float on the way to a half type: inexact ones end in an odd bit, so that rounding
// again gives what rounding once would have.
REGARD_INLINE float to_odd(double x) {
    const float near = float(x);
    if (double(near) == x || x != x) return near;
    return float_of((bits_of(near) - (__builtin_fabs(double(near)) > __builtin_fabs(x))) | 1);
}
// The same for a vector of them.
REGARD_INLINE Few to_odd(Vec<double> x) {
#if defined(__AVX512F__)
    const __m256 cut = _mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), x, _CMP_NEQ_UQ);
    const __m256i bits = _mm256_castps_si256(cut);
    return (Few)_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1));
#else
    typedef int32_t FewBits __attribute__((vector_size(kBytes / 2)));
    const Few near = __builtin_convertvector(x, Few);
    const Vec<double> back = __builtin_convertvector(near, Vec<double>);
    const Bits<double> inexact = (back != x) & (x == x), size = (Bits<double>)all(-0.0);
    const Bits<double> beyond = (~size & (Bits<double>)back) > (~size & (Bits<double>)x);  // −1
    const FewBits odd = ((FewBits)near + __builtin_convertvector(beyond, FewBits)) | 1;
    return select(__builtin_convertvector(inexact, FewBits), (Few)odd, near);
#endif
}
REGARD_INLINE float from_bfloat(uint16_t h) { return float_of(uint32_t(h) << 16); }
REGARD_INLINE uint16_t to_bfloat(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The same for whole vectors of float32.
typedef uint16_t Narrow __attribute__((vector_size(kBytes / 2)));
typedef Modular<float> Wide;

REGARD_INLINE Wide load_wide(const void* p) {
#if defined(__AVX512F__)
    return (Wide)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (Wide)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    Narrow x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Wide);
#endif
}
REGARD_INLINE Vec<float> wide_bfloat(const void* p) { return (Vec<float>)(load_wide(p) << 16); }
#if !defined(__F16C__)
REGARD_INLINE Vec<float> wide_half(Wide bits) {
    const Vec<float> value = (Vec<float>)((bits & 0x7fff) << 13) * all(0x1p112f);
    const Wide size = (Wide)value | ((Wide)(value >= all(65536.0f)) & 0x7f800000);
    return (Vec<float>)(size | (bits & 0x8000) << 16);
}
#endif
REGARD_INLINE Vec<float> wide_half(const void* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return wide_half(load_wide(p));
#endif
}
// Pairs of numbers, as they lie in memory, become their first and their second ones.
REGARD_INLINE void split_bfloat(Vec<float> pairs, Vec<float>& first, Vec<float>& second) {
    first = (Vec<float>)((Wide)pairs << 16);
    second = (Vec<float>)((Wide)pairs & 0xffff0000);
}
#if defined(__F16C__)
template <int... I> REGARD_INLINE Vec<float> firsts_then_seconds(Vec<float> pairs, Indices<I...>) {
    typedef uint16_t Numbers __attribute__((vector_size(kBytes)));
    constexpr int W = kLanes<float>;
    return (Vec<float>)__builtin_shufflevector((Numbers)pairs, (Numbers)pairs,
                                               (2 * (I % W) + I / W)...);
}
#endif
REGARD_INLINE void split_half(Vec<float> pairs, Vec<float>& first, Vec<float>& second) {
#if defined(__F16C__)
    pairs = firsts_then_seconds(pairs, std::make_integer_sequence<int, 2 * kLanes<float>>{});
#endif
#if defined(__AVX512F__)
    first = _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)pairs));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)pairs, 1));
#elif defined(__F16C__)
    first = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)pairs));
    second = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)pairs, 1));
#else
    first = wide_half((Wide)pairs & 0xffff);
    second = wide_half((Wide)pairs >> 16);
#endif
}
// Integers of 8 bits: as many as there are lanes, and every fourth of a vector's, from `Place` on.
REGARD_INLINE Vec<float> wide_bytes(const void* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Bits<float> x;
    for (int i = 0; i < kLanes<float>; i++) x[i] = ((const int8_t*)p)[i];
    return __builtin_convertvector(x, Vec<float>);
#endif
}
template <int Place> REGARD_INLINE Vec<float> bytes_at(Vec<float> cells) {
    return __builtin_convertvector((Bits<float>)((Wide)cells << (24 - 8 * Place)) >> 24,
                                   Vec<float>);
}
REGARD_INLINE void narrow_bfloat(void* p, Vec<float> x) {
    const Wide bits = (Wide)x, number = (Wide)(x == x);
    const Wide rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = bits >> 16 | 0x40;
    const Narrow y = __builtin_convertvector(select(number, rounded, nan), Narrow);
    __builtin_memcpy(p, &y, sizeof y);
}
REGARD_INLINE void narrow_half(void* p, Vec<float> x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    Narrow y;
    for (int i = 0; i < kLanes<float>; i++) y[i] = to_half(x[i]);
    __builtin_memcpy(p, &y, sizeof y);
#endif
}

}  // namespace

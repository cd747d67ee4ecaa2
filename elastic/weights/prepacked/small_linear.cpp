// Products in float32 of a few tokens with a small matrix as it lies, [outputs, inputs]. With so little to compute, others
// spend much of their time on putting the matrix in their own order first, or on finding out what to do.
//
// What is computed for a token depends on nothing else in the batch, nor on the number of threads.

#include <algorithm>
#include <cstdint>
#if defined(__AVX2__) && defined(__FMA__)
#define HAS_KERNEL 1
#include <immintrin.h>
#else
#define HAS_KERNEL 0
#endif

extern "C" {

// Whether there is a kernel for this processor.
int is_supported() { return HAS_KERNEL; }

// The inputs of a matrix are a multiple of it.
int lanes() {
#ifdef __AVX512F__
  return 16;
#else
  return 8;
#endif
}
}

#if HAS_KERNEL
namespace {

constexpr int OUTPUTS = 4;             // whose sums for some tokens stay in registers
constexpr int64_t AHEAD = 16;          // rows by which the matrix is fetched ahead of the first tokens
constexpr int64_t TILE = 48;           // tokens that stay in the first cache
constexpr int64_t LITTLE = 1 << 20;    // products of two numbers that are not worth a second thread

#ifdef __AVX512F__
constexpr int LANES = 16, TOKENS = 6;
typedef __m512 Floats;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats pairs(Floats a, Floats b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
inline __m128 fourths(Floats a, Floats b) {
  const __m512d low = _mm512_castps_pd(a), high = _mm512_castps_pd(b);
  const Floats sum = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sum), upper);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#else
constexpr int LANES = 8, TOKENS = 2;
typedef __m256 Floats;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats pairs(Floats a, Floats b) { return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }
inline __m128 fourths(Floats a, Floats b) {
  const __m256d low = _mm256_castps_pd(a), high = _mm256_castps_pd(b);
  const Floats sum = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)),
                                   _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
  return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}
#endif

struct Product {
  const float* weight;  // of OUTPUTS rows
  int64_t inputs, outputs;
  const float* bias;

  // The sums over inputs of so many tokens, by OUTPUTS rows.
  template <int tokens>
  void compute(const float* x, float* out, bool fetches) const {
    Floats sums[tokens][OUTPUTS];
    for (auto& of_token : sums)
      for (Floats& sum : of_token) sum = zeros();
    for (int64_t i = 0; i < inputs; i += LANES) {
      Floats rows[OUTPUTS];
      for (int o = 0; o < OUTPUTS; o++) {
        rows[o] = load(weight + o * inputs + i);
        if (fetches) _mm_prefetch(reinterpret_cast<const char*>(weight + (AHEAD + o) * inputs + i), _MM_HINT_T0);
      }
      for (int t = 0; t < tokens; t++) {
        const Floats values = load(x + t * inputs + i);
        for (int o = 0; o < OUTPUTS; o++) sums[t][o] = fused(values, rows[o], sums[t][o]);
      }
    }
    for (int t = 0; t < tokens; t++) {
      const __m128 sum = fourths(pairs(sums[t][0], sums[t][1]), pairs(sums[t][2], sums[t][3]));
      _mm_storeu_ps(out + t * outputs, bias ? _mm_add_ps(sum, _mm_loadu_ps(bias)) : sum);
    }
  }

  template <int tokens>
  void compute_all(const float* x, int64_t count, float* out, bool fetches = true) const {
    for (; count >= tokens; x += tokens * inputs, out += tokens * outputs, count -= tokens, fetches = false)
      compute<tokens>(x, out, fetches);
    if constexpr (tokens > 1)
      if (count) compute_all<tokens / 2>(x, count, out, fetches);
  }
};

}  // namespace

extern "C" {

// out[tokens, outputs] = x[tokens, inputs] @ weight[outputs, inputs].T + bias[outputs], if there is one; each in one
// piece. Outputs are a multiple of 4, inputs one of `lanes()`.
void multiply(const float* weight, int64_t inputs, int64_t outputs, const float* x, int64_t tokens, const float* bias,
              float* out, int threads) {
  const int used = tokens * inputs * outputs < LITTLE ? 1 : threads;
#pragma omp parallel num_threads(used) if (used > 1)
  for (int64_t t = 0; t < tokens; t += TILE) {
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < outputs; o += OUTPUTS) {
      const Product product{weight + o * inputs, inputs, outputs, bias ? bias + o : nullptr};
      product.compute_all<TOKENS>(x + t * inputs, std::min(TILE, tokens - t), out + t * outputs + o);
    }
  }
}
}
#else
extern "C" void multiply(const float*, int64_t, int64_t, const float*, int64_t, const float*, float*, int) {}
#endif

// Products with a matrix in bfloat16 that lies as [inputs, outputs], which is how one lies whose inputs come and go part by
// part. For a few tokens: the matrix is read once, in the order in which it lies.
//
// Sums are in float32. What is computed for a token depends on nothing else in the batch, nor on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

extern "C" {

// Whether there is a kernel for this processor.
int is_supported() {
#ifdef __AVX2__
  return 1;
#else
  return 0;
#endif
}
}

#ifdef __AVX2__
namespace {

typedef uint16_t Half;  // a bfloat16: the upper half of a float

#ifdef __AVX512BW__
constexpr int LANES = 16, TOKENS = 8;  // sums of so many tokens and of two vectors stay in registers
typedef __m512i Integers;
typedef __m512 Floats;

inline Integers load(const Half* from) { return _mm512_loadu_si512(from); }
inline Integers zeros() { return _mm512_setzero_si512(); }
inline Integers all(int32_t value) { return _mm512_set1_epi32(value); }
inline Integers lower(Integers a, Integers b) { return _mm512_unpacklo_epi16(a, b); }
inline Integers upper(Integers a, Integers b) { return _mm512_unpackhi_epi16(a, b); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(Floats value, float* to) { _mm512_storeu_ps(to, value); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats first_halves(Integers pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats second_halves(Integers pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, all(static_cast<int32_t>(0xffff0000))));
}
#else
constexpr int LANES = 8, TOKENS = 4;
typedef __m256i Integers;
typedef __m256 Floats;

inline Integers load(const Half* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Integers zeros() { return _mm256_setzero_si256(); }
inline Integers all(int32_t value) { return _mm256_set1_epi32(value); }
inline Integers lower(Integers a, Integers b) { return _mm256_unpacklo_epi16(a, b); }
inline Integers upper(Integers a, Integers b) { return _mm256_unpackhi_epi16(a, b); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(Floats value, float* to) { _mm256_storeu_ps(to, value); }
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  return _mm256_add_ps(_mm256_mul_ps(a, b), c);
#endif
}
inline Floats first_halves(Integers pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Floats second_halves(Integers pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, all(static_cast<int32_t>(0xffff0000))));
}
#endif

constexpr int COLUMNS = 2 * LANES;   // whose sums are two vectors
constexpr int64_t PANEL = 512;       // columns that are summed up at a time
constexpr int64_t DEPTH = 16;        // inputs that are read side by side
constexpr int64_t MOST_TOKENS = 16;  // of a call: see transposed_linear.py
constexpr int64_t SMALL = 1 << 17;   // elements that are not worth a second thread

// Adds to each sum the two products of a pair of halves.
inline Floats add_products(Floats sum, Integers a, Integers b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  return fused(second_halves(a), second_halves(b), fused(first_halves(a), first_halves(b), sum));
#endif
}

inline float widened(Half value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Half rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // no number
  return static_cast<Half>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A matrix, or some columns of it; rows are `step` elements apart.
struct Matrix {
  const Half* weight;
  int64_t step, inputs;
};

// Adds the products of some inputs, and of COLUMNS columns, to their sums: to those of each four columns of eight in the
// lower vector, to those of the other four in the upper one, which is how pairs of rows are unpacked.
template <int tokens>
inline void add_columns(Matrix matrix, int64_t first, int64_t stop, const Half* x, float* sums) {
  Floats low[tokens], high[tokens];
  for (int t = 0; t < tokens; t++) {
    low[t] = load(sums + t * PANEL);
    high[t] = load(sums + t * PANEL + LANES);
  }
  for (int64_t i = first; i < stop; i += 2) {
    const bool alone = i + 1 == matrix.inputs;
    const Half* row = matrix.weight + i * matrix.step;
    const Integers a = load(row), b = alone ? zeros() : load(row + matrix.step);
    const Integers low_pairs = lower(a, b), high_pairs = upper(a, b);
    for (int t = 0; t < tokens; t++) {
      const Half* inputs = x + t * matrix.inputs + i;
      int32_t pair = *inputs;
      if (!alone) std::memcpy(&pair, inputs, sizeof pair);
      low[t] = add_products(low[t], low_pairs, all(pair));
      high[t] = add_products(high[t], high_pairs, all(pair));
    }
  }
  for (int t = 0; t < tokens; t++) {
    store(low[t], sums + t * PANEL);
    store(high[t], sums + t * PANEL + LANES);
  }
}

// The same for all columns of a panel, and all tokens.
template <int tokens>
void add_panel(Matrix matrix, int64_t width, int64_t first, int64_t stop, const Half* x, int64_t count, float* sums) {
  while (count >= tokens) {
    for (int64_t c = 0; c < width; c += COLUMNS)
      add_columns<tokens>({matrix.weight + c, matrix.step, matrix.inputs}, first, stop, x, sums + c);
    x += tokens * matrix.inputs, sums += tokens * PANEL, count -= tokens;
  }
  if constexpr (tokens > 1)
    if (count) add_panel<tokens / 2>(matrix, width, first, stop, x, count, sums);
}

// A panel of `width` columns, a multiple of COLUMNS.
void multiply_panel(Matrix matrix, int64_t width, const Half* x, int64_t tokens, const Half* bias, Half* out,
                    int64_t outputs) {
  alignas(64) float sums[MOST_TOKENS * PANEL];
  std::fill(sums, sums + tokens * PANEL, 0.0f);
  for (int64_t first = 0; first < matrix.inputs; first += DEPTH)
    add_panel<TOKENS>(matrix, width, first, std::min(first + DEPTH, matrix.inputs), x, tokens, sums);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < width; c++) {
      const int64_t within = c % COLUMNS;
      const float sum = sums[t * PANEL + c - within + within % 8 / 4 * LANES + within / 8 * 4 + within % 4];
      out[t * outputs + c] = rounded(sum + (bias ? widened(bias[c]) : 0.0f));
    }
}

}  // namespace

extern "C" {

// out[tokens, outputs] = x[tokens, inputs] @ weight[inputs, outputs] + bias[outputs], if there is one. Outputs are a
// multiple of 32, tokens MOST_TOKENS at most; all but the weight's rows, which are `step` elements apart, in one piece.
void multiply(const uint16_t* weight, int64_t step, int64_t inputs, int64_t outputs, const uint16_t* x, int64_t tokens,
              const uint16_t* bias, uint16_t* out, int threads) {
  const int64_t groups = outputs / COLUMNS;
  const int used = inputs * outputs < SMALL ? 1 : static_cast<int>(std::min<int64_t>(threads, groups));
#pragma omp parallel for num_threads(used) schedule(static) if (used > 1)
  for (int thread = 0; thread < used; thread++) {
    const int64_t stop = groups * (thread + 1) / used * COLUMNS;
    for (int64_t c = groups * thread / used * COLUMNS; c < stop; c += PANEL)
      multiply_panel({weight + c, step, inputs}, std::min(PANEL, stop - c), x, tokens, bias ? bias + c : nullptr, out + c,
                     outputs);
  }
}
}
#else
extern "C" void multiply(const uint16_t*, int64_t, int64_t, int64_t, const uint16_t*, int64_t, const uint16_t*, uint16_t*,
                         int) {}
#endif

// Products with matrices in integers: in codes of 4 bits, or of 8 as two planes of 4, where they lie in torch's order for
// its own kernel; and in rows of int8. Plain C++ with the vector instructions of x86 that multiply integers of 16 bits.
//
// Activations are rounded to 16 bits, each group of a token with a step of its own, so that a group is summed up exactly.
// What is computed for a token depends on nothing else in the batch, nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#ifdef __AVX2__
#include <immintrin.h>
#endif

extern "C" {

// How a matrix of nibbles lies: see int4_layout.py. Block after block of `width` columns; all inputs of a block side by side, a
// byte for two columns, one of each half of the block; of a narrower last block, for two neighbours.
// weight = scale * (code - middle + factor * offset / scale), the last a whole number.
struct Matrix {
  int64_t outputs, inputs, group, width;
  float middle, factor;
};

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

#ifdef __AVX512BW__
constexpr int LANES = 16, MOST_ROWS = 4;  // sums of so many rows and of four vectors stay in registers
typedef __m512i Integers;
typedef __m512 Floats;

inline Integers load(const int32_t* from) { return _mm512_loadu_si512(from); }
inline Integers all(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(Floats value, float* to) { _mm512_storeu_ps(to, value); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats to_floats(Integers value) { return _mm512_cvtepi32_ps(value); }
inline float sum(Floats value) { return _mm512_reduce_add_ps(value); }

inline Integers add_products(Integers sum, Integers a, Integers b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#else
constexpr int LANES = 8, MOST_ROWS = 2;
typedef __m256i Integers;
typedef __m256 Floats;

inline Integers load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Integers all(int32_t value) { return _mm256_set1_epi32(value); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(Floats value, float* to) { _mm256_storeu_ps(to, value); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  return _mm256_add_ps(_mm256_mul_ps(a, b), c);
#endif
}
inline Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats to_floats(Integers value) { return _mm256_cvtepi32_ps(value); }
inline float sum(Floats value) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline Integers add_products(Integers sum, Integers a, Integers b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif

// Keeps a value in a register: compilers read it again for each use otherwise, and reading is what takes time.
inline Integers in_register(Integers value) {
#ifdef __AVX512BW__
  asm("" : "+v"(value));
#else
  asm("" : "+x"(value));
#endif
  return value;
}

constexpr int MOST_WIDTH = 64;             // columns of a block
constexpr int MOST_GROUP = 256;            // inputs: the sum of a group fits 32 bits
constexpr int64_t ROWS_AT_ONCE = 96;       // for which a group of a block is unpacked once
constexpr int OUTPUTS = 4;                 // of a matrix in rows that are computed at once
constexpr int64_t FEW_ROWS = 32;           // whose activations stay in a core's cache
constexpr int64_t SMALL = 1 << 17;         // products that are not worth a second thread

// Rounded activations: [rows, inputs], and for each group of a row its step and its sum.
struct Activations {
  std::unique_ptr<int16_t[]> codes;
  std::unique_ptr<float[]> steps, sums;
};

void round_group(const float* x, int64_t group, int16_t* codes, float* step, float* sum) {
  int32_t most_bits = 0;  // of floats without their signs, which are in the order of these; what is no number is above
  for (int64_t i = 0; i < group; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    most_bits = std::max(most_bits, bits & 0x7fffffff);
  }
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const bool finite = most_bits < 0x7f800000;
  const float inverse = finite && most > 0 ? 32767.0f / most : 0.0f;
  const bool tiny = !(inverse <= std::numeric_limits<float>::max());  // too small to be told from nothing
  int32_t total = 0;
  for (int64_t i = 0; i < group; ++i) {
    const float scaled = finite && !tiny ? x[i] * inverse : 0.0f;
    const int32_t code = static_cast<int32_t>(scaled + std::copysign(0.5f, scaled));
    codes[i] = static_cast<int16_t>(code);
    total += code;
  }
  *step = finite ? most / 32767.0f : std::numeric_limits<float>::quiet_NaN();
  *sum = *step * static_cast<float>(total);
}

// Unpacks a group of a block into pairs of codes, [group / 2, width] of two neighbouring inputs each.
template <int HALF, bool WITH_LOWER>
void unpack_halves(const uint8_t* __restrict upper, const uint8_t* __restrict lower, int64_t group,
                   uint32_t* __restrict pairs) {
  for (int64_t i = 0; i < group / 2; ++i, upper += 2 * HALF, lower += 2 * HALF, pairs += 2 * HALF)
    for (int d = 0; d < HALF; ++d) {
      const uint32_t both = upper[d] | static_cast<uint32_t>(upper[d + HALF]) << 16;
      const uint32_t more = WITH_LOWER ? lower[d] | static_cast<uint32_t>(lower[d + HALF]) << 16 : 0;
      const uint32_t low = both & 0x000f000f, high = both >> 4 & 0x000f000f;
      pairs[d] = WITH_LOWER ? low << 4 | (more & 0x000f000f) : low;
      pairs[d + HALF] = WITH_LOWER ? high << 4 | (more >> 4 & 0x000f000f) : high;
    }
}

void unpack_halves(const uint8_t* upper, const uint8_t* lower, int64_t group, int64_t width, uint32_t* pairs) {
  if (lower == nullptr)
    (width == 64 ? unpack_halves<32, false> : unpack_halves<16, false>)(upper, upper, group, pairs);
  else
    (width == 64 ? unpack_halves<32, true> : unpack_halves<16, true>)(upper, lower, group, pairs);
}

uint32_t code_of(const uint8_t* upper, const uint8_t* lower, int64_t at, int64_t odd) {
  const uint32_t code = upper[at] >> (4 * odd) & 15;
  return lower == nullptr ? code : code << 4 | (lower[at] >> (4 * odd) & 15);
}

void unpack_neighbours(const uint8_t* upper, const uint8_t* lower, int64_t group, int64_t width, int64_t step,
                       uint32_t* pairs) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < group; i += 2)
    for (int64_t column = 0; column < width; ++column) {
      const int64_t at = i * half + column / 2;
      const uint32_t next = code_of(upper, lower, at + half, column % 2);
      pairs[i / 2 * step + column] = code_of(upper, lower, at, column % 2) | next << 16;
    }
}

// Adds what a group gives to outputs [ROWS, VECTORS * LANES], whose pairs of codes are [group / 2, step].
template <int ROWS, int VECTORS>
void add_group(const uint32_t* pairs, int64_t step, int64_t group, const int16_t* codes, int64_t inputs,
               const float* steps, const float* sums, int64_t groups, const float* scales, const float* offsets,
               float* y, int64_t y_step) {
  Integers total[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) total[row][v] = all(0);
  for (int64_t i = 0; i < group / 2; ++i, pairs += step) {
    Integers weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) weights[v] = load(reinterpret_cast<const int32_t*>(pairs) + v * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      int32_t two;
      std::memcpy(&two, codes + row * inputs + 2 * i, sizeof two);
      const Integers x = all(two);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) total[row][v] = add_products(total[row][v], weights[v], x);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row) {
    const Floats each = all(steps[row * groups]), sum = all(sums[row * groups]);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      float* out = y + row * y_step + v * LANES;
      const Floats scaled = product(to_floats(total[row][v]), each);
      const Floats with_scale = fused(load(scales + v * LANES), scaled, load(out));
      store(fused(load(offsets + v * LANES), sum, with_scale), out);
    }
  }
}

typedef decltype(&add_group<1, 2>) AddGroup;

template <int VECTORS>
AddGroup add_group_of(int64_t rows) {
  constexpr AddGroup OF_ROWS[] = {add_group<1, VECTORS>, add_group<2, VECTORS>,
#if defined(__AVX512BW__)
                                  add_group<3, VECTORS>, add_group<4, VECTORS>
#endif
  };
  return OF_ROWS[rows - 1];
}

float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

// Reads scales and offsets, bfloat16 [columns, 2], which are whole numbers of scales; those of no column are 0.
void read_scales(const uint16_t* pairs, int64_t columns, const Matrix& matrix, float* scales, float* offsets) {
  std::fill_n(scales, MOST_WIDTH, 0.0f), std::fill_n(offsets, MOST_WIDTH, 0.0f);
  for (int64_t column = 0; column < columns; ++column) {
    const float scale = widened(pairs[2 * column]), offset = widened(pairs[2 * column + 1]) * matrix.factor;
    scales[column] = scale;
    offsets[column] = scale * (std::nearbyint(scale == 0 ? 0.0f : offset / scale) - matrix.middle);
  }
}

// Computes the columns of a block for some rows; `y` is that of its first column.
void multiply_block(const Matrix& matrix, const uint8_t* upper, const uint8_t* lower, const uint16_t* scale_pairs,
                    int64_t scale_step, int64_t width, const Activations& x, int64_t first, int64_t rows, float* y,
                    int64_t y_step) {
  alignas(64) uint32_t pairs[MOST_GROUP / 2 * MOST_WIDTH];
  alignas(64) float scales[MOST_WIDTH], offsets[MOST_WIDTH], out[ROWS_AT_ONCE * MOST_WIDTH];
  const int64_t group = matrix.group, groups = matrix.inputs / group, half = width / 2;
  const int64_t padded = (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
  const int vectors = padded % (4 * LANES) == 0 ? 4 : 2;
  if (padded != width) std::fill_n(pairs, group / 2 * padded, 0u);
  std::fill_n(out, rows * padded, 0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* from = upper + g * group * half;
    const uint8_t* more = lower == nullptr ? nullptr : lower + g * group * half;
    if (width == matrix.width)
      unpack_halves(from, more, group, width, pairs);
    else
      unpack_neighbours(from, more, group, width, padded, pairs);
    read_scales(scale_pairs + g * scale_step, width, matrix, scales, offsets);
    for (int64_t row = 0; row < rows; row += MOST_ROWS) {
      const int64_t count = std::min<int64_t>(MOST_ROWS, rows - row);
      const AddGroup add = vectors == 4 ? add_group_of<4>(count) : add_group_of<2>(count);
      const int64_t at = first + row;
      for (int64_t tile = 0; tile < padded; tile += vectors * LANES)
        add(pairs + tile, padded, group, x.codes.get() + at * matrix.inputs + g * group, matrix.inputs,
            x.steps.get() + at * groups + g, x.sums.get() + at * groups + g, groups, scales + tile, offsets + tile,
            out + row * padded + tile, padded);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(out + row * padded, width, y + row * y_step);
}

// Adds what a group gives to sums [ROWS, OUTPUTS] of vectors: weights are [OUTPUTS, inputs], codes [ROWS, inputs], of
// which `count`, a multiple of two vectors, are looked at.
template <int ROWS>
void add_rows(const int16_t* weights, const int16_t* codes, int64_t inputs, int64_t count, const float* steps,
              int64_t groups, float* sums) {
  Integers total[ROWS][OUTPUTS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int out = 0; out < OUTPUTS; ++out) total[row][out] = all(0);
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    Integers w[OUTPUTS];
#pragma GCC unroll 8
    for (int out = 0; out < OUTPUTS; ++out)
      w[out] = in_register(load(reinterpret_cast<const int32_t*>(weights + out * inputs + i)));
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
      const Integers x = in_register(load(reinterpret_cast<const int32_t*>(codes + row * inputs + i)));
#pragma GCC unroll 8
      for (int out = 0; out < OUTPUTS; ++out) total[row][out] = add_products(total[row][out], w[out], x);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
    for (int out = 0; out < OUTPUTS; ++out) {
      float* to = sums + (row * OUTPUTS + out) * LANES;
      store(fused(to_floats(total[row][out]), all(steps[row * groups]), load(to)), to);
    }
}

constexpr decltype(&add_rows<1>) ADD_ROWS[] = {nullptr, add_rows<1>, add_rows<2>,
#ifdef __AVX512BW__
                                add_rows<3>, add_rows<4>
#endif
};

// Rounds up to whole vectors of codes.
constexpr int64_t padded(int64_t inputs) { return (inputs + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// Computes `OUTPUTS` outputs of rows `first` to `stop` from their weights, [OUTPUTS, stride], which end in zeros; weight =
// scale * code + offset. The first sum of a row of x is that of all its groups.
void multiply_rows(const int16_t* weights, const float* scales, const float* offsets, int64_t inputs, int64_t stride,
                   const Activations& x, int64_t first, int64_t stop, float* y, int64_t y_step) {
  const int64_t groups = (inputs + MOST_GROUP - 1) / MOST_GROUP;
  for (int64_t row = first; row < stop; row += MOST_ROWS) {
    const int64_t count = std::min<int64_t>(MOST_ROWS, stop - row);
    alignas(64) float sums[MOST_ROWS * OUTPUTS * LANES] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * MOST_GROUP;
      ADD_ROWS[count](weights + from, x.codes.get() + row * stride + from, stride,
                      padded(std::min<int64_t>(MOST_GROUP, inputs - from)), x.steps.get() + row * groups + g, groups,
                      sums);
    }
    for (int64_t i = 0; i < count * OUTPUTS; ++i)
      y[(row + i / OUTPUTS) * y_step + i % OUTPUTS] = sum(load(sums + i * LANES)) * scales[i % OUTPUTS] +
                                                      x.sums[(row + i / OUTPUTS) * groups] * offsets[i % OUTPUTS];
  }
}

}  // namespace

extern "C" {

// Multiplies x, float32 [rows, inputs], with a matrix in rows, int8 [outputs, inputs], of four outputs or a multiple;
// scales, bfloat16 [outputs]; offsets, float32 [outputs], or null; y, float32 [rows, outputs].
void multiply_int8(const int8_t* weights, const uint16_t* scales, const float* offsets, int64_t outputs, int64_t inputs,
                   const float* x, int64_t rows, float* y, int threads) {
  const int64_t stride = padded(inputs) + 2 * LANES;  // rows that lie a power of two apart share lines of a cache
  const int64_t groups = (inputs + MOST_GROUP - 1) / MOST_GROUP, parts = (rows + FEW_ROWS - 1) / FEW_ROWS;
  Activations rounded{std::unique_ptr<int16_t[]>(new int16_t[rows * stride]()),
                      std::unique_ptr<float[]>(new float[rows * groups]),
                      std::unique_ptr<float[]>(new float[rows * groups])};
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * outputs * inputs > SMALL)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * groups; ++i) {
      const int64_t row = i / groups, from = i % groups * MOST_GROUP;
      round_group(x + row * inputs + from, std::min<int64_t>(MOST_GROUP, inputs - from),
                  rounded.codes.get() + row * stride + from, rounded.steps.get() + i, rounded.sums.get() + i);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t g = 1; g < groups; ++g) rounded.sums[row * groups] += rounded.sums[row * groups + g];
    const std::unique_ptr<int16_t[]> wide(new int16_t[OUTPUTS * stride]());
#pragma omp for schedule(static) collapse(2)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t out = 0; out < outputs; out += OUTPUTS) {
        float each[OUTPUTS], more[OUTPUTS] = {};
        for (int64_t o = 0; o < OUTPUTS; ++o) {
          each[o] = widened(scales[out + o]);
          if (offsets != nullptr) more[o] = offsets[out + o];
          std::copy_n(weights + (out + o) * inputs, inputs, wide.get() + o * stride);
        }
        multiply_rows(wide.get(), each, more, inputs, stride, rounded, part * FEW_ROWS,
                      std::min(rows, (part + 1) * FEW_ROWS), y + out, outputs);
      }
  }
}

// Multiplies x, float32 [rows, inputs], with a matrix of nibbles: y, float32 [rows, outputs], whose rows are `y_step` apart.
// `upper`: codes of 4 bits, or the upper halves of those of 8, whose lower ones are `lower`, else null. `scales`: pairs
// of scale and offset, bfloat16 [groups, outputs, 2], those of a group `scale_step` numbers after those before.
void multiply_int4(const Matrix* given, const uint8_t* upper, const uint8_t* lower, const uint16_t* scales,
              int64_t scale_step, const float* x, int64_t rows, float* y, int64_t y_step, int threads) {
  const Matrix matrix = *given;
  const int64_t groups = matrix.inputs / matrix.group, blocks = (matrix.outputs + matrix.width - 1) / matrix.width;
  Activations rounded{std::unique_ptr<int16_t[]>(new int16_t[rows * matrix.inputs]),
                      std::unique_ptr<float[]>(new float[rows * groups]),
                      std::unique_ptr<float[]>(new float[rows * groups])};
  const int64_t parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * matrix.outputs * matrix.inputs > SMALL)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * groups; ++i)
      round_group(x + i * matrix.group, matrix.group, rounded.codes.get() + i * matrix.group, rounded.steps.get() + i,
                  rounded.sums.get() + i);
#pragma omp for schedule(static) collapse(2)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t column = block * matrix.width, byte = column * matrix.inputs / 2, first = part * ROWS_AT_ONCE;
        multiply_block(matrix, upper + byte, lower == nullptr ? nullptr : lower + byte, scales + 2 * column, scale_step,
                       std::min(matrix.width, matrix.outputs - column), rounded, first,
                       std::min(ROWS_AT_ONCE, rows - first), y + first * y_step + column, y_step);
      }
  }
}
}
#endif

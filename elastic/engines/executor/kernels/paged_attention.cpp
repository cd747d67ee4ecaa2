// Attention of one new token per sequence over keys and values in blocks, which are read where they lie; and the copy
// of new ones into their blocks. Plain C++ with the vectors of GCC and Clang; no header but the language's own.
//
// Softmax is computed block by block with a running maximum (FlashAttention, algorithm 1), in float32. What is computed
// for a head of a sequence depends on nothing else in the batch, nor on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 8;   // of a vector: whatever the processor has, it computes with these
constexpr int QUERIES = 4; // query heads of one KV head that are computed at once
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
typedef float Half __attribute__((vector_size(LANES * 2)));

struct bfloat16 {
  uint16_t bits;
};

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector load(const bfloat16* from) {
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}

inline Vector load(const int8_t* from) { return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Vector); }

inline void store(Vector value, float* to) { *reinterpret_cast<Vector*>(to) = value; }

inline void store(Vector value, bfloat16* to) {  // rounded to the nearest, ties to even
  const Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(value == value ? rounded : bits >> 16 | 0x40, Halves);
}

inline float widened(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float sum(Vector value) {
  Half halves[2];
  std::memcpy(halves, &value, sizeof value);
  const Half both = halves[0] + halves[1];
  return (both[0] + both[2]) + (both[1] + both[3]);
}

inline float largest(Vector value) {
  float out = value[0];
  for (int lane = 1; lane < LANES; ++lane) out = std::max(out, value[lane]);
  return out;
}

// e^x of x <= 0, to two units in the last place; 0 where it is no normal number, NaN of NaN. Coefficients: Cephes, expf.
inline Vector exp(Vector x) {
  constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: a float that is added to it is rounded to an integer
  const Vector power = (x * 1.44269504f + TO_INTEGER) - TO_INTEGER;
  const Vector rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Vector series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * (rest * rest) + rest + 1.0f;
  const Integers scale = (__builtin_convertvector(power, Integers) + 127) << 23;
  return x < -87.0f ? Vector{} : series * (Vector)scale;
}

inline Vector tanh(Vector x) {
  const Vector size = x < 0.0f ? -x : x, small = exp(size * -2.0f);
  const Vector out = (1.0f - small) / (1.0f + small);
  return x == x ? (x < 0.0f ? -out : out) : x;
}

}  // namespace

// How blocks lie in a layer's cache: [block, place, K/V, slot, head, dim]. Counts are of elements, heads and tokens.
struct Layout {
  int64_t places;  // of a block, with `heads` heads each
  int64_t heads;
  int64_t slots;   // with 8 bits, those behind `tokens` have the scales, [token, head] of bfloat16
  int64_t tokens;
  int64_t dim;     // a multiple of LANES

  int64_t width() const { return slots * heads * dim; }
  int64_t keys(int64_t block, int64_t place) const { return (block * places + place) * 2 * width(); }
};

namespace {

template <typename Cached>
struct BlockOfHead {  // keys, or values
  const Cached* first;
  const bfloat16* scales;
  int64_t step;     // from token to token
  int64_t heads;

  BlockOfHead(const Cached* block, int64_t head, const Layout& layout)
      : first(block + head * layout.dim),
        scales(reinterpret_cast<const bfloat16*>(block + layout.tokens * layout.heads * layout.dim) + head),
        step(layout.heads * layout.dim),
        heads(layout.heads) {}

  void scale(float* each, int64_t count) const {  // [count]: of tokens
    if (sizeof(Cached) == 1)
      for (int64_t token = 0; token < count; ++token) each[token] *= widened(scales[token * heads]);
  }
};

// The scores of N tokens for G queries, [G, wide].
template <int G, int N, typename Cached>
inline void multiply(const float* queries, const Cached* keys, int64_t step, int64_t dim, float* scores, int64_t wide) {
  Vector sums[N][G] = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    Vector key[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) key[n] = load(keys + n * step + d);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vector query = load(queries + g * dim + d);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][g] += query * key[n];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) scores[g * wide + n] = sum(sums[n][g]);
}

// Rescale C vectors of the outputs, and add weighted values to them.
template <int G, int C, typename Cached>
inline void accumulate(const float* weights, int64_t wide, const Cached* values, int64_t step, int64_t count,
                       const float* rescale, float* outputs, int64_t dim) {
  Vector sums[G][C];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[g][c] = load(outputs + g * dim + c * LANES) * rescale[g];
  for (int64_t token = 0; token < count; ++token) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vector value = load(values + token * step + c * LANES);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][c] += value * weights[g * wide + token];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums[g][c], outputs + g * dim + c * LANES);
}

// What one thread has of the query heads of one KV head.
struct Rows {
  int64_t dim, wide;  // wide: tokens of a block, in whole vectors
  std::vector<float> queries, outputs, scores, max_score, sum_weights;

  Rows(int64_t each, const Layout& layout)
      : dim(layout.dim),
        wide((layout.tokens + LANES - 1) / LANES * LANES),
        queries(each * dim),
        outputs(each * dim),
        scores(QUERIES * wide),
        max_score(each),
        sum_weights(each) {}

  // Let G queries, of which this is the first, attend to `count` tokens of a block.
  template <int G, typename Cached>
  void attend(int64_t first, const BlockOfHead<Cached>& keys, const BlockOfHead<Cached>& values, int64_t count, float cap) {
    float* query = &queries[first * dim];
    float* output = &outputs[first * dim];
    int64_t token = 0;
    for (; token + 4 <= count; token += 4)
      multiply<G, 4>(query, keys.first + token * keys.step, keys.step, dim, &scores[token], wide);
    for (; token < count; ++token)
      multiply<G, 1>(query, keys.first + token * keys.step, keys.step, dim, &scores[token], wide);
    float rescale[LANES] = {}, added[G];
    for (int g = 0; g < G; ++g) {
      float* score = &scores[g * wide];
      keys.scale(score, count);
      std::fill(score + count, score + wide, 0.0f);
      if (cap > 0)
        for (int64_t i = 0; i < wide; i += LANES) store(tanh(load(score + i) / cap) * cap, score + i);
      std::fill(score + count, score + wide, -std::numeric_limits<float>::infinity());
      Vector top = load(score);
      for (int64_t i = LANES; i < wide; i += LANES) {
        const Vector next = load(score + i);
        top = next > top ? next : top;
      }
      const float before = max_score[first + g], now = std::max(before, largest(top));
      Vector sums = {};
      for (int64_t i = 0; i < wide; i += LANES) {
        const Vector weight = exp(load(score + i) - now);
        store(weight, score + i);
        sums += weight;
      }
      rescale[g] = before - now;
      added[g] = sum(sums);
      max_score[first + g] = now;
      values.scale(score, count);
    }
    store(exp(load(rescale)), rescale);
    for (int g = 0; g < G; ++g) sum_weights[first + g] = sum_weights[first + g] * rescale[g] + added[g];
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
      accumulate<G, 4>(scores.data(), wide, values.first + d, values.step, count, rescale, output + d, dim);
    for (; d < dim; d += LANES)
      accumulate<G, 1>(scores.data(), wide, values.first + d, values.step, count, rescale, output + d, dim);
  }
};

// The attention of some sequences in one layer. Tensors are contiguous but for the queries and the block tables.
template <typename State, typename Cached>
void decode(const Layout& layout, const int64_t* places, int64_t heads, const Cached* cache, const int64_t* tables,
            int64_t table_step, const int64_t* seen, int64_t sequences, const State* queries, int64_t query_head_step,
            int64_t query_step, int64_t each, float scaling, float cap, const float* sinks, State* out, int threads) {
  const int64_t dim = layout.dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Rows rows(each, layout);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < sequences * heads; ++task) {
      const int64_t sequence = task / heads, head = task % heads, first = head * each;
      const int64_t place = places[head / layout.heads], inner = head % layout.heads;
      const int64_t* table = tables + sequence * table_step;
      for (int64_t g = 0; g < each; ++g) {
        const State* query = queries + (first + g) * query_head_step + sequence * query_step;
        for (int64_t d = 0; d < dim; d += LANES) store(load(query + d) * scaling, &rows.queries[g * dim + d]);
        rows.max_score[g] = sinks ? sinks[first + g] : -std::numeric_limits<float>::infinity();
        rows.sum_weights[g] = sinks ? 1 : 0;
      }
      std::fill(rows.outputs.begin(), rows.outputs.end(), 0.0f);
      for (int64_t start = 0, index = 0; start < seen[sequence]; start += layout.tokens, ++index) {
        const int64_t count = std::min(layout.tokens, seen[sequence] - start);
        const Cached* block = cache + layout.keys(table[index], place);
        const BlockOfHead<Cached> keys(block, inner, layout), values(block + layout.width(), inner, layout);
        for (int64_t g = 0; g < each; g += QUERIES) switch (std::min<int64_t>(QUERIES, each - g)) {
            case 1: rows.attend<1>(g, keys, values, count, cap); break;
            case 2: rows.attend<2>(g, keys, values, count, cap); break;
            case 3: rows.attend<3>(g, keys, values, count, cap); break;
            default: rows.attend<4>(g, keys, values, count, cap);
          }
      }
      State* output = out + (sequence * heads * each + first) * dim;
      for (int64_t g = 0; g < each; ++g)
        for (int64_t d = 0; d < dim; d += LANES)
          store(load(&rows.outputs[g * dim + d]) / rows.sum_weights[g], output + g * dim + d);
    }
  }
}

}  // namespace

extern "C" {

#define DECODE(NAME, STATE, CACHED)                                                                                    \
  void NAME(const Layout* layout, const int64_t* places, int64_t heads, const CACHED* cache, const int64_t* tables,    \
            int64_t table_step, const int64_t* seen, int64_t sequences, const STATE* queries, int64_t query_head_step, \
            int64_t query_step, int64_t each, float scaling, float cap, const float* sinks, STATE* out, int threads) { \
    decode(*layout, places, heads, cache, tables, table_step, seen, sequences, queries, query_head_step, query_step,   \
           each, scaling, cap, sinks, out, threads);                                                                   \
  }
DECODE(decode_float32, float, float)
DECODE(decode_bfloat16, bfloat16, bfloat16)
DECODE(decode_float32_int8, float, int8_t)
DECODE(decode_bfloat16_int8, bfloat16, int8_t)

// Copy new keys and values, [head, token, dim] with steps in bytes, to slots of blocks. Sizes are in bytes of `dim`.
void write(const Layout* layout, const int64_t* places, int64_t heads, char* cache, int64_t element_bytes,
           const int64_t* blocks, const int64_t* slots, int64_t tokens, const char* keys, int64_t key_head_step,
           int64_t key_step, const char* values, int64_t value_head_step, int64_t value_step) {
  const int64_t bytes = layout->dim * element_bytes, width = layout->width() * element_bytes;
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head) {
      char* to = cache + layout->keys(blocks[token], places[head / layout->heads]) * element_bytes +
                 (slots[token] * layout->heads + head % layout->heads) * bytes;
      std::memcpy(to, keys + head * key_head_step + token * key_step, bytes);
      std::memcpy(to + width, values + head * value_head_step + token * value_step, bytes);
    }
}
}

// Attention of the last tokens of sequences over keys and values in blocks, which are read where they lie; and the copy
// of new ones into their blocks. Plain C++ with the vectors of GCC and Clang; no header but the language's own.
//
// Softmax is computed block by block with a running maximum (FlashAttention, algorithm 1), in float32. What is computed
// for a head of a token depends on nothing else in the batch, nor on the number of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8;   // of a vector: whatever the processor has, it computes with these
constexpr int QUERIES = 4; // rows that are computed at once
constexpr int ROWS = 32;   // that a thread takes at once, of one KV head: their queries and outputs stay in its cache
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

// a * b + c, rounded once where the processor can: as it is written, for compilers fuse one sum and not the same one in
// another loop, and a row would have other bits beside others.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  Vector out;
  for (int lane = 0; lane < LANES; ++lane) out[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return out;
#else
  return a * b + c;
#endif
}

inline Vector all(float value) { return value - Vector{}; }

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

// The sums of four vectors, each as `sum` adds it up.
inline Half sums_of(const Vector& a, const Vector& b, const Vector& c, const Vector& d) {
  Half halves[8];
  std::memcpy(halves, &a, sizeof a), std::memcpy(halves + 2, &b, sizeof b);
  std::memcpy(halves + 4, &c, sizeof c), std::memcpy(halves + 6, &d, sizeof d);
  const Half w = halves[0] + halves[1], x = halves[2] + halves[3], y = halves[4] + halves[5], z = halves[6] + halves[7];
  const Half first = Half{w[0], w[1], x[0], x[1]} + Half{w[2], w[3], x[2], x[3]};
  const Half second = Half{y[0], y[1], z[0], z[1]} + Half{y[2], y[3], z[2], z[3]};
  return Half{first[0], first[2], second[0], second[2]} + Half{first[1], first[3], second[1], second[3]};
}

inline float largest(Vector value) {
  float out = value[0];
  for (int lane = 1; lane < LANES; ++lane) out = std::max(out, value[lane]);
  return out;
}

// e^x of x <= 0, to two units in the last place; 0 where it is no normal number, NaN of NaN. Coefficients: Cephes, expf.
inline Vector exp(Vector x) {
  constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: a float that is added to it is rounded to an integer
  const Vector power = fused(x, all(1.44269504f), all(TO_INTEGER)) - TO_INTEGER;
  const Vector rest = fused(power, all(2.12194440e-4f), fused(power, all(-0.693359375f), x));
  Vector series = fused(rest, all(1.9875691500e-4f), all(1.3981999507e-3f));
  series = fused(series, rest, all(8.3334519073e-3f));
  series = fused(series, rest, all(4.1665795894e-2f));
  series = fused(series, rest, all(1.6666665459e-1f));
  series = fused(series, rest, all(5.0000001201e-1f));
  series = fused(series, rest * rest, rest) + 1.0f;
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
  int64_t step;            // from token to token
  const bfloat16* scales;  // in 8 bits; else null
  int64_t heads;           // from scale to scale

  void scale(float* each, int64_t count) const {  // [count]: of tokens
    if (scales)
      for (int64_t token = 0; token < count; ++token) each[token] *= widened(scales[token * heads]);
  }
};

template <typename Cached>
inline BlockOfHead<Cached> block_of_head(const Cached* block, int64_t head, const Layout& layout) {
  const Cached* scales = block + layout.tokens * layout.heads * layout.dim;
  return {block + head * layout.dim, layout.heads * layout.dim,
          sizeof(Cached) == 1 ? reinterpret_cast<const bfloat16*>(scales) + head : nullptr, layout.heads};
}

// The same in float32, for many rows to read: `to` has room for `count` tokens.
template <typename Cached>
inline BlockOfHead<float> widen(const BlockOfHead<Cached>& block, int64_t count, int64_t dim, float* to) {
  for (int64_t token = 0; token < count; ++token)
    for (int64_t d = 0; d < dim; d += LANES) store(load(block.first + token * block.step + d), to + token * dim + d);
  return {to, dim, block.scales, block.heads};
}

// The scores of N tokens, 4 or 1, for G queries, [G, wide].
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
      for (int n = 0; n < N; ++n) sums[n][g] = fused(query, key[n], sums[n][g]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    if constexpr (N == 4) {
      const Half four = sums_of(sums[0][g], sums[1][g], sums[2][g], sums[3][g]);
      std::memcpy(scores + g * wide, &four, sizeof four);
    } else {
      scores[g * wide] = sum(sums[0][g]);
    }
  }
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
    Vector value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = load(values + token * step + c * LANES);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vector weight = all(weights[g * wide + token]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[g][c] = fused(value[c], weight, sums[g][c]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums[g][c], outputs + g * dim + c * LANES);
}

// Some tokens of a sequence, after one another.
struct Tile {
  int64_t sequence, token, count;  // token: the first of them in the batch
  int64_t seen;                    // tokens of the sequence that this first one sees; the next sees one more
};

// What one thread has of the query heads of one KV head: a row for each, token by token.
struct Rows {
  int64_t each, dim, wide;  // each: query heads; wide: tokens of a block, in whole vectors
  std::vector<float> queries, outputs, scores, max_score, sum_weights, keys, values;

  Rows(int64_t count, int64_t each, const Layout& layout)
      : each(each),
        dim(layout.dim),
        wide((layout.tokens + LANES - 1) / LANES * LANES),
        queries(count * dim),
        outputs(count * dim),
        scores(QUERIES * wide),
        max_score(count),
        sum_weights(count),
        keys(layout.tokens * dim),
        values(layout.tokens * dim) {}

  // Let the first `count` rows attend to a block with `tokens` tokens, of which the first row sees `seen`: fewer than
  // none where the block begins behind it.
  template <typename Cached>
  void attend_all(const BlockOfHead<Cached>& keys, const BlockOfHead<Cached>& values, int64_t count, int64_t seen,
                  int64_t tokens, float cap) {
    for (int64_t row = 0; row < count; row += QUERIES) {
      const int64_t some = std::min<int64_t>(QUERIES, count - row);
      if (seen + (row + some - 1) / each <= 0) continue;
      switch (some) {
        case 1: attend<1>(row, keys, values, seen, tokens, cap); break;
        case 2: attend<2>(row, keys, values, seen, tokens, cap); break;
        case 3: attend<3>(row, keys, values, seen, tokens, cap); break;
        default: attend<4>(row, keys, values, seen, tokens, cap);
      }
    }
  }

  // Let G of them do so, of which this is the first.
  template <int G, typename Cached>
  void attend(int64_t first, const BlockOfHead<Cached>& keys, const BlockOfHead<Cached>& values, int64_t seen,
              int64_t tokens, float cap) {
    float* query = &queries[first * dim];
    float* output = &outputs[first * dim];
    int64_t counts[G];  // of the tokens that each row sees
    for (int g = 0; g < G; ++g)
      counts[g] = std::clamp<int64_t>(seen + (first + g) / each, 0, tokens);
    const int64_t count = counts[G - 1], fewest = counts[0];
    int64_t token = 0;
    for (; token + 4 <= count; token += 4)
      multiply<G, 4>(query, keys.first + token * keys.step, keys.step, dim, &scores[token], wide);
    for (; token < count; ++token)
      multiply<G, 1>(query, keys.first + token * keys.step, keys.step, dim, &scores[token], wide);
    float rescale[LANES] = {}, added[G];
    for (int g = 0; g < G; ++g) {
      float* score = &scores[g * wide];
      keys.scale(score, counts[g]);
      std::fill(score + counts[g], score + wide, 0.0f);
      if (cap > 0)
        for (int64_t i = 0; i < wide; i += LANES) store(tanh(load(score + i) / cap) * cap, score + i);
      std::fill(score + counts[g], score + wide, -std::numeric_limits<float>::infinity());
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
      values.scale(score, counts[g]);
    }
    store(exp(load(rescale)), rescale);
    for (int g = 0; g < G; ++g) sum_weights[first + g] = sum_weights[first + g] * rescale[g] + added[g];
    add<G>(scores.data(), values, 0, fewest, rescale, output);
    constexpr float ONE = 1;
    for (int g = 0; g < G; ++g)  // nothing is read of tokens that a row does not see
      if (fewest < counts[g]) add<1>(&scores[g * wide], values, fewest, counts[g], &ONE, output + g * dim);
  }

  // Rescale the outputs of G rows, and add weighted values of some tokens of a block to them.
  template <int G, typename Cached>
  void add(const float* weights, const BlockOfHead<Cached>& values, int64_t token, int64_t stop, const float* rescale,
           float* output) {
    const Cached* value = values.first + token * values.step;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
      accumulate<G, 4>(weights + token, wide, value + d, values.step, stop - token, rescale, output + d, dim);
    for (; d < dim; d += LANES)
      accumulate<G, 1>(weights + token, wide, value + d, values.step, stop - token, rescale, output + d, dim);
  }
};

// Cut the new tokens of sequences into tiles of `most`; without counts each has one, in the order of the batch.
std::vector<Tile> cut(const int64_t* first, const int64_t* counts, const int64_t* seen, int64_t sequences, int64_t most) {
  std::vector<Tile> tiles;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t start = first ? first[sequence] : sequence, count = counts ? counts[sequence] : 1;
    for (int64_t i = 0; i < count; i += most)
      tiles.push_back({sequence, start + i, std::min(most, count - i), seen[sequence] - count + 1 + i});
  }
  return tiles;
}

// The attention of some sequences in one layer. Tensors are contiguous but for the queries and the block tables.
template <typename State, typename Cached>
void attend(const Layout& layout, const int64_t* places, int64_t heads, const Cached* cache, const int64_t* tables,
            int64_t table_step, const int64_t* seen, const int64_t* first, const int64_t* counts, int64_t sequences,
            const State* queries, int64_t query_head_step, int64_t query_step, int64_t each, float scaling, float cap,
            const float* sinks, State* out, int threads) {
  const int64_t dim = layout.dim, most = std::max<int64_t>(1, ROWS / each);
  const std::vector<Tile> tiles = cut(first, counts, seen, sequences, most);
  const int64_t tasks = tiles.size() * heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Rows rows(most * each, each, layout);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const Tile& tile = tiles[task / heads];
      const int64_t head = task % heads, place = places[head / layout.heads], inner = head % layout.heads;
      const int64_t* table = tables + tile.sequence * table_step;
      const int64_t count = tile.count * each, last = tile.seen + tile.count - 1;
      for (int64_t row = 0; row < count; ++row) {
        const int64_t query_head = head * each + row % each;
        const State* query = queries + query_head * query_head_step + (tile.token + row / each) * query_step;
        for (int64_t d = 0; d < dim; d += LANES) store(load(query + d) * scaling, &rows.queries[row * dim + d]);
        rows.max_score[row] = sinks ? sinks[query_head] : -std::numeric_limits<float>::infinity();
        rows.sum_weights[row] = sinks ? 1 : 0;
      }
      std::fill_n(rows.outputs.begin(), count * dim, 0.0f);
      for (int64_t start = 0, index = 0; start < last; start += layout.tokens, ++index) {
        const Cached* block = cache + layout.keys(table[index], place);
        const auto keys = block_of_head(block, inner, layout), values = block_of_head(block + layout.width(), inner, layout);
        const int64_t seen = tile.seen - start, tokens = std::min(layout.tokens, last - start);
        if (sizeof(Cached) < sizeof(float) && count > 2 * QUERIES)
          rows.attend_all(widen(keys, tokens, dim, rows.keys.data()), widen(values, tokens, dim, rows.values.data()),
                          count, seen, tokens, cap);
        else
          rows.attend_all(keys, values, count, seen, tokens, cap);
      }
      for (int64_t row = 0; row < count; ++row) {
        State* output = out + ((tile.token + row / each) * heads * each + head * each + row % each) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
          store(load(&rows.outputs[row * dim + d]) / rows.sum_weights[row], output + d);
      }
    }
  }
}

}  // namespace

extern "C" {

#define ATTEND(NAME, STATE, CACHED)                                                                                     \
  void NAME(const Layout* layout, const int64_t* places, int64_t heads, const CACHED* cache, const int64_t* tables,    \
            int64_t table_step, const int64_t* seen, const int64_t* first, const int64_t* counts, int64_t sequences,   \
            const STATE* queries, int64_t query_head_step, int64_t query_step, int64_t each, float scaling, float cap, \
            const float* sinks, STATE* out, int threads) {                                                             \
    attend(*layout, places, heads, cache, tables, table_step, seen, first, counts, sequences, queries,                 \
           query_head_step, query_step, each, scaling, cap, sinks, out, threads);                                      \
  }
ATTEND(attend_float32, float, float)
ATTEND(attend_bfloat16, bfloat16, bfloat16)
ATTEND(attend_float32_int8, float, int8_t)
ATTEND(attend_bfloat16_int8, bfloat16, int8_t)

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

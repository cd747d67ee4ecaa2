// A list of operators on elements of small tensors, run in one call: each as torch computes it, to the same bits.
//
// All arithmetic is one IEEE operation for each element, in float32; bfloat16 is widened before and rounded behind it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int DIMS = 4;
constexpr int64_t PIECE = 1024;    // elements of a row that are computed at a time
constexpr int64_t GRAIN = 32768;   // elements from which on threads share an operator, as in torch

enum Dtype : int64_t { FLOAT32, BFLOAT16 };
enum Code : int64_t { COPY, ADD, SUB, MUL, DIV, NEG, RSQRT };

struct Operand {
  char* data;           // none: the number of the instruction
  int64_t steps[DIMS];  // in elements; the last is 0 or 1
  Dtype dtype;
};

struct Instruction {
  Code code;
  int64_t sizes[DIMS];
  Operand out, left, right;
  float number;
};

inline float widened(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}

inline uint16_t rounded(float value) {  // to the nearest, ties to even
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const uint16_t out = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  return value == value ? out : 0x7fc0;
}

// `out` may be `left` or `right`, element for element.
template <typename F>
inline void apply(float* out, const float* left, int64_t left_step, const float* right, int64_t right_step, int64_t count,
                  F f) {
  if (left_step && right_step) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = f(left[i], right[i]);
  } else if (left_step) {
    const float number = *right;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = f(left[i], number);
  } else if (right_step) {
    const float number = *left;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = f(number, right[i]);
  } else {
    std::fill(out, out + count, f(*left, *right));
  }
}

// `count` elements of a row from `first` on, as float32: where they lie, or in `room`.
inline const float* read(const Operand& operand, int64_t row, int64_t first, int64_t count, float* room) {
  const int64_t step = operand.steps[DIMS - 1], at = row + first * step;
  if (operand.dtype == FLOAT32) return reinterpret_cast<const float*>(operand.data) + at;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(operand.data) + at;
  const int64_t some = step ? count : 1;
  for (int64_t i = 0; i < some; ++i) room[i] = widened(from[i]);
  return room;
}

template <typename F>
void run_row(const Instruction& each, int64_t out_row, int64_t left_row, int64_t right_row, F f) {
  float left_room[PIECE], right_room[PIECE], out_room[PIECE];
  const int64_t size = each.sizes[DIMS - 1], left_step = each.left.steps[DIMS - 1], right_step = each.right.steps[DIMS - 1];
  for (int64_t first = 0; first < size; first += PIECE) {
    const int64_t count = std::min(PIECE, size - first);
    const float* left = read(each.left, left_row, first, count, left_room);
    const float* right = each.right.data ? read(each.right, right_row, first, count, right_room) : &each.number;
    if (each.out.dtype == FLOAT32) {
      apply(reinterpret_cast<float*>(each.out.data) + out_row + first, left, left_step, right, right_step, count, f);
    } else {
      apply(out_room, left, left_step, right, right_step, count, f);
      uint16_t* to = reinterpret_cast<uint16_t*>(each.out.data) + out_row + first;
      for (int64_t i = 0; i < count; ++i) to[i] = rounded(out_room[i]);
    }
  }
}

template <typename F>
void run_rows(const Instruction& each, int threads, F f) {
  const int64_t middle = each.sizes[1], inner = each.sizes[2], outer = each.sizes[0] * middle;
#pragma omp parallel for num_threads(threads) if (threads > 1 && outer * inner * each.sizes[3] > GRAIN)
  for (int64_t row = 0; row < outer; ++row) {
    const auto at = [&](const Operand& of) { return row / middle * of.steps[0] + row % middle * of.steps[1]; };
    const int64_t out = at(each.out), left = at(each.left), right = at(each.right);
    for (int64_t i = 0; i < inner; ++i)
      run_row(each, out + i * each.out.steps[2], left + i * each.left.steps[2], right + i * each.right.steps[2], f);
  }
}

}  // namespace

extern "C" void run(const Instruction* instructions, int64_t count, int threads) {
  for (const Instruction* each = instructions; each != instructions + count; ++each) switch (each->code) {
      case COPY: run_rows(*each, threads, [](float a, float) { return a; }); break;
      case ADD: run_rows(*each, threads, [](float a, float b) { return a + b; }); break;
      case SUB: run_rows(*each, threads, [](float a, float b) { return a - b; }); break;
      case MUL: run_rows(*each, threads, [](float a, float b) { return a * b; }); break;
      case DIV: run_rows(*each, threads, [](float a, float b) { return a / b; }); break;
      case NEG: run_rows(*each, threads, [](float a, float) { return -a; }); break;
      case RSQRT: run_rows(*each, threads, [](float a, float) { return 1.0f / std::sqrt(a); }); break;
    }
}

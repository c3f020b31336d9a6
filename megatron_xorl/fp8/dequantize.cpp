// Block-FP8 bytes to numbers a GEMM can read, one tile at a time. Plain C interface, no torch headers: it builds in a second.
//
// dequantize: value = code * scale as one fp32 product, then, for bf16, ONE rounding to nearest even; the bits are those of
// torch's `(codes.float() * scales).to(dtype)` for every code but the two NaN codes, which are refused when a weight is loaded.
// Where a CPU looks up bytes in registers (AVX512_VBMI: every server with bf16 instructions but one), a block's 128 magnitudes are
// computed once by that rule, and its codes are looked up: four times as fast, the same bits.
// quantize_round_trip: what an activation is worth after dynamic 1 x group quantisation.
//
// An e4m3 number is s eeee mmm, bias 7. A normal one becomes an fp32 number by moving its seven low bits under the fp32
// exponent and adding the difference of the biases; a subnormal one is mmm * 2^-9. No fp32 subnormal appears on the way, so decoding
// does not depend on flush-to-zero, and no power of two is folded into the scale, so no scale is too large.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

// One copy of each hot loop per instruction set, chosen when the library is loaded: a cache on a shared file system then works
// on every node, which -march=native would not.
#if defined(__x86_64__) && defined(__linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define EVERY_CPU __attribute__((target_clones("avx512f,avx512bw,avx512vl", "avx2", "default")))
#endif
#endif
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#undef EVERY_CPU
#define EVERY_CPU __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#endif
#ifndef EVERY_CPU
#define EVERY_CPU
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_VBMI_CODE 1
#include <immintrin.h>
#endif

namespace {

enum Kind { BF16 = 0, FP32 = 1, FP32_OF_BF16 = 2 };  // fp32 storage of bf16 values

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// All ones where a condition holds: a choice by mask, which every compiler turns into vector code.
inline uint32_t mask(bool condition) { return 0u - static_cast<uint32_t>(condition); }

inline float decode(uint32_t code) {
  const uint32_t low = code & 0x7fu;
  const uint32_t subnormal = mask(low < 8u);
  // A subnormal one is read with the exponent of 2^-6, as 2^-6 + mmm * 2^-9, and 2^-6 is taken off again; both are exact.
  const float size = from_bits((low << 20) + (120u << 23) + (subnormal & (1u << 23))) - from_bits(subnormal & to_bits(0x1p-6f));
  return from_bits(to_bits(size) | ((code & 0x80u) << 24));
}

// Upper half of the fp32 number, rounded to nearest even; the input is never NaN.
inline uint32_t rounded(float value) {
  const uint32_t bits = to_bits(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

EVERY_CPU void run_bf16(const uint8_t* codes, float scale, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint16_t>(rounded(decode(codes[i]) * scale) >> 16);
}

EVERY_CPU void run_fp32(const uint8_t* codes, float scale, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = decode(codes[i]) * scale;
}

EVERY_CPU void run_fp32_of_bf16(const uint8_t* codes, float scale, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = from_bits(rounded(decode(codes[i]) * scale) & 0xffff0000u);
}

// bf16 of every magnitude under one scale, low and high bytes apart: each is what two registers hold.
struct Table {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

void fill(Table& table, float scale) {
  uint8_t codes[128];
  uint16_t values[128];
  for (int code = 0; code < 128; ++code) codes[code] = static_cast<uint8_t>(code);
  run_bf16(codes, scale, values, 128);
  for (int code = 0; code < 128; ++code) {
    table.low[code] = static_cast<uint8_t>(values[code]);
    table.high[code] = static_cast<uint8_t>(values[code] >> 8);
  }
}

#ifdef HAS_VBMI_CODE
const bool has_vbmi = (__builtin_cpu_init(), __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw"));

// A lookup reads seven bits of each index, so the sign is not in its way and is put back on the high byte.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) void look_up_bf16(const uint8_t* codes, const Table& table,
                                                                          uint16_t* out, int64_t count) {
  const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
  const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  // Unpacking works on lanes of 16 bytes: chunks of 8 codes are put where it leaves the results in order.
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t left = count - i;
    const uint64_t part = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    const __m512i some = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(part, codes + i));
    const __m512i low = _mm512_permutex2var_epi8(low0, some, low1);
    const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, some, high1), _mm512_and_si512(some, sign));
    _mm512_mask_storeu_epi16(out + i, static_cast<__mmask32>(part), _mm512_unpacklo_epi8(low, high));
    if (left > 32) _mm512_mask_storeu_epi16(out + i + 32, static_cast<__mmask32>(part >> 32), _mm512_unpackhi_epi8(low, high));
  }
}
#else
const bool has_vbmi = false;
void look_up_bf16(const uint8_t*, const Table&, uint16_t*, int64_t) {}
#endif

constexpr int64_t kTables = 16;      // of one pass over columns: 4 KiB, which stay in the first cache
constexpr int64_t kLookups = 1024;   // a table that serves fewer costs more than it saves

// Nearest e4m3 number, ties to even, saturating; |value| < 2^-6 has the fixed step 2^-9.
inline float nearest_e4m3(float value) {
  const uint32_t sign = to_bits(value) & 0x80000000u;
  uint32_t bits = to_bits(value) & 0x7fffffffu;  // the bits of non-negative floats are ordered as the floats are
  bits = bits < to_bits(448.0f) ? bits : to_bits(448.0f);
  const uint32_t small = mask(bits < to_bits(0x1p-6f));
  const uint32_t normal = (bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u;
  const uint32_t fixed = to_bits((from_bits(bits) + 0x1p14f) - 0x1p14f);
  return from_bits((small & fixed) | (~small & normal) | sign);
}

EVERY_CPU float largest(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = to_bits(values[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return from_bits(most);
}

EVERY_CPU void round_trip_group(float* values, float scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = nearest_e4m3(values[i] / scale) * scale;
}

// Cut `rows` over at most `threads` threads and wait for them. Threads of our own, not OpenMP's: a pool does not survive a fork.
template <class Work>
void over_rows(int64_t rows, int64_t threads, Work work) {
  if (threads > rows) threads = rows;
  if (threads <= 1) {
    work(int64_t{0}, rows);
    return;
  }
  std::vector<std::thread> others;
  int64_t done = 0;
  const int64_t step = (rows + threads - 1) / threads;
  try {
    for (; done + step < rows; done += step) others.emplace_back(work, done, done + step);
  } catch (...) {
    // The system has no thread to give: this one does the rest.
  }
  work(done, rows);
  for (auto& other : others) other.join();
}

// Columns [first, last) of a matrix of codes and where their values go.
struct Tile {
  const uint8_t* codes;
  int64_t code_stride, first, last, block_cols;
  void* out;
  int64_t out_stride, kind;

  // Column where the block of `col` ends, within the tile.
  int64_t border(int64_t col) const {
    const int64_t end = (col / block_cols + 1) * block_cols;
    return end < last ? end : last;
  }

  // `count` rows of codes from `row` on become rows of the output from `at` on; all have the scales `row_scales`.
  void compute(int64_t row, int64_t at, int64_t count, const float* row_scales) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t col = first, end; col < last; col = end) {
        end = border(col);
        const uint8_t* from = codes + (row + i) * code_stride + col;
        const float scale = row_scales[col / block_cols];
        const int64_t to = (at + i) * out_stride + col - first;
        if (kind == BF16)
          run_bf16(from, scale, static_cast<uint16_t*>(out) + to, end - col);
        else if (kind == FP32)
          run_fp32(from, scale, static_cast<float*>(out) + to, end - col);
        else
          run_fp32_of_bf16(from, scale, static_cast<float*>(out) + to, end - col);
      }
    }
  }

  // The same for bf16, by one table a block.
  void look_up(int64_t row, int64_t at, int64_t count, const float* row_scales) const {
    Table tables[kTables];
    for (int64_t begin = first, stop; begin < last; begin = stop) {
      stop = begin;
      for (int64_t n = 0; n < kTables && stop < last; ++n, stop = border(stop)) fill(tables[n], row_scales[stop / block_cols]);
      for (int64_t i = 0; i < count; ++i) {
        const Table* table = tables;
        for (int64_t col = begin, end; col < stop; col = end) {
          end = border(col);
          look_up_bf16(codes + (row + i) * code_stride + col, *table++,
                       static_cast<uint16_t*>(out) + (at + i) * out_stride + col - first, end - col);
        }
      }
    }
  }
};

}  // namespace

extern "C" {

// The tile [first_row, first_row + rows) x [first_col, first_col + cols) of one matrix of codes.
//   codes, scales: of the whole matrix, rows `code_stride` and `scale_stride` elements apart
//   part_rows, part_grid: rows of codes and of scales of each part the matrix is stacked from
//   block_rows, block_cols: of a scale block; a part's grid begins at its first row
//   out: uint16 (kind 0) or float (kinds 1, 2), rows `out_stride` elements apart
void mx_dequantize(const uint8_t* codes, int64_t code_stride, const float* scales, int64_t scale_stride, int64_t first_row,
                   int64_t rows, int64_t first_col, int64_t cols, int64_t part_rows, int64_t part_grid, int64_t block_rows,
                   int64_t block_cols, void* out, int64_t out_stride, int64_t kind, int64_t threads) {
  const Tile tile{codes, code_stride, first_col, first_col + cols, block_cols, out, out_stride, kind};
  over_rows(rows, threads, [=](int64_t begin, int64_t end) {
    while (begin < end) {
      // The rows that share one row of scales.
      const int64_t row = first_row + begin, inside = row % part_rows;
      const int64_t block = inside / block_rows, border = (block + 1) * block_rows;
      const int64_t same = (border < part_rows ? border : part_rows) - inside;
      const int64_t count = same < end - begin ? same : end - begin;
      const float* row_scales = scales + (row / part_rows * part_grid + block) * scale_stride;
      if (kind == BF16 && has_vbmi && count * block_cols >= kLookups)
        tile.look_up(row, begin, count, row_scales);
      else
        tile.compute(row, begin, count, row_scales);
      begin += count;
    }
  });
}

// Replace each group of `group` values of a row by nearest_e4m3(value / scale) * scale, scale = max(largest, floor) / 448;
// the last group of a row may be shorter.
void mx_quantize_round_trip(float* values, int64_t rows, int64_t cols, int64_t stride, int64_t group, float floor,
                            int64_t threads) {
  over_rows(rows, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t col = 0; col < cols; col += group) {
        const int64_t count = col + group < cols ? group : cols - col;
        float* own = values + i * stride + col;
        const float most = largest(own, count);
        round_trip_group(own, (most > floor ? most : floor) / 448.0f, count);
      }
    }
  });
}

}  // extern "C"

// Drawing one token from a row of logits: filters, seeded noise, log-probabilities. Knows no MLX arrays.
//
// The results are bit for bit those of mantou/sampling on plain MLX (x86): the same f32 operations in the same order, or
// ones that are proven to round alike. Logits are finite or -infinity; with others only the token is undefined.
#pragma once

#include <cstdint>

namespace mantou {

struct DrawTask {
  const float* logits;
  const uint8_t* allowed;  // one bit a token, the lowest first; null = all may be drawn
  int vocab;
  bool sampled;  // false = the most likely token, ties by lower index
  float inverse_temperature;
  uint32_t seed_words[2], position;
  float top_p;      // 1 or more = off
  float min_p_log;  // ln(min_p), -infinity = off
  int top_k;        // vocab or more = off
  int num_top;      // alternatives wanted beside the token's log-probability; -1 = no log-probabilities
  // Results.
  int32_t* token;
  float* logprob;
  int32_t* top_tokens;  // [num_top], most likely first, ties by lower index
  float* top_logprobs;
};

// Tokens of ln p below `kHead` in buckets of equal width; `bucket` kNone is for all others.
struct Buckets {
  static constexpr float kHead = -9.0f, kPerUnit = 1024 / 9.2f;
  static constexpr int kCount = 1024, kNone = 1024;
  static constexpr int kTie = 1 << 16;
};

// What one instruction set provides for it.
struct DrawKernels {
  // y = x where the bit of a token is 1, else x - infinity. y may be x.
  void (*restrict)(const float* x, const uint8_t* bits, int n, float* y);
  float (*highest)(const float* x, int n);
  void (*exp)(const float* x, float shift, int n, float* y);  // y = e^(x - shift), with MLX's bits; y may be x
  // s + p[0] + p[1] + ..., in this order, each sum rounded.
  float (*add_in_order)(float s, const float* p, int n);
  // Each token's bucket, and what it adds to a sum whose last bit is 1 / scale: an integer below kTie, plus kTie if it
  // lies half between two.
  void (*bucket)(const float* logprobs, const float* probs, int n, float scale, int32_t* bucket, int32_t* units);
  int (*select_from)(const float* x, int n, float from, int32_t* index);  // where x >= from; returns how many
  int (*select_equal)(const int32_t* x, int n, int32_t wanted, int32_t* index);
  // x * gain + noise up to 1e-4, for the tokens with key >= bound (all when key is null); -infinity for the others.
  void (*scores)(const float* x, float gain, uint32_t low, uint32_t high, const float* key, float bound, int n, float* y);
};

struct Kernels;
void draw(const Kernels& kernels, const DrawTask& task);

}  // namespace mantou

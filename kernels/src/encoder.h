// Post-norm encoder layers: QKV, attention over the whole row, output, norm, two dense layers, norm. Knows no MLX.
// Every step is the same code, with the same rounding, as the separate operations.
//
//   h = norm(x + attention(x Wqkv) Wo);  y = norm(h + activation(h Wu) Wd)
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace mantou {

struct EncoderSpec {
  std::shared_ptr<Packed> qkv, out, up, down;               // q, k and v rows follow each other
  std::vector<float> qkv_bias, out_bias, up_bias, down_bias;  // empty = none
  std::vector<float> attention_norm, attention_norm_bias, norm, norm_bias;
  float eps = 1e-12f;
  int heads = 0;
  float scale = 1;
  Gate activation = Gate::gelu_erf;
};

// The sizes that do not fit each other are std::invalid_argument.
void check_encoder(const EncoderSpec& spec);

struct EncoderCall {
  const std::vector<std::shared_ptr<const EncoderSpec>>* layers = nullptr;  // one or more, all as wide
  const void* x = nullptr;  // [batch, tokens, hidden]
  void* out = nullptr;      // like x
  Scalar type = Scalar::f32;
  int batch = 0, tokens = 0;
  const int32_t* lengths = nullptr;  // tokens of each row, or null where all are full; behind them results are 0
};

// Lengths outside 0..tokens are std::out_of_range.
void run_encoder(const Kernels& kernels, const EncoderCall& call);

}  // namespace mantou

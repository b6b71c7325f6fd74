// The gated delta rule and the Mamba-2 recurrence as MLX primitives. The state is f32, inputs are read as f32.
#include <cmath>
#include <cstring>

#include "bridge.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

class GatedDelta : public CpuPrimitive {
 public:
  GatedDelta(mx::Stream s, bool masked) : CpuPrimitive(s), masked_(masked) {}
  const char* name() const override { return "MantouGatedDelta"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [masked = masked_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[7];
      const float* p[6];  // q, k, v, g, beta, state
      for (int i = 0; i < 6; ++i) p[i] = contiguous_as<float>(in[i], scratch[i]);
      const uint8_t* mask = masked ? contiguous(in[6], scratch[6]) : nullptr;
      const int batch = in[0].shape(0), steps = in[0].shape(1), key_heads = in[0].shape(2), dk = in[0].shape(3);
      const int heads = in[2].shape(2), dv = in[2].shape(3);
      const bool vector_gate = in[3].ndim() == 4;
      float *y = out[0].data<float>(), *state = out[1].data<float>();
      std::memcpy(state, p[5], out[1].nbytes());
      const int64_t g_width = vector_gate ? dk : 1;
      const double cost = static_cast<double>(batch) * heads * steps * dk * dv * 2e-4;
      Pool::instance().run(batch * heads, 1, cost, [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          const int64_t b = i / heads, h = i % heads, kh = h / (heads / key_heads), row = b * steps;
          kernels().gated_delta({p[0] + (row * key_heads + kh) * dk, p[1] + (row * key_heads + kh) * dk,
                                 p[2] + (row * heads + h) * dv, p[3] + (row * heads + h) * g_width,
                                 p[4] + row * heads + h, int64_t{key_heads} * dk, int64_t{key_heads} * dk,
                                 int64_t{heads} * dv, heads * g_width, heads, int64_t{heads} * dv,
                                 mask != nullptr ? mask + row : nullptr, vector_gate, steps, dk, dv,
                                 state + static_cast<int64_t>(i) * dk * dv, y + (row * heads + h) * dv});
        }
      });
    });
  }

 private:
  bool masked_;
};

class Ssm : public CpuPrimitive {
 public:
  Ssm(mx::Stream s, bool masked) : CpuPrimitive(s), masked_(masked) {}
  const char* name() const override { return "MantouSsm"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [masked = masked_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[8];
      const float* p[7];  // x, a_log, b, c, d, dt, state
      for (int i = 0; i < 7; ++i) p[i] = contiguous_as<float>(in[i], scratch[i]);
      const uint8_t* mask = masked ? contiguous(in[7], scratch[7]) : nullptr;
      const int batch = in[0].shape(0), steps = in[0].shape(1), heads = in[0].shape(2), head_dim = in[0].shape(3);
      const int groups = in[2].shape(2), n = in[2].shape(3);
      float *y = out[0].data<float>(), *state = out[1].data<float>();
      std::memcpy(state, p[6], out[1].nbytes());
      const double cost = static_cast<double>(batch) * heads * steps * head_dim * n * 1e-4;
      Pool::instance().run(batch * heads, 1, cost, [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          const int64_t b = i / heads, h = i % heads, g = h / (heads / groups), row = b * steps;
          const int64_t x_width = int64_t{heads} * head_dim, bc_width = int64_t{groups} * n;
          kernels().ssm({p[0] + row * x_width + h * head_dim, p[2] + row * bc_width + g * n,
                         p[3] + row * bc_width + g * n, p[5] + row * heads + h, x_width, bc_width, bc_width, heads,
                         x_width, -std::exp(p[1][h]), p[4][h], mask != nullptr ? mask + row : nullptr, steps, head_dim,
                         n, state + static_cast<int64_t>(i) * head_dim * n, y + row * x_width + h * head_dim});
        }
      });
    });
  }

 private:
  bool masked_;
};

std::vector<array> all_floats(std::initializer_list<array> arrays, const Optional& mask, int batch, int steps) {
  std::vector<array> out;
  for (const array& a : arrays) out.push_back(as_floats(a));
  if (mask) {
    require(mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{batch, steps}, "scan: the mask is bool [B, T]");
    out.push_back(*mask);
  }
  return out;
}

}  // namespace

std::vector<array> gated_delta(const array& q, const array& k, const array& v, const array& g, const array& beta,
                               const array& state, const Optional& mask) {
  require(q.ndim() == 4 && k.shape() == q.shape() && v.ndim() == 4 && state.ndim() == 4, "gated_delta: wrong axes");
  const int batch = q.shape(0), steps = q.shape(1), dk = q.shape(3), heads = v.shape(2), dv = v.shape(3);
  require(v.shape(0) == batch && v.shape(1) == steps && q.shape(2) >= 1 && heads % q.shape(2) == 0 && dk >= 1,
          "gated_delta: shapes of q, k and v do not match");
  require(beta.shape() == mx::Shape{batch, steps, heads} &&
              (g.shape() == mx::Shape{batch, steps, heads} || g.shape() == mx::Shape{batch, steps, heads, dk}),
          "gated_delta: g or beta has the wrong shape");
  require(state.shape() == mx::Shape{batch, heads, dv, dk}, "gated_delta: the state has the wrong shape");
  auto node = std::make_shared<GatedDelta>(cpu_stream(), mask.has_value());
  auto out = array::make_arrays({v.shape(), state.shape()}, {mx::float32, mx::float32}, node,
                                all_floats({q, k, v, g, beta, state}, mask, batch, steps));
  return {as_type(out[0], q.dtype()), out[1]};
}

std::vector<array> ssm(const array& x, const array& a_log, const array& b, const array& c, const array& d, const array& dt,
                       const array& state, const Optional& mask) {
  require(x.ndim() == 4 && b.ndim() == 4 && c.shape() == b.shape() && state.ndim() == 4, "ssm: wrong axes");
  const int batch = x.shape(0), steps = x.shape(1), heads = x.shape(2), n = b.shape(3);
  require(b.shape(0) == batch && b.shape(1) == steps && b.shape(2) >= 1 && heads % b.shape(2) == 0 && n >= 1,
          "ssm: shapes of x, b and c do not match");
  require(a_log.size() == static_cast<size_t>(heads) && d.size() == static_cast<size_t>(heads) &&
              dt.shape() == mx::Shape{batch, steps, heads} && state.shape() == mx::Shape{batch, heads, x.shape(3), n},
          "ssm: a_log, d, dt or the state has the wrong shape");
  auto node = std::make_shared<Ssm>(cpu_stream(), mask.has_value());
  auto out = array::make_arrays({x.shape(), state.shape()}, {mx::float32, mx::float32}, node,
                                all_floats({x, a_log, b, c, d, dt, state}, mask, batch, steps));
  return {as_type(out[0], x.dtype()), out[1]};
}

}  // namespace mantou

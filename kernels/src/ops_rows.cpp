// Norms, gates and rotary embedding as MLX primitives.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>

#include "bridge.h"
#include "ops.h"
#include "pool.h"
#include "rope_table.h"

namespace mantou {
namespace {

double row_cost_us(size_t values) { return static_cast<double>(values) * 5e-4; }

// Rows of x, an optional weight and bias of the last axis.
class Norm : public CpuPrimitive {
 public:
  Norm(mx::Stream s, bool centred, bool weight, bool bias, float eps)
      : CpuPrimitive(s), centred_(centred), weight_(weight), bias_(bias), eps_(eps) {}
  const char* name() const override { return centred_ ? "MantouLayerNorm" : "MantouRMSNorm"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, [c = centred_, w = weight_, b = bias_, eps = eps_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[3];
      const uint8_t* x = contiguous(in[0], scratch[0]);
      const float* weight = w ? contiguous_as<float>(in[1], scratch[1]) : nullptr;
      const float* bias = b ? contiguous_as<float>(in[w ? 2 : 1], scratch[2]) : nullptr;
      const int n = in[0].shape(-1), rows = static_cast<int>(in[0].size() / n);
      const Scalar from = scalar_of(in[0].dtype()), to = scalar_of(out[0].dtype());
      const Kernels& f = kernels();
      Pool::instance().run(rows, 8, row_cost_us(in[0].size()), [&](int begin, int end) {
        static thread_local Scratch row;
        float* v = row.floats(n);
        for (int r = begin; r < end; ++r) {
          const size_t at = static_cast<size_t>(r) * n;
          f.load(x, at, from, n, v);
          c ? f.layer_norm(v, weight, bias, eps, n, to, v) : f.rms_norm(v, weight, eps, n, to, v);
          f.store(v, n, to, out[0].data<uint8_t>(), at);
        }
      });
    });
  }

 private:
  bool centred_, weight_, bias_;
  float eps_;
};

class GateProduct : public CpuPrimitive {
 public:
  GateProduct(mx::Stream s, Gate kind, bool up) : CpuPrimitive(s), kind_(kind), up_(up) {}
  const char* name() const override { return "MantouGate"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, [kind = kind_, has_up = up_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[2];
      const uint8_t *g = contiguous(in[0], scratch[0]), *u = has_up ? contiguous(in[1], scratch[1]) : nullptr;
      const size_t total = out[0].size();
      constexpr int kChunk = 4096;
      const Scalar type = scalar_of(out[0].dtype());
      const Kernels& f = kernels();
      Pool::instance().run(static_cast<int>((total + kChunk - 1) / kChunk), 1, row_cost_us(4 * total), [&](int begin, int end) {
        alignas(64) float a[kChunk], b[kChunk];
        for (int i = begin; i < end; ++i) {
          const size_t at = static_cast<size_t>(i) * kChunk;
          const int n = static_cast<int>(std::min<size_t>(kChunk, total - at));
          f.load(g, at, type, n, a);
          if (u != nullptr) f.load(u, at, type, n, b);
          f.gate(kind, a, u != nullptr ? b : nullptr, n, type, a);
          f.store(a, n, type, out[0].data<uint8_t>(), at);
        }
      });
    });
  }

 private:
  Gate kind_;
  bool up_;
};

class Rope : public CpuPrimitive {
 public:
  Rope(mx::Stream s, int dims, bool traditional, float scale, std::shared_ptr<RopeTable> table)
      : CpuPrimitive(s), dims_(dims), traditional_(traditional), scale_(scale), table_(std::move(table)) {}
  const char* name() const override { return "MantouRope"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, [dims = dims_, traditional = traditional_, scale = scale_, table = table_](
                                  std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[3];
      // Periods given as an array are known only now; their table is found by content.
      const auto t = table ? table
                           : RopeTable::shared(RopeTable::from_periods(contiguous_as<float>(in[2], scratch[2]), dims / 2), scale);
      run(in, out, dims, traditional, *t, scratch);
    });
  }

 private:
  static void run(std::vector<array>& in, std::vector<array>& out, int dims, bool traditional, RopeTable& table, Scratch* scratch) {
    const array& x = in[0];
    const int n = x.shape(-1), tokens = x.shape(-2), batch = x.shape(0);
    const int rows = static_cast<int>(x.size() / n), per_batch = rows / std::max(1, batch);
    const bool strided = x.ndim() == 4 && x.strides(3) == 1;  // [B, H, T, D] transposed from [B, T, H, D]: no copy
    const uint8_t* data = strided ? x.data<uint8_t>() : contiguous(x, scratch[0]);
    const auto* offset = contiguous_as<int32_t>(in[1], scratch[1]);
    const bool per_row = in[1].size() > 1;
    const Scalar type = scalar_of(x.dtype());
    const Kernels& f = kernels();
    Pool::instance().run(rows, 16, row_cost_us(2 * x.size()), [&](int begin, int end) {
      static thread_local Scratch temporary;
      float* v = temporary.floats(static_cast<size_t>(n) + dims);
      for (int r = begin; r < end; ++r) {
        const int b = r / per_batch, t = r % tokens, h = r / tokens % (per_batch / tokens);
        const size_t from = strided ? b * x.strides(0) + h * x.strides(1) + t * x.strides(2) : static_cast<size_t>(r) * n;
        f.load(data, from, type, n, v);
        f.rope(v, n, dims, traditional, table.angles(static_cast<int64_t>(offset[per_row ? b : 0]) + t, v + n), type, v);
        f.store(v, n, type, out[0].data<uint8_t>(), static_cast<size_t>(r) * n);
      }
    });
  }

  int dims_;
  bool traditional_;
  float scale_;
  std::shared_ptr<RopeTable> table_;
};

std::vector<array> norm_inputs(const array& x, const Optional& weight, const Optional& bias, mx::Dtype& type) {
  require(is_float(x.dtype()) && x.ndim() >= 1 && x.shape(-1) >= 1 && x.shape(-1) <= kMaxK, "norm: wrong input");
  type = x.dtype();
  std::vector<array> inputs{x};
  for (const Optional* o : {&weight, &bias}) {
    if (!*o) continue;
    require((*o)->ndim() == 1 && (*o)->shape(0) == x.shape(-1), "norm: a weight or bias has the wrong shape");
    type = mx::promote_types(type, (*o)->dtype());
    inputs.push_back(as_floats(**o));
  }
  require(is_float(type), "norm: expected float weights");
  return inputs;
}

}  // namespace

// exp(-i * log(base) / half), by MLX itself: one unit in the last place here is a visible angle at position 10000.
std::vector<float> rope_frequencies(float base, int half) {
  static std::mutex mutex;
  static std::map<std::pair<float, int>, std::vector<float>> known;
  std::lock_guard<std::mutex> lock(mutex);
  if (known.size() > 256) known.clear();  // dynamic scaling makes a new base for every length
  std::vector<float>& f = known[{base, half}];
  if (f.empty()) {
    const mx::Stream s = cpu_stream();
    const array exponents = mx::arange(0, -half, -1, mx::float32, s);
    array values = mx::exp(mx::multiply(exponents, array(std::log(base) / static_cast<float>(half)), s), s);
    values.eval();
    f.assign(values.data<float>(), values.data<float>() + half);
  }
  return f;
}

array rms_norm(const array& x, const Optional& weight, float eps) {
  mx::Dtype type = x.dtype();
  std::vector<array> inputs = norm_inputs(x, weight, std::nullopt, type);
  return array(x.shape(), type, std::make_shared<Norm>(cpu_stream(), false, weight.has_value(), false, eps), std::move(inputs));
}

array layer_norm(const array& x, const Optional& weight, const Optional& bias, float eps) {
  mx::Dtype type = x.dtype();
  std::vector<array> inputs = norm_inputs(x, weight, bias, type);
  auto node = std::make_shared<Norm>(cpu_stream(), true, weight.has_value(), bias.has_value(), eps);
  return array(x.shape(), type, std::move(node), std::move(inputs));
}

array gate(const std::string& kind, const array& g, const Optional& up) {
  require(is_float(g.dtype()), "gate: expected a float input");
  require(!up || (up->shape() == g.shape() && up->dtype() == g.dtype()), "gate: gate and up must be alike");
  const Gate k = gate_of(kind);
  std::vector<array> inputs{g};
  if (up) inputs.push_back(*up);
  return array(g.shape(), g.dtype(), std::make_shared<GateProduct>(cpu_stream(), k, up.has_value()), std::move(inputs));
}

array rope(const array& x, int dims, bool traditional, std::optional<float> base, float scale, const array& offset,
           const Optional& freqs) {
  require(is_float(x.dtype()) && x.ndim() >= 3, "rope: expected [B, ..., T, D] floats");
  require(dims >= 2 && dims % 2 == 0 && dims <= x.shape(-1), "rope: dims must be even and at most the last axis");
  require(base.has_value() != freqs.has_value(), "rope: give exactly one of base and freqs");
  require(offset.size() == 1 || (offset.ndim() == 1 && offset.shape(0) == x.shape(0)), "rope: offset is a number or one a row");
  std::vector<array> inputs{x, as_type(offset, mx::int32)};
  std::shared_ptr<RopeTable> table;
  if (base) {
    table = RopeTable::shared(rope_frequencies(*base, dims / 2), scale);
  } else {
    require(freqs->ndim() == 1 && freqs->shape(0) == dims / 2, "rope: freqs must have dims / 2 values");
    inputs.push_back(as_floats(*freqs));
  }
  auto node = std::make_shared<Rope>(cpu_stream(), dims, traditional, scale, table);
  return array(x.shape(), x.dtype(), std::move(node), std::move(inputs));
}

}  // namespace mantou

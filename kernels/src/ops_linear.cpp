// Linear layers, embeddings, the fused head and adapter rows as MLX primitives.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bridge.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

mx::Dtype dtype_of(Scalar s) { return s == Scalar::f32 ? mx::float32 : s == Scalar::bf16 ? mx::bfloat16 : mx::float16; }

// Where the optional inputs of a linear node are.
struct LinearNode {
  Weights weights;
  int planes = 2;
  float norm_eps = 0;
  bool norm = false, bias = false, residual = false, gated = false, gathered = false;
  Gate gate = Gate::silu;
  int top = 0;  // > 0: the outputs are the `top` largest values and their indices
  std::optional<Scalar> highest_of;  // the outputs are the largest value, of products in this type, and its index
  bool restricted = false;           // the last input says which may win
};

class Linear : public CpuPrimitive {
 public:
  Linear(mx::Stream s, LinearNode node) : CpuPrimitive(s), node_(std::move(node)) {}
  const char* name() const override { return "MantouLinear"; }
  const LinearNode& node() const { return node_; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [node = node_](std::vector<array>& in, std::vector<array>& out) { run(node, in, out); });
  }

 private:
  static void run(const LinearNode& node, const std::vector<array>& in, std::vector<array>& out) {
    static thread_local Scratch scratch[6];
    LinearCall c;
    size_t i = 0;
    const auto next = [&] {
      const uint8_t* p = contiguous(in[i], scratch[i]);
      ++i;
      return p;
    };
    const array& x = in[0];
    c.weights = node.weights.get();
    c.x_type = scalar_of(x.dtype());
    c.planes = node.planes;
    c.norm_eps = node.norm_eps;
    c.x = next();
    if (node.norm) c.norm = reinterpret_cast<const float*>(next());
    if (node.bias) c.bias = reinterpret_cast<const float*>(next());
    if (node.residual) c.residual = next();
    c.num_rows = static_cast<int>(x.size() / x.shape(-1));
    if (node.gathered) {
      const int sources = c.num_rows;
      c.source = reinterpret_cast<const int32_t*>(next());
      c.expert = reinterpret_cast<const int32_t*>(next());
      c.num_rows = out[0].shape(0);
      check_gather(c, sources);
    }
    c.gated = node.gated;
    c.gate = node.gate;
    if (node.highest_of) {
      c.out_type = *node.highest_of;
      const uint8_t* allowed = node.restricted ? next() : nullptr;
      highest(c, allowed, out[0].data<float>(), out[1].data<int32_t>());
    } else if (node.top > 0) {
      c.out_type = c.x_type;
      linear_top(kernels(), c, node.top, out[0].data<float>(), out[1].data<int32_t>());
    } else {
      c.out = out[0].data<uint8_t>();
      c.out_type = scalar_of(out[0].dtype());
      node.norm || node.bias || node.residual || node.gated || node.gathered ? linear(kernels(), c) : product(c);
    }
  }

  // Whether `bytes` are numbers of `size` bytes that are all 0 or -0.
  static bool zeros(const uint8_t* x, size_t bytes, size_t size) {
    for (size_t i = 0; i < bytes; ++i)
      if (x[i] != 0 && !(i % size == size - 1 && x[i] == 0x80)) return false;
    return true;
  }

  // The rows that are not all zero. Others come from padding (a fused layer gives zeros for it), and the vocabulary head
  // would spend a fifth of a small model's time on each: their products are zero without being computed.
  struct Filled {
    std::vector<int> rows;
    std::vector<uint8_t> x;  // of those, one after the other; empty if there are no others

    explicit Filled(LinearCall& c) {
      const size_t one = c.weights->layout.k * size_of(c.x_type);
      const auto* x0 = static_cast<const uint8_t*>(c.x);
      for (int r = 0; r < c.num_rows; ++r)
        if (!zeros(x0 + r * one, one, size_of(c.x_type))) rows.push_back(r);
      if (static_cast<int>(rows.size()) == c.num_rows) return;
      x.resize(rows.size() * one);
      for (size_t i = 0; i < rows.size(); ++i) std::memcpy(x.data() + i * one, x0 + rows[i] * one, one);
      c.x = x.data();
      c.num_rows = static_cast<int>(rows.size());
    }
  };

  static void product(LinearCall& c) {
    const int all = c.num_rows;
    const Filled filled(c);
    if (c.num_rows > 0) linear(kernels(), c);
    if (c.num_rows == all) return;
    // The results lie at the front: each goes to its place, the last one first.
    const size_t one = c.weights->layout.rows * size_of(c.out_type);
    auto* out = static_cast<uint8_t*>(c.out);
    for (int r = all - 1, i = c.num_rows - 1; r >= 0; --r) {
      if (i >= 0 && filled.rows[i] == r) {
        if (i != r) std::memcpy(out + r * one, out + i * one, one);
        --i;
      } else {
        std::memset(out + r * one, 0, one);
      }
    }
  }

  static void highest(LinearCall& c, const uint8_t* allowed, float* values, int32_t* indices) {
    const int all = c.num_rows;
    const Filled filled(c);
    std::vector<uint8_t> kept;
    if (allowed != nullptr && c.num_rows < all) {
      const size_t one = (c.weights->layout.rows + 7) / 8;
      for (const int r : filled.rows) kept.insert(kept.end(), allowed + r * one, allowed + (r + 1) * one);
      allowed = kept.data();
    }
    if (c.num_rows > 0) linear_highest(kernels(), c, allowed, values, indices);
    if (c.num_rows == all) return;
    for (int r = all - 1, i = c.num_rows - 1; r >= 0; --r) {
      const bool here = i >= 0 && filled.rows[i] == r;
      values[r] = here ? values[i] : 0.0f;
      indices[r] = here ? indices[i] : 0;
      i -= here;
    }
  }

  static void check_gather(const LinearCall& c, int sources) {
    for (int i = 0; i < c.num_rows; ++i)
      if (c.source[i] < 0 || c.source[i] >= sources || c.expert[i] < 0 || c.expert[i] >= c.weights->layout.experts)
        throw std::out_of_range("[mantou_kernels] gather_linear: a source or expert index is outside its range");
  }

  LinearNode node_;
};

// The checked inputs of a node, in the order in which Linear::run reads them.
std::vector<array> linear_inputs(const array& x0, const Weights& w, const LinearOptions& o, LinearNode& node) {
  require(w != nullptr, "linear: no weights");
  const array x = is_float(x0.dtype()) ? x0 : as_floats(x0);
  require(x.ndim() >= 1 && x.shape(-1) == w->layout.k,
          "linear: the input has length " + std::to_string(x.ndim() ? x.shape(-1) : 0) + ", the weights want " +
              std::to_string(w->layout.k));
  require(o.planes == 1 || o.planes == 2, "linear: planes is 1 or 2");
  require(x.size() / x.shape(-1) < (size_t{1} << 24), "linear: too many rows");
  node.weights = w;
  node.planes = o.planes;
  node.norm_eps = o.norm_eps;
  std::vector<array> inputs{x};
  if (o.norm) {
    require(o.norm->ndim() == 1 && o.norm->shape(0) == w->layout.k, "linear: the norm weight has the wrong shape");
    node.norm = true;
    inputs.push_back(as_floats(*o.norm));
  }
  if (o.bias) {
    require(o.bias->size() == static_cast<size_t>(w->layout.rows) * w->layout.experts, "linear: the bias has the wrong shape");
    node.bias = true;
    inputs.push_back(as_floats(*o.bias));
  }
  return inputs;
}

class Embed : public CpuPrimitive {
 public:
  Embed(mx::Stream s, Weights w) : CpuPrimitive(s), weights_(std::move(w)) {}
  const char* name() const override { return "MantouEmbed"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, [w = weights_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch;
      const auto* ids = contiguous_as<int32_t>(in[0], scratch);
      const int count = static_cast<int>(in[0].size()), k = w->layout.k;
      for (int i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= w->layout.rows)
          throw std::out_of_range("[mantou_kernels] embed: token " + std::to_string(ids[i]) + " is outside the table of " +
                                  std::to_string(w->layout.rows));
      const Scalar type = scalar_of(out[0].dtype());
      // MLX dequantises in the type of the scales, and rounds after each step.
      const Scalar round = w->layout.scalar;
      Pool::instance().run(count, 4, count * k * 2e-3, [&](int begin, int end) {
        static thread_local Scratch row;
        float* values = row.floats(k);
        for (int i = begin; i < end; ++i) {
          unpack_row(*w, 0, ids[i], round, values);
          kernels().store(values, k, type, out[0].data<uint8_t>(), static_cast<size_t>(i) * k);
        }
      });
    });
  }

 private:
  Weights weights_;
};

class AdapterRows : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  const char* name() const override { return "MantouAdapterRows"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, run);
  }

 private:
  static void run(std::vector<array>& in, std::vector<array>& out) {
    static thread_local Scratch scratch[6];
    const uint8_t* p[6];
    for (int i = 0; i < 6; ++i) p[i] = contiguous(in[i], scratch[i]);
    const auto *a = reinterpret_cast<const float*>(p[2]), *b = reinterpret_cast<const float*>(p[3]);
    const auto* scale = reinterpret_cast<const float*>(p[4]);
    const auto* slot = reinterpret_cast<const int32_t*>(p[5]);
    const int m = in[0].shape(0), n = in[0].shape(1), k = in[1].shape(1), slots = in[2].shape(0), r = in[2].shape(1);
    const Scalar type = scalar_of(in[0].dtype()), x_type = scalar_of(in[1].dtype());
    for (int i = 0; i < m; ++i)
      if (slot[i] >= slots) throw std::out_of_range("[mantou_kernels] adapter_rows: a slot is outside the stack");
    const Kernels& f = kernels();
    Pool::instance().run(m, 1, m * 1e-4 * r * (n + k), [&](int begin, int end) {
      static thread_local Scratch temporary;
      float *y = temporary.floats(static_cast<size_t>(n) + k + r), *x = y + n, *low = x + k;
      for (int i = begin; i < end; ++i) {
        f.load(p[0], static_cast<size_t>(i) * n, type, n, y);
        if (const int s = slot[i]; s >= 0) {
          f.load(p[1], static_cast<size_t>(i) * k, x_type, k, x);
          for (int j = 0; j < r; ++j) low[j] = scale[s] * f.dot(x, a + (static_cast<size_t>(s) * r + j) * k, k);
          for (int j = 0; j < n; ++j) y[j] += f.dot(low, b + (static_cast<size_t>(s) * n + j) * r, r);
        }
        f.store(y, n, type, out[0].data<uint8_t>(), static_cast<size_t>(i) * n);
      }
    });
  }
};

}  // namespace

Gate gate_of(const std::string& name) {
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  if (name == "gelu_erf") return Gate::gelu_erf;
  require(name == "silu", "gate '" + name + "' is not silu, gelu_tanh or gelu_erf");
  return Gate::silu;
}

array linear(const array& x, const Weights& w, const LinearOptions& o) {
  LinearNode node;
  std::vector<array> inputs = linear_inputs(x, w, o, node);
  require(w->layout.experts == 1, "linear: stacked experts need gather_linear");
  mx::Shape shape = inputs[0].shape();
  shape.back() = w->layout.rows;
  if (!o.gate.empty()) {
    require(w->layout.rows % (2 * kBlockRows) == 0, "linear: a gate needs interleaved gate and up rows");
    node.gated = true;
    node.gate = gate_of(o.gate);
    shape.back() /= 2;
  }
  const mx::Dtype type = o.type ? *o.type : mx::promote_types(inputs[0].dtype(), dtype_of(w->layout.scalar));
  if (o.residual) {
    require(o.residual->shape() == shape, "linear: the residual has the wrong shape");
    node.residual = true;
    inputs.push_back(as_type(*o.residual, type));
  }
  const mx::Stream s = cpu_stream();
  return array(shape, type, std::make_shared<Linear>(s, node), std::move(inputs));
}

array gather_linear(const array& x, const Weights& w, const array& source, const array& expert, Optional bias, int planes) {
  LinearNode node;
  LinearOptions options;
  options.bias = bias;
  options.planes = planes;
  std::vector<array> inputs = linear_inputs(x, w, options, node);
  require(x.ndim() == 2 && source.ndim() == 1 && expert.shape() == source.shape(), "gather_linear: shapes do not match");
  node.gathered = true;
  inputs.push_back(as_type(source, mx::int32));
  inputs.push_back(as_type(expert, mx::int32));
  const mx::Dtype type = mx::promote_types(inputs[0].dtype(), dtype_of(w->layout.scalar));
  return array({source.shape(0), w->layout.rows}, type, std::make_shared<Linear>(cpu_stream(), node), std::move(inputs));
}

array embed(const array& ids, const Weights& w, mx::Dtype type) {
  require(w != nullptr && w->layout.experts == 1, "embed: no table");
  scalar_of(type);
  mx::Shape shape = ids.shape();
  shape.push_back(w->layout.k);
  return array(shape, type, std::make_shared<Embed>(cpu_stream(), w), {as_type(ids, mx::int32)});
}

std::vector<array> linear_top(const array& x, const Weights& w, int count, const LinearOptions& o) {
  LinearNode node;
  std::vector<array> inputs = linear_inputs(x, w, o, node);
  require(w->layout.experts == 1 && !node.bias && o.gate.empty() && !o.residual, "linear_top: no bias, gate or residual");
  require(count >= 1 && count <= w->layout.rows, "linear_top: count is outside 1..rows");
  node.top = count;
  mx::Shape shape = inputs[0].shape();
  shape.back() = count;
  return array::make_arrays({shape, shape}, {mx::float32, mx::int32}, std::make_shared<Linear>(cpu_stream(), node), inputs);
}

std::optional<std::vector<array>> highest_of_product(const array& logits, const Optional& allowed) {
  if (!logits.has_primitive() || logits.status() != array::Status::unscheduled) return std::nullopt;
  const auto* product = dynamic_cast<const Linear*>(&logits.primitive());
  if (product == nullptr) return std::nullopt;
  LinearNode node = product->node();
  if (node.bias || node.residual || node.gated || node.gathered || node.top > 0 || node.highest_of) return std::nullopt;
  node.highest_of = scalar_of(logits.dtype());
  std::vector<array> inputs = logits.inputs();
  mx::Shape shape = logits.shape();
  if (allowed) {
    shape.back() = (shape.back() + 7) / 8;
    require(allowed->dtype() == mx::uint8 && allowed->shape() == shape,
            "highest_of_product: what is allowed is uint8 [..., V / 8 rounded up]");
    inputs.push_back(*allowed);
    node.restricted = true;
  }
  shape.pop_back();
  auto found = array::make_arrays({shape, shape}, {mx::float32, mx::int32}, std::make_shared<Linear>(cpu_stream(), node),
                                  inputs);
  return std::vector<array>{found[1], found[0]};
}

std::optional<Product> product_of(const array& logits) {
  if (!logits.has_primitive() || logits.status() != array::Status::unscheduled) return std::nullopt;
  const auto* product = dynamic_cast<const Linear*>(&logits.primitive());
  if (product == nullptr) return std::nullopt;
  const LinearNode& node = product->node();
  if (node.norm || node.bias || node.residual || node.gated || node.gathered || node.top > 0 || node.highest_of)
    return std::nullopt;
  return Product{logits.inputs()[0], node.weights, node.planes};
}

array adapter_rows(const array& base, const array& x, const array& a, const array& b, const array& scale, const array& slot) {
  require(base.ndim() == 2 && x.ndim() == 2 && a.ndim() == 3 && b.ndim() == 3, "adapter_rows: wrong number of axes");
  require(is_float(base.dtype()) && is_float(x.dtype()), "adapter_rows: expected float inputs");
  require(x.shape(0) == base.shape(0) && slot.ndim() == 1 && slot.shape(0) == base.shape(0) &&
              a.shape(2) == x.shape(1) && b.shape(1) == base.shape(1) && b.shape(2) == a.shape(1) &&
              b.shape(0) == a.shape(0) && scale.ndim() == 1 && scale.shape(0) == a.shape(0),
          "adapter_rows: shapes do not match");
  return array(base.shape(), base.dtype(), std::make_shared<AdapterRows>(cpu_stream()),
               {base, x, as_floats(a), as_floats(b), as_floats(scale), as_type(slot, mx::int32)});
}

}  // namespace mantou
